"""Views without asking torch: the sizes, strides and offset of a view of a tensor follow from a few integers.

Each rule takes the type of the operand and the other arguments, and returns the types of the views; None
where eager would raise an error, or where torch's choice of a stride is not simple, as for a dimension of
size 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from ..program.types import TensorType, tensor_type

Rule = Callable[..., list[TensorType] | None]


@functools.lru_cache(4096)
def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a new tensor of this shape, which is not empty."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def is_contiguous(type_: TensorType) -> bool:
    """Whether the elements lie one behind the other, with the strides that torch gives a new tensor."""
    return type_.stride == dense_strides(type_.shape)


def dimension(dim: Any, rank: int) -> int | None:
    """A dimension counted from the front; None if there is no such dimension."""
    if type(dim) is not int or not -rank <= dim < rank:
        return None
    return dim % rank


def _like(x: TensorType, shape: Sequence[int], stride: Sequence[int], shift: int = 0) -> list[TensorType]:
    return [tensor_type(x.dtype, tuple(shape), tuple(stride), x.offset + shift)]


def _view(x: TensorType, sizes: Any) -> list[TensorType] | None:
    if type(sizes) is not list or not all(type(size) is int for size in sizes):
        return None
    shape, numel = list(sizes), math.prod(x.shape)
    if shape.count(-1) == 1:
        known = math.prod(size for size in shape if size != -1)
        if known <= 0 or numel % known:
            return None
        shape[shape.index(-1)] = numel // known
    if any(size < 1 for size in shape) or math.prod(shape) != numel:
        return None
    if is_contiguous(x):
        return _like(x, shape, dense_strides(tuple(shape)))
    if 1 in shape or 1 in x.shape:
        return None
    stride = _split_blocks(_blocks(x), shape)
    return None if stride is None else _like(x, shape, stride)


def _blocks(x: TensorType) -> list[tuple[int, int]]:
    """Runs of dimensions that could be one dimension, from the last to the first: its size and stride."""
    blocks: list[tuple[int, int]] = []
    for size, stride in zip(reversed(x.shape), reversed(x.stride), strict=True):
        if blocks and stride == blocks[-1][0] * blocks[-1][1]:
            blocks[-1] = blocks[-1][0] * size, blocks[-1][1]
        else:
            blocks.append((size, stride))
    return blocks


def _split_blocks(blocks: list[tuple[int, int]], shape: Sequence[int]) -> list[int] | None:
    """The strides of a view with this shape: each block must be a product of some of its dimensions."""
    strides: list[int] = []
    sizes = list(shape)
    for total, step in blocks:
        covered = 1
        while covered < total and sizes:
            strides.append(covered * step)
            covered *= sizes.pop()
        if covered != total:
            return None
    return strides[::-1] if not sizes else None


def _t(x: TensorType) -> list[TensorType] | None:
    return _like(x, x.shape[::-1], x.stride[::-1]) if len(x.shape) == 2 else None


def _transpose(x: TensorType, first: Any, second: Any) -> list[TensorType] | None:
    a, b = dimension(first, len(x.shape)), dimension(second, len(x.shape))
    if a is None or b is None:
        return None
    order = list(range(len(x.shape)))
    order[a], order[b] = order[b], order[a]
    return _like(x, [x.shape[dim] for dim in order], [x.stride[dim] for dim in order])


def _permute(x: TensorType, dims: Any) -> list[TensorType] | None:
    order = [dimension(dim, len(x.shape)) for dim in dims]
    if sorted(dim for dim in order if dim is not None) != list(range(len(x.shape))):
        return None
    chosen = [dim for dim in order if dim is not None]
    return _like(x, [x.shape[dim] for dim in chosen], [x.stride[dim] for dim in chosen])


def _unsqueeze(x: TensorType, dim: Any) -> list[TensorType] | None:
    rank = len(x.shape)
    at = dimension(dim, rank + 1)
    if at is None:
        return None
    step = x.shape[at] * x.stride[at] if at < rank else 1
    return _like(x, (*x.shape[:at], 1, *x.shape[at:]), (*x.stride[:at], step, *x.stride[at:]))


def _select(x: TensorType, dim: Any, index: Any) -> list[TensorType] | None:
    at = dimension(dim, len(x.shape))
    if at is None:
        return None
    place = dimension(index, x.shape[at])
    if place is None:
        return None
    rest = [other for other in range(len(x.shape)) if other != at]
    stride = [x.stride[other] for other in rest]
    return _like(x, [x.shape[other] for other in rest], stride, place * x.stride[at])


def _split(x: TensorType, size: Any, dim: Any = 0) -> list[TensorType] | None:
    at = dimension(dim, len(x.shape))
    if at is None or type(size) is not int or size < 1:
        return None
    found: list[TensorType] = []
    for start in range(0, x.shape[at], size):
        shape = (*x.shape[:at], min(size, x.shape[at] - start), *x.shape[at + 1 :])
        found += _like(x, shape, x.stride, start * x.stride[at])
    return found


def _expand(x: TensorType, sizes: Any) -> list[TensorType] | None:
    if type(sizes) is not list or not x.shape or len(sizes) < len(x.shape):
        return None
    num_new = len(sizes) - len(x.shape)
    shape: list[int] = []
    stride: list[int] = []
    for dim in reversed(range(len(sizes))):
        is_new = dim < num_new
        size = 1 if is_new else x.shape[dim - num_new]
        step = shape[0] * stride[0] if is_new else x.stride[dim - num_new]
        wanted = size if sizes[dim] == -1 and not is_new else sizes[dim]
        if type(wanted) is not int or wanted < 1 or size not in (1, wanted):
            return None
        shape.insert(0, wanted)
        stride.insert(0, step if size == wanted else 0)
    return _like(x, shape, stride)


def _slice(x: TensorType, dim: Any = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    at = dimension(dim, len(x.shape))
    if at is None or type(step) is not int or step < 1:
        return None
    if not all(bound is None or type(bound) is int for bound in (start, end)):
        return None
    first, last, _ = slice(start, end).indices(x.shape[at])
    size = -(-(last - first) // step)
    if size < 1:
        return None
    shape = (*x.shape[:at], size, *x.shape[at + 1 :])
    stride = (*x.stride[:at], x.stride[at] * step, *x.stride[at + 1 :])
    return _like(x, shape, stride, first * x.stride[at])


VIEWS: dict[str, Rule] = {
    "aten.view.default": _view,
    "aten._unsafe_view.default": _view,
    "aten.t.default": _t,
    "aten.transpose.int": _transpose,
    "aten.permute.default": _permute,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.select.int": _select,
    "aten.split.Tensor": _split,
    "aten.expand.default": _expand,
    "aten.slice.Tensor": _slice,
}
