"""Compares native results with the reference's, up to rounding, and names the instructions that differ.

Fused loops round differently, and the effect of rounding on a value depends on how the value was computed.
For example, an optimizer may divide a gradient that is zero except for rounding by its own size. So a
difference beyond the tolerance is not yet an error: the reference runs again on inputs with changed last
bits, to measure how far its result moves by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from ..program.program import Program

# The largest allowed difference, as a fraction of the tensor's largest element.
TOLERANCES = {
    torch.float64: 1e-8,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 4e-2,
}
# A native result may differ this many times as much as changed last bits move the reference's result.
_CONDITION_FACTOR = 32.0
_PIECE = 1 << 18  # elements that are compared at a time, in double precision

Results = Sequence[tuple[int, torch.Tensor]]


class Difference(NamedTuple):
    """A result that differs: its value in the program, and the difference relative to its magnitude."""

    value: int
    relative: float


def differences(
    program: Program,
    expected: Results,
    actual: Iterable[tuple[int, torch.Tensor]],
    moves: Callable[[Sequence[int]], Sequence[float]],
) -> list[Difference]:
    """The results of two runs of a program that differ by more than rounding explains.

    Results are pairs of a value and its tensor, in program order. Of `actual`, one is held at a time. `moves`
    gets positions in `expected` and runs the reference again, on inputs with changed last bits: how far does
    each result move? It is called only if a result differs.
    """
    tolerances = tolerances_by_storage(program)
    suspects = []
    for number, ((value, a), (_, b)) in enumerate(zip(expected, actual, strict=True)):
        relative = distance(a, b)
        if relative > tolerances[program.values[value].storage]:
            suspects.append((number, Difference(value, relative)))
    if not suspects:
        return []
    moved = moves([number for number, _ in suspects])
    return [
        difference
        for (_, difference), by_itself in zip(suspects, moved, strict=True)
        if difference.relative > _CONDITION_FACTOR * by_itself
    ]


def tolerances_by_storage(program: Program) -> dict[int, float]:
    """For each storage, the tolerance of the coarsest data type that its values were computed from.

    float32 parameters whose update was computed in bfloat16 are no more exact than bfloat16. Integers and
    bools must be equal, whatever they were computed from.
    """
    found: dict[int, float] = defaultdict(float)
    for type_, storage in program.values.values():
        found[storage] = max(found[storage], TOLERANCES.get(type_.dtype, 0.0))
    is_exact = {storage: tolerance == 0.0 for storage, tolerance in found.items()}
    for instruction in program.instructions:
        read = max((found[program.values[v].storage] for v in instruction.reads()), default=0.0)
        for value in (*instruction.defines(), *instruction.writes):
            storage = program.values[value].storage
            if not is_exact[storage]:
                found[storage] = max(found[storage], read)
    return found


def describe(program: Program, found: Sequence[Difference]) -> str:
    """The first values that differ, in program order, each with the op that made or last wrote it."""
    made: dict[int, int] = {}
    for position, instruction in enumerate(program.instructions):
        for value in (*instruction.defines(), *instruction.writes):
            made[value] = position
    lines = []
    for value, relative in sorted(found, key=lambda d: made.get(d.value, -1))[:5]:
        if value in made:
            origin = program.instructions[made[value]].label
        else:
            origin = "an input"
        lines.append(f"%{value} ({origin}) by {relative:.2g} of its magnitude")
    return "; ".join(lines)


def perturb_(row: torch.Tensor, generator: torch.Generator) -> None:
    """Add noise to the last bits of the elements, if they are floating-point numbers."""
    if row.dtype not in TOLERANCES:
        return
    for piece in row.split(_PIECE):
        noise = torch.empty(piece.shape, dtype=torch.float64).uniform_(-1, 1, generator=generator)
        piece.copy_(piece.double() * (1 + torch.finfo(row.dtype).eps * noise))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference between elements, divided by the largest element.

    Infinite if the two have NaN or infinity in different places.
    """
    if a.numel() == 0:
        return 0.0
    if not a.dtype.is_floating_point:
        return 0.0 if torch.equal(a, b) else 1.0
    size = difference = 0.0
    for rows_a, rows_b in zip(_pieces(a), _pieces(b), strict=True):
        piece_size, piece_difference = _sizes(rows_a.double(), rows_b.double())
        size, difference = max(size, piece_size), max(difference, piece_difference)
    if difference == float("inf"):
        return difference
    return difference / size if size > 0 else (0.0 if difference < 1e-30 else float("inf"))


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor in pieces of about `_PIECE` elements: the comparison copies a piece several times."""
    if tensor.numel() <= _PIECE or tensor.dim() == 0:
        yield tensor
        return
    for row in tensor.split(max(1, _PIECE * tensor.shape[0] // tensor.numel())):
        if row.numel() > _PIECE and row.shape[0] == 1:
            yield from _pieces(row[0])
        else:
            yield row


def _sizes(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """The largest element, and the largest difference, of the finite elements of two pieces."""
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()) or not torch.equal(
        a[~finite].nan_to_num(nan=0.5), b[~finite].nan_to_num(nan=0.5)
    ):
        return 0.0, float("inf")
    a, b = a[finite], b[finite]
    return (float(a.abs().max()), float((a - b).abs().max())) if a.numel() else (0.0, 0.0)
