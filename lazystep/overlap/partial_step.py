"""One step of an ordinary optimizer for some of its parameters, with given gradients.

The optimizer stays the owner of `param_groups` and `state`: for the time of the call it is shown groups
that hold only the chosen parameters, and those parameters have the given gradients. Its own `step` runs,
so any optimizer whose update of a parameter depends on that parameter alone gives the same numbers as
one step over all.
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
# A parameter, the gradient that it is to be stepped with, and the group that it is in.
Item = tuple[Tensor, Tensor, Group]


def step_only(optimizer: Optimizer, items: Sequence[Item]) -> None:
    """Step exactly these parameters. Fires none of the optimizer's step hooks, and blocks on nothing."""
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
    # Fused kernels on the CPU don't do so themselves; a stale use in a graph must raise, not be wrong.
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
    # By name: importing torch.distributed.optim raises a warning of torch's own.
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
