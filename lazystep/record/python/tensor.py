"""`LazyTensor`: a tensor on `device="lazy"` that stands for a value which may not exist yet.

A wrapper subclass: autograd, hooks and modules see an ordinary tensor with a shape and a data type;
every op below autograd arrives in `__torch_dispatch__`, which the module `dispatch` sets.
The methods here are those that torch answers without dispatching, by looking at memory. What is asked of
tensors, one or many at once, stands here too: in C++ where the native front end is in use.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ... import metrics
from ...errors import UnsupportedError
from ...program.types import TensorType
from ..handle import Handle
from ..source import user_line

DEVICE = torch.device("lazy", 0)
HAS_HOOKS = 4  # see `gradient_flags`; whatever is at least this has some

_make_wrapper = torch.Tensor._make_wrapper_subclass
# `tensor.data = other` without the property below: gives a tensor the shape and strides of another.
set_metadata = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]


# The native front end's extension where it is in use: its tensors are plain `torch.Tensor` objects with
# another implementation behind them. Sparse tensors are of the class below in both front ends.
_native: Any = None


def use_native(extension: Any) -> None:
    """Let the functions of this module make and know native tensors. Once per process."""
    global _native
    _native = extension


def find_handle(obj: Any) -> Handle | None:
    """The handle of a lazy tensor; None for any other object."""
    if type(obj) is LazyTensor:
        return obj._handle
    return _native.handle_of(obj) if _native is not None else None


def find_handles(objects: list[Any]) -> list[Handle | None]:
    """`find_handle` of each object, at once."""
    if _native is None:
        return [obj._handle if type(obj) is LazyTensor else None for obj in objects]
    handles: list[Handle | None] = _native.handles_of(objects)
    # A native sparse tensor is of the Python class.
    return [find_handle(obj) for obj in objects] if None in handles else handles


def have_handles(objects: list[Any], handles: list[Handle]) -> bool:
    """Whether these are lazy tensors with just these handles."""
    if _native is None:
        return find_handles(objects) == handles
    return bool(_native.have_handles(objects, handles))


def gradient_flags(tensors: Sequence[torch.Tensor]) -> bytes:
    """For each tensor, lazy or not, what there is to know about its gradient.

    Wanted (1), there (2), has had hooks before (`HAS_HOOKS`) or after its accumulation (8).
    """
    if _native is None:
        return bytes(map(_gradient_flag, tensors))
    flags: bytes = _native.gradient_flags(tensors)
    return flags


def _gradient_flag(tensor: torch.Tensor) -> int:
    hooks = (tensor._backward_hooks is not None) * HAS_HOOKS | (
        tensor._post_accumulate_grad_hooks is not None
    ) << 3
    return tensor.requires_grad | (tensor.grad is not None) << 1 | hooks


def handle_of(tensor: torch.Tensor) -> Handle:
    """The handle of a lazy tensor."""
    handle = find_handle(tensor)
    assert handle is not None
    return handle


def is_lazy(obj: Any) -> bool:
    """Whether this is a tensor on the lazy device."""
    return type(obj) is LazyTensor or (_native is not None and _native.is_lazy(obj))


class LazyTensor(torch.Tensor):
    """A tensor whose ops are recorded. Made by factories with `device="lazy"` and by `.to("lazy")`."""

    _handle: Handle

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    # -- reading values: each of these synchronizes --------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        text = repr(self.detach().cpu().requires_grad_(self.requires_grad and self.is_leaf))
        if self.grad_fn is not None:
            text = f"{text[:-1]}, grad_fn=<{type(self.grad_fn).__name__}>)"
        return f"{text[:-1]}, device='{DEVICE}')"

    def __format__(self, format_spec: str) -> Any:
        return (
            self.detach().cpu().__format__(format_spec)
            if self.dim() == 0
            else super().__format__(format_spec)
        )

    def numpy(self, *, force: bool = False) -> Any:
        """The values as a NumPy array of its own. Synchronizes."""
        if self.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
            )
        return self.detach().cpu().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def tolist(self) -> Any:
        """The values as nested lists. Synchronizes."""
        return self.detach().cpu().tolist()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.detach().cpu().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.detach().cpu().__dlpack_device__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Files and pickles hold plain CPU tensors, so that they load where lazystep is not
        # installed. The real tensor, not a copy: tensors that share memory share it in the file.
        plain = _plain_tensor(self)
        plain.__dict__.update(_user_attributes(self))
        return plain.__reduce_ex__(protocol)

    def __copy__(self) -> torch.Tensor:
        alias: torch.Tensor = wrap(handle_of(self))
        if isinstance(self, torch.nn.Parameter):
            alias = torch.nn.Parameter(alias, self.requires_grad)
        alias.__dict__.update(_user_attributes(self))
        return alias.requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) in memo:
            found: torch.Tensor = memo[id(self)]
            return found
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
            )
        with torch.no_grad():
            clone: torch.Tensor = self.clone()
            if isinstance(self, torch.nn.Parameter):
                # As eager does it: neither the gradient nor the user's attributes come along.
                clone = memo[id(self)] = torch.nn.Parameter(clone, self.requires_grad)
                return clone
            clone.requires_grad_(self.requires_grad)
            if self.grad is not None:
                clone.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(_user_attributes(self), memo))
        return clone

    # -- what torch does without dispatching ---------------------------------------------------

    @property
    def data(self) -> torch.Tensor:
        """An alias without autograd history and with a version counter of its own, as in eager."""
        return wrap(handle_of(self))

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not is_lazy(other):
            other = other.to(DEVICE)
        retype(self, handle_of(other))

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `torch.Tensor.to`; `"lazy"` and `"lazy:0"` are one device, so neither copies."""
        args = tuple(_with_index(a) for a in args)
        if "device" in kwargs:
            kwargs["device"] = _with_index(kwargs["device"])
        return super().to(*args, **kwargs)

    def new(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """The legacy constructor, which sparse optimizers still call."""
        if self.layout is torch.sparse_coo:
            return torch.sparse_coo_tensor(*args, **kwargs)
        return self.detach().cpu().new(*args, **kwargs).to(DEVICE)

    def data_ptr(self) -> int:
        """0: a lazy tensor has no memory of its own to point to."""
        return 0

    def untyped_storage(self) -> Any:
        """Refused: the memory behind a lazy tensor is not there yet, or changes under the executor."""
        raise _no_storage("untyped_storage")

    def storage(self) -> Any:
        """Refused, see `untyped_storage`."""
        raise _no_storage("storage")

    def share_memory_(self) -> Any:
        """Refused, see `untyped_storage`."""
        raise _no_storage("share_memory_")

    def is_shared(self) -> bool:
        """False: no lazy tensor is in shared memory."""
        return False

    def __tensor_flatten__(self) -> Any:
        # Its presence makes `Module.to` swap parameters in place, so that tied ones stay tied and
        # optimizers keep theirs. Only torch.compile calls it.
        raise UnsupportedError(
            "torch.compile does not take lazy tensors: a lazy step is compiled as a whole by lazystep. "
            "Call the plain function or module, or compile it on CPU tensors."
        )

    @staticmethod
    def __tensor_unflatten__(*_: Any) -> Any:
        raise UnsupportedError("torch.compile does not take lazy tensors")


def _plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The real tensor behind a lazy one, as leaf of the same kind. Synchronizes; shares memory."""
    from .dispatch import recorder

    handle = handle_of(tensor)
    with recorder().lock:
        is_pending = recorder().is_pending(handle)
    # `save` has waited for all tensors together: the pickler then finds each of them ready.
    if is_pending or any(run and not run.is_finished for run in (handle.run, handle.storage.run)):
        metrics.count_synchronization("pickle", user_line())
    recorder().synchronize([handle])
    assert handle.tensor is not None
    real = handle.tensor.detach()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(real, tensor.requires_grad)
    return real.requires_grad_(tensor.requires_grad)


def _user_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """What the user has hung on a tensor, without what belongs to the lazy device or to torch."""
    ours = ("_handle", "_tensor_id", "_is_param")
    return {name: value for name, value in tensor.__dict__.items() if name not in ours}


def _with_index(arg: Any) -> Any:
    is_lazy = (type(arg) is str and arg == "lazy") or (type(arg) is torch.device and arg.type == "lazy")
    return DEVICE if is_lazy else arg


def _no_storage(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name}() of a lazy tensor, at {user_line(2)}: there is no memory to show. "
        "Use .cpu() for a copy of the values."
    )


def wrap(handle: Handle) -> torch.Tensor:
    """A new lazy tensor for a value. The hot path of recording: keep it short."""
    type_ = handle.type
    if type_.layout is not torch.strided:
        return _wrap_sparse(handle)
    tensor: LazyTensor
    if _native is not None:
        tensor = _native.wrap(handle)
        return tensor
    tensor = _make_wrapper(
        LazyTensor, type_.shape, type_.stride, type_.offset, dtype=type_.dtype, device=DEVICE
    )
    if type_.conj or type_.neg:
        _set_bits(tensor, type_)
    tensor._handle = handle
    return tensor


def _wrap_sparse(handle: Handle) -> LazyTensor:
    type_ = handle.type
    tensor: LazyTensor = _make_wrapper(
        LazyTensor,
        type_.shape,
        dtype=type_.dtype,
        layout=type_.layout,
        device=DEVICE,
        # A plain TensorImpl can't answer for the layout of a compressed tensor: it asks us.
        dispatch_layout=True,
    )
    tensor._handle = handle
    return tensor


def _set_bits(tensor: torch.Tensor, type_: TensorType) -> None:
    torch._C._set_conj(tensor, type_.conj)
    torch._C._set_neg(tensor, type_.neg)


def retype(tensor: torch.Tensor, handle: Handle) -> None:
    """Let an existing tensor stand for another value, as `t_`, `resize_` and `.data = ...` do."""
    if not isinstance(tensor, LazyTensor):
        _native.retype(tensor, handle)
        return
    old, new = tensor._handle.type, handle.type
    if (old.conj, old.neg) != (new.conj, new.neg):
        _set_bits(tensor, new)  # torch takes over metadata only between tensors that agree in these
    set_metadata(tensor, wrap(handle))
    tensor._handle = handle


_ids = itertools.count(1)


def get_tensor_id(tensor: torch.Tensor) -> int:
    """A number that no other tensor has, stable for the tensor's life. Does not synchronize.

    For example:

        seen[lazystep.get_tensor_id(weight)] = name
    """
    if not is_lazy(tensor):
        raise ValueError(f"expected a tensor on the lazy device, got one on {tensor.device}")
    number: int = tensor.__dict__.setdefault("_tensor_id", next(_ids))
    return number
