"""One step of an ordinary optimizer for some of its parameters, with given gradients.

The optimizer still owns `param_groups` and `state`. For the time of the call, its groups hold only the chosen
parameters, and these parameters have the given gradients. Then the optimizer's own `step` runs. If its update
of a parameter depends on that parameter alone, the result equals one step over all parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import OverlapError, UnsupportedError
from .optimizer_internals import is_replaced, no_step_hooks, unhooked_step

Group = dict[str, Any]
# A parameter, the gradient to step it with, and the group that the parameter is in.
Item = tuple[Tensor, Tensor, Group]


def step_only(optimizer: Optimizer, items: Sequence[Item]) -> None:
    """Step exactly these parameters. Does not fire the optimizer's step hooks, and does not block."""
    groups: dict[int, tuple[Group, Group]] = {}
    before = []
    for p, gradient, group in items:
        _, shown = groups.setdefault(id(group), (group, {**group, "params": []}))
        shown["params"].append(p)
        before.append(p.grad)
        p.grad = gradient
    owned = optimizer.param_groups
    optimizer.param_groups = [shown for _, shown in groups.values()]
    try:
        with torch.no_grad(), no_step_hooks(optimizer):
            unhooked_step(optimizer)(optimizer)
    finally:
        optimizer.param_groups = owned
        for (p, _, _), gradient_before in zip(items, before, strict=True):
            p.grad = gradient_before
    # Fused CPU kernels don't raise the version themselves. It must rise, so that a backward that saved the
    # old value raises instead of computing wrong gradients.
    torch.autograd.graph.increment_version([p for p, _, _ in items])
    for group, shown in groups.values():
        changed = [key for key in shown if key != "params" and shown[key] is not group.get(key)]
        if changed:
            name = type(optimizer).__name__
            raise OverlapError(
                f"{name}.step() changed {', '.join(changed)} of a parameter group: a counter for the whole "
                "group can't be kept when parameters are stepped one bucket at a time. Keep it in "
                f"`state`, per parameter, or use {name} without overlap."
            )


def check_steppable(optimizer: Optimizer, per_parameter: bool) -> None:
    """Raise `UnsupportedError` for an optimizer that can't step parameters separately."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError("LBFGS updates all parameters from one closure: step it after backward()")
    # Compared by name: importing torch.distributed.optim makes torch warn.
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
        raise UnsupportedError(
            "ZeroRedundancyOptimizer steps only this rank's shard and broadcasts it: use a plain optimizer"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedError("differentiable=True needs the gradients' graph: step after backward()")
    if is_replaced(optimizer):
        raise UnsupportedError(
            f"`step` was replaced on this {name} instance: overlap would go around the replacement. "
            "Use step hooks instead (`register_step_post_hook`)."
        )
    if not per_parameter and not _is_torchs_own(optimizer):
        raise UnsupportedError(
            f"{name} is not one of torch's optimizers. If its update of a parameter depends on this "
            "parameter, its gradient and its `state` alone, and on no counter of the group, say so with "
            "per_parameter=True."
        )


def _is_torchs_own(optimizer: Optimizer) -> bool:
    owner = next(cls for cls in type(optimizer).__mro__ if "step" in vars(cls))
    return f"{owner.__module__}.".startswith("torch.optim.") and owner is not Optimizer
