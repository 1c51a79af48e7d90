"""What the commonest ops return, without asking torch: a product of matrices is m by n.

`resized` asks here before it asks meta tensors, and compares the answer with the first decision about an op
in the same way. A rule answers only for operands that are contiguous and where eager raises no error: None
says that it does not know. `view_rules` has the rules for views, `image_rules` those for layers of images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..program.types import TensorType, tensor_type
from .decision import Operand, Result
from .image_rules import IMAGES, Made, Shape
from .image_rules import are_plain as _are_plain
from .view_rules import VIEWS, dense_strides, dimension, is_contiguous


class Answer(NamedTuple):
    """What an op returns: see `Decision`."""

    results: tuple[Result | None, ...]
    structure: str


# -- products of matrices and ops on elements ------------------------------------------------------------


def _mm(a: Shape, b: Shape) -> Shape | None:
    return (a[0], b[1]) if len(a) == len(b) == 2 and a[1] == b[0] else None


def _bmm(a: Shape, b: Shape) -> Shape | None:
    is_known = len(a) == len(b) == 3 and a[0] == b[0] and a[2] == b[1]
    return (a[0], a[1], b[2]) if is_known else None


def _addmm(bias: Shape, a: Shape, b: Shape) -> Shape | None:
    shape = _mm(a, b)
    return shape if shape is not None and bias in (shape, shape[1:]) else None


_PRODUCTS: dict[str, Callable[..., Shape | None]] = {"mm": _mm, "bmm": _bmm, "addmm": _addmm}
_POINTWISE = (
    "add sub mul div neg exp log sqrt rsqrt relu threshold_backward sigmoid sigmoid_backward gelu "
    "gelu_backward silu silu_backward tanh tanh_backward"
)
_ELEMENTWISE = frozenset(_POINTWISE.split())


def _elementwise(types: Sequence[TensorType]) -> Shape | None:
    """The shape of the largest operand, of which the others are rows, blocks of rows and so on."""
    shape = max((type_.shape for type_ in types), key=len)
    for type_ in types:
        rank = len(type_.shape)
        if not rank or type_.shape != shape[len(shape) - rank :] or not is_contiguous(type_):
            return None
    return shape


# -- layers: each gets the arguments, with types in place of tensors, and knows their data types ------------


def _layer_norm(x: Any, size: Any, weight: Any, bias: Any, _eps: Any) -> Made | None:
    affine = [one for one in (weight, bias) if one is not None]
    if not _are_plain(x, *affine) or not _is_end_of(size, x) or any(list(t.shape) != size for t in affine):
        return None
    rest = (*x.shape[: -len(size)], *(1 for _ in size))
    return (x.dtype, x.shape), (x.dtype, rest), (x.dtype, rest)


def _layer_norm_backward(
    grad: Any, x: Any, size: Any, mean: Any, rstd: Any, weight: Any, bias: Any, mask: Any
) -> Made | None:
    affine = [one for one in (weight, bias) if one is not None]
    if not _are_plain(x, grad, mean, rstd, *affine) or not _is_end_of(size, x) or grad.shape != x.shape:
        return None
    rest = (*x.shape[: -len(size)], *(1 for _ in size))
    if mean.shape != rest or rstd.shape != rest or len(affine) != 2:
        return None
    if any(list(one.shape) != size for one in affine):
        return None
    own = (x.dtype, x.shape), (x.dtype, weight.shape), (x.dtype, bias.shape)
    return [made if is_wanted else None for made, is_wanted in zip(own, mask, strict=True)]


def _softmax(x: Any, dim: Any, half_to_float: Any) -> Made | None:
    if not _are_plain(x) or dimension(dim, len(x.shape)) is None or half_to_float:
        return None
    return ((x.dtype, x.shape),)


def _softmax_backward(grad: Any, output: Any, dim: Any, dtype: Any) -> Made | None:
    if not _are_plain(grad, output) or grad.shape != output.shape or dtype is not grad.dtype:
        return None
    return ((grad.dtype, grad.shape),) if dimension(dim, len(grad.shape)) is not None else None


def _nll_loss(x: Any, target: Any, weight: Any, reduction: Any, _ignored: Any) -> Made | None:
    if not _is_classified(x, target) or weight is not None or reduction not in (1, 2):
        return None
    return (x.dtype, ()), (x.dtype, ())


def _nll_loss_backward(
    grad: Any, x: Any, target: Any, weight: Any, reduction: Any, _ignored: Any, total: Any
) -> Made | None:
    if not _is_classified(x, target) or weight is not None or reduction not in (1, 2):
        return None
    if not _are_plain(x, grad, total) or grad.shape != () or total.shape != ():
        return None
    return ((x.dtype, x.shape),)


def _embedding(weight: Any, indices: Any, _padding: Any = -1, *_flags: Any) -> Made | None:
    if not _are_plain(weight) or len(weight.shape) != 2 or not _is_index(indices):
        return None
    return ((weight.dtype, (*indices.shape, weight.shape[1])),)


def _embedding_backward(grad: Any, indices: Any, num_rows: Any, *_rest: Any) -> Made | None:
    if not _are_plain(grad) or not _is_index(indices) or grad.shape[:-1] != indices.shape:
        return None
    return ((grad.dtype, (num_rows, grad.shape[-1])),) if type(num_rows) is int and num_rows > 0 else None


def _sum(x: Any, dims: Any, keepdim: Any = False) -> Made | None:
    if not _are_plain(x) or type(dims) is not list or not dims:
        return None
    reduced = [dimension(dim, len(x.shape)) for dim in dims]
    if None in reduced or len(set(reduced)) < len(reduced):
        return None
    sizes = [1 if dim in reduced else size for dim, size in enumerate(x.shape)]
    shape = tuple(size for dim, size in enumerate(sizes) if keepdim or dim not in reduced)
    return ((x.dtype, shape),)


def _cat(tensors: Any, dim: Any = 0) -> Made | None:
    first = tensors[0]
    at = dimension(dim, len(first.shape))
    # With four dimensions torch may take the strides of a dimension of size 1 for another layout.
    if at is None or len(first.shape) > 3 or not _are_plain(*tensors):
        return None
    others = {(*one.shape[:at], *one.shape[at + 1 :]) for one in tensors}
    if len(others) > 1 or any(len(one.shape) != len(first.shape) for one in tensors):
        return None
    return ((first.dtype, (*first.shape[:at], sum(t.shape[at] for t in tensors), *first.shape[at + 1 :])),)


_LAYERS: dict[str, Callable[..., Made | None]] = {
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten._softmax.default": _softmax,
    "aten._log_softmax.default": _softmax,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten._log_softmax_backward_data.default": _softmax_backward,
    "aten.nll_loss_forward.default": _nll_loss,
    "aten.nll_loss_backward.default": _nll_loss_backward,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.sum.dim_IntList": _sum,
    "aten.mean.dim": _sum,
    "aten.cat.default": _cat,
    **IMAGES,
}


def _is_index(type_: Any) -> bool:
    return type_.dtype in (torch.int64, torch.int32) and is_contiguous(type_)


def _is_classified(x: Any, target: Any) -> bool:
    is_batch = len(x.shape) == 2 and target.shape == x.shape[:1]
    return is_batch and _are_plain(x) and target.dtype is torch.int64 and is_contiguous(target)


def _is_end_of(size: Any, x: Any) -> bool:
    return type(size) is list and 0 < len(size) < len(x.shape) and list(x.shape[-len(size) :]) == size


# -- all rules ------------------------------------------------------------------------------------------

_ARANGE = "aten.arange.default"
_PACKETS = frozenset((*_PRODUCTS, *_ELEMENTWISE))
NAMES = _PACKETS | frozenset(name.split(".")[1] for name in (*VIEWS, *_LAYERS, _ARANGE))


def answer(
    op: str, operands: Sequence[Operand], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Answer | None:
    """What the op returns; None if it has no rule, or if the operands are not what the rule is for."""
    _, packet, _ = op.split(".")
    if op == _ARANGE:
        return _answer_arange(args[0], kwargs.get("dtype"))
    if packet not in NAMES or not operands:
        return None
    types = [operand.type for operand in operands]
    if any(type_.conj or type_.neg or 0 in type_.shape for type_ in types):
        return None
    if op in VIEWS or op in _LAYERS:
        if kwargs:
            return None
        remaining = iter(types)
        filled = [_fill(arg, remaining) for arg in args]
        return _answer_view(op, operands[0], filled) if op in VIEWS else _answer_layer(op, filled)
    return _answer_plain(packet, types, args)


def _answer_arange(end: Any, dtype: torch.dtype | None) -> Answer | None:
    if type(end) is not int or end < 1 or dtype not in (None, torch.int64):
        return None
    return Answer((_new(torch.int64, (end,)),), "one")


def _fill(arg: Any, types: Any) -> Any:
    if type(arg) is Operand:
        return next(types)
    return [_fill(a, types) for a in arg] if type(arg) in (list, tuple) else arg


def _answer_view(op: str, operand: Operand, args: list[Any]) -> Answer | None:
    views = VIEWS[op](*args)
    if views is None:
        return None
    itemsize = operand.type.dtype.itemsize
    nbytes = -(-operand.nbytes // itemsize) * itemsize  # of whole elements, as in `make`
    is_list = op == "aten.split.Tensor"
    return Answer(tuple(Result(type_, -1, 0, nbytes) for type_ in views), "list" if is_list else "one")


def _answer_layer(op: str, args: list[Any]) -> Answer | None:
    made = _LAYERS[op](*args)
    if made is None:
        return None
    results: list[Result | None] = []
    num_new = 0
    for one in made:
        num_new += one is not None
        results.append(None if one is None else _new(*one, -num_new))
    return Answer(tuple(results), "one" if len(results) == 1 else "tuple")


def _answer_plain(packet: str, types: Sequence[TensorType], args: Sequence[Any]) -> Answer | None:
    # Lists of tensors, and operands among the keywords, have no rule; nor has another type for the result.
    if packet not in _PACKETS or len(types) != sum(type(arg) is Operand for arg in args):
        return None
    if any(type_.dtype is not types[0].dtype for type_ in types):
        return None
    if packet in _PRODUCTS:
        shape = _PRODUCTS[packet](*(type_.shape for type_ in types)) if len(types) == len(args) else None
    else:
        shape = _elementwise(types)
    return None if shape is None else Answer((_new(types[0].dtype, shape),), "one")


def _new(dtype: torch.dtype, shape: Shape, alias: int = -1) -> Result:
    type_ = tensor_type(dtype, shape, dense_strides(shape))
    return Result(type_, -1, alias, math.prod(shape) * dtype.itemsize)
