"""Numbers that remember how they were computed, so that a replay can compute them again.

While a step is recorded, learning rates, step counts and float arguments are `Traced`: floats with an
expression. Optimizers and user code compute with them as with any float.

A number that goes into a torch op becomes a plain double and loses its expression. So every traced number
carries a *tag*: a tiny perturbation that makes its double unlike any other. By the tag, the number is found
again among the scalars of the recording. The true value replaces the tag before the step runs, so nothing is
ever computed from a tagged number.

Comparisons use true values and become guards of the replay. Code that does arithmetic that we cannot see gets
the true value, and a guard requires the same value in every replay (`Pins` for torch functions, `Traced.pin`
for Python and NumPy).
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..program.program import Number
from ..record.tensor import is_lazy
from .places import Place

Expression = Any  # a float, or a tuple: ("name", ...) of a source, ("+", left, right), ("sqrt", argument)

_BINARY: dict[str, Callable[[float, float], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": operator.pow,
}
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_MATH = ("sqrt", "exp", "log", "cos", "sin", "tanh", "fabs")
SOURCES = ("argument", "group", "state")
_MAX_TAGS = 8  # attempts to find a tag that is unlike all others


class Trace:
    """The traced numbers of one recording, by their tagged values."""

    def __init__(self) -> None:
        # A separate generator, so that the user's random numbers stay the same.
        self._random = random.Random()
        self._by_tag: dict[float, Traced] = {}
        self.guards: dict[tuple[str, Expression, Expression], bool] = {}

    def source(self, value: float, *name: Any) -> Traced:
        """A traced number that a replay reads again; `name` says where."""
        return self.number(value, name)

    def number(self, true: float, expression: Expression) -> Traced:
        """Make a traced number with a new tag.

        The tag is not computed from the operands' tags: `1 - beta ** step` tends to 1.0 for any tag of beta,
        and could then not be told from any other 1.0 in the recording.
        """
        tag = self._new_tag(true)
        made = Traced(tag)
        made.trace, made.true, made.expression = self, true, expression
        if tag == true or tag != tag:  # infinite or NaN, or no free tag: it can't be recognized
            made.pin()
        else:
            self._by_tag[tag] = made
        return made

    def _new_tag(self, true: float) -> float:
        for _ in range(_MAX_TAGS):
            noise = self._random.uniform(1e-7, 1e-6) * self._random.choice((-1, 1))
            tag = true * (1.0 + noise) if true else noise * 1e-2
            if tag != true and tag not in self._by_tag:
                return tag
        return true

    def numbers(self) -> list[Traced]:
        """All traced numbers that have a tag of their own."""
        return list(self._by_tag.values())

    def find(self, value: Number) -> Traced | None:
        """The traced number behind a plain double: x itself, or -x, 1 - x, x - 1 or 1/x of a traced x.

        The formulas in torch negate numbers, subtract them from 1 and divide by them.
        """
        if type(value) is not float or value == 0.0 or not math.isfinite(value):
            return None
        found = self._by_tag.get(value)
        if found is not None:
            return found
        derivations: tuple[tuple[Callable[[Any], Any], float], ...] = (
            (lambda t: -t, -value),
            (lambda t: 1.0 - t, 1.0 - value),
            (lambda t: t - 1.0, value + 1.0),
            (lambda t: 1.0 / t, 1.0 / value),
        )
        for wrap, candidate in derivations:
            base = self._by_tag.get(candidate)
            if base is not None and wrap(base.tag) == value:
                derived: Traced = wrap(base)
                return derived
        return None


class Traced(float):
    """A float with an expression. Its float value is the tag, which C code reads; `true` its true value."""

    __slots__ = ("expression", "trace", "true")
    trace: Trace
    true: float
    expression: Expression

    # The caller may parse the text or look up a dict entry, which we cannot see: pin the true value.

    def __repr__(self) -> str:
        return repr(self.pin())

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.pin(), spec)

    def __hash__(self) -> int:
        return hash(self.pin())

    def __reduce__(self) -> Any:
        return float, (self.true,)

    @property
    def tag(self) -> float:
        """The double that an op sees."""
        return float.__float__(self)

    def __neg__(self) -> Traced:
        return self.trace.number(-self.true, ("neg", self.expression))

    def __abs__(self) -> Traced:
        return self.trace.number(abs(self.true), ("abs", self.expression))

    def __pos__(self) -> Traced:
        return self

    def __bool__(self) -> bool:
        return bool(_compare("!=", self, 0.0))

    # The caller may do arithmetic that we cannot see, so it gets the true value.

    def __float__(self) -> float:
        return self.pin()

    def __complex__(self) -> complex:
        return complex(self.pin())

    def __int__(self) -> int:
        return int(self.pin())

    __trunc__ = __int__

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.pin(), dtype=dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return getattr(ufunc, method)(*map(_pinned, inputs), **kwargs)

    def pin(self) -> float:
        """The true value, for arithmetic that we cannot see. A guard requires the same value in a replay."""
        self.trace.guards[("==", self.expression, self.true)] = True
        return self.true


def untagged(value: Any, seen: set[int]) -> Any:
    """`value` with true numbers in place of traced ones. Lists and dicts are changed in place, each once."""
    if type(value) is Traced:
        return value.pin()
    if isinstance(value, tuple):
        elements = [untagged(element, seen) for element in value]
        if all(map(operator.is_, elements, value)):
            return value
        return type(value)(*elements) if hasattr(value, "_fields") else type(value)(elements)
    if isinstance(value, (dict, list, deque)) and id(value) not in seen:
        seen.add(id(value))
        for key, element in list(value.items() if isinstance(value, dict) else enumerate(value)):
            true = untagged(element, seen)
            if true is not element:
                value[key] = true
    return value


def true_value(value: Any) -> Any:
    """The true value of a traced number; any other value as it is."""
    return value.true if type(value) is Traced else value


def _pinned(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_pinned, value))
    return value.pin() if type(value) is Traced else value


def _binary(symbol: str, left: Any, right: Any) -> Any:
    function = _BINARY[symbol]
    if isinstance(left, complex) or isinstance(right, complex):
        return function(_pinned(left), _pinned(right))
    if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
        return NotImplemented
    true = function(true_value(left), true_value(right))
    if type(true) is complex:
        raise ValueError("a negative number has no real power of that kind")
    return _trace_of(left, right).number(float(true), (symbol, _expression(left), _expression(right)))


def _compare(symbol: str, left: Any, right: Any) -> Any:
    if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
        return NotImplemented
    result = _COMPARE[symbol](true_value(left), true_value(right))
    trace = _trace_of(left, right)
    trace.guards[(symbol, _expression(left), _expression(right))] = result
    return result


def _trace_of(left: Any, right: Any) -> Trace:
    traced: Traced = left if type(left) is Traced else right
    return traced.trace


def _expression(value: Any) -> Expression:
    return value.expression if type(value) is Traced else value


def _install() -> None:
    names = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "**": "pow"}
    for symbol, name in names.items():
        setattr(Traced, f"__{name}__", lambda a, b, _mod=None, s=symbol: _binary(s, a, b))
        setattr(Traced, f"__r{name}__", lambda a, b, _mod=None, s=symbol: _binary(s, b, a))
    for symbol, name in {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}.items():
        setattr(Traced, f"__{name}__", lambda a, b, s=symbol: _compare(s, a, b))
    # Discontinuous functions, which expressions do not support: rounding, remainders, digits.
    for name in ("round", "floor", "ceil", "floordiv", "rfloordiv", "mod", "rmod", "divmod", "rdivmod"):
        setattr(Traced, f"__{name}__", _on_pinned(getattr(float, f"__{name}__")))
    for name in ("hex", "is_integer", "as_integer_ratio"):
        setattr(Traced, name, _on_pinned(getattr(float, name)))


def _on_pinned(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, called with pinned true values."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_pinned, args), **{name: _pinned(value) for name, value in kwargs.items()})

    return call


_install()


@contextlib.contextmanager
def traced_math(held: Sequence[Place]) -> Iterator[None]:
    """For the time of the block, let functions of `math` follow traced numbers, or else use true values.

    `held`: places where user code may hold such a function under another name.
    """

    def follow(name: str, function: Callable[..., float]) -> Callable[..., float]:
        def call(value: float, *rest: float) -> float:
            if rest:  # `math.log(x, base)`
                return function(*map(_pinned, (value, *rest)))
            if type(value) is not Traced:
                return function(value)
            return value.trace.number(function(value.true), (name, value.expression))

        return call

    originals = {name: value for name, value in vars(math).items() if name[0] != "_" and callable(value)}
    replacements = {
        function: follow(name, function) if name in _MATH else _on_pinned(function)
        for name, function in originals.items()
    }
    imported = []
    for place in held:
        value = place.get()
        if isinstance(value, BuiltinFunctionType) and value in replacements:
            imported.append((place, value))
    try:
        for name, function in originals.items():
            setattr(math, name, replacements[function])
        for place, function in imported:
            place.set(replacements[function])
        yield
    finally:
        for name, function in originals.items():
            setattr(math, name, function)
        for place, function in imported:
            place.set(function)


# Functions that pass a number to one op unchanged. The first set does so in backward, too.
_OPERATORS = ("add", "sub", "mul", "div", "truediv")
_PASS_WITH_GRAD = frozenset(
    (
        *_OPERATORS,
        *(f"{side}{name}" for side in "ri" for name in _OPERATORS),
        *("true_divide", "eq", "ne", "lt", "le", "gt", "ge", "clamp", "clamp_min", "clamp_max"),
    )
)
_PASS = _PASS_WITH_GRAD | frozenset(
    (
        *("addcmul", "addcdiv", "lerp", "pow", "rpow", "fill", "maximum", "minimum"),
        *("fused_sgd", "fused_adam", "fused_adamw", "fused_adagrad"),
    )
)


class Pins(TorchFunctionMode):
    """Gives true numbers to every torch function that may do arithmetic with them before an op sees them.

    For example, `F.dropout` computes 1 - p, the backward of `pow` subtracts 1 from the exponent, and an op
    on the CPU runs at once. We cannot see the result of such arithmetic, so a replay needs the same number.
    `host_state`: ids of the CPU tensors whose updates are followed.
    """

    def __init__(self, host_state: Collection[int]) -> None:
        super().__init__()
        self._host_state = host_state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, with pinned numbers unless it is known to pass numbers on unchanged."""
        del types
        kwargs = kwargs or {}
        if any(map(_has_traced, (*args, *kwargs.values()))) and not self._passes_on(func, args, kwargs):
            args, kwargs = pytree.tree_map_only(Traced, Traced.pin, (args, kwargs))
        return func(*args, **kwargs)

    def _passes_on(self, func: Any, args: Any, kwargs: Any) -> bool:
        name = getattr(func, "__name__", "").strip("_").removeprefix("foreach_")
        if name not in _PASS:
            return False
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(id(tensor) in self._host_state for tensor in tensors):
            return True
        if not any(map(is_lazy, tensors)):
            return False
        has_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        # Backward formulas negate keyword numbers such as `alpha`.
        is_plain = name in _PASS_WITH_GRAD and not any(map(_has_traced, kwargs.values()))
        return is_plain or not has_grad


def _has_traced(arg: Any) -> bool:
    if type(arg) in (list, tuple):
        return any(map(_has_traced, arg))
    return type(arg) is Traced


class Writer:
    """Writes a Python function that evaluates expressions, each distinct expression once.

    `read` returns the code that reads a source. It may call `emit` for expressions that the source needs.
    """

    def __init__(self, read: Callable[[Expression], str], names: dict[str, Any]) -> None:
        self._read = read
        self._known: dict[Expression, str] = {}
        self._lines = ["def evaluate(arguments):"]
        self._scope = {**names, **{f"_{name}": getattr(math, name) for name in _MATH}, "_abs": abs}

    def emit(self, expression: Expression) -> str:
        """The code for an expression: a literal, or the name of a variable that holds its value."""
        if not isinstance(expression, tuple):
            return f"float({str(expression)!r})" if _is_odd(expression) else repr(expression)
        if expression not in self._known:
            head, *operands = expression
            if head in SOURCES:
                code = self._read(expression)
            elif head == "neg":
                code = f"-({self.emit(operands[0])})"
            elif head == "abs" or head in _MATH:
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
        self.line(f"if (({self.emit(left)}) {symbol} ({self.emit(right)})) is not {expected}: return None")

    def finish(
        self, results: Sequence[Expression], epilogue: Sequence[str]
    ) -> Callable[[Any], list[Any] | None]:
        """The finished function: it runs the lines of the epilogue and returns all results."""
        values = [self.emit(result) for result in results]
        for code in epilogue:
            self.line(code)
        self.line(f"return [{', '.join(values)}]")
        exec(compile("\n".join(self._lines), "<lazystep scalars>", "exec"), self._scope)
        evaluate: Callable[[Any], list[Any] | None] = self._scope["evaluate"]
        return evaluate


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
