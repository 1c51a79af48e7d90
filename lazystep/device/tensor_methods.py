"""Methods of `torch.Tensor` that look at memory without asking the dispatcher.

Each gets a version that does the right thing for lazy tensors and calls the original for all others.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .. import metrics
from ..errors import UnsupportedError
from ..ops.sparse import wrap_any
from ..record import _recorder, observer
from ..record.recorder import Recorder
from ..record.source import user_line
from ..record.tensor import DEVICE, handle_of, is_lazy
from .storage import LazyStorage, address_of, plain_tensor

# Name of a method to its version for lazy tensors.
_METHODS: dict[str, Callable[..., Any]] = {}


def replace_methods(recorder: Recorder) -> None:
    """Replace every method of `_METHODS`, and those that read through the recorder."""
    for name, ours in _METHODS.items():
        _replace(name, ours)
    _replace("__reduce_ex__", functools.partial(_reduce, recorder))
    _replace("untyped_storage", functools.partial(_untyped_storage, recorder))


def _replace(name: str, ours: Callable[..., Any]) -> None:
    original: Any = getattr(torch.Tensor, name, None) or _plain_copy

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_ours = is_lazy(self) and not isinstance(self, FakeTensor)  # a fake of a lazy tensor has no handle
        return ours(self, *args, **kwargs) if is_ours else original(self, *args, **kwargs)

    setattr(torch.Tensor, name, method)


def replace_data() -> None:
    """`tensor.data = other` moves a tensor of another device to the lazy one."""
    original: Any = torch.Tensor.data

    def assign(self: Any, other: Any) -> None:
        if is_lazy(self) and isinstance(other, torch.Tensor) and not is_lazy(other):
            other = other.to(DEVICE)
        original.__set__(self, other)

    torch.Tensor.data = property(original.__get__, assign)  # type: ignore[assignment]


def _for_lazy_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    _METHODS[function.__name__] = function
    return function


def _plain_copy(tensor: torch.Tensor) -> Any:
    # `copy.copy` does this for a class without `__copy__`, and `torch.Tensor` is one before `_replace`.
    return copy._reconstruct(tensor, None, *tensor.__reduce_ex__(4))  # type: ignore[attr-defined]


# -- methods that read values: each of these synchronizes ------------------------------------------


@_for_lazy_tensors
def __repr__(self: torch.Tensor, *, tensor_contents: Any = None) -> str:  # noqa: N807
    text = repr(self.detach().cpu().requires_grad_(self.requires_grad and self.is_leaf))
    if self.grad_fn is not None:
        text = f"{text[:-1]}, grad_fn=<{type(self.grad_fn).__name__}>)"
    return f"{text[:-1]}, device='{DEVICE}')"


@_for_lazy_tensors
def __format__(self: torch.Tensor, format_spec: str) -> str:  # noqa: N807
    if self.dim() > 0:
        return object.__format__(self, format_spec)
    return str(self.detach().cpu().__format__(format_spec))


@_for_lazy_tensors
def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
    """The values as a NumPy array of its own."""
    if self.requires_grad and not force:
        raise RuntimeError(
            "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
        )
    return self.detach().cpu().numpy(force=force)


@_for_lazy_tensors
def __array__(self: torch.Tensor, dtype: Any = None, copy: Any = None) -> Any:  # noqa: N807
    array = self.numpy()
    return array if dtype is None else array.astype(dtype, copy=False)


@_for_lazy_tensors
def tolist(self: torch.Tensor) -> Any:
    """The values as nested lists."""
    return self.detach().cpu().tolist()


@_for_lazy_tensors
def __dlpack__(self: torch.Tensor, **kwargs: Any) -> Any:  # noqa: N807
    return self.detach().cpu().__dlpack__(**kwargs)


@_for_lazy_tensors
def __dlpack_device__(self: torch.Tensor) -> Any:  # noqa: N807
    return self.detach().cpu().__dlpack_device__()


def _reduce(recorder: Recorder, self: torch.Tensor, protocol: Any) -> Any:
    # Files and pickles hold plain CPU tensors, so that they load where lazystep is not installed.
    plain = _plain_leaf(recorder, self)
    plain.__dict__.update(_user_attributes(self))
    return plain.__reduce_ex__(protocol)


def _plain_leaf(recorder: Recorder, tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the same kind with the same values, as a leaf."""
    handle = handle_of(tensor)
    with recorder.lock:
        is_pending = _recorder.is_pending(handle)
    # `save` has waited for all tensors together: the pickler then finds each of them ready.
    if is_pending or any(run and not run.is_finished for run in (handle.run, handle.memory.run)):
        metrics.count_synchronization("pickle", user_line())
    plain = plain_tensor(recorder, handle)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(plain, tensor.requires_grad)
    return plain.requires_grad_(tensor.requires_grad)


# -- methods that ask for memory -------------------------------------------------------------------


@_for_lazy_tensors
def __copy__(self: torch.Tensor) -> torch.Tensor:  # noqa: N807
    alias = wrap_any(handle_of(self))
    if isinstance(self, torch.nn.Parameter):
        alias = torch.nn.Parameter(alias, self.requires_grad)
    alias.__dict__.update(_user_attributes(self))
    return alias.requires_grad_(self.requires_grad)


@_for_lazy_tensors
def new(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The legacy constructor, which sparse optimizers still call."""
    if self.layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(*args, **kwargs)
    made: torch.Tensor = self.detach().cpu().new(*args, **kwargs)
    return made.to(DEVICE)


@_for_lazy_tensors
def data_ptr(self: torch.Tensor) -> int:
    """A number: that of the memory plus the tensor's offset in it. See storage.py."""
    if self.numel() == 0:
        return 0
    return address_of(handle_of(self).memory) + int(self.storage_offset()) * self.element_size()


@_for_lazy_tensors
def storage(self: torch.Tensor) -> Any:
    """Refused: the memory behind a lazy tensor is not there yet, or changes under the executor."""
    raise _no_storage("storage")


@_for_lazy_tensors
def share_memory_(self: torch.Tensor) -> Any:
    """Refused, see `storage`."""
    raise _no_storage("share_memory_")


@_for_lazy_tensors
def is_shared(self: torch.Tensor) -> bool:
    """False: no lazy tensor is in shared memory."""
    return False


def _untyped_storage(recorder: Recorder, self: torch.Tensor) -> LazyStorage:
    if self.layout is not torch.strided:
        raise NotImplementedError(f"Cannot access storage of a tensor with layout {self.layout}")  # as eager
    return LazyStorage(handle_of(self), recorder)


def _no_storage(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name}() of a lazy tensor, at {user_line(2)}: there is no memory to show. "
        "Use .cpu() for a copy of the values, or untyped_storage() to ask which tensors share memory."
    )


def _user_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that the user has set on a tensor, without those of the lazy device and of torch."""
    watching = observer.current()
    if watching is not None:
        watching.on_attributes(tensor)
    ours = ("_handle", "_tensor_id", "_is_param")
    return {name: value for name, value in tensor.__dict__.items() if name not in ours}
