"""Goals: bounds on measured numbers, each of them met or missed, and never forgotten in a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from .timing import Table

T = TypeVar("T")
Numbers = Mapping[str, float | None]
TITLE = "Goals"
# Above this part of the processor's time, a verdict says little.
MAX_OTHERS = 0.1


@dataclass(frozen=True)
class Goal(Generic[T]):
    """A bound on a number, which has to hold for each model or for a mean over them.

    `measure` gives the numbers by what they are of; None is a number that is missing.
    """

    text: str
    measure: Callable[[T], Numbers]
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""
    scale: float = 1.0

    def judge(self, outcomes: T) -> tuple[str, str]:
        """`met`, `missed` or `not measured`, and the numbers that it follows from.

        One number that is out of bounds is enough to miss; a missing one leaves the goal open otherwise.
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
    """Every goal with its verdict. `others`: the part of the processor that others used meanwhile."""
    rows = [[goal.text, *goal.judge(outcomes)] for goal in goals]
    note = f"By medians. Others used up to {others:.0%} of the processor while this was measured."
    if others > MAX_OTHERS:
        note += " That is too much: these verdicts are about a busy machine."
    return Table(TITLE, ["goal", "verdict", "numbers"], rows, note)
