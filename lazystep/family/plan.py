"""What is asked of the builder for a family, and what its library then serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .expression import Expression, from_data, holds, to_text
from .fit import Fit, Symbol


class Plan(NamedTuple):
    """A family to build, from the member with these `numbers`.

    `members`: the values of the symbols in all members that are known.
    """

    key: str  # of the skeleton
    fit: Fit
    numbers: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]

    def to_data(self) -> dict[str, Any]:
        """As plain data, for the builder's process."""
        return {
            "symbols": self.fit.symbols,
            "expressions": self.fit.expressions,
            "numbers": self.numbers,
            "members": self.members,
        }


class Region(NamedTuple):
    """The programs that a family's library serves: those that the fit describes and the guards accept."""

    fit: Fit
    guards: tuple[Expression, ...]

    def bind(self, numbers: Sequence[int]) -> tuple[int, ...] | None:
        """The values of the symbols for a program with these numbers; None if the library is not for it."""
        values = self.fit.bind(numbers)
        return values if values is not None and all(holds(guard, values) for guard in self.guards) else None

    def why_not(self, numbers: Sequence[int]) -> str:
        """Why the library does not serve a program with these numbers, for messages."""
        misfit = self.fit.misfit(numbers)
        if misfit >= 0:
            return f"a number is {numbers[misfit]} where {to_text(self.fit.expressions[misfit])} was expected"
        values = [one.value(numbers) for one in self.fit.symbols]
        broken = [to_text(guard) for guard in self.guards if not holds(guard, values)]
        return f"it holds where {broken[0]}" if broken else ""

    def __str__(self) -> str:
        guards = [to_text(guard) for guard in self.guards]
        return " and ".join(guards) if guards else "all sizes"

    def to_data(self) -> dict[str, Any]:
        """As plain data, for the library's manifest."""
        return {"symbols": self.fit.symbols, "expressions": self.fit.expressions, "guards": self.guards}


def fit_from_data(data: Mapping[str, Any]) -> Fit:
    """The fit that was written as plain data. Raises `ValueError`, `TypeError` or `KeyError`."""
    symbols = tuple(Symbol(int(number), int(carries)) for number, carries in data["symbols"])
    return Fit(symbols, tuple(from_data(expression) for expression in data["expressions"]))


def region_from_data(data: Mapping[str, Any]) -> Region:
    """The region that `Region.to_data` wrote. Raises as `fit_from_data` does."""
    return Region(fit_from_data(data), tuple(from_data(guard) for guard in data["guards"]))
