"""What layers for images return: convolution, pooling, batch norm. See `shape_rules`, which asks here.

Each rule gets the arguments of the op, with types in place of tensors, and returns the data types and shapes
of the new, contiguous results; None if it does not know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .view_rules import is_contiguous

Shape = tuple[int, ...]
# The data type and shape of each new, contiguous result; None for a result that is not asked for.
Made = Sequence[tuple[torch.dtype, Shape] | None]


def are_plain(*types: Any) -> bool:
    """Whether all are contiguous tensors of one of the two usual data types."""
    usual = types[0].dtype in (torch.float32, torch.float64)
    return usual and all(type_.dtype is types[0].dtype and is_contiguous(type_) for type_ in types)


def _numbers(given: Any, count: int, least: int) -> list[int] | None:
    """One integer per dimension; one stands for all of them."""
    if type(given) is not list or len(given) not in (1, count):
        return None
    found = given * count if len(given) == 1 else given
    return found if all(type(one) is int and one >= least for one in found) else None


def _window(
    sizes: Sequence[int], kernel: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> Shape | None:
    """The places of a window that slides over these sizes."""
    count = len(sizes)
    steps, margins, gaps = (
        _numbers(stride, count, 1),
        _numbers(padding, count, 0),
        _numbers(dilation, count, 1),
    )
    if steps is None or margins is None or gaps is None:
        return None
    room = [
        size + 2 * margin - gap * (width - 1) - 1
        for size, margin, gap, width in zip(sizes, margins, gaps, kernel, strict=True)
    ]
    if min(room) < 0:
        return None
    return tuple(left // step + 1 for left, step in zip(room, steps, strict=True))


def _convolved(
    x: Any, weight: Any, stride: Any, padding: Any, dilation: Any, transposed: Any, groups: Any
) -> Shape | None:
    rank = len(x.shape)
    if not are_plain(x, weight) or transposed is not False or rank not in (3, 4, 5):
        return None
    if len(weight.shape) != rank or type(groups) is not int or groups < 1:
        return None
    if x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        return None
    places = _window(x.shape[2:], weight.shape[2:], stride, padding, dilation)
    return None if places is None else (x.shape[0], weight.shape[0], *places)


def _convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: Any,
    _added: Any,
    groups: Any,
) -> Made | None:
    shape = _convolved(x, weight, stride, padding, dilation, transposed, groups)
    if shape is None or (bias is not None and (not are_plain(x, bias) or bias.shape != weight.shape[:1])):
        return None
    return ((x.dtype, shape),)


def _convolution_backward(
    grad: Any,
    x: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: Any,
    _added: Any,
    groups: Any,
    mask: Any,
) -> Made | None:
    shape = _convolved(x, weight, stride, padding, dilation, transposed, groups)
    if shape is None or not are_plain(x, grad) or grad.shape != shape:
        return None
    # Some kernels make the weight's gradient unasked, along with that of the bias.
    if not mask[1] or (mask[2] and bias_sizes != [weight.shape[0]]):
        return None
    own = (x.dtype, x.shape), (x.dtype, weight.shape), (x.dtype, weight.shape[:1])
    return [made if is_wanted else None for made, is_wanted in zip(own, mask, strict=True)]


def _pooled(x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: Any) -> Shape | None:
    widths = _numbers(kernel, 2, 1)
    margins = _numbers(padding, 2, 0)
    if not are_plain(x) or len(x.shape) not in (3, 4) or widths is None or margins is None or ceil:
        return None
    if any(2 * margin > width for margin, width in zip(margins, widths, strict=True)):
        return None
    places = _window(x.shape[-2:], widths, stride or widths, margins, dilation)
    return None if places is None else (*x.shape[:-2], *places)


def _max_pool(
    x: Any, kernel: Any, stride: Any = None, padding: Any = (0,), dilation: Any = (1,), ceil: Any = False
) -> Made | None:
    shape = _pooled(x, kernel, stride, list(padding), list(dilation), ceil)
    return None if shape is None else ((x.dtype, shape), (torch.int64, shape))


def _max_pool_backward(
    grad: Any, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: Any, indices: Any
) -> Made | None:
    shape = _pooled(x, kernel, stride, padding, dilation, ceil)
    if shape is None or not are_plain(x, grad) or grad.shape != shape:
        return None
    if indices.dtype is not torch.int64 or indices.shape != shape or not is_contiguous(indices):
        return None
    return ((x.dtype, x.shape),)


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: Any, _momentum: Any, _eps: Any
) -> Made | None:
    if training is not True or not _are_channels(x, weight, bias, mean, var):
        return None
    return (x.dtype, x.shape), (x.dtype, x.shape[1:2]), (x.dtype, x.shape[1:2])


def _batch_norm_backward(
    grad: Any,
    x: Any,
    weight: Any,
    mean: Any,
    var: Any,
    saved_mean: Any,
    saved_var: Any,
    training: Any,
    _eps: Any,
    mask: Any,
) -> Made | None:
    if training is not True or saved_mean is None or saved_var is None or grad.shape != x.shape:
        return None
    if not are_plain(x, grad) or not _are_channels(x, weight, mean, var, saved_mean, saved_var):
        return None
    channels = x.shape[1:2]
    own = (x.dtype, x.shape), (x.dtype, channels), (x.dtype, channels)
    return [made if is_wanted else None for made, is_wanted in zip(own, mask, strict=True)]


def _are_channels(x: Any, *vectors: Any) -> bool:
    """Whether these have one number per channel of an image, or are not there."""
    given = [one for one in vectors if one is not None]
    if not are_plain(x, *given) or len(x.shape) < 2 or math.prod(x.shape) == x.shape[1]:
        return False
    return all(one.shape == x.shape[1:2] for one in given)


IMAGES: dict[str, Callable[..., Made | None]] = {
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten.max_pool2d_with_indices.default": _max_pool,
    "aten.max_pool2d_with_indices_backward.default": _max_pool_backward,
    "aten.native_batch_norm.default": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
}
