"""Ops that were met before with other sizes: a rule or meta tensors say what they do now, in microseconds.

A step of a new length is full of such ops. A trial computes on real memory, and inference on fake tensors
takes milliseconds: 59 of them made the first step of each length of a small GPT 40 ms longer.

Only for ops whose shapes and strides come from code that does not ask for the device. A first call with these
data types and literals has been decided in full, so that eager's errors about them have been raised. A rule
(`shape_rules`) or meta tensors are asked only if they agreed with that decision.
"""

from __future__ import annotations

from typing import Any

import torch

from ..eager import eager_dispatch
from ..program.program import Arg, map_args
from .decision import Decision, Operand
from .facts import OpFacts
from .shape_rules import NAMES, answer
from .stand_ins import call, describe, make
from .trial import is_cheap
from .view_rules import is_contiguous

# Asking meta tensors is quicker than a trial on real memory.
_QUICK = (
    "view _unsafe_view t transpose permute unsqueeze squeeze slice select split expand detach mm bmm sum cat "
    "embedding embedding_dense_backward arange _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention_for_cpu_backward"
)
# Torch computes their meta tensors in Python: quicker than inference alone.
_IF_LARGE = (
    "addmm baddbmm add sub mul div neg exp log tanh sigmoid sqrt rsqrt pow gelu silu gelu_backward "
    "silu_backward tanh_backward sigmoid_backward threshold_backward eq ne lt le gt ge maximum minimum "
    "clamp_min mean amax amin _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data "
    "native_layer_norm native_layer_norm_backward nll_loss_forward nll_loss_backward"
)
_QUICK_OPS, _LARGE_OPS = frozenset(_QUICK.split()), frozenset(_IF_LARGE.split())
_KNOWN = NAMES | _QUICK_OPS | _LARGE_OPS

# By what calls have in common if they differ in sizes only: whether meta tensors agreed with a decision.
_agreed: dict[Any, bool] = {}
# The same for the rule, which is for contiguous operands only: a first call may have had others.
_rule_agreed: dict[Any, bool] = {}
_MAX_KEYS = 10_000


def decide_resized(
    decision: Decision, facts: OpFacts, operands: list[Operand], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Note in `decision` what the op does, if a call that differs in sizes only has been decided in full."""
    if not _is_for(facts, operands):
        return False
    key = _key(decision, operands)
    if _rule_agreed.get(key, False):
        by_rule = answer(decision.op, operands, args, kwargs)
        if by_rule is not None:
            decision.results, decision.structure = by_rule
            return True
    if not _agreed.get(key, False) or not _is_for_meta(facts, operands):
        return False
    return _ask(decision, operands, args, kwargs)


def note_decided(
    decision: Decision, facts: OpFacts, operands: list[Operand], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """A call has been decided in full: see whether rule and meta tensors would have said the same."""
    if not _is_for(facts, operands):
        return
    if len(_agreed) + len(_rule_agreed) >= _MAX_KEYS:
        _agreed.clear()
        _rule_agreed.clear()
    key = _key(decision, operands)
    if _rule_agreed.get(key, True):
        by_rule = answer(decision.op, operands, args, kwargs)
        if by_rule is not None:
            has_rebinds = bool(decision.rebinds)
            _rule_agreed[key] = not has_rebinds and by_rule == (decision.results, decision.structure)
    if _agreed.get(key, True) and _is_for_meta(facts, operands):
        other = Decision(decision.action, decision.op, decision.func, writes=decision.writes)
        _agreed[key] = _ask(other, operands, args, kwargs) and (
            (other.results, other.rebinds, other.structure)
            == (decision.results, decision.rebinds, decision.structure)
        )


def _is_for(facts: OpFacts, operands: list[Operand]) -> bool:
    _, packet, _ = facts.name.split(".")
    return (
        packet in _KNOWN
        and facts.name.startswith("aten.")
        and (bool(operands) or packet == "arange")
        and not (facts.writes or facts.needs_nbytes)
        # The strides of an empty result are others on the CPU than on meta tensors.
        and all(operand.group < 0 and 0 not in operand.type.shape for operand in operands)
    )


def _is_for_meta(facts: OpFacts, operands: list[Operand]) -> bool:
    _, packet, _ = facts.name.split(".")
    if packet in _QUICK_OPS:
        return True
    # Meta tensors computed in Python may have another stride where a dimension of size 1 is not in its place.
    is_odd = any(1 in operand.type.shape and not is_contiguous(operand.type) for operand in operands)
    return packet in _LARGE_OPS and not is_odd and not is_cheap(facts.work, operands)


def _key(decision: Decision, operands: list[Operand]) -> Any:
    types = tuple((o.type.dtype, len(o.type.shape), o.type.conj, o.type.neg) for o in operands)
    literals = map_args((decision.args, decision.kwargs), _without_size)
    return decision.op, types, literals, decision.scalar_types


def _without_size(arg: Arg) -> Arg:
    # The type of other literals, because 1.0 and True are equal.
    return "size" if type(arg) is int else (type(arg), arg)


def _ask(decision: Decision, operands: list[Operand], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        with eager_dispatch():
            tensors = [make(operand, torch.empty, "meta") for operand in operands]
            storages = [tensor.untyped_storage()._cdata for tensor in tensors]
            out = call(decision.func, tensors, args, kwargs, "meta")
            describe(decision, operands, tensors, storages, out)
    except Exception:
        return False  # a decision in full says whether it is an error, and which
    return True
