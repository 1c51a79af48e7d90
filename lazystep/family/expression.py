"""Expressions over the symbols of a family: what a size, a stride or a literal is for every member.

An expression is an int, or a tuple whose first item says what the tuple is: `("s", n)` is the symbol with
number n, `("+", a, b)` a sum. So an expression is plain data that can be compared, hashed and written as
JSON. The same form holds conditions: `("==", ("%", ("s", 0), 8), 0)`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Expression = int | tuple[Any, ...]

# By name: how the values of the arguments give the value. `//` and `%` round down, as Python's do.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "+": lambda *terms: functools.reduce(operator.add, terms),
    "*": lambda *factors: functools.reduce(operator.mul, factors),
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "max": max,
    "min": min,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "and": lambda *conditions: all(conditions),
    "or": lambda *conditions: any(conditions),
    "not": operator.not_,
}
_LOOSE = ("+", "//", "%", "*")  # operators that need parentheses inside another one


def symbol(number: int) -> Expression:
    """The symbol with this number."""
    return ("s", number)


def plus(a: Expression, b: Expression) -> Expression:
    """`a + b`."""
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    return a if b == 0 else b if a == 0 else ("+", a, b)


def times(a: Expression, b: Expression) -> Expression:
    """`a * b`."""
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    return a if b == 1 else b if a == 1 else ("*", a, b)


def evaluate(expression: Expression, symbols: Sequence[Any]) -> Any:
    """The value of an expression for these values of the symbols: ints, or torch's symbolic ints."""
    if not isinstance(expression, tuple):
        return expression
    name, *arguments = expression
    if name == "s":
        return symbols[arguments[0]]
    return _FUNCTIONS[name](*(evaluate(argument, symbols) for argument in arguments))


def holds(condition: Expression, symbols: Sequence[int]) -> bool:
    """Whether a condition is true for these values. One that can't be computed, as `1 // 0`, is false."""
    try:
        return bool(evaluate(condition, symbols))
    except (ArithmeticError, ValueError):
        return False


def to_text(expression: Expression) -> str:
    """The expression as a reader writes it: `4*s0 + 1`."""
    if not isinstance(expression, tuple):
        return str(expression)
    name, *arguments = expression
    if name == "s":
        return f"s{arguments[0]}"
    texts = [_inner(name, argument) for argument in arguments]
    if name in ("max", "min", "not"):
        return f"{name}({', '.join(texts)})"
    return (f"{name}" if name in ("*", "**") else f" {name} ").join(texts)


def _inner(outer: str, expression: Expression) -> str:
    text = to_text(expression)
    is_loose = isinstance(expression, tuple) and expression[0] in _LOOSE
    needs_none = outer == "+" or (isinstance(expression, tuple) and expression[0] == "*" and outer == "*")
    is_comparison = outer in ("==", "!=", "<", "<=", ">", ">=", "max", "min")
    return f"({text})" if is_loose and not needs_none and not is_comparison else text


def from_data(data: Any) -> Expression:
    """The expression that was written as JSON, where tuples are lists. Raises `ValueError` for other data."""
    if isinstance(data, bool) or not isinstance(data, (int, list, tuple)):
        raise ValueError(f"no expression: {data!r}")
    if isinstance(data, int):
        return data
    name, *arguments = data
    if name == "s" and len(arguments) == 1 and isinstance(arguments[0], int):
        return ("s", arguments[0])
    if name not in _FUNCTIONS:
        raise ValueError(f"no expression: {data!r}")
    return (name, *(from_data(argument) for argument in arguments))


def product(factors: Sequence[Expression]) -> Expression:
    """The product of some expressions."""
    result: Expression = 1
    for factor in factors:
        result = times(result, factor)
    return result


def common_factor(numbers: Sequence[int], by: Sequence[int]) -> int:
    """The integer c with `number == c * b` for all pairs; 0 if there is none."""
    if not by[0] or numbers[0] % by[0]:
        return 0
    factor = numbers[0] // by[0]
    return factor if all(n == factor * b for n, b in zip(numbers, by, strict=True)) else 0


def round_up(size: int, to: int) -> int:
    """The smallest multiple of `to` that is not less than `size`."""
    return math.ceil(size / to) * to
