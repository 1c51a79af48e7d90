"""`torch.amp.GradScaler` on lazy tensors: the scale, the flags and the skip of an update stay in the program.

torch's class works on any device, except that it reads on the host whether a gradient has overflowed, before
it updates. A fused optimizer is told on the device instead; torch does that by itself. The update of any
other optimizer of torch becomes one op that gets the flag (`program/updates.py`). For that, its step counts
move to the lazy device: the host does not know how many steps were skipped.

The flag is read as eager reads it, which synchronizes, where the host has to know: in a step that makes
state, because a skipped step makes none, and for optimizers that are not torch's, or that call hooks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from ..errors import UnsupportedError
from ..program.updates import FUNCTIONS, OPTIMIZE, position_of_counts, take_apart
from ..record.tensor import DEVICE, is_lazy
from .patches import wrapping

# The optimizers whose steps do nothing but call the functions of `program/updates.py`.
_CLASSES = frozenset(
    (
        *(torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam),
        *(torch.optim.AdamW, torch.optim.Adamax, torch.optim.ASGD, torch.optim.Muon, torch.optim.NAdam),
        *(torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
    )
)
# Options of torch's optimizers with which a step reads no count on the host.
_ON_THE_DEVICE = ("fused", "capturable", "differentiable")


class _Flag(threading.local):
    """Set while `GradScaler` calls an optimizer: not zero if a gradient has overflowed."""

    value: torch.Tensor | None = None


_flag = _Flag()


def skip_updates_in_the_program() -> None:
    """Replace the place where `GradScaler` reads a flag, and forget the flags after their step."""

    @wrapping(torch.amp.GradScaler, "_maybe_opt_step")
    def _maybe_opt_step(
        original: Any, scaler: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> Any:
        flags = list(optimizer_state["found_inf_per_device"].values())
        if args or kwargs or not flags or not all(map(is_lazy, flags)) or not _is_known(optimizer):
            return original(scaler, optimizer, optimizer_state, *args, **kwargs)
        _move_counts(optimizer)
        _flag.value = sum(flags[1:], flags[0])
        try:
            return optimizer.step()
        finally:
            _flag.value = None

    @wrapping(torch.amp.GradScaler, "update")
    def update(original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        before = scaler._per_optimizer_states if scaler.is_enabled() else {}
        flags = [state["found_inf_per_device"] for state in before.values()]
        original(scaler, *args, **kwargs)
        if any(is_lazy(flag) for one in flags for flag in one.values()):
            # torch has put an empty dict in the place of this one. A replay can't make a dict of that class,
            # and does not know that nobody will look at the flags. So the old one is emptied and stays.
            for one in flags:
                one.clear()
            before.clear()
            scaler._per_optimizer_states = before

    for name, module in FUNCTIONS.items():
        wrapping(sys.modules[module], name)(_recording(name))


def _recording(name: str) -> Callable[..., None]:
    """In the place of one of torch's functions: an update with counts on the lazy device is one op."""

    position = position_of_counts(name)

    def call(original: Any, params: Any, grads: Any, *lists: Any, **options: Any) -> None:
        if torch.compiler.is_compiling():  # Dynamo can't trace `is_lazy`, and never gets lazy tensors
            original(params, grads, *lists, **options)
            return
        counts: Any = lists[position] if position is not None and position < len(lists) else ()
        on_device = [is_lazy(count) for count in counts]
        if any(on_device) and not all(on_device):
            # A parameter that has got its first gradient, beside others that were under a scaler before.
            for chosen in (True, False):
                call(original, *_only(on_device, chosen, (params, grads, *lists)), **options)
            return
        is_ours = _flag.value is not None or any(on_device)
        is_ours = is_ours and len(params) > 0 and all(map(is_lazy, params))
        if not is_ours or any(options.get(one) for one in _ON_THE_DEVICE):
            original(params, grads, *lists, **options)
            return
        apart = take_apart(name, (params, grads, *lists), options)
        tensors = [] if apart is None else [*apart.written, *apart.read]
        if apart is None or any(tensor.layout is not torch.strided for tensor in tensors):
            if _flag.value is not None:
                raise UnsupportedError(
                    f"torch.optim's {name} under a GradScaler: an option is no number, string or tensor, "
                    "which a program can't hold. Use a plain number, or fused=True."
                )
            original(params, grads, *lists, **options)
            return
        read = [tensor if is_lazy(tensor) else tensor.to(DEVICE) for tensor in apart.read]
        # Not through `OpOverload.__call__`: a frame of torch's that hands numbers to C, so that a capture
        # would require the same numbers in each replay.
        OPTIMIZE._op(apart.written, read, _flag.value, apart.numbers, apart.text)
        torch.autograd.graph.increment_version(apart.written)

    return call


def _only(on_device: list[bool], chosen: bool, lists: tuple[Any, ...]) -> list[Any]:
    """The lists of an update, of the parameters that have or have not their counts on the lazy device."""
    # An optimizer without a kind of state, such as `amsgrad`, has an empty list in its place.
    return [
        [one for one, is_there in zip(some, on_device, strict=True) if is_there is chosen]
        if isinstance(some, list) and some
        else some
        for some in lists
    ]


def _is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the optimizer is calls of torch's functions on lazy tensors, and nothing else."""
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        optimizers._global_optimizer_pre_hooks,
        optimizers._global_optimizer_post_hooks,
    )
    step = vars(optimizer).get("step")
    if type(optimizer) not in _CLASSES or (step and not hasattr(step, "_wrapped_by_lr_sched")):
        return False
    if not all(getattr(hook, "records_only", False) for some in hooks for hook in some.values()):
        return False
    parameters = [(p, g) for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    if (shards := vars(optimizer).get("_lazystep_shards")) is not None:
        # There is state of this rank's parts alone, and all ranks must come to the same answer.
        parameters = [(p, group) for p, group in parameters if shards.has_part(p)]
    return all(
        is_lazy(p)
        and p.grad.layout is p.layout is torch.strided
        and _has_state(optimizer, p, group)
        and not any(group.get(one) for one in _ON_THE_DEVICE)
        for p, group in parameters
    )


def _has_state(optimizer: torch.optim.Optimizer, parameter: Any, group: dict[str, Any]) -> bool:
    """Whether a step finds all state of a parameter. In eager, a skipped step makes none."""
    if type(optimizer) is torch.optim.SGD:
        has_momentum = group["momentum"] != 0
        return not has_momentum or optimizer.state.get(parameter, {}).get("momentum_buffer") is not None
    return bool(optimizer.state.get(parameter))


def _move_counts(optimizer: torch.optim.Optimizer) -> None:
    """Move what the optimizer keeps on the host, such as step counts, to the lazy device."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                state[name] = value.to(DEVICE)
