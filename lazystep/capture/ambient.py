"""What torch itself keeps around a step: hooks and modes. Both are private in part.

A replay runs no Python, so no hook either: a hook that comes or goes has to be noticed, wherever torch keeps
it. The public API can add and remove hooks, but not list them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils._device import DeviceContext

Hooks = dict[int, Any]

# An attribute of a module that belongs to torch, not to whoever wrote the module.
FIELDS_OF_MODULES = frozenset(nn.Module().__dict__) - {"training"}
FIELDS_OF_OPTIMIZERS = frozenset(torch.optim.Optimizer([torch.zeros(())], {}).__dict__)


def hooks_of_module(module: nn.Module) -> list[Hooks]:
    """Those of its forward and backward. Live: what is added later is in them."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [module.__dict__[name] for name in names]


def hooks_of_optimizer(optimizer: torch.optim.Optimizer) -> list[Hooks]:
    """Those before and after its step. Live."""
    return [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]


def hooks_of_all() -> list[Hooks]:
    """Those of every module and every optimizer. Live."""
    return [
        modules._global_forward_hooks,
        modules._global_forward_pre_hooks,
        modules._global_backward_hooks,
        modules._global_backward_pre_hooks,
        optimizers._global_optimizer_pre_hooks,
        optimizers._global_optimizer_post_hooks,
    ]


def hooks_of_tensors(tensors: Sequence[torch.Tensor]) -> list[Hooks]:
    """Those of all their gradients; nothing in the usual case that there are none."""
    hooks = [t._backward_hooks for t in tensors] + [t._post_accumulate_grad_hooks for t in tensors]
    return [one or {} for one in hooks] if any(hooks) else []


def modes() -> tuple[Any, ...]:
    """Everything that makes torch do something else with the same call."""
    c = torch._C
    stack = map(c._get_function_stack_at, range(c._len_torch_function_stack()))
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        c._autograd._top_saved_tensors_default_hooks(True),
        # `with torch.device(...)` is another object each time.
        *(mode.device if isinstance(mode, DeviceContext) else mode for mode in stack),
        *map(c._get_dispatch_stack_at, range(c._len_torch_dispatch_stack())),
    )
