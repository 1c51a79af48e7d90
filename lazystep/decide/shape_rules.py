"""The shape of what the commonest ops return, without asking torch: a product of matrices is m by n.

For ops with one new, contiguous result in the data type of all operands. `resized` asks here before it asks
meta tensors, and compares the answer with the first decision about an op in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch._prims_common import make_contiguous_strides_for

from ..program.types import TensorType, tensor_type
from .decision import Operand, Result

Shape = tuple[int, ...]


def _mm(a: Shape, b: Shape) -> Shape | None:
    return (a[0], b[1]) if len(a) == len(b) == 2 and a[1] == b[0] else None


def _bmm(a: Shape, b: Shape) -> Shape | None:
    is_known = len(a) == len(b) == 3 and a[0] == b[0] and a[2] == b[1]
    return (a[0], a[1], b[2]) if is_known else None


def _addmm(bias: Shape, a: Shape, b: Shape) -> Shape | None:
    shape = _mm(a, b)
    return shape if shape is not None and bias in (shape, shape[1:]) else None


_PRODUCTS: dict[str, Callable[..., Shape | None]] = {"mm": _mm, "bmm": _bmm, "addmm": _addmm}
# Element by element, on operands of one shape that are contiguous.
_ELEMENTWISE = frozenset(
    ("add", "sub", "mul", "gelu", "gelu_backward", "silu", "silu_backward", "tanh", "tanh_backward")
)
NAMES = frozenset((*_PRODUCTS, *_ELEMENTWISE))


def result_of(packet: str, operands: Sequence[Operand], args: Sequence[Any]) -> Result | None:
    """What the op returns; None if it has no rule, or if the operands are not what the rule is for."""
    types = [operand.type for operand in operands]
    # Lists of tensors, and operands among the keywords, have no rule.
    if packet not in NAMES or len(types) != sum(type(arg) is Operand for arg in args):
        return None
    first = types[0]
    if any(type_.dtype is not first.dtype or type_.conj or type_.neg or 0 in type_.shape for type_ in types):
        return None
    if packet in _PRODUCTS:
        if len(types) != len(args):  # with another type for the result, say
            return None
        shape = _PRODUCTS[packet](*(type_.shape for type_ in types))
    else:
        shape = first.shape if all(_is_contiguous(type_, first.shape) for type_ in types) else None
    if shape is None:
        return None
    made = tensor_type(first.dtype, shape, make_contiguous_strides_for(shape))
    return Result(made, -1, -1, math.prod(shape) * first.dtype.itemsize)


def _is_contiguous(type_: TensorType, shape: Shape) -> bool:
    return type_.shape == shape and type_.stride == make_contiguous_strides_for(shape)
