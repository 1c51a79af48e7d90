"""Numbers that remember how they were computed, so that a replay can compute them again.

While a step is recorded, learning rates, step counts and number arguments are `Traced`: floats with
an expression. Optimizers and user code compute with them as with any float. But a number that goes into
a torch op comes out as a plain double, without its expression; so every traced number carries a *tag*, a
tiny perturbation that makes its double unlike any other, by which it is recognized among the scalars of
the recording. There the true value is put back before the step runs: nothing is ever computed from a
tagged number. Comparisons use true values and become guards of the replay; so does every use by a
function that computes with the number itself, out of sight: it gets the true value (`Pins`, and
`Traced.pin` for Python and NumPy).
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

from ..record.device import is_lazy
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
_MAX_TAGS = 8  # tries to find one that is unlike all others


class Trace:
    """The traced numbers of one recording, by their tagged values."""

    def __init__(self) -> None:
        # Its own generator: the user's random numbers stay where they are.
        self._random = random.Random()
        self._by_tag: dict[float, Traced] = {}
        self.guards: dict[tuple[str, Expression, Expression], bool] = {}

    def source(self, value: float, *name: Any) -> Traced:
        """A number that a replay reads anew: `name` says from where."""
        return self.number(value, name)

    def number(self, true: float, expression: Expression) -> Traced:
        """Make a traced number, with a tag of its own.

        Not the tags' result: `1 - beta ** step` ends at 1.0 whatever the tag of beta, and would be taken
        for every other 1.0 in the recording.
        """
        tag = self._new_tag(true)
        made = Traced(tag)
        made.trace, made.true, made.expression = self, true, expression
        if tag == true or tag != tag:  # infinite, or none at all: one can't be told from another
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
        """Every number that can be told from the others."""
        return list(self._by_tag.values())

    def find(self, value: float) -> Traced | None:
        """The traced number that a plain double once was, or the opposite, rest or inverse of one.

        torch's own formulas negate numbers, subtract them from one and divide by them.
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
    """See the module. Its own value, which C reads, is its tag; `true` is what it stands for."""

    __slots__ = ("expression", "trace", "true")
    trace: Trace
    true: float
    expression: Expression

    # Text and a place in a dict lead to other numbers, out of sight.

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

    # Whoever asks for another kind of number computes on with that, out of sight.

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
        """The true value, for code that takes it out of sight: a replay has to have the same one."""
        self.trace.guards[("==", self.expression, self.true)] = True
        return self.true


def untagged(value: Any, seen: set[int]) -> Any:
    """The same with true numbers for traced ones; lists and dicts are changed in place, each once."""
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
    """What a number stands for."""
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
    # Functions with jumps, which no expression of ours has: rounding, remainders, a number's digits.
    for name in ("round", "floor", "ceil", "floordiv", "rfloordiv", "mod", "rmod", "divmod", "rdivmod"):
        setattr(Traced, f"__{name}__", _on_pinned(getattr(float, f"__{name}__")))
    for name in ("hex", "is_integer", "as_integer_ratio"):
        setattr(Traced, name, _on_pinned(getattr(float, name)))


def _on_pinned(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of numbers, with true ones."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_pinned, args), **{name: _pinned(value) for name, value in kwargs.items()})

    return call


_install()


@contextlib.contextmanager
def traced_math(held: Sequence[Place]) -> Iterator[None]:
    """Let functions of `math` keep the expression of a traced number, or at least see the true one.

    `held`: where the user's code may have such a function under a name of its own.
    """

    def follow(name: str, function: Callable[[float], float]) -> Callable[[float], float]:
        def call(value: float) -> float:
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


# Functions that hand a number to one op as it is. Those of the first kind do so in their backward, too.
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
    """Gives true numbers to every torch function that may compute with them before an op sees them.

    `F.dropout` takes its probability from one; the backward of `pow` takes one from its exponent; an op on
    the CPU runs at once. What they make of a number can't be followed, so a replay needs the same number.
    `host_state`: ids of tensors on the CPU that are followed.
    """

    def __init__(self, host_state: Collection[int]) -> None:
        super().__init__()
        self._host_state = host_state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, with pinned numbers unless it is known to pass them on."""
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
        # `alpha` and its like are negated in backward formulas.
        is_plain = name in _PASS_WITH_GRAD and not any(map(_has_traced, kwargs.values()))
        return is_plain or not has_grad


def _has_traced(arg: Any) -> bool:
    if type(arg) in (list, tuple):
        return any(map(_has_traced, arg))
    return type(arg) is Traced


class Writer:
    """Writes a Python function that evaluates expressions, each distinct one once.

    `read` gives the code that reads a source; it may use `emit` for what the source depends on.
    """

    def __init__(self, read: Callable[[Expression], str], names: dict[str, Any]) -> None:
        self._read = read
        self._known: dict[Expression, str] = {}
        self._lines = ["def evaluate(arguments):"]
        self._scope = {**names, **{f"_{name}": getattr(math, name) for name in _MATH}, "_abs": abs}

    def emit(self, expression: Expression) -> str:
        """The code of an expression: a literal, or the name of a variable that has been computed."""
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
        """Add a line."""
        self._lines.append(f" {code}")

    def guard(self, symbol: str, left: Expression, right: Expression, expected: bool) -> None:
        """Return None unless a comparison comes out as expected."""
        self.line(f"if (({self.emit(left)}) {symbol} ({self.emit(right)})) is not {expected}: return None")

    def finish(
        self, results: Sequence[Expression], epilogue: Sequence[str]
    ) -> Callable[[Any], list[Any] | None]:
        """The function: it returns all results, after the lines of the epilogue."""
        values = [self.emit(result) for result in results]
        for code in epilogue:
            self.line(code)
        self.line(f"return [{', '.join(values)}]")
        exec(compile("\n".join(self._lines), "<lazystep scalars>", "exec"), self._scope)
        evaluate: Callable[[Any], list[Any] | None] = self._scope["evaluate"]
        return evaluate


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
