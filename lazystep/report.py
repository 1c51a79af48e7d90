"""Ready-made closures: a CSV or JSONL log, TensorBoard, a progress bar.

A report takes lazy tensors and adds one async closure, which is its only cost on the training thread.
`gradient_norms` and TensorBoard's histograms are recorded into the step, so the step computes them, and a few
numbers leave the device instead of whole tensors.

    with lazystep.report.JsonlLog("run.jsonl", every=10) as log:
        for step, (x, y) in enumerate(loader):
            ...
            log(step, loss=loss, **lazystep.report.gradient_norms(model))
            lazystep.mark_step()

TensorBoard and the progress bar need the extras `lazystep[tensorboard]` and `lazystep[progress]`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

from . import metrics
from .step_closures import add_step_closure, flush_step_closures


def gradient_norms(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The norm of each parameter's gradient, by name. Recorded into the step; does not synchronize."""
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    norms = torch._foreach_norm([grad for _, grad in named]) if named else ()
    return {f"grad_norm/{name}": norm for (name, _), norm in zip(named, norms, strict=True)}


def _to_number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


class _Report:
    """Adds an async closure in every N-th step. Leaving the `with` block waits for all closures."""

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"every = {every}: expected at least 1")
        self.every = every

    def is_due(self, step: int) -> bool:
        """Whether this step is reported. Check it before computing something only for the report."""
        return step % self.every == 0

    def close(self) -> None:
        """Block until all queued closures have run, raise their errors, and close the output."""
        try:
            flush_step_closures()
        finally:
            self._close()

    def _close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _FileLog(_Report):
    def __init__(self, path: str | Path, every: int = 1) -> None:
        super().__init__(every)
        self._file: IO[str] = open(path, "w", newline="", encoding="utf-8")  # noqa: SIM115

    def __call__(self, step: int, **values: Any) -> None:
        """Log numbers and one-element tensors of this step. Does not synchronize."""
        if self._file.closed:
            raise ValueError(f"step {step} came after the log was closed")
        if self.is_due(step):
            add_step_closure(self._log, (step, values), run_async=True)

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        if self._file.closed:  # the `with` block raised in mid-step, so the barrier came later
            metrics.count("log_rows_late")
            return
        self._write({"step": step, **{name: _to_number(value) for name, value in values.items()}})
        self._file.flush()  # a killed run keeps every line so far

    def _write(self, row: dict[str, Any]) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        self._file.close()


class JsonlLog(_FileLog):
    """A log file with one JSON object per line. The names of the values may differ between steps."""

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")


class CsvLog(_FileLog):
    """A CSV table. The first row sets the columns; a later value with another name is an error."""

    _writer: csv.DictWriter[str] | None = None

    def _write(self, row: dict[str, Any]) -> None:
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, list(row))
            self._writer.writeheader()
        self._writer.writerow(row)


class TensorBoardLog(_Report):
    """Scalars and histograms for TensorBoard."""

    def __init__(self, directory: str | Path, every: int = 1, **writer_arguments: Any) -> None:
        super().__init__(every)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoardLog needs the extra: pip install 'lazystep[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(directory), **writer_arguments)

    def scalars(self, step: int, **values: Any) -> None:
        """Log numbers and one-element tensors of this step. Does not synchronize."""
        if self.is_due(step):
            add_step_closure(self._log_scalars, (step, values), run_async=True)

    def histogram(self, step: int, name: str, tensor: torch.Tensor, bins: int = 64) -> None:
        """Log the distribution of a tensor. The step counts the bins; only the counts leave the device."""
        if not self.is_due(step):
            return
        x = tensor.detach().float().reshape(-1)
        low, high = x.min(), x.max()
        # histc takes its range as Python numbers, which would synchronize. So scale to a fixed range.
        scaled = (x - low) / (high - low).clamp_min(1e-12) * bins
        counts = torch.histc(scaled, bins, 0.0, float(bins))
        args = (step, name, counts, low, high, x.sum(), x.square().sum())
        add_step_closure(self._log_histogram, args, run_async=True)

    def _log_scalars(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, _to_number(value), step)

    def _log_histogram(
        self,
        step: int,
        name: str,
        counts: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
        total: torch.Tensor,
        squares: torch.Tensor,
    ) -> None:
        limits = torch.linspace(low.item(), high.item(), counts.numel() + 1)[1:]
        self._writer.add_histogram_raw(
            name,
            min=low.item(),
            max=high.item(),
            num=int(counts.sum().item()),
            sum=total.item(),
            sum_squares=squares.item(),
            bucket_limits=limits.tolist(),
            bucket_counts=counts.tolist(),
            global_step=step,
        )

    def _close(self) -> None:
        self._writer.close()


class ProgressBar(_Report):
    """A live progress bar with the step's numbers; plain lines if the output is not a terminal."""

    def __init__(self, total: int, every: int = 1, description: str = "training") -> None:
        super().__init__(every)
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError as error:
            raise ImportError("ProgressBar needs the extra: pip install 'lazystep[progress]'") from error
        self._console = Console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(description, total=total, numbers="")
        self._progress.start()

    def __call__(self, step: int, **values: Any) -> None:
        """Show numbers and one-element tensors of this step. Does not synchronize."""
        if self.is_due(step):
            add_step_closure(self._show, (step, values), run_async=True)

    def _show(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {name: _to_number(value) for name, value in values.items()}
        text = " ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in numbers.items())
        self._progress.update(self._task, completed=step + 1, numbers=text)
        if not self._console.is_terminal:
            self._console.print(f"step {step}: {text}", highlight=False)

    def _close(self) -> None:
        self._progress.stop()
