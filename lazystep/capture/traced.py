"""Numbers that remember how they were computed, so that a replay can compute them again.

While a call is witnessed, a number that it reads from a place or an argument is a `TracedFloat` or a
`TracedInt`: the very same number, with an expression. Python code computes with it as with any number, and
the results remember their expressions, too. Comparisons become guards of the replay.

Code in C can't follow: it gets the plain number, and a guard requires the same value in every replay. This is
called *pinning*. The witness pins what goes into C functions, `Trace` what Python asks of the number itself.

See capture/op_numbers.py for how a number goes into an op.
"""

from __future__ import annotations

import functools
import math
import operator
import random
from collections.abc import Callable, Sequence
from types import MethodDescriptorType, WrapperDescriptorType
from typing import Any

from ._places import is_same

# A number, or a tuple: ("place", place), ("argument", number), ("count", state), ("+", left, right), ...
Expression = Any
Number = float | int

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
SOURCES = ("argument", "place", "count")
_MAX_TAGS = 8  # attempts to find a tag that is unlike all others


class Trace:
    """The traced numbers of one call: what must hold of them, and the tags by which ops carry them."""

    def __init__(self) -> None:
        # A separate generator, so that the user's random numbers stay the same.
        self._random = random.Random()
        self._by_tag: dict[Number, Any] = {}
        # Comparisons and their results; ("same", expression, value) requires the very same number.
        self.guards: dict[tuple[str, Expression, Expression], bool] = {}

    def number(self, value: Any, expression: Expression) -> Any:
        """A traced number, or the value itself if it is neither a float nor an int."""
        kind = _KINDS.get(type(value))
        if kind is None:
            return value
        made: Any = type(value).__new__(kind, value)
        made.trace, made.expression, made.original = self, expression, value
        return made

    def pin(self, expression: Expression, value: Any) -> None:
        """Require the same value in every replay."""
        if isinstance(expression, tuple):
            # By its digits as well, because -0.0 and 0.0 are equal, and NaN equals nothing.
            self.guards[("same", expression, _Exact(value))] = True

    # -- tags: how an op carries a number ------------------------------------------------------------------

    def tag(self, number: Any) -> Any:
        """A number by which this one is found again among the scalars of the recording."""
        for _ in range(_MAX_TAGS):
            tag = self._new_tag(plain(number))
            if tag is not None and tag not in self._by_tag:
                self._by_tag[tag] = number
                return tag
        return number.pin()

    def _new_tag(self, true: Number) -> Number | None:
        if isinstance(true, int):
            # Far from every number that an op would have by itself.
            return (1 << 40) + self._random.getrandbits(32)
        if not math.isfinite(true):
            return None
        noise = self._random.uniform(1e-7, 1e-6) * self._random.choice((-1, 1))
        tag = true * (1.0 + noise) if true else noise * 1e-2
        return tag if tag != true and math.isfinite(tag) else None

    def find(self, value: Number | complex) -> Any:
        """The traced number behind a tag: x itself, or -x, 1 - x, x - 1 or 1/x of a traced x; else None.

        The formulas in torch negate numbers, subtract them from 1 and divide by them.
        """
        if (
            not isinstance(value, (float, int))
            or isinstance(value, bool)
            or value == 0
            or not math.isfinite(value)
        ):
            return None
        found = self._by_tag.get(value)
        if found is not None and type(value) is type(plain(found)):
            return found
        derivations: tuple[tuple[Callable[[Any], Any], float], ...] = (
            (lambda t: -t, -value),
            (lambda t: 1 - t, 1 - value),
            (lambda t: t - 1, value + 1),
            (lambda t: 1 / t, 1 / value),
        )
        for wrap, candidate in derivations:
            base = self._by_tag.get(candidate)
            if base is not None and is_same(wrap(candidate), value):
                return wrap(base)
        return None


class _Exact:
    """A number in a guard, hashed and compared by its type and digits."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Exact) and is_same(self.value, other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), repr(self.value)))


class _Traced:
    """What traced floats and ints have in common. The number itself is always the true one."""

    trace: Trace
    expression: Expression
    original: Any  # the plain number; the very object if it was read

    def pin(self) -> Any:
        """The plain number, for arithmetic that we can't see. A replay requires the same value."""
        value = plain(self)
        self.trace.pin(self.expression, value)
        return value

    # The caller may parse the text or look up a dict entry, which we can't see.

    def __repr__(self) -> str:
        return repr(self.pin())

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.pin(), spec)

    def __hash__(self) -> int:
        return hash(self.pin())

    def __reduce__(self) -> Any:
        return type(plain(self)), (plain(self),)

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __copy__(self) -> Any:
        return self

    def __neg__(self) -> Any:
        return self.trace.number(-plain(self), ("neg", self.expression))

    def __abs__(self) -> Any:
        return self.trace.number(abs(plain(self)), ("abs", self.expression))

    def __pos__(self) -> Any:
        return self

    def __bool__(self) -> bool:
        return bool(_compare("!=", self, 0))


class TracedFloat(_Traced, float):
    """A float with an expression."""

    def __new__(cls, value: Any = 0.0) -> Any:  # noqa: D102 - code that has got hold of the class means `float`
        return float(value)


class TracedInt(_Traced, int):
    """An int with an expression."""

    def __new__(cls, value: Any = 0) -> Any:  # noqa: D102 - code that has got hold of the class means `int`
        return int(value)


_KINDS: dict[type, Any] = {float: TracedFloat, int: TracedInt}


def is_traced(value: Any) -> bool:
    """Whether a value is a traced number."""
    return type(value) is TracedFloat or type(value) is TracedInt


def plain(value: Any) -> Any:
    """The plain number of a traced one; any other value as it is."""
    return value.original if is_traced(value) else value


def expression_of(value: Any) -> Expression:
    """The expression of a traced number; any other number is its own."""
    return value.expression if is_traced(value) else value


def _trace_of(left: Any, right: Any) -> Trace:
    trace: Trace = (left if is_traced(left) else right).trace
    return trace


def _binary(symbol: str, left: Any, right: Any) -> Any:
    if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
        # Complex numbers, NumPy's, fractions: the other operand decides, with the plain number.
        if not _is_number(right if is_traced(left) else left):
            return NotImplemented
        return _BINARY[symbol](pinned(left), pinned(right))
    try:
        value = _BINARY[symbol](plain(left), plain(right))
    except ArithmeticError:  # other numbers may not raise
        pinned([left, right])
        raise
    if type(value) not in _KINDS:  # complex, as (-1) ** 0.5 is
        pinned([left, right])
    return _trace_of(left, right).number(value, (symbol, expression_of(left), expression_of(right)))


def _is_number(value: Any) -> bool:
    return isinstance(value, complex) or type(value).__module__ in ("numpy", "fractions", "decimal")


def _compare(symbol: str, left: Any, right: Any) -> Any:
    if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
        return NotImplemented
    result = _COMPARE[symbol](plain(left), plain(right))
    _trace_of(left, right).guards[(symbol, expression_of(left), expression_of(right))] = result
    return result


def _on_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, called with plain numbers, which must stay the same."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(pinned, args), **{name: pinned(value) for name, value in kwargs.items()})

    return call


def pinned(value: Any) -> Any:
    """A value with the plain numbers in place of traced ones, which must stay the same; also inside."""
    if type(value) in (list, tuple):
        return type(value)(map(pinned, value))
    if type(value) is dict:
        return {key: pinned(element) for key, element in value.items()}
    return value.pin() if is_traced(value) else value


def _install() -> None:
    """Give both classes the operators of numbers."""
    names = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "**": "pow", "//": "floordiv", "%": "mod"}
    for kind, base in ((TracedFloat, float), (TracedInt, int)):
        for symbol, name in names.items():
            setattr(kind, f"__{name}__", lambda a, b, _mod=None, s=symbol: _binary(s, a, b))
            setattr(kind, f"__r{name}__", lambda a, b, _mod=None, s=symbol: _binary(s, b, a))
        for symbol, name in {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}.items():
            setattr(kind, f"__{name}__", lambda a, b, s=symbol: _compare(s, a, b))
        own = {
            f"__{name}__" for name in ("new", "init", "getattribute", "getnewargs", "sizeof", "class_getitem")
        }
        done = set(vars(kind)) | set(vars(_Traced)) | own
        # Everything else that the type can do: rounding, digits, bits, conversions.
        for name, function in vars(base).items():
            if name not in done and isinstance(function, (MethodDescriptorType, WrapperDescriptorType)):
                setattr(kind, name, _on_plain(function))


_install()

# -- functions in C that a replay can call again -----------------------------------------------------

_FOLLOWED: dict[Callable[..., Any], str] = {
    function: f"math.{name}"
    for name, function in vars(math).items()
    if not name.startswith("_") and callable(function) and name not in ("fsum", "prod", "dist", "sumprod")
}
_FOLLOWED |= {float: "float", int: "int", abs: "abs", sum: "sum"}
_BY_NAME: dict[str, Callable[..., Any]] = {name: function for function, name in _FOLLOWED.items()}
_BY_NAME["sum"] = lambda first, *others: sum(others, first)
# From Python 3.12 on they add floats, and nothing but floats, more precisely than one after the other.
_OF_FLOATS: dict[Callable[..., Any], str] = {
    function: name for name, function in vars(math).items() if name == "sumprod"
}


def can_follow(function: Any) -> bool:
    """Whether there is a version of this function that follows traced numbers."""
    try:
        return function in _FOLLOWED or function in _OF_FLOATS
    except TypeError:
        return False


def following(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes the same and remembers how, if all its arguments are numbers."""
    if function is sum:
        return _sum
    if function in _OF_FLOATS:
        return _on_plain(function)
    name = _FOLLOWED[function]

    def call(*args: Any, **kwargs: Any) -> Any:
        is_plain = not kwargs and all(isinstance(arg, (int, float)) for arg in args)
        traced = next((arg for arg in args if is_traced(arg)), None)
        if traced is None or not is_plain:
            return function(*map(pinned, args), **{key: pinned(value) for key, value in kwargs.items()})
        try:
            value = function(*map(plain, args))
        except Exception:  # other numbers may not raise
            pinned(list(args))
            raise
        if type(value) not in (int, float):  # the answer to a question, such as `isnan`
            return function(*map(pinned, args))
        return traced.trace.number(value, ("call", name, *map(expression_of, args)))

    return call


def _sum(iterable: Any, /, start: Any = 0) -> Any:
    """`sum`, which adds the numbers before anything else by an algorithm of its own."""
    parts = [start, *iterable]
    num_numbers = next((i for i, one in enumerate(parts) if not isinstance(one, (int, float))), len(parts))
    traced = next(filter(is_traced, parts[:num_numbers]), None)
    if traced is None:
        return sum(parts[1:], start)
    numbers = parts[:num_numbers]
    value = _BY_NAME["sum"](*map(plain, numbers))
    total = traced.trace.number(value, ("call", "sum", *map(expression_of, numbers)))
    for one in parts[num_numbers:]:
        total = total + one
    return total


class Writer:
    """Writes a Python function that evaluates expressions, each distinct expression once.

    `read` returns the code that reads a source. It may call `emit` for expressions that the source needs.
    """

    def __init__(self, read: Callable[[Expression], str], names: dict[str, Any]) -> None:
        self._read = read
        self._known: dict[Expression, str] = {}
        self._lines = ["def evaluate(arguments, places):"]
        self._scope: dict[str, Any] = {**names, "_same": is_same}

    def emit(self, expression: Expression) -> str:
        """The code for an expression: a literal, or the name of a variable that holds its value."""
        if not isinstance(expression, tuple):
            value = expression.value if type(expression) is _Exact else expression
            if type(value) is int or (type(value) is float and math.isfinite(value)):
                return repr(value)
            name = f"_constant{len(self._scope)}"  # a literal would lose the sign of a NaN
            self._scope[name] = value
            return name
        if expression not in self._known:
            head, *operands = expression
            if head in SOURCES:
                code = self._read(expression)
            elif head == "neg":
                code = f"-({self.emit(operands[0])})"
            elif head == "abs":
                code = f"abs({self.emit(operands[0])})"
            elif head == "call":
                name = f"_f_{operands[0].replace('.', '_')}"
                self._scope[name] = _BY_NAME[operands[0]]
                code = f"{name}({', '.join(map(self.emit, operands[1:]))})"
            elif head in ("float32", "float64", "float16", "bfloat16"):
                code = f"_{head}({self.emit(operands[0])})"
            else:
                code = f"({self.emit(operands[0])}) {head} ({self.emit(operands[1])})"
            name = self._known[expression] = f"x{len(self._known)}"
            self.line(f"{name} = {code}")
        return self._known[expression]

    def line(self, code: str) -> None:
        """Add a line of code."""
        self._lines.append(f" {code}")

    def guard(self, symbol: str, left: Expression, right: Expression, expected: bool) -> None:
        """Make the function return None unless a comparison has the expected result."""
        if symbol == "same":
            self.line(f"if not _same({self.emit(left)}, {self.emit(right)}): return None")
        else:
            self.line(
                f"if (({self.emit(left)}) {symbol} ({self.emit(right)})) is not {expected}: return None"
            )

    def finish(
        self, results: Sequence[Expression], epilogue: Sequence[str]
    ) -> tuple[Callable[[Any, Any], list[Any] | None], list[int]]:
        """The finished function, and for each result its position in the list that the function returns.

        The function runs the lines of the epilogue, too. Equal results are returned once: an optimizer has
        the same few numbers for every parameter.
        """
        values = [self.emit(result) for result in results]
        distinct = {code: number for number, code in enumerate(dict.fromkeys(values))}
        for code in epilogue:
            self.line(code)
        self.line(f"return [{', '.join(distinct)}]")
        exec(compile("\n".join(self._lines), "<lazystep scalars>", "exec"), self._scope)
        evaluate: Callable[[Any, Any], list[Any] | None] = self._scope["evaluate"]
        return evaluate, [distinct[code] for code in values]


def sources_in(expression: Expression, found: set[Any]) -> None:
    """Collect the sources of an expression."""
    if isinstance(expression, tuple):
        if expression[0] in SOURCES:
            found.add(expression)
        else:
            for part in expression[1:]:
                sources_in(part, found)
