"""The numbers of a replay: learning rates, step counts and what is computed from them.

The numbers of a program are expressions over arguments, places and counts. They are computed by a generated
function, which also compares what the captured call has compared, and advances the counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..program.program import Number
from ..record._recorder import Counts
from ._places import to_float32
from .op_numbers import COUNT_TYPES, Count
from .places import Place
from .recorded import RecordedCall
from .traced import SOURCES, Expression, Writer, sources_in


class Evaluation:
    """Computes the values of expressions at each replay.

    `evaluate(leaves, values)` returns them, each distinct value once, and advances the counts. It returns
    None, with nothing changed, if a comparison comes out differently. `positions` says where in the list the
    value of each expression is.
    """

    def __init__(
        self, call: RecordedCall, expressions: Sequence[Expression], outputs: Mapping[Place, int]
    ) -> None:
        """`outputs`: positions of places among the values that a replay reads."""
        used: set[Any] = set()
        for expression in (*call.expressions(), *expressions):
            sources_in(expression, used)
        counts = {
            count.source: count for count in call.counts.values() if count.is_changed or count.source in used
        }
        groups = _merge_counts(counts)
        # Counts that were equal are read as one; a replay is refused if they differ.
        self._counts = [
            Counts([counts[source].tensor for source in (first, *others)]) for first, others in groups.items()
        ]
        names: dict[str, Any] = {"_float32": to_float32, "_float64": float}
        for number, group in enumerate(self._counts):
            names |= {f"read{number}": group.read, f"write{number}": group.write}
        variables = {first: f"count{number}" for number, first in enumerate(groups)}

        def read(source: Expression) -> str:
            if source[0] == "argument":
                return f"arguments[{source[1]}]"
            return f"places[{outputs[source[1]]}]" if source[0] == "place" else variables[source]

        writer = Writer(read, names)
        for number in range(len(self._counts)):
            writer.line(f"count{number} = read{number}()")
            writer.line(f"if count{number} is None: return None")
        stands_for = {source: first for first, others in groups.items() for source in others}
        # A pinned place is compared with the other places: its number is a literal.
        stands_for |= {("place", place): call.before[place].value for place in call.pinned_places()}
        memo: dict[Expression, Expression] = {}
        for (symbol, left, right), expected in call.trace.guards.items():
            left, right = _rename(left, stands_for, memo), _rename(right, stands_for, memo)
            if isinstance(left, tuple) or isinstance(right, tuple):
                writer.guard(symbol, left, right, expected)
        epilogue = []
        for number, first in enumerate(groups):
            if counts[first].is_changed:
                value = writer.emit(_rename(counts[first].expression, stands_for, memo))
                epilogue.append(f"write{number}({value})")
        renamed = [_rename(expression, stands_for, memo) for expression in expressions]
        self.evaluate, self.positions = writer.finish(renamed, epilogue)

    def counts(self) -> list[Number | None]:
        """The present values of all counts; None where equal counts have diverged."""
        return [group.read() for group in self._counts]

    def restore(self, counts: Sequence[Number | None]) -> None:
        """Put earlier values of all counts back. Counts that have diverged were not written."""
        for group, number in zip(self._counts, counts, strict=True):
            if number is not None:
                group.write(number)


def _merge_counts(counts: Mapping[Any, Count]) -> dict[Any, list[Any]]:
    """Counts that were equal and change alike: the first of each group, and those that it stands for."""
    groups: dict[Any, list[Any]] = {}
    for source, count in counts.items():
        alike = _rename(count.expression, {source: ("count", None)}, {})
        key = count.before, COUNT_TYPES[count.tensor.dtype], alike
        groups.setdefault(key, []).append(source)
    return {sources[0]: sources[1:] for sources in groups.values()}


def _rename(expression: Expression, names: Mapping[Any, Any], memo: dict[Any, Any]) -> Expression:
    if not isinstance(expression, tuple):
        return expression
    if expression not in memo:
        if expression[0] in SOURCES:
            memo[expression] = names.get(expression, expression)
        else:
            memo[expression] = (expression[0], *(_rename(e, names, memo) for e in expression[1:]))
    return memo[expression]
