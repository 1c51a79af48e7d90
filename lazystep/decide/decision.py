"""A decision: what an op returns, aliases and writes. Plain data, kept for ever under the key of its call.

Made by `decide.decide`. The recorder in C++ unpacks it once (record/src/decision.cpp) and follows it in
every later call with the same metadata.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..program.program import Arg
from ..program.types import TensorType


class Action(enum.Enum):
    """What happens to an op."""

    RECORD = "record"  # append an instruction
    DRAW = "draw"  # random numbers that depend on no value: draw on the host now, in eager's order
    HOST = "host"  # the result depends on values: run on the host now, which synchronizes


class Operand(NamedTuple):
    """A lazy tensor among the arguments, as far as a decision may depend on it."""

    type: TensorType
    nbytes: int  # of its memory
    group: int = -1  # operands with the same number share their memory; -1: unknown, or none of them do


class Result(NamedTuple):
    """A tensor that the op returns.

    `same`: the number of the operand that is returned itself, or -1.
    `alias`: the number of the operand whose memory the result shares. Below zero the memory is new, and
    results with the same negative number share it.
    """

    type: TensorType
    same: int
    alias: int
    nbytes: int


class Rebind(NamedTuple):
    """An operand whose metadata the op changes, and what it becomes. `nbytes`: what its memory must hold."""

    operand: int
    type: TensorType
    alias: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Decision:
    """What an op does. Compared by identity: one per op, argument metadata and literal arguments."""

    action: Action
    op: str
    func: Any
    reason: str = ""
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    scalar_types: tuple[type, ...] = ()
    results: tuple[Result | None, ...] = ()
    structure: str = "one"  # "one", "tuple" or "list": how the op returns its results
    writes: tuple[int, ...] = ()
    rebinds: tuple[Rebind, ...] = ()
    # Of its operands when it was made. A result in the memory of an operand moves with that operand.
    offsets: tuple[int, ...] = ()
    # The numbers that each data type of the call can hold. See [Note: numbers] in record/src/decision.h.
    range: tuple[float, float] = (-math.inf, math.inf)
    # Whether the op has run on zeros or ones with some numbers.
    was_tried: bool = False
    # Numbers that are known to be taken, beside those of a kind that has been tried.
    numbers_taken: set[tuple[Any, ...]] = field(default_factory=set)

    @property
    def made(self) -> tuple[tuple[TensorType, int, int], ...]:
        """Type, alias and nbytes of every value that the op makes: new results, then rebound operands."""
        new = [(r.type, r.alias, r.nbytes) for r in self.results if r is not None and r.same < 0]
        return (*new, *((r.type, r.alias, r.nbytes) for r in self.rebinds))
