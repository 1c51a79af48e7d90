"""Compares native results with the reference's, up to rounding, and names the instructions that differ.

Fused loops round differently, and the effect of rounding on a value depends on how the value was computed.
For example, an optimizer may divide a gradient that is zero except for rounding by its own size. So a
difference beyond the tolerance is not yet an error: the reference runs again on inputs with changed last
bits, to measure how far its result moves by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
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

Results = Sequence[tuple[int, torch.Tensor]]


class Difference(NamedTuple):
    """A result that differs: its value in the program, and the difference relative to its magnitude."""

    value: int
    relative: float


def differences(
    program: Program, expected: Results, actual: Results, perturbed: Callable[[], Results]
) -> list[Difference]:
    """The results of two runs of a program that differ by more than rounding explains.

    Results are pairs of a value and its tensor, in program order. `perturbed` runs the reference again, on
    inputs with changed last bits; it is called only if a result differs.
    """
    tolerances = tolerances_by_storage(program)
    suspects = []
    for number, ((value, a), (_, b)) in enumerate(zip(expected, actual, strict=True)):
        distance = _distance(a, b)
        if distance > tolerances[program.values[value].storage]:
            suspects.append((number, Difference(value, distance)))
    if not suspects:
        return []
    moved = perturbed()
    return [
        difference
        for number, difference in suspects
        if difference.relative > _CONDITION_FACTOR * _distance(expected[number][1], moved[number][1])
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


def perturb(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`tensor` with noise in the last bits of floating-point elements."""
    if not tensor.dtype.is_floating_point or tensor.dtype not in TOLERANCES:
        return tensor
    noise = torch.empty(tensor.shape, dtype=torch.float64).uniform_(-1, 1, generator=generator)
    scale = torch.finfo(tensor.dtype).eps
    return (tensor.double() * (1 + scale * noise)).to(tensor.dtype)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference between elements, divided by the largest element.

    Infinite if the two have NaN or infinity in different places.
    """
    if a.numel() == 0:
        return 0.0
    if not a.dtype.is_floating_point:
        return 0.0 if torch.equal(a, b) else 1.0
    a, b = a.double(), b.double()
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()) or not torch.equal(
        a[~finite].nan_to_num(nan=0.5), b[~finite].nan_to_num(nan=0.5)
    ):
        return float("inf")
    a, b = a[finite], b[finite]
    if a.numel() == 0:
        return 0.0
    size = float(a.abs().max())
    difference = float((a - b).abs().max())
    return difference / size if size > 0 else (0.0 if difference < 1e-30 else float("inf"))
