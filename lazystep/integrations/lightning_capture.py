"""Lightning's automatic optimization as a captured step.

Inside the step: the module's `training_step`, `zero_grad`, backward, clipping, the update, and the hooks
between them, in Lightning's order. Outside: the progress counters, which Lightning saves in checkpoints, and
the arguments of `log`. While a call is recorded, `log` only notes what it gets. Each call returns the values,
and then `log` itself gets them.

`_AutomaticOptimization` is private to Lightning. The trainer's keeps its state and gets another class.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision

from ..capture.step import Step, step
from ..errors import UnsupportedError
from . import masks

_OVERRIDABLE = ("backward", "configure_gradient_clipping", "optimizer_zero_grad")
_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")


def capture_optimization(trainer: Any) -> CapturedOptimization:
    """Have the trainer's training steps captured. Refuses a module that steps in its own way."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise UnsupportedError(
            "LazyStrategy(capture=True) and automatic_optimization=False: decorate the part of training_step "
            "that is a step with @lazystep.step, and leave capture=True out."
        )
    if type(module).optimizer_step is not LightningModule.optimizer_step:
        raise UnsupportedError(
            f"LazyStrategy(capture=True) and {type(module).__name__}.optimizer_step: the captured step does "
            "not call it. Leave capture=True out, or use on_before_optimizer_step."
        )
    optimization = trainer.fit_loop.epoch_loop.automatic_optimization
    optimization.__class__ = CapturedOptimization
    optimization.prepare(module)
    return optimization  # type: ignore[no-any-return]


class CapturedOptimization(_AutomaticOptimization):
    """Lightning's loop of one batch, with the work in a captured step."""

    captured_step: Step[..., Any]

    def prepare(self, module: LightningModule) -> None:
        """Before `fit`: no captures yet."""
        self.module = module
        self.captured_step = step(self._step)
        self.batch_idx = 0
        self._has_updated = False
        self._noting = self._note  # one object, because a capture compares it
        self._logged: list[tuple[str, Any, dict[str, Any]]] | None = None
        hooks: dict[str, list[Callable[..., Any]]] = {name: [] for name in _HOOKS}
        for name in _HOOKS:
            # Lightning calls those of callbacks first. One that does nothing is left out.
            for callback in self.trainer.callbacks:
                if getattr(type(callback), name) is not getattr(Callback, name):
                    hooks[name].append(_of_callback(getattr(callback, name), self.trainer, module))
            if getattr(type(module), name) is not getattr(LightningModule, name):
                hooks[name].append(getattr(module, name))
        self._hooks = hooks

    def run(self, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> Any:
        """One batch: a captured call, and the counters around it."""
        if "batch" not in kwargs:
            raise UnsupportedError(
                "LazyStrategy(capture=True) and training_step(self, dataloader_iter): take a batch, or leave "
                "capture=True out."
            )
        is_update = not self.trainer.fit_loop._should_accumulate()
        is_first = batch_idx % self.trainer.accumulate_grad_batches == 0 and not self._skip_backward
        progress = self.optim_progress.optimizer
        if is_update:
            progress.step.increment_ready()
        if is_first:
            progress.zero_grad.increment_ready()
            progress.zero_grad.increment_started()
        self.batch_idx = (
            batch_idx  # not an argument, because it counts: a capture would be for one value of it
        )
        own_log = self.module.__dict__.get("log")
        self.module.__dict__["log"] = self._noting
        try:
            batch = kwargs["batch"]
            # What a model of Transformers asks of its masks chooses the kernel: a capture for each answer.
            answers = masks.answers_of(batch) if isinstance(batch, Mapping) else ()
            takes_index = "batch_idx" in kwargs
            with self._default_type(optimizer):
                result, logged = self.captured_step(batch, is_update, is_first, takes_index, answers)
        finally:
            if own_log is None:
                del self.module.__dict__["log"]
            else:
                self.module.__dict__["log"] = own_log
        if is_first:
            progress.zero_grad.increment_completed()
        if is_update:
            progress.step.increment_completed()
            self._has_updated = True
        self.module._current_fx_name = "training_step"
        for name, value, options in logged:
            self.module.log(name, value, **options)
        self.module._current_fx_name = None
        return result

    def _default_type(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """For `precision="64-true"` and its like: torch's default type, around the step instead of inside it.

        Lightning sets it around `training_step`. A change of the default type ends the program, and then the
        step is not replayed. Around the whole step it holds for backward and the update as well. Torch's own
        code makes no tensor of the default type there, but for the optimizer's first state. Where other code
        runs, the default type is left to Lightning, and the step is recorded.
        """
        plugin = self.trainer.strategy.precision_plugin
        if not isinstance(plugin, (DoublePrecision, HalfPrecision)) or not self._has_updated:
            return nullcontext()
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Lightning's wrapper has torch's
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        is_torchs = (
            type(optimizer).__module__.startswith("torch.optim.")
            and not optimizer._optimizer_step_pre_hooks
            and not optimizer._optimizer_step_post_hooks
            and len(optimizer.state) in (0, len(parameters))
            and not any(self._hooks.values())
            and all(getattr(type(self.module), n) is getattr(LightningModule, n) for n in _OVERRIDABLE)
        )
        return plugin.forward_context() if is_torchs else nullcontext()

    def _note(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if args:
            raise TypeError(f"log({name!r}, ...): pass the options by name, for LazyStrategy(capture=True)")
        assert self._logged is not None
        self._logged.append((name, value.detach() if isinstance(value, torch.Tensor) else value, options))

    def _step(
        self,
        batch: Any,
        is_update: bool,
        is_first: bool,
        takes_index: bool,
        answers: tuple[tuple[str, bool | None], ...],
    ) -> Any:
        self._logged = []
        if answers:
            batch = masks.told(batch, answers)
        optimizer = self.trainer.optimizers[0]
        results: list[ClosureResult] = []

        scaler = getattr(self.trainer.strategy.precision_plugin, "scaler", None)

        def closure() -> Any:
            with torch.enable_grad():
                results.append(self._forward_backward(batch, optimizer, is_first, takes_index, scaler))
            if is_update:
                if scaler is not None and results[-1].closure_loss is not None and not _is_fused(optimizer):
                    scaler.unscale_(optimizer)
                self._call_hooks("on_before_optimizer_step", optimizer)
                self.module.configure_gradient_clipping(
                    optimizer,
                    gradient_clip_val=self.trainer.gradient_clip_val,
                    gradient_clip_algorithm=self.trainer.gradient_clip_algorithm,
                )
            return results[-1].loss

        if not is_update:
            with _block_parallel_sync_behavior(self.trainer.strategy):
                closure()
        elif scaler is None:
            optimizer.step(closure=closure)
        else:  # in the order of Lightning's `MixedPrecision.optimizer_step`
            closure()
            if results[-1].closure_loss is not None:
                scaler.step(optimizer)
                scaler.update()
        logged, self._logged = self._logged, None
        result = results[-1]
        return {} if result.loss is None else {"loss": result.loss, **result.extra}, logged

    def _forward_backward(
        self, batch: Any, optimizer: torch.optim.Optimizer, is_first: bool, takes_index: bool, scaler: Any
    ) -> ClosureResult:
        arguments = (batch, self.batch_idx) if takes_index else (batch,)
        output = self.trainer.strategy.training_step(*arguments)
        if isinstance(output, Mapping):
            output = dict(output)
        result = ClosureResult.from_training_step_output(output, self.trainer.accumulate_grad_batches)
        if is_first:
            self._call_hooks("on_before_zero_grad", optimizer)
            self.module.optimizer_zero_grad(self.trainer.current_epoch, self.batch_idx, optimizer)
        # Averaging of weights has an epoch of forward passes alone, for the statistics of batch norm.
        if result.closure_loss is not None and not self._skip_backward:
            loss = result.closure_loss if scaler is None else scaler.scale(result.closure_loss)
            self._call_hooks("on_before_backward", loss)
            self.module.backward(loss)
            self._call_hooks("on_after_backward")
        return result

    def _call_hooks(self, name: str, *args: Any) -> None:
        for hook in self._hooks[name]:
            hook(*args)


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer unscales the gradients by itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _of_callback(hook: Callable[..., Any], trainer: Any, module: LightningModule) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return hook(trainer, module, *args)

    return call
