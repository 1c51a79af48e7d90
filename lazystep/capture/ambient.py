"""Hooks and modes that torch keeps outside the step function, read in part from torch's private attributes.

A replay runs no Python and therefore no hook, so a replay must notice every hook that was added or removed.
torch's public API can add and remove hooks, but it can't list them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils._device import DeviceContext

from ..record._recorder import casts_around, settings_and_keys

Hooks = dict[int, Any]


# The global hooks, which apply to every module and every optimizer. Live dicts, which torch never replaces.
HOOKS_OF_ALL: tuple[Hooks, ...] = (
    modules._global_forward_hooks,
    modules._global_forward_pre_hooks,
    modules._global_backward_hooks,
    modules._global_backward_pre_hooks,
    optimizers._global_optimizer_pre_hooks,
    optimizers._global_optimizer_post_hooks,
)


def hooks_of_tensors(tensors: Sequence[torch.Tensor]) -> list[Hooks]:
    """The hooks on the gradients of these tensors; an empty list in the usual case of no hooks."""
    hooks = [t._backward_hooks for t in tensors] + [t._post_accumulate_grad_hooks for t in tensors]
    return [one or {} for one in hooks] if any(hooks) else []


def modes() -> tuple[Any, ...]:
    """All torch modes that change what the same call does."""
    c = torch._C
    stack = map(c._get_function_stack_at, range(c._len_torch_function_stack()))
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        casts_around(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        c._autograd._top_saved_tensors_default_hooks(True),
        settings_and_keys(),
        tuple((layer.key(), layer.level()) for layer in c._functorch.get_interpreter_stack() or ()),
        # Each `with torch.device(...)` makes a new object, so compare the device.
        *(mode.device if isinstance(mode, DeviceContext) else mode for mode in stack),
        *map(c._get_dispatch_stack_at, range(c._len_torch_dispatch_stack())),
    )
