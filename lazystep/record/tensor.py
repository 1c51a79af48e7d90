"""Lazy tensors: `torch.Tensor` objects on `device="lazy"`, each with a handle behind it.

`find_handle`, `find_handles`, `is_lazy` and `gradient_flags` are C++ functions.
"""

from __future__ import annotations

import itertools

import torch

from ._recorder import find_handle, find_handles, gradient_flags, is_lazy, retype, wrap
from .handle import Handle

__all__ = [
    "DEVICE",
    "HAS_GRADIENT",
    "HAS_HOOKS",
    "find_handle",
    "find_handles",
    "get_tensor_id",
    "gradient_flags",
    "handle_of",
    "is_lazy",
    "retype",
    "wrap",
]

DEVICE = torch.device("lazy", 0)
# A byte of `gradient_flags`: gradient wanted (1), there (2), hooks before (4) or after its accumulation (8),
# no leaf (16). See `Flag` in src/replay.h.
HAS_GRADIENT = 2
HAS_HOOKS = 4 | 8

_ids = itertools.count(1)


def handle_of(tensor: torch.Tensor) -> Handle:
    """The handle of a lazy tensor. `ValueError` for any other object."""
    handle = find_handle(tensor)
    if handle is None:
        kind = f"a tensor on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f'expected tensors on the lazy device, got {kind}; .to("lazy") moves a tensor there')
    return handle


def get_tensor_id(tensor: torch.Tensor) -> int:
    """A number that no other tensor has, stable for the tensor's life. Does not synchronize.

    For example:

        seen[lazystep.get_tensor_id(weight)] = name
    """
    handle_of(tensor)  # raises for any other object
    number: int = tensor.__dict__.setdefault("_tensor_id", next(_ids))
    return number
