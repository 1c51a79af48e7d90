"""Scheduling: waits go to the first use, and work is ordered by the collective that it waits for.

A loop records backward, then the update of all parameters. In that order the first update waits for the last
reduction, because the optimizer begins with the parameters whose gradients come last. Here each instruction
gets a level: 0 if it depends on no wait, otherwise one more than the number of the last launch that it has to
wait for. Instructions are sorted by level. So everything that needs no reduction runs before the first wait,
and the parameters of the first bucket are updated while later buckets are still on their way.

An op on lists of tensors (`_foreach_add_`, `_fused_adamw_`) may depend on several waits. It is split into one
call per level, element by element.

The results do not change. An instruction never moves across one that it depends on: by a value, or by memory
that one of them writes. Launches keep their order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from .collectives import WAIT, is_launch
from .lists import num_elements, part
from .program import Instruction, Program


def schedule(program: Program) -> Program:
    """`program` with its instructions ordered by what they wait for. Unchanged if it has no collectives."""
    if not any(map(is_launch, program.instructions)):
        return program
    levels = _Levels(program)
    found: list[tuple[int, Instruction]] = []
    for instruction in program.instructions:
        found += levels.place(instruction)
    found.sort(key=lambda pair: pair[0])  # stable: the recorded order holds within a level
    return dataclasses.replace(program, instructions=tuple(instruction for _, instruction in found))


class _Levels:
    """The level of each instruction, from those before it."""

    def __init__(self, program: Program) -> None:
        self._program = program
        # By storage: the level of the last write, and the highest level of a read.
        self._written: dict[int, int] = {}
        self._read: dict[int, int] = {}
        # By the storage of a collective's result: the number of the launch, and the storages that it reads.
        self._launched: dict[int, tuple[int, set[int]]] = {}
        self._num_launches = 0
        self._launch_level = 0  # of the last launch

    def place(self, instruction: Instruction) -> list[tuple[int, Instruction]]:
        """The instruction with its level; its parts if it is a list op with elements of several levels."""
        by_level: dict[int, list[int]] = {}
        for element in range(num_elements(instruction)):
            by_level.setdefault(self._level(part(instruction, [element])), []).append(element)
        if len(by_level) < 2:
            parts = [instruction]
        else:
            parts = [part(instruction, elements) for _, elements in sorted(by_level.items())]
        placed = [(self._level(piece), piece) for piece in parts]
        for level, piece in placed:
            self._note(piece, level)
        return placed

    def _storages(self, values: Iterable[int]) -> set[int]:
        return {self._program.values[value].storage for value in values}

    def _level(self, instruction: Instruction) -> int:
        """The lowest level at which everything that the instruction depends on has run."""
        used = self._storages(instruction.reads())
        level = max((self._written.get(storage, 0) for storage in used), default=0)
        for storage in self._storages(instruction.writes):
            level = max(level, self._read.get(storage, 0))
        if is_launch(instruction):
            level = max(level, self._launch_level)
        if instruction.op == WAIT:
            level = max(level, *(self._launched[storage][0] for storage in used))
        return level

    def _note(self, instruction: Instruction, level: int) -> None:
        used = self._storages(instruction.reads())
        written = self._storages([*instruction.writes, *instruction.defines()])
        if instruction.op == WAIT:
            # The network reads the operand of a launch until the wait: nothing may overwrite it before that.
            used = used.union(*(self._launched[storage][1] for storage in used))
        for storage in used:
            self._read[storage] = max(self._read.get(storage, 0), level)
        for storage in written:
            self._written[storage] = max(self._written.get(storage, 0), level)
        if is_launch(instruction):
            self._launch_level = level
            self._num_launches += 1
            for storage in self._storages(instruction.writes):
                self._launched[storage] = self._num_launches, used
