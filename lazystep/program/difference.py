"""The first difference between two programs, as text, with the user's line."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from .program import Arg, Instruction, Program, Ref, ScalarRef, Value


def first_difference(old: Program, new: Program) -> str:
    """Describe the first difference between `old` and `new`. Empty if there is none."""
    pairs = itertools.zip_longest(old.instructions, new.instructions)
    for position, (before, now) in enumerate(pairs):
        if now is None:
            return f"it ends {len(old.instructions) - position} instructions earlier, before {before.label}"
        if before is None:
            return f"it goes on for {len(new.instructions) - position} more instructions, from {now.label}"
        text = _instruction_difference(old, new, before, now)
        if text:
            return text
    if old.outputs != new.outputs:
        return _output_difference(old, new)
    return ""


def differ_in_sizes_only(old: Program, new: Program) -> bool:
    """Whether two programs are the same op for op, but for sizes, strides, offsets and integer literals."""
    if (old.inputs, old.outputs, old.scalars, len(old.instructions), len(old.storages)) != (
        new.inputs,
        new.outputs,
        new.scalars,
        len(new.instructions),
        len(new.storages),
    ):
        return False
    for before, now in zip(old.instructions, new.instructions, strict=True):
        if before[0] != now[0] or before[3:6] != now[3:6]:  # op; results, writes, rebinds
            return False
        if not (_are_alike(before.args, now.args) and _are_alike(before.kwargs, now.kwargs)):
            return False
    return old.values.keys() == new.values.keys() and all(
        _is_alike(value, new.values[number]) for number, value in old.values.items()
    )


def _are_alike(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    if len(before) != len(now):
        return False
    for a, b in zip(before, now, strict=True):
        if type(a) is not type(b):
            return False
        if type(a) is tuple:
            if not _are_alike(a, b):
                return False
        elif type(a) is not int and a != b:
            return False
    return True


def _is_alike(before: Value, now: Value) -> bool:
    a, b = before.type, now.type
    return before.storage == now.storage and (
        a is b
        or (a.dtype, len(a.shape), a.conj, a.neg, a.layout)
        == (b.dtype, len(b.shape), b.conj, b.neg, b.layout)
    )


def nearest(program: Program, others: Sequence[Program]) -> Program | None:
    """The program in `others` that has the most leading instructions in common with `program`."""
    return max(others, key=lambda other: _common_length(other, program), default=None)


def _common_length(old: Program, new: Program) -> tuple[int, int]:
    """A rank for `nearest`: the number of leading instructions in common, then the nearness in size."""
    size = -abs(len(old.instructions) - len(new.instructions))
    for position, (before, now) in enumerate(zip(old.instructions, new.instructions, strict=False)):
        if _instruction_difference(old, new, before, now):
            return position, size
    return min(len(old.instructions), len(new.instructions)), size


def _instruction_difference(old: Program, new: Program, before: Instruction, now: Instruction) -> str:
    if before.op != now.op:
        return f"{now.label} stands where {before.op} was"
    named_before = [*enumerate(before.args), *before.kwargs]
    named_now = [*enumerate(now.args), *now.kwargs]
    if len(named_before) != len(named_now):
        return f"{now.label} has {len(named_now)} arguments, it had {len(named_before)}"
    for (name, a), (_, b) in zip(named_before, named_now, strict=True):
        text = _argument_difference(old, new, a, b)
        if text:
            return f"argument {name!r} of {now.label} is {text}"
    return ""


def _argument_difference(old: Program, new: Program, before: Arg, now: Arg) -> str:
    if type(before) is tuple and type(now) is tuple and len(before) == len(now):
        if not any(type(a) in (Ref, ScalarRef, tuple) for a in (*before, *now)):
            return f"{list(now)}, it was {list(before)}" if before != now else ""
        texts = (_argument_difference(old, new, a, b) for a, b in zip(before, now, strict=True))
        return next(filter(None, texts), "")
    if type(before) is Ref and type(now) is Ref:
        type_before, type_now = old.values[before.value].type, new.values[now.value].type
        if type_before is not type_now:
            return f"{type_now}, it was {type_before}"
        return f"another value (%{now.value}, it was %{before.value})" if before != now else ""
    if type(before) is ScalarRef and type(now) is ScalarRef:
        kinds = old.scalars[before.slot].__name__, new.scalars[now.slot].__name__
        return f"a number of type {kinds[1]}, it was {kinds[0]}" if kinds[0] != kinds[1] else ""
    return f"{_show(now)}, it was {_show(before)}" if before != now else ""


def _output_difference(old: Program, new: Program) -> str:
    maker = {value: i for i in new.instructions for value in i.defines()}
    more = [value for value in new.outputs if value not in old.outputs]
    if more:
        made = f", made by {maker[more[0]].label}" if more[0] in maker else ""
        return f"{len(more)} more values are alive at the barrier{made}"
    return f"{len(old.outputs) - len(new.outputs)} fewer values are alive at the barrier"


def _show(arg: Any) -> str:
    if type(arg) is Ref:
        return f"the value %{arg.value}"
    return "a number" if type(arg) is ScalarRef else repr(arg)
