"""How much work an op is, told from the types of its operands.

Known only for ops whose result depends on the types of their operands alone, so that a trial may take the
place of inference. The size of the operands does not tell it: an outer product of small vectors need not be
small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..program.types import TensorType

Work = Callable[[Sequence[TensorType]], int]


def work_of(func: Any) -> Work | None:
    """How the work of an op follows from the types of its operands; None if that is not known."""
    if not func._schema.name.startswith("aten::"):
        return None
    packet = func._schema.name.partition("::")[2].removesuffix("_")
    if torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags:
        return _broadcast
    return _WORK.get(packet)


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
