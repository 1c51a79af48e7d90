"""Fitting: learns from some members of a family which number is which expression of which symbols.

The symbols are those input sizes that vary and are not an expression of other sizes. Every other number that
varies is tried as a few forms, the commonest first: `s`, `c*s`, `s*t`, `s + c`, `c*s + d`, `(a*s + b)//c`,
what pads `s` to a multiple of `c`. A number that is none of these, such as the offset of a slice, becomes a
symbol of its own (`Symbol.carries`).

Two members can be fitted in many ways, and a fit may be wrong for the next one. `Fit.bind` compares every
number of a program before the program counts as a member, so a wrong fit refuses members and never misleads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .expression import Expression, common_factor, evaluate, plus, product, round_up, symbol, times
from .skeleton import Kind, Place

Column = tuple[int, ...]  # one number of the program, in each member

# More symbols than this are no lengths and batch sizes, but programs that have little to do with each other.
MAX_SYMBOLS = 6
# Forms that round need this many members: with two, any pair of numbers has such a form.
_ENOUGH_TO_ROUND = 3
_DIVISORS = range(2, 17)
_MULTIPLES = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
# An input size this much larger than another one counts as related to it even if only two members say so.
_NEAR = 2


class NoFitError(Exception):
    """The programs have no common form. `place` is the first number that has none."""

    def __init__(self, message: str, place: Place | None = None) -> None:
        super().__init__(message)
        self.place = place


class Symbol(NamedTuple):
    """A symbol of a family, and which number of a member is its value.

    A size is the value itself. Another number is carried by an input of its own that has no memory and whose
    size is the number plus two, since sizes begin at 2 (`carries` 1), or two minus the number (`carries` -1).
    """

    number: int  # among the numbers of the skeleton
    carries: int = 0

    def value(self, numbers: Sequence[int]) -> int:
        """The symbol's value in a member with these numbers."""
        number = numbers[self.number]
        return number if not self.carries else self.carries * number + 2


class Fit(NamedTuple):
    """The symbols of a family, and each number of its programs as an expression of them."""

    symbols: tuple[Symbol, ...]
    expressions: tuple[Expression, ...]

    def bind(self, numbers: Sequence[int]) -> tuple[int, ...] | None:
        """The values of the symbols for a program with these numbers; None if the fit is wrong for it."""
        values = tuple(one.value(numbers) for one in self.symbols)
        if len(numbers) != len(self.expressions) or any(value < 2 for value in values):
            return None
        return values if self.misfit(numbers) < 0 else None

    def misfit(self, numbers: Sequence[int]) -> int:
        """The first number that is not what its expression says; -1 if there is none."""
        values = [one.value(numbers) for one in self.symbols]
        for index, (expression, number) in enumerate(zip(self.expressions, numbers, strict=True)):
            if type(expression) is int:
                if expression != number:
                    return index
            elif evaluate(expression, values) != number:
                return index
        return -1


def fit(places: Sequence[Place], members: Sequence[Sequence[int]]) -> Fit:
    """Fit the numbers of at least two members. Raises `NoFitError` if one of the numbers has no form."""
    if len(members) < 2:
        raise NoFitError("there is only one program of this kind")
    columns: list[Column] = list(zip(*members, strict=True))
    known = _Forms()
    for column, index in _varying_sizes(places, columns):
        if known.find(column, is_size=True) is None:
            known.add(column, Symbol(index))
    expressions: list[Expression] = []
    for index, column in enumerate(columns):
        if column.count(column[0]) == len(column):
            expressions.append(column[0])
            continue
        found = known.find(column)
        if found is None:
            known.add(column, _carrier(index, places[index], column))
            found = known.find(column)
            assert found is not None
        expressions.append(found)
    if len(known.symbols) > MAX_SYMBOLS:
        raise NoFitError(f"{len(known.symbols)} sizes vary independently")
    return Fit(tuple(known.symbols), tuple(expressions))


def _varying_sizes(places: Sequence[Place], columns: Sequence[Column]) -> list[tuple[Column, int]]:
    """The sizes that vary, the smallest first: the larger ones are often sums and products of these."""
    found: dict[Column, int] = {}
    for index, column in enumerate(columns):
        if places[index].kind is Kind.SIZE and len(set(column)) > 1:
            found.setdefault(column, index)
    # A size of its own before the length of a flat argument, which is mostly a product.
    return sorted(found.items(), key=lambda item: (places[item[1]].which < 0, sum(item[0])))


def _carrier(index: int, place: Place, column: Column) -> Symbol:
    if min(column) >= 0:
        return Symbol(index, 1)
    if max(column) <= 0:
        return Symbol(index, -1)
    raise NoFitError(f"a number varies as {', '.join(map(str, column))}", place)


class _Forms:
    """The symbols so far, and every column that has an expression of them."""

    def __init__(self) -> None:
        self.symbols: list[Symbol] = []
        self._columns: list[Column] = []
        self._found: dict[Column, Expression] = {}

    def add(self, column: Column, new: Symbol) -> None:
        """Make a column a symbol."""
        here = symbol(len(self.symbols))
        self.symbols.append(new)
        if not new.carries:
            self._columns.append(column)
            self._found[column] = here
            return
        self._columns.append(tuple(new.carries * number + 2 for number in column))
        self._found[column] = plus(times(new.carries, here), -2 * new.carries)

    def find(self, column: Column, is_size: bool = False) -> Expression | None:
        """The column as an expression of the symbols; None if it has no form."""
        if column in self._found:
            return self._found[column]
        if not self.symbols:
            return None
        found = next(self._candidates(column, is_size), None)
        if found is not None:
            self._found[column] = found
        return found

    def _candidates(self, column: Column, is_size: bool) -> Iterator[Expression]:
        """The forms that give the column, the likeliest first."""
        products = [self._product(chosen) for chosen in self._choices((1, 2, 3))]
        for values, expression in products:
            factor = common_factor(column, values)
            if factor:
                yield times(factor, expression)
        has_many = len(column) >= _ENOUGH_TO_ROUND
        for number, values in enumerate(self._columns):
            apart = column[0] - values[0]
            is_near = has_many or not is_size or 0 < apart <= _NEAR
            if is_near and all(c - v == apart for c, v in zip(column, values, strict=True)):
                yield plus(symbol(number), apart)
        if is_size and not has_many:
            return
        for values, expression in products:
            yield from _linear(column, values, expression)
        if has_many:
            yield from self._sums(column)
            for number, values in enumerate(self._columns):
                if not is_size or len(column) > _ENOUGH_TO_ROUND:
                    yield from _rounded(column, values, symbol(number))

    def _choices(self, degrees: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for degree in degrees:
            yield from itertools.combinations_with_replacement(range(len(self._columns)), degree)

    def _product(self, chosen: Sequence[int]) -> tuple[Column, Expression]:
        values = [1] * len(self._columns[0])
        for number in chosen:
            values = [v * w for v, w in zip(values, self._columns[number], strict=True)]
        return tuple(values), product([symbol(number) for number in chosen])

    def _sums(self, column: Column) -> Iterator[Expression]:
        """`c*m + d*n` for two products m and n: `(s + k)*t` is one."""
        products = [self._product(chosen) for chosen in self._choices((1, 2))]
        for (m, first), (n, second) in itertools.combinations(products, 2):
            determinant = m[0] * n[1] - m[1] * n[0]
            if not determinant:
                continue
            c, c_rest = divmod(column[0] * n[1] - column[1] * n[0], determinant)
            d, d_rest = divmod(m[0] * column[1] - m[1] * column[0], determinant)
            if c_rest or d_rest:
                continue
            if all(v == c * a + d * b for v, a, b in zip(column, m, n, strict=True)):
                yield plus(times(c, first), times(d, second))


def _linear(column: Column, values: Column, expression: Expression) -> Iterator[Expression]:
    """`c*m + d`."""
    other = next((i for i, v in enumerate(values) if v != values[0]), None)
    if other is None:
        return
    slope, rest = divmod(column[other] - column[0], values[other] - values[0])
    if rest or not slope:
        return
    start = column[0] - slope * values[0]
    if all(c == slope * v + start for c, v in zip(column, values, strict=True)):
        yield plus(times(slope, expression), start)


def _rounded(column: Column, values: Column, here: Expression) -> Iterator[Expression]:
    """`(a*s + b)//c`, as convolutions and pooling make it; `s % c`; and what pads s to a multiple."""
    pairs = list(zip(column, values, strict=True))
    far: list[Expression] = []
    for divisor, factor in itertools.product(_DIVISORS, (1, 2, 3)):
        if factor % divisor == 0:
            continue
        low = max(divisor * c - factor * v for c, v in pairs)
        high = min(divisor * c + divisor - 1 - factor * v for c, v in pairs)
        if low <= high:
            start = min(max(0, low), high)
            found = ("//", plus(times(factor, here), start), divisor)
            if 0 <= start < divisor:
                yield found
            else:
                # Some divisor fits three numbers by chance, with a large start. A size that is padded to a
                # multiple and then halved is likelier.
                far.append(found)
    for multiple in _MULTIPLES:
        if all(c == v % multiple for c, v in pairs):
            yield ("%", here, multiple)
        rounded = times(multiple, ("//", plus(here, multiple - 1), multiple))
        for sign in (1, -1):
            if all(sign * c == round_up(v, multiple) for c, v in pairs):
                yield times(sign, rounded)
            if all(sign * c == round_up(v, multiple) - v for c, v in pairs):
                yield times(sign, plus(rounded, times(-1, here)))
    for multiple in _MULTIPLES:
        parts = tuple(round_up(v, multiple) // multiple for v in values)
        yield from _linear(column, parts, ("//", plus(here, multiple - 1), multiple))
    yield from far
