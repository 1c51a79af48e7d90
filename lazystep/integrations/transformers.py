"""Transformers' `Trainer` on the lazy device: `LazyTrainingArguments` with `LazyTrainer`.

    args = LazyTrainingArguments(output_dir="out", max_steps=100, capture=True)
    LazyTrainer(model=model, args=args, train_dataset=data).train()

The arguments choose the device, and switch off what waits in each step. `LazyTrainer` ends each step by a
barrier, captures steps with `capture=True`, and reports without a wait. A `Trainer` of another class needs
`LazyCallback` for the barriers. Logging, evaluation, saving and resuming are Transformers'.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import transformers.trainer
from transformers import Trainer, TrainerCallback, TrainingArguments

from ..barrier import mark_step
from ..capture.step import Step, step
from ..errors import UnsupportedError
from ..notices import LazyStepWarning
from ..record.tensor import DEVICE
from . import masks
from .accelerate import ScalingAccelerator, device_for_new_states, num_processes, refuse_sharding

masks.install()


@dataclass
class LazyTrainingArguments(TrainingArguments):
    """Training arguments for the lazy device. Takes what `TrainingArguments` takes, and `capture`.

    With `capture=True`, `LazyTrainer` captures a training step (forward, backward, clipping, update) and
    replays it. Two defaults differ: `logging_nan_inf_filter` is off, because it reads the loss in each step,
    and so is `dataloader_pin_memory`, which is for other devices.

        args = LazyTrainingArguments(output_dir="out", max_steps=100, logging_steps=50)
    """

    logging_nan_inf_filter: bool = False
    dataloader_pin_memory: bool = False
    capture: bool = field(default=False, metadata={"help": "Capture the training step and replay it."})

    def _validate_args(self) -> None:
        if self.use_cpu:
            raise ValueError("use_cpu=True on the lazy device: leave it out, or use TrainingArguments")
        if self.fp16 and self.capture:
            raise UnsupportedError(
                "fp16=True with capture=True: after each update Accelerate asks whether it was skipped, and "
                "a step that waits for a value is not captured. Use bf16=True, or capture=False."
            )
        if self.torch_compile:
            raise UnsupportedError("torch_compile=True: leave it out, lazystep compiles the whole step")
        refuse_sharding(name for name in ("fsdp", "deepspeed", "parallelism_config") if getattr(self, name))
        with self._as_on_the_cpu():  # for the one check of whether there is bf16
            super()._validate_args()

    @contextmanager
    def _as_on_the_cpu(self) -> Iterator[None]:
        self.__dict__["use_cpu"] = True
        try:
            yield
        finally:
            self.__dict__["use_cpu"] = False

    @cached_property
    def _setup_devices(self) -> torch.device:
        # The state of the process decides where the Trainer puts the model; `device` alone does not move it.
        # Several processes are Accelerate's mode for CPUs: gloo, and DDP without device ids.
        mode = self._as_on_the_cpu() if num_processes() > 1 else nullcontext()
        with mode, device_for_new_states():
            device: torch.device = TrainingArguments._setup_devices.func(self)
        self._n_gpu = 0
        if device.type != DEVICE.type:
            raise ValueError(
                f"the Trainer chose {device}, not the lazy device: hide the other device from it"
            )
        return device


class LazyCallback(TrainerCallback):
    """Ends the step after each batch of training and evaluation. Waits for no value.

    `LazyTrainer` has it already. It is for trainers of another class.

        trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[LazyCallback()])
    """

    def __init__(self, is_captured: bool = False) -> None:
        """`is_captured`: whether the trainer captures its steps, which then begin and end with a barrier."""
        self._is_captured = is_captured

    def on_train_begin(self, args: Any, *others: Any, **kwargs: Any) -> None:
        """Refuse `capture=True` with a trainer that does not capture."""
        if getattr(args, "capture", False) and not self._is_captured:
            raise ValueError("capture=True with a Trainer that does not capture: use LazyTrainer")

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """After an update: a barrier."""
        if not self._is_captured:
            mark_step()

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        """After a backward pass that only accumulates gradients: a barrier."""
        if not self._is_captured:
            mark_step()

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """After a batch of an evaluation: a barrier."""
        mark_step()


class LazyTrainer(Trainer):
    """Transformers' `Trainer` on the lazy device. Takes what `Trainer` takes, and `report`.

    `report(step, loss=..., grad_norm=...)` is called after each update with lazy tensors: a log or a progress
    bar of `lazystep.report`, which does not wait. The Trainer's own logs wait for two values every
    `logging_steps`.

        log = lazystep.report.JsonlLog("log.jsonl")
        trainer = LazyTrainer(model=model, args=args, train_dataset=data, report=log)
    """

    def __init__(self, *args: Any, report: Callable[..., None] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.args, LazyTrainingArguments):
            raise ValueError(f"LazyTrainer got {type(self.args).__name__}: pass LazyTrainingArguments")
        self.report = report
        self.captured_step: Step[..., Any] | None = step(self._step) if self.args.capture else None
        self._loss: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None  # of the gradients, in a captured step
        self._update: Callable[[], Any] | None = None  # the optimizer's step, in a captured step
        self.remove_callback(LazyCallback)  # one that the user has passed
        self.add_callback(LazyCallback(self.args.capture))

    def create_accelerator_and_postprocess(self) -> None:
        """Transformers' own, with a scaler for `fp16=True`."""
        # The class is a global name there. Accelerate's own refuses float16 on devices that it does not know.
        before = transformers.trainer.Accelerator
        transformers.trainer.Accelerator = ScalingAccelerator
        try:
            super().create_accelerator_and_postprocess()
        finally:
            transformers.trainer.Accelerator = before

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Transformers' own. Waits for the loss every `logging_steps`, for checkpoints, and at the end."""
        if self.captured_step is not None and not self.args.use_cache:
            self._warn_of_caches()
        try:
            result = super().train(*args, **kwargs)
            mark_step()  # for the closures of the last step
            return result
        finally:
            if self._update is not None:
                self.optimizer.step, self._update = self._update, None

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward; captured, also clipping, the update and the removal of gradients."""
        if self.captured_step is None:
            self._loss = super().training_step(model, inputs, num_items_in_batch)
            return self._loss
        self._check_callbacks()
        if self.optimizer.step is not _leave_out:
            # The Trainer calls it after this, and it is in the step already.
            self._update, self.optimizer.step = self.optimizer.step, _leave_out
        batch = dict(inputs)
        answers = masks.answers_of(batch)
        is_update = bool(self.accelerator.gradient_state.sync_gradients)
        self._loss, self._norm = self.captured_step(batch, num_items_in_batch, answers, is_update)
        return self._loss

    def _step(
        self,
        batch: dict[str, Any],
        num_items: Any,
        answers: tuple[tuple[str, bool | None], ...],
        is_update: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs = masks.told(batch, answers)
        model = self.model_wrapped
        loss = super().training_step(model, inputs, num_items)
        norm = None
        if is_update:
            if self.args.max_grad_norm > 0:
                norm = super()._clip_grad_norm(model)
            norm = super()._get_grad_norm(model, grad_norm=norm)
            assert self._update is not None
            self._update()
            model.zero_grad()
        return loss, norm

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        return super()._clip_grad_norm(model) if self.captured_step is None else self._norm

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        if self.captured_step is not None:
            grad_norm = self._norm
        else:
            grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self.report is not None:
            self.report(self.state.global_step, loss=self._loss, grad_norm=grad_norm)
        return grad_norm

    def _warn_of_caches(self) -> None:
        # The Trainer gives `args.use_cache` to the model's own config alone. The parts keep theirs: without a
        # cache, T5's attention is rounded differently.
        for name, part in self.model.named_modules():
            config = getattr(part, "config", None)
            if config is self.model.config or not getattr(config, "use_cache", False):
                continue
            warnings.warn(
                f"model.{name}.config.use_cache is True. A decoder such as T5's copies its config "
                "for the cache in each step, and such a step can't be replayed. Training needs no cache: set "
                f"model.{name}.config.use_cache = False.",
                LazyStepWarning,
                stacklevel=3,
            )
            return

    def _check_callbacks(self) -> None:
        for callback in self.callback_handler.callbacks:
            for name in ("on_pre_optimizer_step", "on_optimizer_step"):
                if getattr(type(callback), name) is not getattr(TrainerCallback, name):
                    raise UnsupportedError(
                        f"{type(callback).__name__}.{name} with capture=True: the update is part of the "
                        "captured step, and gradients are gone when the callback runs. "
                        "Use on_step_end, or capture=False."
                    )

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Transformers', then a barrier: what follows depends on how many batches there were before."""
        result = super().prediction_step(*args, **kwargs)
        mark_step()
        return result


def _leave_out(*args: Any, **kwargs: Any) -> None:
    """The update of an optimizer whose update is part of a captured step."""


_leave_out._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedules ask for it, and warn
