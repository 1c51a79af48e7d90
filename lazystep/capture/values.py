"""Values around a step: which are compared by what they are, which by identity, which by their contents."""

from __future__ import annotations

import array
import collections
import ctypes
import enum
import pickle
import random
import types
from typing import Any

import numpy as np
import torch

from ._places import is_same

_SIMPLE = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    range,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    np.generic,
    np.dtype,
    torch.Size,
)
CONTAINERS = (list, tuple, dict, collections.deque)
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_C_DATA = (ctypes.Array, ctypes.Structure, ctypes.Union)
BUFFERS = (set, bytearray, array.array, np.ndarray, np.void, memoryview, *_C_DATA)
MAX_COMPARED = 1 << 20  # bytes of an array: comparing a larger one could take longer than the step
_MAX_TENSOR = 1 << 16  # bytes of a CPU tensor that is compared as a whole


def is_simple(value: Any) -> bool:
    """Whether a value can't change and is compared by what it is."""
    if isinstance(value, (tuple, frozenset)) and not isinstance(value, torch.Size):
        return all(map(is_simple, value))
    # A record of an array's shares its memory.
    return isinstance(value, _SIMPLE) and not isinstance(value, (enum.Enum, np.void))


def keys_of(names: dict[Any, Any]) -> tuple[Any, ...]:
    """The keys of a dict in their order, without running a method of a subclass."""
    if isinstance(names, collections.OrderedDict):
        return tuple(collections.OrderedDict.keys(names))
    return tuple(dict.keys(names))


def contents_of(container: Any) -> Any:
    """What is in a set or an array now, to be compared with `==`. Keeps nothing of a large array."""
    if isinstance(container, np.ndarray):
        if container.dtype.hasobject:
            return container.shape, [_Same(element) for element in container.ravel()]
        return container.dtype, container.shape, container.flags.num, container.tobytes()
    if isinstance(container, np.void):
        return container.dtype, container.tobytes()
    if isinstance(container, array.array):
        return container.typecode, container.tobytes()
    if isinstance(container, memoryview):
        return container.format, container.shape, container.tobytes()
    if isinstance(container, (bytearray, *_C_DATA)):
        return bytes(container)
    return type(container), [_Same(element) for element in container]  # code may depend on their order


class _Same:
    """An element, compared by what it is if that can't change, and else by identity. Keeps it alive."""

    __slots__ = ("element",)

    def __init__(self, element: Any) -> None:
        self.element = element

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or self.element is other.element:
            return isinstance(other, _Same)
        are_simple = is_simple(self.element) and is_simple(other.element)
        return are_simple and bool(is_same(self.element, other.element))

    __hash__ = None  # type: ignore[assignment]


def generator_id(generator: torch.Generator) -> int:
    """What tells a generator from others: several objects of Python's may stand for one."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def state_of_generator(generator: Any) -> Any:
    """The state of a random number generator of Python or NumPy, to be compared with `==`."""
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    is_numpys = generator is np.random or isinstance(generator, np.random.RandomState)
    return pickle.dumps(generator.get_state()) if is_numpys else generator.getstate()


class Version:
    """A CPU tensor at one moment. Keeps the tensor alive, because a new tensor could get a dead one's id."""

    __slots__ = ("contents", "number", "tensor")

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.number = self.contents = None
        if not isinstance(tensor, torch.Tensor):
            return
        if not tensor.is_inference():
            self.number = tensor._version
        # NumPy, `.data` and other processes write without a new version: compare small tensors by value.
        if tensor.layout == torch.strided and (tensor.nbytes <= _MAX_TENSOR or tensor.is_inference()):
            self.contents = _bytes_of(tensor)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Version)
            and self.tensor is other.tensor
            and self.number == other.number
            and self.contents == other.contents
        )

    __hash__ = None  # type: ignore[assignment]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    # A tensor of one element is contiguous with any stride, and then has no view as bytes: a clone has.
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return bytes(plain.reshape(-1).view(torch.uint8).numpy().tobytes())


def describe(value: Any) -> str:
    """A value in a message: what it is, if that is short, else its type."""
    if is_simple(value):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, (*CONTAINERS, set)):
        return f"a {type(value).__name__} of {len(value)}"
    # Not its text: that may run the user's code.
    is_named = isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType))
    return str(value.__name__) if is_named else f"a {type(value).__name__}"


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, with the original's strides and offset, which `clone` may change."""
    # On its own device, whatever is the default in the step.
    data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(data.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        torch._C._set_conj(copy, True)
    if tensor.is_neg():
        torch._C._set_neg(copy, True)
    return copy
