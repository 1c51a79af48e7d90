"""Private attributes of an optimizer that overlap uses: its step without hooks, and the order of its hooks.

No other module in this folder uses private attributes of torch.optim.Optimizer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def unhooked_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The class's `step` without the wrapper that fires hooks. Hooks fire once, from the user's `step()`."""
    step = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


@contextmanager
def no_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Take the step hooks off for the time of the block.

    A subclass that calls `super().step()` would otherwise fire them through its base class's wrapper.
    """
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks


def put_innermost(optimizer: Optimizer, pre_hook: RemovableHandle, post_hook: RemovableHandle) -> None:
    """Make `pre_hook` the last hook before the step, and `post_hook` the first after it."""
    pre_hooks: Any = optimizer._optimizer_step_pre_hooks
    post_hooks: Any = optimizer._optimizer_step_post_hooks
    pre_hooks.move_to_end(pre_hook.id, last=True)
    post_hooks.move_to_end(post_hook.id, last=False)


def is_replaced(optimizer: Optimizer) -> bool:
    """Whether `step` was replaced on the instance by anything else than a scheduler's known wrapper."""
    own_step = vars(optimizer).get("step")
    return own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched")
