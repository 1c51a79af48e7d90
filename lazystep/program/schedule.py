"""Scheduling: waits come late, but not at the end, and work is ordered by the collective that it waits for.

A loop records backward, then the update of all parameters. In that order the first update waits for the last
reduction, because the optimizer begins with the parameters whose gradients come last, and all gradients are
there at once. Here each instruction gets a moment, which has two numbers:

- its *level*: 0 if it depends on no wait, otherwise one more than the number of the last launch that it has
  to wait for;
- its *slot*: behind how many launches it comes. Forward and backward keep theirs. A wait comes behind
  `AHEAD` more launches than its own. What is recorded behind the last reduction, the update, comes as soon
  as everything that it depends on is there.

Instructions are sorted by slot, then by level. So the parameters of a bucket are updated, and its gradients
freed, while backward computes and later buckets are on their way, and the network always has a bucket to
work on while the executor waits.

An op on lists of tensors (`_foreach_add_`, `_fused_adamw_`) may depend on several waits. It is split into one
call per moment, element by element.

The results do not change. An instruction never moves across one that it depends on: by a value, or by memory
that one of them writes. Launches keep their order, so ranks whose waits are elsewhere never block each other:
before a rank waits for a launch, it waits for earlier ones only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from .collectives import ALL_REDUCE, WAIT, is_launch
from .lists import num_elements, part
from .program import Instruction, Program

# How many further launches come before the wait for a launch. With 0 the network would be idle from the end
# of one reduction until backward has the next bucket; each more keeps the gradients of a bucket longer.
AHEAD = 2
# A tensor of the update that needs no wait and is larger is not made earlier than recorded: it would only
# take memory during backward.
_SMALL = 1 << 12


def schedule(program: Program) -> Program:
    """`program` with its instructions ordered by what they wait for. Unchanged if it has no collectives."""
    if not any(map(is_launch, program.instructions)):
        return program
    moments = _Moments(program)
    found: list[tuple[_Moment, Instruction]] = []
    for instruction in program.instructions:
        found += moments.place(instruction)
    found.sort(key=lambda pair: pair[0])  # stable: the recorded order holds within a moment
    return dataclasses.replace(program, instructions=tuple(instruction for _, instruction in found))


class _Moment(NamedTuple):
    """When an instruction runs. Moments are sorted; one that depends on another is not smaller in either."""

    slot: int = 0
    level: int = 0


def _latest(moments: Iterable[_Moment]) -> _Moment:
    """The first moment at which all of these have been."""
    slot = level = 0
    for moment in moments:
        slot, level = max(slot, moment.slot), max(level, moment.level)
    return _Moment(slot, level)


class _Moments:
    """The moment of each instruction, from those before it."""

    def __init__(self, program: Program) -> None:
        self._program = program
        # By storage: the moment of the last write, and the latest moment of a read.
        self._written: dict[int, _Moment] = {}
        self._read: dict[int, _Moment] = {}
        # By the storage of a collective's result: the number of the launch, and the storages that it reads.
        self._launched: dict[int, tuple[int, set[int]]] = {}
        self._num_launches = 0
        self._launch_moment = _Moment()  # of the last launch
        self._num_reductions_left = sum(one.op == ALL_REDUCE for one in program.instructions)

    def place(self, instruction: Instruction) -> list[tuple[_Moment, Instruction]]:
        """The instruction with its moment; its parts if it is a list op with elements of several moments."""
        by_moment: dict[_Moment, list[int]] = {}
        for element in range(num_elements(instruction)):
            by_moment.setdefault(self._moment(part(instruction, [element])), []).append(element)
        if len(by_moment) < 2:
            parts = [instruction]
        else:
            parts = [part(instruction, elements) for _, elements in sorted(by_moment.items())]
        placed = [(self._moment(piece), piece) for piece in parts]
        for moment, piece in placed:
            self._note(piece, moment)
        return placed

    def _storages(self, values: Iterable[int]) -> set[int]:
        return {self._program.values[value].storage for value in values}

    def _moment(self, instruction: Instruction) -> _Moment:
        """The first moment at which everything that the instruction depends on has run."""
        used = self._storages(instruction.reads())
        needed = [self._written.get(storage, _Moment()) for storage in used]
        needed += [self._read.get(storage, _Moment()) for storage in self._storages(instruction.writes)]
        if is_launch(instruction):
            needed.append(self._launch_moment)
        if instruction.op == WAIT:
            numbers = [self._launched[storage][0] for storage in used]
            needed += [_Moment(number - 1 + AHEAD, number) for number in numbers]
        found = _latest(needed)
        is_free = not self._num_reductions_left and (found.level or not self._makes_much(instruction))
        return found if is_free else _latest([found, _Moment(self._num_launches)])

    def _makes_much(self, instruction: Instruction) -> bool:
        made = self._storages(instruction.defines()) - self._storages(instruction.reads())
        return any(self._program.storages[storage].nbytes > _SMALL for storage in made)

    def _note(self, instruction: Instruction, moment: _Moment) -> None:
        used = self._storages(instruction.reads())
        written = self._storages([*instruction.writes, *instruction.defines()])
        if instruction.op == WAIT:
            # The network reads the operand of a launch until the wait: nothing may overwrite it before that.
            used = used.union(*(self._launched[storage][1] for storage in used))
        for storage in used:
            self._read[storage] = _latest([self._read.get(storage, _Moment()), moment])
        for storage in written:
            self._written[storage] = _latest([self._written.get(storage, _Moment()), moment])
        self._num_reductions_left -= instruction.op == ALL_REDUCE
        if is_launch(instruction):
            self._launch_moment = moment
            self._num_launches += 1
            for storage in self._storages(instruction.writes):
                self._launched[storage] = self._num_launches, used
