"""Numbers on their way into ops, and numbers that optimizers keep in CPU tensors.

An op receives a number as a plain double or integer, which has no expression. So a traced number that goes
into an op on lazy tensors is replaced by a *tag*, a number unlike any other, by which it is found again among
the scalars of the recording. The true number takes the tag's place there before anything runs. Only functions
that are known to pass numbers on unchanged, to ops that are recorded and not run, ever see a tag. All other
functions get the plain number, and a guard requires the same value in every replay.

A *count* is a number in a CPU tensor of one element, such as an optimizer's step count. Adding to it and
multiplying it are followed; any other use requires the same value in every replay.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, handle_torch_function

from ..record.handle import Handle
from ..record.tensor import find_handle, is_lazy
from .code_owners import is_torchs
from .places import Place
from .traced import Expression, Trace, TracedInt, expression_of, is_traced, pinned, plain

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
        "optimize.default",  # an update under a `GradScaler`: program/updates.py
    )
)
# Updates of a count, in place, by the name of the function without underscores.
_UPDATES = {
    "add": "+",
    "iadd": "+",
    "sub": "-",
    "isub": "-",
    "mul": "*",
    "imul": "*",
    "div": "/",
    "itruediv": "/",
}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
# Questions about a tensor that its value does not answer.
_METADATA = frozenset(
    [
        "dim",
        "size",
        "numel",
        "stride",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "element_size",
        "nelement",
        "ndimension",
        "shape",
        "dtype",
        "device",
        "layout",
        "is_cpu",
        "is_cuda",
        "is_xpu",
        "is_mps",
        "is_mtia",
        "is_xla",
        "is_sparse",
        "is_leaf",
        "requires_grad",
        "grad",
        "grad_fn",
        "ndim",
        "is_quantized",
        "is_meta",
        "is_nested",
        "is_mkldnn",
        "is_inference",
        "itemsize",
        "nbytes",
        "get_device",
    ]
)
COUNT_TYPES = {torch.float32: "float32", torch.float64: "float64", torch.int64: "int"}
_FLOATS = (torch.float32, torch.float64)


class Count:
    """A number in a CPU tensor of one element, at a known place."""

    def __init__(self, tensor: torch.Tensor, place: Place) -> None:
        self.tensor = tensor
        self.place = place
        self.before = tensor.item()
        self.source: Expression = ("count", place)
        self.expression: Expression = self.source
        self._version = tensor._version

    @property
    def is_changed(self) -> bool:
        """Whether the call has changed the number."""
        return self.expression is not self.source

    @property
    def is_lost(self) -> bool:
        """Whether somebody has written the tensor in a way that was not followed."""
        return self.tensor._version != self._version

    def update(self, symbol: str, operand: Expression) -> None:
        """Follow an update that has just happened: `number symbol= operand`."""
        kind = COUNT_TYPES[self.tensor.dtype]
        # Computed in the tensor's type: a double holds the exact result, which is then rounded once.
        rounded = (kind, operand) if kind == "float32" else operand
        computed = (symbol, self.expression, rounded)
        self.expression = computed if kind == "int" else (kind, computed)
        self._version = self.tensor._version

    def fill(self, value: Expression) -> None:
        """Follow `fill_`, `zero_` and `copy_`."""
        kind = COUNT_TYPES[self.tensor.dtype]
        self.expression = value if kind == "int" else (kind, value)
        self._version = self.tensor._version


def find_counts(values: Iterable[tuple[Place, Any]]) -> dict[int, Count]:
    """The counts among the values of places, by the id of the tensor."""
    counts: dict[int, Count] = {}
    for place, value in values:
        if (
            isinstance(value, torch.Tensor)
            and value.device.type == "cpu"
            and value.dim() == 0
            and value.dtype in COUNT_TYPES
            and value.layout is torch.strided
            and not (value.requires_grad or value.is_inference())
        ):
            counts.setdefault(id(value), Count(value, place))
    return counts


def _unreplaced(func: Any) -> Any:
    """The function of torch's that asks a mode, where somebody has replaced it by one that calls it.

    torch finds itself by its name: `def relu(...): handle_torch_function(relu, ...)`. Under that name is what
    has replaced it, and would do its work twice.
    """
    asking = sys._getframe(2)
    frame = asking.f_back
    if asking.f_code is not handle_torch_function.__code__ or frame is None or type(func) is not FunctionType:
        return func
    code = frame.f_code
    is_itself = code is func.__code__ or is_torchs(func.__code__)
    return func if is_itself or code.co_freevars else FunctionType(code, frame.f_globals)


class OpNumbers(TorchFunctionMode):
    """Looks after the numbers of every torch function while a call is recorded."""

    def __init__(self, trace: Trace, counts: dict[int, Count]) -> None:
        super().__init__()
        self._trace = trace
        self._counts = counts  # by the id of the tensor
        self.moved: dict[Handle, Expression] = {}  # counts that were moved to the lazy device
        # Answers to comparisons of counts, by id, with what was compared: a guard if the answer is used.
        self._answers: dict[int, tuple[torch.Tensor, str, Expression, Expression]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function with tags, with plain numbers, or as a followed update of a count."""
        del types
        func, kwargs = _unreplaced(func), kwargs or {}
        if self._answers and args and id(args[0]) in self._answers:
            answer, symbol, left, right = self._answers[id(args[0])]
            if getattr(func, "__name__", "") not in ("__bool__", "item"):
                return func(*(pinned(arg) for arg in args), **kwargs)
            self._trace.guards[(symbol, left, right)] = bool(answer.item())
            return func(*args, **kwargs)
        if self._counts:
            counts = [one for one in _tensors(args, kwargs) if id(one) in self._counts]
            if counts:
                return self._with_counts(func, args, kwargs, [self._counts[id(one)] for one in counts])
        if any(map(_has_traced, (*args, *kwargs.values()))):
            replace = self._trace.tag if _passes_on(func, args, kwargs) else pinned
            args, kwargs = _replace(args, replace), _replace(kwargs, replace)
        return func(*args, **kwargs)

    def _with_counts(self, func: Any, args: Any, kwargs: Any, counts: list[Count]) -> Any:
        name = getattr(func, "__name__", "")
        if name in _METADATA or (name == "__get__" and func.__self__.__name__ in _METADATA):
            return func(*args, **kwargs)
        if name == "item" and not kwargs:
            return self._trace.number(func(*args), counts[0].expression)
        if name in ("to", "lazy") and len(counts) == 1:
            moved = func(*args, **kwargs)
            handle = find_handle(moved)
            if handle is not None:  # a replay moves the number of its own step
                self.moved[handle] = counts[0].expression
                return moved
        compared = _COMPARISONS.get(name.strip("_"))
        if compared is not None and len(args) == 2 and args[0] is counts[0].tensor and not kwargs:
            operand = self._operand(args[1])
            if operand is not None:
                answer = func(args[0], plain(args[1]))
                self._answers[id(answer)] = answer, compared, counts[0].expression, operand
                return answer
        followed = self._followed(name, args, kwargs)
        if followed is None:
            for count in counts:
                self._trace.pin(count.expression, count.tensor.item())
        result = func(*_replace(args, pinned if followed is None else plain), **_replace(kwargs, pinned))
        for count, symbol, operand in followed or ():
            count.fill(operand) if symbol == "=" else count.update(symbol, operand)
        return result

    def _followed(self, name: str, args: Any, kwargs: Any) -> list[tuple[Count, str, Expression]] | None:
        """The updates that a call makes, as (count, symbol, operand); None if it does something else."""
        is_in_place = name.endswith("_") or name.startswith("__i")
        base = name.strip("_").removeprefix("foreach_")
        alpha = kwargs.get("alpha", 1)
        if (
            not is_in_place
            or is_traced(alpha)
            or alpha != 1
            or kwargs.keys() - {"alpha"}
            or len(args) not in (1, 2)
        ):
            return None
        if base in _UPDATES and len(args) == 2:
            symbol, operand = _UPDATES[base], args[1]
        elif base in ("fill", "copy") and len(args) == 2 and "foreach" not in name:
            symbol, operand = "=", args[1]
        elif base == "zero" and len(args) == 1:
            symbol, operand = "=", 0.0
        else:
            return None
        if isinstance(args[0], torch.Tensor):
            targets, operands = [args[0]], [operand]
        elif isinstance(operand, (list, tuple)):
            targets, operands = list(args[0]), list(operand)
        else:
            targets, operands = list(args[0]), [operand] * len(args[0])
        if not all(id(target) in self._counts for target in targets) or len(targets) != len(operands):
            return None
        known = [self._operand(one) for one in operands]
        if None in known or any(not _fits(t, symbol, e) for t, e in zip(targets, operands, strict=True)):
            return None
        return [(self._counts[id(t)], symbol, e) for t, e in zip(targets, known, strict=True)]

    def _operand(self, value: Any) -> Expression:
        if isinstance(value, (int, float)):
            return expression_of(value)
        if not isinstance(value, torch.Tensor) or value.dim() or is_lazy(value):
            return None
        if id(value) in self._counts:
            return self._counts[id(value)].expression
        # A constant of the call's own, or a tensor that is compared before each replay.
        return value.item() if value.device.type == "cpu" and not value.is_complex() else None


def _fits(target: torch.Tensor, symbol: str, operand: Any) -> bool:
    """Whether an update stays in the type of the count: an int that is added to, say."""
    if target.dtype in _FLOATS:
        return True
    is_int = isinstance(operand, int) or (isinstance(operand, torch.Tensor) and operand.dtype is torch.int64)
    return is_int and symbol != "/"


def _passes_on(func: Any, args: Any, kwargs: Any) -> bool:
    name = getattr(func, "__name__", "").strip("_").removeprefix("foreach_")
    if name not in _PASS:
        return False
    tensors = list(_tensors(args, kwargs))
    # A CPU tensor beside lazy ones may be computed with at once, and a sparse tensor always is.
    if not tensors or not all(is_lazy(tensor) and tensor.layout is torch.strided for tensor in tensors):
        return False
    # The tag of an int would not fit into other types. And where the int is a default, such as `alpha=1`,
    # an op without it is recorded: the tag would make that another op.
    if any(map(_has_traced_int, kwargs.values())):
        return False
    if any(map(_has_traced_int, args)) and not all(tensor.dtype in _FLOATS for tensor in tensors):
        return False
    has_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    # Backward formulas negate keyword numbers such as `alpha`.
    is_plain = name in _PASS_WITH_GRAD and not any(map(_has_traced, kwargs.values()))
    return is_plain or not has_grad


def _tensors(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif type(arg) in (list, tuple):
            for one in arg:
                if isinstance(one, torch.Tensor):
                    yield one


def _has_traced_int(arg: Any) -> bool:
    return any(map(_has_traced_int, arg)) if type(arg) in (list, tuple) else type(arg) is TracedInt


def _has_traced(arg: Any) -> bool:
    if type(arg) in (list, tuple):
        return any(map(_has_traced, arg))
    return is_traced(arg)


def _replace(value: Any, function: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_replace(one, function) for one in value)
    if type(value) is dict:
        return {key: _replace(one, function) for key, one in value.items()}
    return function(value) if is_traced(value) else value
