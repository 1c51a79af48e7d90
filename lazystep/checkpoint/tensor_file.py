"""Tensors in the format of safetensors: the length of a header, the header as JSON, and the bytes.

Written here and not by the package, so that the file is written and hashed tensor by tensor as values arrive,
without a copy of the whole, and every write is a call that tests can interrupt. A test reads the files with
the package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_SMALL, _BLOCK = 1 << 16, 1 << 20


class TensorKind(NamedTuple):
    """What the header says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of its values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def check(place: str, tensor: torch.Tensor) -> TensorKind:
    """The kind of a tensor. Raises `CheckpointError` if the format can't hold it. Reads no values."""
    if torch.nn.parameter.is_lazy(tensor):
        raise CheckpointError(
            f"{place.removeprefix('.')} is a parameter that has no shape yet: call the module once."
        )
    if tensor.layout is not torch.strided or tensor.dtype not in _NAMES or tensor.is_nested or tensor.is_meta:
        what = "nested" if tensor.is_nested else "on the meta device" if tensor.is_meta else tensor.layout
        raise CheckpointError(
            f"{place.removeprefix('.')} is a tensor of {tensor.dtype}, {what}, which the file format can't "
            "hold. Keep it out of the state, or keep it as another tensor (to_dense, view_as_real)."
        )
    return TensorKind(tensor.dtype, tuple(tensor.shape))


def header_of(kinds: Mapping[str, TensorKind]) -> bytes:
    """The beginning of a file with these tensors, in this order."""
    header, offset = {}, 0
    for name, kind in kinds.items():
        end = offset + kind.nbytes
        header[name] = {"dtype": _NAMES[kind.dtype], "shape": list(kind.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The values of a CPU tensor. No copy if it is contiguous."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    # A single value counts as contiguous whatever its stride is.
    array: Any = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(array)


def joined(pieces: Iterable[memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes with small pieces put together.

    Hashing and writing give up the interpreter's lock for each piece, and then ask the training thread for it
    again: a model has many small tensors and few large ones.
    """
    small: list[memoryview] = []
    num_bytes = 0
    for piece in pieces:
        if len(piece) < _SMALL:
            small.append(piece)
            num_bytes += len(piece)
            if num_bytes < _BLOCK:
                continue
        if small:
            yield b"".join(small)
            small, num_bytes = [], 0
        if len(piece) >= _SMALL:
            yield piece
    if small:
        yield b"".join(small)


def read(data: bytearray) -> dict[str, torch.Tensor]:
    """The tensors of a file, on the CPU, in the memory of `data`. Its digest has been checked before."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    return dict(_read_each(header, data, 8 + size))


def _read_each(
    header: dict[str, dict[str, list[int]]], data: bytearray, start: int
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, entry in header.items():
        dtype = _DTYPES[str(entry["dtype"])]
        first, end = entry["data_offsets"]
        if first == end:
            yield name, torch.empty(entry["shape"], dtype=dtype)
        else:
            flat = torch.frombuffer(data, dtype=torch.uint8, count=end - first, offset=start + first)
            # An offset that is no multiple of the element size is legal in the file, and not in torch.
            yield name, flat.clone().view(dtype).reshape(entry["shape"])
