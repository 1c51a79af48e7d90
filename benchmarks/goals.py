"""Goals are bounds on measured numbers. Every report lists each of its goals as met or missed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from .timing import Table

T = TypeVar("T")
Numbers = Mapping[str, float | None]
TITLE = "Goals"
# If others take more than this share of the processor's time, the verdicts are doubtful.
MAX_OTHERS = 0.1


@dataclass(frozen=True)
class Goal(Generic[T]):
    """A bound on one number per model, or on the mean over all models.

    `measure` returns the numbers by model or other name. None is a missing number.
    """

    text: str
    measure: Callable[[T], Numbers]
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""
    scale: float = 1.0

    def judge(self, outcomes: T) -> tuple[str, str]:
        """`met`, `missed` or `not measured`, and the numbers as text.

        One number out of bounds makes it `missed`. Otherwise one missing number makes it `not measured`.
        """
        numbers = self.measure(outcomes)
        cells = (f"{name} {self._format(number)}" for name, number in numbers.items())
        found = [number for number in numbers.values() if number is not None]
        if not all(map(self._holds, found)):
            verdict = "missed"
        elif not found or len(found) < len(numbers):
            verdict = "not measured"
        else:
            verdict = "met"
        return verdict, ", ".join(cells) or "-"

    def _holds(self, number: float) -> bool:
        is_enough = self.at_least is None or number >= self.at_least
        return is_enough and (self.at_most is None or number <= self.at_most)

    def _format(self, number: float | None) -> str:
        return "missing" if number is None else f"{number * self.scale:.3g}{self.unit}"


def to_table(goals: Sequence[Goal[T]], outcomes: T, others: float) -> Table:
    """Every goal with its verdict. `others`: the share of the processor that other processes used."""
    rows = [[goal.text, *goal.judge(outcomes)] for goal in goals]
    note = f"By medians. Others used up to {others:.0%} of the processor while this was measured."
    if others > MAX_OTHERS:
        note += " That is too much: these verdicts are about a busy machine."
    return Table(TITLE, ["goal", "verdict", "numbers"], rows, note)
