"""Trials: an op runs once on zeros when it is first met, to show what it does.

Inference on fake tensors takes 1 to 8 ms for an op, and a run on a megabyte of zeros a tenth of that; the
first step of a small GPT spent 0.34 s on inference. A trial says the truth wherever the result of an op
depends on the types of its operands alone. That holds for the ops of `work.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from ..eager import serial_dispatch
from ..program.updates import UPDATE
from .decision import Decision, Operand
from .facts import OpFacts
from .stand_ins import call, describe, make_all
from .work import Work

_MAX_WORK = 1 << 20  # elements
_MAX_NBYTES = 1 << 23  # of zeros to be made
# Behind inference, ops that move at most this many bytes are tried as well.
_MAX_NBYTES_BEHIND_INFERENCE = 1 << 18
# Ops whose inferred shapes are wrong on the CPU are tried whatever their size. Embedding bags touch little of
# their operands when every index is zero. The LSTM layer, whose workspace is inferred as empty, runs once.
_ALWAYS_TRIED = (
    "aten._embedding_bag.default",
    "aten._embedding_bag_forward_only.default",
    "aten.mkldnn_rnn_layer.default",
    "lazystep.lstm_layer_without_grad.default",
)
# Errors that do not depend on the values of tensors: they are raised at the user's line.
_VALUE_FREE_ERROR = re.compile(
    r"not implemented for|scalar type|dtype|data type|unsupported operation|can't be cast|complex|"
    r"without overflow|negative integer powers|integral input|too many indices|Boolean (alpha|beta)|"
    r"does not support|out of bounds for storage|Index to scalar|tensor shape must match|"
    r"axis dim should be positive"
)


def is_cheap(work: Work | None, operands: Sequence[Operand]) -> bool:
    """Whether a trial on these operands costs less than inference."""
    if work is None or not operands or sum(o.nbytes for o in operands) > _MAX_NBYTES:
        return False
    try:
        return work([o.type for o in operands]) <= _MAX_WORK
    except (RuntimeError, IndexError):
        return False  # shapes that do not fit: inference raises the right error


def is_due_behind_inference(decision: Decision, facts: OpFacts, operands: Sequence[Operand]) -> bool:
    """Whether an op that has been inferred is tried as well, because inference may be wrong about it."""
    if not facts.name.startswith(("aten.", "lazystep.")) or facts.is_collective:
        return False  # a custom op may do more than compute, and other ranks take part in a collective
    if facts.name == UPDATE:
        return False  # makes nothing: what it writes is all there is to know
    nbytes = sum(o.nbytes for o in operands) + sum(r.nbytes for r in decision.results if r)
    # Inference does not see that an op reads what it writes, or writes an element twice.
    may_overlap = any(o.group >= 0 for o in operands) or any(
        0 in operands[k].type.stride for k in decision.writes
    )
    is_known_wrong = facts.has_out or facts.name in _ALWAYS_TRIED
    return nbytes <= _MAX_NBYTES_BEHIND_INFERENCE or may_overlap or is_known_wrong


def run_trial(
    decision: Decision,
    operands: list[Operand],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_value_free: bool,
) -> bool:
    """Run an op on zeros, or ones, and note in `decision` what it did. False if it takes neither.

    Raises an error that no values of tensors cause, and with `is_value_free` any error.
    """
    try:
        tensors, storages, out = _attempt(decision.func, operands, args, kwargs)
    except Exception as error:
        if is_value_free or _is_about_numbers(error) or _is_about_shapes(error, operands):
            raise
        return False  # a value may be the cause: a singular matrix
    describe(decision, operands, tensors, storages, out)
    decision.was_tried = True
    return True


def try_numbers(
    decision: Decision, operands: list[Operand], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Run an op on zeros, or ones, with other numbers than before. Raises an error that the numbers cause."""
    try:
        _attempt(decision.func, operands, args, kwargs)
    except Exception as error:
        if decision.was_tried or _is_about_numbers(error):
            raise


def _attempt(
    func: Any, operands: list[Operand], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[int], Any]:
    """The operands, their storages and the results of a call on zeros, or on ones if it takes no zeros."""
    first: Exception | None = None
    for factory in (torch.zeros, torch.ones):  # zero is a valid index, one a valid pivot
        tensors = make_all(operands, factory)
        storages = [t.untyped_storage()._cdata for t in tensors]
        try:
            with serial_dispatch():
                return tensors, storages, call(func, tensors, args, kwargs)
        except Exception as error:
            first = first or error
            if is_about_types(error):
                break
    assert first is not None
    raise first


def is_about_types(error: Exception) -> bool:
    """Whether types, shapes, numbers or overlapping memory cause an error, and not the values of tensors."""
    return bool(_VALUE_FREE_ERROR.search(str(error)))


def _is_about_shapes(error: Exception, operands: Sequence[Operand]) -> bool:
    # What an index selects has a shape that no value changes, unless the index is a mask.
    masks = (torch.bool, torch.uint8)
    return "shape mismatch" in str(error) and not any(o.type.dtype in masks for o in operands)


def _is_about_numbers(error: Exception) -> bool:
    # Ones are no zeros, so a call that fails on ones divides by a number.
    return is_about_types(error) or "ZeroDivisionError" in str(error)
