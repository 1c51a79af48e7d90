"""Sparse tensors on the lazy device: a wrapper class, since C++'s tensor has strides and they have none.

No program holds a sparse tensor. Every op on one runs on the host and synchronizes.
"""

from __future__ import annotations

from typing import Any

import torch

from ..record import _recorder
from ..record.handle import Handle
from ..record.tensor import DEVICE, handle_of, is_lazy, retype, wrap

# `tensor.data = other` of torch itself: gives a tensor the shape and strides of another one.
set_metadata = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]


class SparseLazyTensor(torch.Tensor):
    """A sparse tensor on the lazy device. `find_handle` reads `_handle`."""

    _handle: Handle

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:
        """An alias without autograd history and with a version counter of its own, as in eager."""
        return wrap_any(self._handle)

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        retype_any(self, handle_of(other if is_lazy(other) else other.to(DEVICE)))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.layout.default:
            return args[0]._handle.type.layout
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return wrap_any(args[0]._handle)
        return _recorder.installed().run_sparse(func, args, kwargs or {})


def wrap_any(handle: Handle) -> torch.Tensor:
    """A new lazy tensor for a value of any layout."""
    type_ = handle.type
    if type_.layout is torch.strided:
        return wrap(handle)
    tensor: SparseLazyTensor = torch.Tensor._make_wrapper_subclass(
        SparseLazyTensor,
        type_.shape,
        dtype=type_.dtype,
        layout=type_.layout,
        device=DEVICE,
        # A plain TensorImpl can't answer for the layout of a compressed tensor: it asks the class.
        dispatch_layout=True,
    )
    tensor._handle = handle
    return tensor


def retype_any(tensor: torch.Tensor, handle: Handle) -> None:
    """Let an existing tensor of any layout stand for another value, as `resize_` and `.data = ...` do."""
    if isinstance(tensor, SparseLazyTensor):
        set_metadata(tensor, wrap_any(handle))
        tensor._handle = handle
    else:
        retype(tensor, handle)
