"""Which op of a native step has failed: the step runs again, op by op, up to the error.

A library does its work in an order of its own, and says little about what went wrong in it: "index out of
bounds". Eager's kernels name the index, and the reference executable knows the op and the user's line. So the
reference runs on what the failed step was given. It changes nothing of that: memory that the step writes is
copied, and the run ends before an op that would write a lot of it, as an optimizer does.

The library may have updated some tensors before it failed, so the second run can go well, or fail elsewhere.
It serves the message alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ..program.collectives import launches_of
from ..program.program import Program
from .executable import InstructionError
from .reference import ReferenceExecutable

_MAX_COPIED = 1 << 24  # bytes


def find_failure(
    program: Program, inputs: Sequence[torch.Tensor], scalars: Sequence[Any]
) -> InstructionError | None:
    """The error of the first op that fails on these inputs, which stay as they are; None if none does."""
    if launches_of(program):
        return None  # other ranks do not run their collectives again
    end, written = _part_to_run(program)
    part = dataclasses.replace(program, instructions=program.instructions[:end], outputs=())
    copies: dict[int, torch.UntypedStorage] = {}
    given = []
    for value, tensor in zip(program.inputs, inputs, strict=True):
        number = program.values[value].storage
        if number in written:
            if number not in copies:
                copies[number] = tensor.untyped_storage().clone()
            place = int(tensor.storage_offset()), tensor.shape, tensor.stride()
            tensor = torch.empty(0, dtype=tensor.dtype).set_(copies[number], *place)
        given.append(tensor)
    try:
        ReferenceExecutable(part).run(given, scalars)
    except InstructionError as error:
        # Not the step's failure but this run's: no memory is left, or lazystep has a bug.
        is_own = isinstance(error.__cause__, AssertionError) or "allocate" in str(error.__cause__)
        return None if is_own else error
    return None


def _part_to_run(program: Program) -> tuple[int, set[int]]:
    """How many instructions to run, and the input storages that they write."""
    written: set[int] = set()
    num_bytes = 0
    for position, instruction in enumerate(program.instructions):
        new = {program.values[value].storage for value in instruction.writes} - written
        new = {number for number in new if program.storages[number].is_input}
        num_bytes += sum(program.storages[number].nbytes for number in new)
        if num_bytes > _MAX_COPIED:
            return position, written
        written |= new
    return len(program.instructions), written
