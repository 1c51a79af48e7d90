"""The arguments of a captured step: split into leaves, moved to the lazy device, and sorted into kinds.

Calls share captures if their arguments have the same kind: the same structure, tensors of the same types and
equal plain values. Floats may vary within a kind, because they are inputs of the program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ..program.types import TensorType
from ..record.handle import Handle
from ..record.tensor import find_handle

# How to build the arguments from the leaves: the number of leaves if there are only positional leaves, else a
# tree.
Structure = int | pytree.TreeSpec
Kind = tuple[Any, ...]

_LEAVES = frozenset((torch.Tensor, torch.nn.Parameter, float, int, bool, str, type(None)))


def take_apart(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Structure]:
    """The leaves of all arguments, with CPU tensors moved to the lazy device, and their structure."""
    structure: Structure
    if not kwargs and _LEAVES.issuperset(map(type, args)):
        leaves, structure = list(args), len(args)  # fast path: most steps are called like this
    else:
        leaves, structure = pytree.tree_flatten((args, kwargs))
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_cpu:
            leaves[number] = leaf.to("lazy")
    return leaves, structure


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
        return None if handle is None else handle.type, leaf.requires_grad, first
    if type(leaf) is float:
        return (float,)
    try:
        hash(leaf)
    except TypeError:
        if isinstance(leaf, np.ndarray):
            # By its contents: nothing else shows that an array was written in place.
            digest = hashlib.blake2b(np.ascontiguousarray(leaf).tobytes()).digest()
            return type(leaf), leaf.dtype.str, leaf.shape, digest
        return type(leaf), id(leaf)
    return type(leaf), leaf


def kind_difference(old: Kind, new: Kind) -> str:
    """Which argument has another kind, and what to do about it."""
    if old[0] != new[0]:
        return "its arguments have another structure"
    number = next(n for n, (a, b) in enumerate(zip(old[1:], new[1:], strict=True)) if a != b)
    if isinstance(new[number + 1][0], TensorType):
        return f"argument {number} is a tensor of another shape or type"
    return (
        f"argument {number} ({new[number + 1][0].__name__}) has another value, which is part of the step; "
        "pass a number that varies as a float or a tensor"
    )
