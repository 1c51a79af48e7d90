"""Lightning's metrics without a wait in each step.

Lightning reads each metric with `prog_bar=True` after each batch, whether it is shown or not, and all metrics
every `log_every_n_steps`. Here both go through async closures. A progress bar shows the newest values that
have arrived, which are those of an earlier step, and loggers get each value with its own step. At the end of
an epoch metrics are read, so that callbacks decide on true values.

A callback may call a logger itself, as `LearningRateMonitor` does. While training runs, these calls become
closures, too: so a logger gets everything in the order of the CPU, and on one thread.

`_LoggerConnector` is private to Lightning. The trainer's keeps its state and gets another class.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector

from ..record.tensor import is_lazy
from ..step_closures import add_step_closure


def log_by_closures(trainer: Any) -> None:
    """Have the metrics of a trainer logged and shown by closures."""
    connector = trainer._logger_connector
    if type(connector) is _LoggerConnector:
        connector.__class__ = _ClosureConnector
        connector._newest = {}
        connector._is_at_batch_end = False
    for logger in trainer.loggers:
        for name in _QUEUED:
            vars(logger).setdefault(name, _Queued(getattr(logger, name)))


def log_directly(trainer: Any) -> None:
    """Calls of the loggers are plain calls again: those of closures have all been made."""
    for logger in trainer.loggers:
        for name in _QUEUED:
            if isinstance(vars(logger).get(name), _Queued):
                del vars(logger)[name]


_QUEUED = ("log_metrics", "save")
_calling = threading.local()  # `is_direct`: this thread is inside a queued call


class _Queued:
    """A method of a logger as an async closure. Inside another one it is called at once."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if getattr(_calling, "is_direct", False):
            self._method(*args, **kwargs)
        else:
            add_step_closure(self._call, (args, kwargs), run_async=True)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with _direct_calls():
            self._method(*args, **kwargs)


@contextmanager
def _direct_calls() -> Iterator[None]:
    _calling.is_direct = True
    try:
        yield
    finally:
        _calling.is_direct = False


class _ClosureConnector(_LoggerConnector):
    """Lightning's, but for who reads values."""

    _newest: dict[str, Any]  # what has arrived for progress bars, by name
    _is_at_batch_end: bool

    def on_batch_end(self) -> None:
        """Queue the values for progress bars. Does not synchronize."""
        self._is_at_batch_end = True
        try:
            super().on_batch_end()
        finally:
            self._is_at_batch_end = False

    @property
    def metrics(self) -> Any:
        """Metrics of the batch or of the epoch; only those of an epoch are read for progress bars."""
        results = self.trainer._results
        if self._first_loop_iter is None:  # the end of an epoch
            return super().metrics
        shown = [metric for _, metric in results.valid_items() if metric.meta.prog_bar]
        for metric in shown:
            metric.meta.prog_bar = False  # Lightning would read it
        try:
            metrics = results.metrics(True)
        finally:
            for metric in shown:
                metric.meta.prog_bar = True
        values = {results._forked_name(metric, True)[1]: results._get_cache(metric, True) for metric in shown}
        values = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        if values and self._is_at_batch_end:
            add_step_closure(self._arrived, (values,), run_async=True)
        metrics["pbar"] = {name: self._newest[name] for name in values if name in self._newest}
        return metrics

    def _arrived(self, values: dict[str, torch.Tensor]) -> None:
        self._newest.update(convert_tensors_to_scalars(values))

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Give the metrics to the loggers, by a closure. Only a metric called `step` synchronizes."""
        if not any(is_lazy(value) for value in metrics.values()) or "step" in metrics:
            super().log_metrics(metrics, step)
            return
        if not self.trainer.loggers:
            return
        self._logged_metrics.update(metrics)
        if step is None:  # as Lightning does
            metrics = {**metrics, "epoch": metrics.get("epoch", self.trainer.current_epoch)}
            step = self.trainer.fit_loop.epoch_loop._batches_that_stepped
        add_step_closure(self._log, (dict(metrics), step), run_async=True)

    def _log(self, metrics: dict[str, Any], step: int) -> None:
        numbers = convert_tensors_to_scalars(metrics)
        with _direct_calls():
            for logger in self.trainer.loggers:
                logger.log_metrics(metrics=numbers, step=step)
                logger.save()
