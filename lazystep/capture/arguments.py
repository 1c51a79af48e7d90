"""The arguments of a captured step: split into leaves, moved to the lazy device, and sorted into kinds.

Calls share captures if their arguments have the same kind: the same structure, tensors of the same types and
equal plain values. Floats may vary within a kind, because they are inputs of the program.
"""

from __future__ import annotations

import decimal
import hashlib
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ..errors import UnsupportedError
from ..program.types import TensorType
from ..record.handle import Handle
from ..record.tensor import find_handle
from .values import describe, is_simple

# How to build the arguments from the leaves: the number of leaves if there are only positional leaves, else a
# tree.
Structure = int | pytree.TreeSpec
Kind = tuple[Any, ...]
_INEXACT = (complex, frozenset, decimal.Decimal, range)  # of which equal ones may differ

_LEAVES = frozenset((torch.Tensor, torch.nn.Parameter, float, int, bool, str, type(None)))


def take_apart(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Structure]:
    """The leaves of all arguments, with CPU tensors moved to the lazy device, and their structure."""
    structure: Structure
    if not kwargs and _LEAVES.issuperset(map(type, args)):
        leaves, structure = list(args), len(args)  # fast path: most steps are called like this
    else:
        leaves, structure = pytree.tree_flatten((args, kwargs))
    moved: dict[int, torch.Tensor] = {}  # one tensor that is given twice stays one
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_cpu:
            if id(leaf) not in moved:
                moved[id(leaf)] = leaf.to("lazy")
                moved[id(leaf)].__dict__.update(leaf.__dict__)
            leaves[number] = moved[id(leaf)]
    return leaves, structure


class MovedArguments:
    """CPU tensors among the arguments. The step works on copies, so it must not change them."""

    def __init__(
        self, args: Sequence[Any], kwargs: dict[str, Any], leaves: Sequence[Any], structure: Structure
    ) -> None:
        given = args if isinstance(structure, int) else pytree.tree_leaves((args, kwargs))
        pairs = zip(given, leaves, strict=True)
        self._facts = [
            (number, before, now, now.requires_grad, find_handle(now))
            for number, (before, now) in enumerate(pairs)
            if now is not before
        ]
        # Leaves that want a gradient, each with the gradient that it has now.
        self._gradients = [
            (number, before, before.grad, _version_of(before.grad))
            for number, before in enumerate(given)
            if isinstance(before, torch.Tensor) and before.is_cpu and before.requires_grad and before.is_leaf
        ]

    def explain(self, error: Exception) -> None:
        """Tell in an error that an op wants a tensor on the CPU why it is not there."""
        if self._facts and "cpu" in str(error).lower():
            numbers = ", ".join(str(number) for number, *_ in self._facts)
            error.add_note(
                "lazystep: a captured step moves its CPU tensors to the lazy device (here argument "
                f"{numbers}). Where an op needs one on the CPU, pass x.cpu() to it inside the step, which "
                "reads its values."
            )

    def check(self, name: str, inputs: Sequence[Handle], written: Sequence[bool]) -> None:
        """Raise if the step has changed one of them. `written`: which inputs of the program it writes."""
        for number, leaf, gradient, version in self._gradients:
            if leaf.grad is not gradient or _version_of(gradient) != version:
                raise UnsupportedError(
                    f"{name} computes the gradient of argument {number}, a CPU tensor. The step works on a "
                    "copy, so x.grad is not found inside. Pass a tensor on the lazy device: "
                    'x.detach().to("lazy").requires_grad_().'
                )
        for number, before, now, requires_grad, handle in self._facts:
            what = ""
            if any(is_written and one == handle for one, is_written in zip(inputs, written, strict=True)):
                what = "in place"
            elif find_handle(now) != handle:
                what = "in place, by another shape or other memory"
            elif now.requires_grad != requires_grad or (requires_grad and now.is_leaf):
                what = "by requires_grad_"
            elif _attributes_of(now) != _attributes_of(before):
                what = "by an attribute"
            if what:
                raise UnsupportedError(
                    f"{name} changes argument {number}, a CPU tensor, {what}. The step works on a copy, so "
                    'the change would be lost. Pass a tensor on the lazy device, x.to("lazy"), or change '
                    "x.clone() inside."
                )


def _attributes_of(tensor: torch.Tensor) -> list[tuple[str, int]]:
    """The attributes that code has set on a tensor, with the ids of their values."""
    return [(name, id(value)) for name, value in tensor.__dict__.items()]


def _version_of(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None else int(tensor._version)


def put_together(leaves: list[Any], structure: Structure) -> tuple[Sequence[Any], dict[str, Any]]:
    """The positional and keyword arguments that have these leaves."""
    if isinstance(structure, int):
        return leaves, {}
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return args, kwargs


def kind_of(leaves: Sequence[Any], structure: Structure) -> Kind:
    """The kind of a call: two calls share captures if their kinds are equal. Hashable."""
    handles = [find_handle(leaf) for leaf in leaves]
    first: dict[int, int] = {}
    same = [
        first.setdefault(id(handle or leaf), n)
        for n, (handle, leaf) in enumerate(zip(handles, leaves, strict=True))
    ]
    return structure, *map(_kind, leaves, handles, same)


def _kind(leaf: Any, handle: Handle | None, first: int) -> Hashable:
    """`first`: the number of the first leaf that is the same object or has the same handle."""
    if isinstance(leaf, torch.Tensor):
        # Where a slice begins in its memory is no part of the program.
        # A step may ask which attributes code has set on a tensor. Reading one is refused.
        return None if handle is None else handle.type.at(0), leaf.requires_grad, first, *leaf.__dict__
    if type(leaf) is float:
        return (float,)
    if type(leaf) in _INEXACT or isinstance(leaf, np.generic):
        return type(leaf), _exact(leaf)
    if is_simple(leaf) and getattr(leaf, "__dict__", None):
        return type(leaf), id(leaf), leaf  # a text with attributes, say
    try:
        hash(leaf)
    except TypeError:
        if isinstance(leaf, np.ndarray):
            # By its contents: nothing else shows that an array was written in place.
            digest = hashlib.blake2b(np.ascontiguousarray(leaf).tobytes()).digest()
            return type(leaf), leaf.dtype.str, leaf.shape, leaf.flags.num, digest
        return type(leaf), id(leaf)
    return type(leaf), leaf


def _exact(leaf: Any) -> Hashable:
    """What is equal only if a value is: 0j and -0j are equal, and so are 1 and True in a set."""
    if isinstance(leaf, frozenset):
        return tuple((type(element), _exact(element)) for element in leaf)
    if isinstance(leaf, np.generic):
        return leaf.dtype.str, leaf.tobytes()
    if isinstance(leaf, decimal.Decimal):
        return leaf.as_tuple()
    if isinstance(leaf, range):
        return leaf.start, leaf.stop, leaf.step
    return repr(leaf) if isinstance(leaf, (float, complex)) else leaf


def differ_in_sizes(old: Kind, new: Kind) -> bool:
    """Whether two kinds have the same structure and values, and their tensors differ in sizes only."""
    if old[0] != new[0] or len(old) != len(new):
        return False
    for before, now in zip(old[1:], new[1:], strict=True):
        if before == now:
            continue
        if not (isinstance(before[0], TensorType) and isinstance(now[0], TensorType)):
            return False
        if before[1:] != now[1:] or before[0].dtype != now[0].dtype:
            return False
        if len(before[0].shape) != len(now[0].shape):
            return False
    return True


def kind_difference(old: Kind, new: Kind) -> str:
    """Which argument has another kind, and what to do about it."""
    if old[0] != new[0]:
        return f"the structure of its arguments from {_shape(old[0])} to {_shape(new[0])}"
    number = next(n for n, (a, b) in enumerate(zip(old[1:], new[1:], strict=True)) if a != b)
    before, now = old[number + 1], new[number + 1]
    if isinstance(now[0], TensorType) and isinstance(before[0], TensorType) and before[0] is not now[0]:
        types = [f"{type_} ({type_.dtype})" for type_ in (before[0], now[0])]
        return f"argument {number} is a tensor of another type: from {types[0]} to {types[1]}"
    if isinstance(now[0], TensorType) and isinstance(before[0], TensorType):
        if before[3:] != now[3:]:
            return f"the attributes of argument {number}, a tensor,"
        return f"argument {number} is a tensor that shares memory or wants gradients differently"
    return (
        f"argument {number} ({_name_of_kind(now)}) has another value, from {_describe_kind(before)} to "
        f"{_describe_kind(now)}, which is part of the step; pass a number that varies as a float or a tensor"
    )


def _name_of_kind(kind: Any) -> str:
    return "tensor" if isinstance(kind[0], TensorType) else str(kind[0].__name__)


def _describe_kind(kind: Any) -> str:
    is_value = len(kind) == 2 and not isinstance(kind[0], TensorType)
    return describe(kind[1]) if is_value and is_simple(kind[1]) else f"a {_name_of_kind(kind)}"


def _shape(structure: Structure) -> str:
    if isinstance(structure, int):
        return f"{structure} values"
    text = str(pytree.tree_unflatten(["*"] * structure.num_leaves, structure))
    return text if len(text) <= 120 else f"{text[:117]}..."
