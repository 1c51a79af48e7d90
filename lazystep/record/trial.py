"""Which ops are tried out on zeros, not inferred, when they are first met.

Inference on fake tensors takes 1 to 8 ms for an op, a run on a megabyte of zeros a tenth of that; the first
step of a small GPT spent 0.34 s on inference. A run tells the same, and the truth, where what an op
returns depends on the types of its operands alone. That holds for the kinds below, for each of which
the work can be told beforehand: an outer product of small vectors need not be small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..program.types import TensorType

_MAX_WORK = 1 << 20  # elements
_MAX_NBYTES = 1 << 23  # of zeros to be made

Work = Callable[[Sequence[TensorType]], int]


def work_of(func: Any) -> Work | None:
    """How the work of an op follows from the types of its operands; None if it is not of these kinds."""
    if not func._schema.name.startswith("aten::"):
        return None
    packet = func._schema.name.partition("::")[2].removesuffix("_")
    if torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags:
        return _broadcast
    return _WORK.get(packet)


def is_cheap(work: Work | None, types: Sequence[TensorType], nbytes: int) -> bool:
    """Whether an op with these operands, in `nbytes` of memory, costs less to try out than to infer."""
    if work is None or not types or nbytes > _MAX_NBYTES:
        return False
    try:
        return work(types) <= _MAX_WORK
    except (RuntimeError, IndexError):
        return False  # shapes that do not fit: what is wrong with them is said elsewhere


def _nothing(types: Sequence[TensorType]) -> int:
    return 0


def _broadcast(types: Sequence[TensorType]) -> int:
    return math.prod(torch.broadcast_shapes(*(type_.shape for type_ in types)))


def _largest(types: Sequence[TensorType]) -> int:
    return max(math.prod(type_.shape) for type_ in types)


def _product(types: Sequence[TensorType]) -> int:
    """Of the last two operands, which are matrices or batches of them: a multiplication is quick."""
    left, right = types[-2].shape, types[-1].shape
    return math.prod(left) * right[-1] // 64


_VIEWS = ("view", "_unsafe_view", "t", "transpose", "permute", "unsqueeze", "squeeze", "slice", "select")
_REDUCTIONS = ("sum", "mean", "amax", "amin", "var_mean", "_softmax", "_log_softmax")
_LIKE = ("zeros_like", "ones_like", "full_like", "empty_like", "fill", "zero", "_to_copy")
_LAYERS = (
    "_softmax_backward_data",
    "_log_softmax_backward_data",
    "native_layer_norm",
    "native_layer_norm_backward",
    "native_batch_norm",
    "native_batch_norm_backward",
    "nll_loss_forward",
    "nll_loss_backward",
    "mse_loss",
    "mse_loss_backward",
)
_WORK: dict[str, Work] = {
    **dict.fromkeys((*_VIEWS, "split", "expand", "detach"), _nothing),
    **dict.fromkeys((*_REDUCTIONS, *_LIKE, *_LAYERS), _largest),
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _product),
}
