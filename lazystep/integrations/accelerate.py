"""Accelerate on the lazy device: the `Accelerator` of this module instead of Accelerate's, and nothing else.

    accelerator = lazystep.integrations.accelerate.Accelerator()
    model, opt, loader = accelerator.prepare(model, opt, loader)
    for x, y in loader:                     # batches are on the lazy device; each iteration is a step
        loss = loss_fn(model(x), y)
        accelerator.backward(loss)
        opt.step(); opt.zero_grad()

It differs from Accelerate's own in three places: the device; the loaders that `prepare` returns, which cross
a barrier after each batch, so that a loop needs no `mark_step`; and `log`, which is a step closure.
`save_state` and `load_state` are Accelerate's. Several processes are Accelerate's own mode for CPUs, with
gloo and `DistributedDataParallel`, which takes lazy modules.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import get_int_from_env

from ..barrier import mark_step
from ..errors import UnsupportedError
from ..reads import wait_device_ops
from ..record.tensor import DEVICE
from ..step_closures import add_step_closure, flush_step_closures
from . import masks

_DEVICE_VARIABLE = (
    "ACCELERATE_TORCH_DEVICE"  # how a user tells `PartialState` of a device that it does not know
)
_PLUGINS = (
    "fsdp_plugin",
    "deepspeed_plugin",
    "deepspeed_plugins",
    "megatron_lm_plugin",
    "parallelism_config",
)
_PLUGIN_VARIABLES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
# Where `PartialState` looks for the number of processes.
_SIZE_VARIABLES = ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"]


class ScalingAccelerator(accelerate.Accelerator):
    """Accelerate's `Accelerator` with a scaler of the lazy device for `mixed_precision="fp16"`.

    After each update Accelerate asks whether it was skipped, which waits: a schedule does not count such a
    step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._is_made = False
        super().__init__(*args, **kwargs)
        self._is_made = True
        if self.state.mixed_precision == "fp16":
            options = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
            self.scaler = torch.amp.GradScaler(DEVICE.type, **options)
            self.native_amp = True

    @property
    def device(self) -> Any:
        """The lazy device."""
        # Accelerate's constructor refuses float16 on devices that it has no scaler for. On the CPU it makes
        # none, and refuses nothing.
        is_asked_for_a_scaler = not self._is_made and self.state.mixed_precision == "fp16"
        return torch.device("cpu") if is_asked_for_a_scaler else super().device


class Accelerator(ScalingAccelerator):
    """Accelerate's `Accelerator` on the lazy device. Takes the same arguments, in one process or several.

    Iterating over a prepared loader ends a step after each batch. `save_state`, `save_model`,
    `check_trigger` and reads of your own (`.item()`) synchronize; `backward`, `clip_grad_norm_`,
    `accumulate`, `gather_for_metrics` and `log` do not.

        accelerator = lazystep.integrations.accelerate.Accelerator(gradient_accumulation_steps=2)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("cpu"):
            raise ValueError(
                "Accelerator(cpu=True) on the lazy device: leave `cpu` out, or use accelerate.Accelerator"
            )
        refuse_sharding(name for name in _PLUGINS if kwargs.get(name) is not None)
        use_lazy_device()
        super().__init__(*args, **kwargs)

    def prepare_model(self, *args: Any, **kwargs: Any) -> Any:
        """Accelerate's model. Models of Transformers ask for the values of their masks without a wait."""
        masks.install_if_used()
        return super().prepare_model(*args, **kwargs)

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Accelerate's loader, with a barrier after each batch."""
        return _with_barriers(super().prepare_data_loader(*args, **kwargs))

    def skip_first_batches(self, *args: Any, **kwargs: Any) -> Any:
        """Accelerate's loader for the rest of an epoch, with a barrier after each batch."""
        return _with_barriers(super().skip_first_batches(*args, **kwargs))

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Give the values to the trackers, with one-element tensors as numbers. Does not synchronize.

        It is an async step closure: it runs after the barrier, off the training thread, and `end_training`
        waits for it.
        """
        add_step_closure(self._log, (dict(values), step, log_kwargs), run_async=True)

    def _log(self, values: dict[str, Any], step: int | None, log_kwargs: dict[str, Any] | None) -> None:
        super().log(_with_numbers(values), step, log_kwargs)

    def end_training(self) -> None:
        """End the step, wait until everything is logged, and close the trackers."""
        mark_step()
        flush_step_closures()
        wait_device_ops()  # Accelerate closes the process group, and queued steps communicate
        super().end_training()


def use_lazy_device() -> None:
    """Make the lazy device the device of this process for Accelerate, and for what is built on it.

    All `Accelerator`s of a process share a state, which the first of them makes. A logger or a script may
    have made the part that has the device before: then it is changed. A finished state on another device is
    refused, because models may have been prepared for it.
    """
    before = AcceleratorState._shared_state.get("device")
    if before is not None and before.type != DEVICE.type:
        raise ValueError(
            f"this process already has an Accelerator on {before}, and a process has one device. Make that "
            "of lazystep first, or call accelerate.state.AcceleratorState._reset_state(True) in between."
        )
    with device_for_new_states():
        # With `cpu`, several processes are a group of gloo, and DDP gets no device ids.
        state = PartialState(cpu=num_processes() > 1)
    if state.num_processes != num_processes():
        raise ValueError(
            f"this process is one of {num_processes()}, but Accelerate's state was made before for "
            f"{state.num_processes}. Make the Accelerator of lazystep before anything else of Accelerate."
        )
    state.device = DEVICE


def refuse_sharding(given: Iterable[str]) -> None:
    """Refuse to shard a model over processes: in its mode for CPUs, Accelerate would ignore the wish."""
    asked = [*given, *(name for name in _PLUGIN_VARIABLES if os.environ.get(name, "").lower() == "true")]
    if asked and num_processes() > 1:
        raise UnsupportedError(
            f"{asked[0]} in {num_processes()} processes on the lazy device: models are not sharded. Leave it "
            "out: each process then has the whole model, and gradients are averaged (docs/accelerate.md)."
        )


def num_processes() -> int:
    """How many processes were started together with this one, by torchrun, `accelerate launch` or MPI."""
    return int(get_int_from_env(_SIZE_VARIABLES, 1))


@contextmanager
def device_for_new_states() -> Iterator[None]:
    """A state of the process that is made inside this block is on the lazy device."""
    before = os.environ.get(_DEVICE_VARIABLE)
    os.environ[_DEVICE_VARIABLE] = str(DEVICE)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_DEVICE_VARIABLE]
        else:
            os.environ[_DEVICE_VARIABLE] = before


_kinds_with_barriers: dict[type, type] = {}


def _with_barriers(loader: Any) -> Any:
    # A subclass, because Accelerate asks for the type of its loaders. Their `__class__` is a property, which
    # shows torch's class: `object`'s own is the one to set.
    kind = type(loader)
    if kind not in _kinds_with_barriers.values():
        if kind not in _kinds_with_barriers:
            _kinds_with_barriers[kind] = _kind_with_barriers(kind)
        vars(object)["__class__"].__set__(loader, _kinds_with_barriers[kind])
    return loader


def _kind_with_barriers(kind: Any) -> type:
    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807
        for batch in kind.__iter__(self):
            yield batch
            mark_step()

    return type(kind.__name__, (kind,), {"__iter__": __iter__, "__doc__": kind.__doc__})


def _with_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_numbers(one) for name, one in value.items()}
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
