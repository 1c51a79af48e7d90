"""`torch.amp.GradScaler` on lazy tensors: the scale, the flags and the skip of an update stay in the program.

torch's class works on any device, except that it reads on the host whether a gradient has overflowed, before
it updates. A fused optimizer is told on the device instead; torch does that by itself. For the other
optimizers of torch without state on the host, the update is recorded in any case, and what it has written is
taken back on the device if a gradient has overflowed. Where the host must know, because an optimizer counts
its steps there, the flag is read as eager reads it, which synchronizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import optimizer as optimizers

from ..record.tensor import is_lazy
from .patches import wrapping


def skip_updates_in_the_program() -> None:
    """Replace the place where `GradScaler` reads a flag, and forget the flags after their step."""

    @wrapping(torch.amp.GradScaler, "_maybe_opt_step")
    def _maybe_opt_step(
        original: Any, scaler: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> Any:
        flags = list(optimizer_state["found_inf_per_device"].values())
        if args or kwargs or not all(map(is_lazy, flags)) or not _is_on_the_device(optimizer):
            return original(scaler, optimizer, optimizer_state, *args, **kwargs)
        return _step_unless(sum(flags[1:], flags[0]), optimizer)

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


def _is_on_the_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the optimizer changes lazy tensors and nothing else, once its state is there."""
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        optimizers._global_optimizer_pre_hooks,
        optimizers._global_optimizer_post_hooks,
    )
    # SGD alone: other optimizers of torch count steps on the host, and what others' do is unknown.
    return (
        type(optimizer) is torch.optim.SGD
        and not any(hooks)
        and all(is_lazy(tensor) and tensor.layout is torch.strided for tensor in _tensors_of(optimizer))
    )


def _step_unless(flag: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """A step of the optimizer that leaves everything as it was if the flag is not zero."""
    tensors = list({id(tensor): tensor for tensor in _tensors_of(optimizer)}.values())
    with torch.no_grad():
        before = [tensor.clone() for tensor in tensors]
        versions = [tensor._version for tensor in tensors]
        states = {parameter: dict(state) for parameter, state in optimizer.state.items()}
        optimizer.step()
        has_overflowed = flag != 0
        for tensor, old, version in zip(tensors, before, versions, strict=True):
            # The clone of a tensor that was not written is used by nothing, and is not computed.
            if tensor._version != version:
                tensor.copy_(torch.where(has_overflowed, old, tensor))
    # State that this step has made: in eager it is not there after a skipped step.
    if any(_has_changed(states.get(p, {}), state) for p, state in optimizer.state.items()) and flag.item():
        optimizer.state.clear()
        optimizer.state.update(states)


def _has_changed(before: dict[str, Any], state: dict[str, Any]) -> bool:
    return before.keys() != state.keys() or any(before[name] is not state[name] for name in state)


def _tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters that have gradients, their gradients, and the tensors of the state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    state = [value for one in optimizer.state.values() for value in one.values()]
    tensors = [*parameters, *(p.grad for p in parameters), *state]
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
