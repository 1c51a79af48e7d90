"""The type of a tensor in a program: all metadata that an op can see, without the data."""

from __future__ import annotations

import weakref

import torch
from torch._prims_common import compute_required_storage_length, make_contiguous_strides_for

_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


class TensorType:
    """Data type, shape, strides, offset into the storage, conjugate and negative bit, layout.

    Types are interned: equal types are one object. So comparing types, and hashing keys that contain types,
    costs as little as comparing addresses. Make types with `tensor_type` or `type_of`.
    """

    __slots__ = ("__weakref__", "conj", "dtype", "layout", "neg", "offset", "shape", "stride")

    def __init__(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
        conj: bool,
        neg: bool,
        layout: torch.layout,
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.stride = stride
        self.offset = offset
        self.conj = conj
        self.neg = neg
        self.layout = layout

    def __str__(self) -> str:
        name = _SHORT.get(self.dtype, str(self.dtype).removeprefix("torch."))
        text = f"{name}[{', '.join(map(str, self.shape))}]"
        if self.layout is not torch.strided:
            return f"{text} {str(self.layout).removeprefix('torch.')}"
        if self.stride != make_contiguous_strides_for(self.shape):
            text += f" stride {list(self.stride)}"
        if self.offset:
            text += f" offset {self.offset}"
        return text + (" conj" if self.conj else "") + (" neg" if self.neg else "")

    __repr__ = __str__

    def at(
        self, offset: int, shape: tuple[int, ...] | None = None, stride: tuple[int, ...] | None = None
    ) -> TensorType:
        """The type like this one at another offset, or with another shape as well."""
        if offset == self.offset and shape is None and stride is None:
            return self
        shape, stride = self.shape if shape is None else shape, self.stride if stride is None else stride
        return tensor_type(self.dtype, shape, stride, offset, self.conj, self.neg, self.layout)

    @property
    def extent(self) -> int:
        """The bytes from the start of the storage to the end of this tensor's last element."""
        length: int = compute_required_storage_length(self.shape, self.stride, self.offset)
        return length * self.dtype.itemsize


# Weak, so that a long run with many shapes keeps only the types that are still in use.
_interned: weakref.WeakValueDictionary[tuple[object, ...], TensorType] = weakref.WeakValueDictionary()


def tensor_type(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int = 0,
    conj: bool = False,
    neg: bool = False,
    layout: torch.layout = torch.strided,
) -> TensorType:
    """The only `TensorType` object with these fields."""
    key = (dtype, shape, stride, offset, conj, neg, layout)
    found = _interned.get(key)
    # setdefault: two threads that make the same type must get the same object.
    return found if found is not None else _interned.setdefault(key, TensorType(*key))


def type_of(tensor: torch.Tensor) -> TensorType:
    """The type of a tensor. The type of a sparse tensor has a layout, but no strides and no offset."""
    if tensor.layout is not torch.strided:
        return tensor_type(tensor.dtype, tuple(tensor.shape), (), layout=tensor.layout)
    return tensor_type(
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.is_conj(),
        tensor.is_neg(),
    )
