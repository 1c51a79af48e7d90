"""The decision core: what an op does, from the metadata of its arguments alone.

Receives an op and its arguments, with an `Operand` in place of every lazy tensor. Answers with a
`Decision`, which the recorder keeps under the call's key. Nothing here knows tensor classes, recordings or
values.

C++ calls this with the user's modes off (src/modes.h): a decision holds for later calls without them.

Ops that are cheap to try run once on zeros (`trial`). The others are inferred on fake CPU tensors, and
small ones are tried as well: a trial gives the strides of the real kernel, and finds ops that have no kernel
for the data type while the user's line is still on the stack. An op that was met before with other sizes is
asked of meta tensors (`resized`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from ..eager import eager_dispatch
from ..program.program import Arg, Number, Ref, ScalarRef
from ..program.types import TensorType
from .decision import Action, Decision, Operand
from .facts import OpFacts
from .resized import decide_resized, note_decided
from .stand_ins import call, describe, make, make_all
from .trial import is_about_types, is_cheap, is_due_behind_inference, run_trial, try_numbers

# Draws whose numbers depend on types and numbers, and on no tensor's values.
_VALUE_FREE_DRAWS = frozenset(
    f"aten.{packet}.{overload}"
    for packet, overloads in {
        "bernoulli_": "float",
        "bernoulli": "p",
        "uniform_": "default",
        "uniform": "default",
        "normal_": "default",
        "normal_functional": "default",
        "normal": "float_float",
        "exponential_": "default",
        "exponential": "default",
        "geometric_": "default",
        "geometric": "default",
        "cauchy_": "default",
        "cauchy": "default",
        "log_normal_": "default",
        "log_normal": "default",
        "random_": "default from to",
        "random": "default from to",
        "rand": "default generator",
        "randn": "default generator",
        "randint": "default low generator low_generator",
        "randperm": "default generator",
        "rand_like": "default generator",
        "randn_like": "default generator",
        "randint_like": "default low_dtype generator low_generator_dtype",
    }.items()
    for overload in overloads.split()
)

_MAX_NUMBERS_TAKEN = 100


class _Inference(threading.local):
    """Each thread infers with a fake mode of its own.

    While a kernel runs, torch sets a flag in the mode, and all fake tensors of the mode behave as meta
    tensors. With one mode for two threads, inference failed at random, and the decision to run the op on the
    host stayed in the cache.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.is_active = False


_inference = _Inference()


def _is_not_inferring(record: logging.LogRecord) -> bool:
    return not _inference.is_active


# A failure of inference is normal here: eager then says whether it is an error, and which.
logging.getLogger("torch._subclasses.fake_tensor").addFilter(_is_not_inferring)


def decide(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Decision:
    """What `facts.func` does with these arguments, each lazy tensor given as an `Operand`.

    Raises what eager raises for arguments that the op does not take.
    """
    func = facts.func
    if facts.is_random and not _draws_nothing(facts.name, args):
        if facts.name in _VALUE_FREE_DRAWS:
            return Decision(Action.DRAW, facts.name, func)
        return Decision(Action.HOST, facts.name, func, "random op that reads values")
    if not (facts.returns_tensors or facts.writes):
        return Decision(Action.HOST, facts.name, func, _reason_for_reading(facts.name))
    if any(type_.layout is not torch.strided for type_ in _operand_types([*args, *kwargs.values()])):
        return Decision(Action.HOST, facts.name, func, "sparse tensor")
    if facts.is_quantizing:
        return Decision(Action.HOST, facts.name, func, "quantized tensor")

    template = _Template(facts)
    template_args = tuple(template.build(a, i in facts.number_positions) for i, a in enumerate(args))
    template_kwargs = tuple((k, template.build(v, k in facts.number_names)) for k, v in kwargs.items())
    operands = template.operands
    decision = Decision(
        Action.RECORD,
        facts.name,
        func,
        args=template_args,
        kwargs=template_kwargs,
        scalar_types=tuple(template.scalar_types),
        writes=tuple(facts.written_operands(args, kwargs)),
        offsets=tuple(operand.type.offset for operand in operands),
    )
    if decide_resized(decision, facts, operands, args, kwargs):
        return _with_numbers(decision, operands, template.numbers)
    if is_cheap(facts.work, operands):
        with contextlib.suppress(NotImplementedError):  # results of another kind: inference says which
            if run_trial(decision, operands, args, kwargs, is_value_free=True):
                note_decided(decision, facts, operands, args, kwargs)
                return _with_numbers(decision, operands, template.numbers)
    _inference.is_active = True
    try:
        with eager_dispatch(), _inference.mode:
            fakes = [make(o, torch.empty) for o in operands]
            storages = [t.untyped_storage()._cdata for t in fakes]
            describe(decision, operands, fakes, storages, call(func, fakes, args, kwargs))
    except (DataDependentOutputException, DynamicOutputShapeException):
        return Decision(Action.HOST, facts.name, func, "shape depends on values")
    except (UnsupportedOperatorException, UnsupportedFakeTensorException, NotImplementedError):
        return Decision(Action.HOST, facts.name, func, "no shape inference for the op")
    except Exception:
        # Eager decides what is an error and which one. If it accepts the call, inference was wrong.
        with eager_dispatch():
            call(func, make_all(operands, torch.zeros), args, kwargs)
        return Decision(Action.HOST, facts.name, func, "no shape inference for the op")
    finally:
        _inference.is_active = False
    if is_due_behind_inference(decision, facts, operands):
        run_trial(decision, operands, args, kwargs, is_value_free=False)
    note_decided(decision, facts, operands, args, kwargs)
    return _with_numbers(decision, operands, template.numbers)


def check_numbers(facts: OpFacts, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what eager raises if the op does not take the numbers among these arguments, but took others.

    Asked for numbers of a new kind: see [Note: numbers] in record/src/decision.h. An op that was not tried,
    because it is large, is tried only if it does not take a number for certain; otherwise it is inferred.
    """
    template = _Template(facts)
    for i, arg in enumerate(args):
        template.build(arg, i in facts.number_positions)
    for name, arg in kwargs.items():
        template.build(arg, name in facts.number_names)
    numbers = tuple(template.numbers)
    if numbers in decision.numbers_taken:
        return
    if decision.was_tried or (facts.work is not None and _has_outside(numbers, decision.range)):
        try_numbers(decision, template.operands, args, kwargs)
    else:
        _inference.is_active = True
        try:
            with eager_dispatch(), _inference.mode:
                call(facts.func, [make(o, torch.empty) for o in template.operands], args, kwargs)
        except Exception as error:
            if is_about_types(error):
                try_numbers(decision, template.operands, args, kwargs)
        finally:
            _inference.is_active = False
    if len(decision.numbers_taken) >= _MAX_NUMBERS_TAKEN:
        decision.numbers_taken.clear()
    decision.numbers_taken.add(numbers)


def _with_numbers(decision: Decision, operands: list[Operand], numbers: list[Number]) -> Decision:
    """The decision, with the numbers that it is known to hold for."""
    types = [o.type.dtype for o in operands] + [type_.dtype for type_, _, _ in decision.made]
    # Every number has a truth value.
    ranges = [_range_of(dtype) for dtype in types if dtype is not torch.bool]
    if ranges:
        decision.range = max(low for low, _ in ranges), min(high for _, high in ranges)
    if decision.was_tried or not _has_outside(numbers, decision.range):
        decision.numbers_taken.add(tuple(numbers))
    return decision


@functools.cache
def _range_of(dtype: torch.dtype) -> tuple[float, float]:
    if dtype.is_floating_point or dtype.is_complex:
        limits = torch.finfo(dtype)
        return limits.min, limits.max
    integers = torch.iinfo(dtype)
    # Rounded to a float, the largest int64 would be too large.
    high = float(integers.max) if integers.bits <= 32 else math.nextafter(float(integers.max), 0.0)
    return float(integers.min), high


def _has_outside(numbers: Sequence[Number], range_: tuple[float, float]) -> bool:
    return any(not isinstance(n, complex) and not range_[0] <= n <= range_[1] for n in numbers)


def _draws_nothing(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an op that is tagged as random is not, with these arguments."""
    if name == "aten._scaled_dot_product_flash_attention_for_cpu.default":
        return len(args) < 4 or args[3] == 0.0  # its dropout, which the CPU kernel does not have
    # aten.rrelu_with_noise(self, noise, lower, upper, training)
    return name.startswith("aten.rrelu_with_noise") and not any(arg is True for arg in args)


def _reason_for_reading(name: str) -> str:
    return "item" if name.startswith("aten._local_scalar_dense") else "value read by the op"


def _operand_types(args: list[Any]) -> Iterator[TensorType]:
    for arg in args:
        if type(arg) is Operand:
            yield arg.type
        elif type(arg) is list:
            yield from _operand_types(arg)


class _Template:
    """Numbers the operands and scalars of a call, in the order in which the recorder collects them."""

    def __init__(self, facts: OpFacts) -> None:
        self.facts = facts
        self.operands: list[Operand] = []
        self.scalar_types: list[type] = []
        self.numbers: list[Number] = []

    def build(self, arg: Any, is_number: bool) -> Arg:
        kind = type(arg)
        if kind is Operand:
            self.operands.append(arg)
            return Ref(len(self.operands) - 1)
        if kind is list or kind is tuple:
            return tuple(self.build(a, is_number) for a in arg)
        if not self.facts.float_literals and (
            kind is float or kind is complex or (kind is int and is_number)
        ):
            self.scalar_types.append(kind)
            self.numbers.append(arg)
            return ScalarRef(len(self.scalar_types) - 1)
        if kind is torch.device:
            return torch.device("cpu")
        return arg
