"""Ops on lists of tensors: `_foreach_add_`, `_fused_adamw_`. They take their lists element by element.

So such an op can be split into calls on some of the elements, with the same results. An optimizer on lists
makes its intermediate results for all parameters at once, which for a large model is as much memory as the
model. `in_pieces` splits such an update: all ops for some parameters, then all ops for the next ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from .program import LIST_OPS, Arg, Instruction, Program

# An update that makes more bytes at once is split into pieces that each make about so much.
_PIECE = 1 << 25


def num_elements(instruction: Instruction) -> int:
    """How many elements the lists of an op on lists of tensors have; 0 for any other op."""
    if not instruction.op.startswith(LIST_OPS):
        return 0
    lists = [arg for arg in _arguments(instruction) if type(arg) is tuple and arg]
    lengths = {len(arg) for arg in lists}
    if _has_results(instruction):
        lengths.add(len(instruction.results))
    # Lists of one length belong together element by element. Anything else stays in one piece.
    return lengths.pop() if len(lengths) == 1 else 0


def part(instruction: Instruction, elements: Sequence[int]) -> Instruction:
    """A list op on some of the elements."""

    def select(arg: Arg) -> Arg:
        return tuple(arg[n] for n in elements) if type(arg) is tuple and arg else arg

    found = instruction._replace(
        args=tuple(map(select, instruction.args)),
        kwargs=tuple((name, select(arg)) for name, arg in instruction.kwargs),
        results=select(instruction.results) if _has_results(instruction) else instruction.results,
    )
    used = set(found.reads())
    return found._replace(writes=tuple(value for value in instruction.writes if value in used))


def in_pieces(program: Program) -> Program:
    """`program` with large updates on lists taken piece by piece. Unchanged if there are none."""
    instructions: list[Instruction] = []
    is_changed = False
    for run in _runs(program.instructions):
        if len(run) == 1 and num_elements(run[0]) < 2:
            instructions += run
            continue
        pieces = _pieces(program, run)
        if len(pieces) < 2:
            instructions += run
            continue
        is_changed = True
        instructions += [part(instruction, elements) for elements in pieces for instruction in run]
    return dataclasses.replace(program, instructions=tuple(instructions)) if is_changed else program


def _runs(instructions: Sequence[Instruction]) -> Iterator[list[Instruction]]:
    """The instructions, with neighbours together if they are list ops of the same length."""
    run: list[Instruction] = []
    length = 0
    for instruction in instructions:
        found = num_elements(instruction)
        if run and (found != length or not found):
            yield run
            run = []
        run.append(instruction)
        length = found
    if run:
        yield run


def _pieces(program: Program, run: Sequence[Instruction]) -> list[list[int]]:
    """The elements of neighbouring list ops in pieces; a single piece if it is small or can't be split."""
    elements = range(num_elements(run[0]))
    outputs = set(program.outputs)
    made = [0] * len(elements)
    for instruction in run if len(elements) > 1 else ():
        if _has_results(instruction):
            for element, value in enumerate(instruction.results):
                if value is not None and value not in outputs:
                    made[element] += program.storages[program.values[value].storage].nbytes
    if sum(made) <= 2 * _PIECE or not _are_independent(program, run, elements):
        return [list(elements)]
    pieces: list[list[int]] = []
    room = 0
    for element in elements:
        if made[element] > room or not pieces:
            pieces.append([])
            room = _PIECE
        pieces[-1].append(element)
        room -= made[element]
    return pieces


def _are_independent(program: Program, run: Sequence[Instruction], elements: Sequence[int]) -> bool:
    """Whether no element's ops write memory that another element's ops use."""
    used: dict[int, set[int]] = {}
    written: dict[int, set[int]] = {}
    for instruction in run:
        for element in elements:
            single = part(instruction, [element])
            for value in (*single.reads(), *single.defines()):
                used.setdefault(program.values[value].storage, set()).add(element)
            for value in (*single.writes, *single.defines()):
                written.setdefault(program.values[value].storage, set()).add(element)
    return all(len(used[storage] | writers) == 1 for storage, writers in written.items())


def _has_results(instruction: Instruction) -> bool:
    return any(value is not None for value in instruction.results)


def _arguments(instruction: Instruction) -> Iterator[Arg]:
    yield from instruction.args
    for _, arg in instruction.kwargs:
        yield arg
