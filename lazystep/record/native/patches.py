"""Methods of `torch.Tensor` that look at memory without asking the dispatcher, for native lazy tensors.

The Python front end overrides them in its class; native tensors have none, so `torch.Tensor` itself
gets a method that takes the same code for lazy tensors and the original for all others.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorConverter

from ..python.tensor import LazyTensor
from . import _recorder

_METHODS = (
    "__repr__",
    "numpy",
    "__array__",
    "tolist",
    "__dlpack__",
    "__dlpack_device__",
    "__reduce_ex__",
    "__copy__",
    "new",
    "data_ptr",
    "untyped_storage",
    "storage",
    "share_memory_",
    "is_shared",
)


def apply() -> None:
    """Apply every patch. Once per process."""
    for name in _METHODS:
        _patch(name, getattr(torch.Tensor, name, None) or _plain_copy, LazyTensor.__dict__[name])
    _patch("__format__", torch.Tensor.__format__, _format)
    _patch_data()
    _swap_parameters_in_conversions()
    _refuse_torch_compile()


def _refuse_torch_compile() -> None:
    """It would trace lazy tensors, give up at each op and run the rest uncompiled."""
    original = FakeTensorConverter.from_real_tensor

    @functools.wraps(original)
    def from_real_tensor(self: Any, fake_mode: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
        if _recorder.is_lazy(t):
            LazyTensor.__tensor_flatten__(t)
        return original(self, fake_mode, t, *args, **kwargs)

    FakeTensorConverter.from_real_tensor = from_real_tensor  # type: ignore[method-assign]


def _swap_parameters_in_conversions() -> None:
    """`module.to("lazy")` swaps parameters in place for wrapper subclasses, of which native lazy tensors
    are none: tied parameters stay tied, and optimizers keep theirs. Nothing else in that module asks."""
    module: Any = torch.nn.modules.module
    original = module.is_traceable_wrapper_subclass
    module.is_traceable_wrapper_subclass = lambda tensor: _recorder.is_lazy(tensor) or original(tensor)


def watch_explicit_kernels(register_kernel: Callable[[str], None]) -> None:
    """A custom op gets a kernel for every backend after it is defined: ours must stand before that one."""
    original = torch.library.Library.impl

    @functools.wraps(original)
    def impl(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **kwargs: Any) -> Any:
        result = original(self, op_name, fn, dispatch_key, **kwargs)
        if dispatch_key.startswith("CompositeExplicitAutograd"):
            name = op_name if isinstance(op_name, str) else op_name.name()
            register_kernel(name if "::" in name else f"{self.ns}::{name}")
        return result

    torch.library.Library.impl = impl  # type: ignore[method-assign]


def _patch(name: str, original: Any, ours: Any) -> None:
    is_lazy = _recorder.is_lazy

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *args, **kwargs) if is_lazy(self) else original(self, *args, **kwargs)

    setattr(torch.Tensor, name, method)


def _patch_data() -> None:
    """`tensor.data = other` takes a tensor of another device along, as the Python front end does."""
    original: Any = torch.Tensor.data
    ours: Any = LazyTensor.__dict__["data"]

    def assign(self: Any, other: Any) -> None:
        (ours if _recorder.is_lazy(self) else original).__set__(self, other)

    torch.Tensor.data = property(original.__get__, assign)  # type: ignore[assignment]


def _plain_copy(tensor: torch.Tensor) -> Any:
    # What copy.copy does for a class without `__copy__`, such as `torch.Tensor` before this patch.
    return copy._reconstruct(tensor, None, *tensor.__reduce_ex__(4))  # type: ignore[attr-defined]


def _format(tensor: torch.Tensor, format_spec: str) -> Any:
    plain = tensor.detach().cpu() if tensor.dim() == 0 else tensor
    return plain.__format__(format_spec) if tensor.dim() == 0 else object.__format__(tensor, format_spec)
