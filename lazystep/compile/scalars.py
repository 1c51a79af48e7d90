"""Python numbers as inputs of a native library, so that a schedule never needs a new library.

- Where an op also accepts a tensor, the number becomes an element of an input vector.
- Some arguments must be numbers (`alpha`, `value`, `weight`, bounds, fill values). For the ops that schedules
  use, the rules below compute the same result from tensors.
- Every other number, such as an `eps` or an exponent, is fixed: its value is part of the library, and a step
  with another value runs on the reference executable. An exponent is fixed on purpose: `x ** 2` is a
  multiplication, `x ** s` is not.

Data types are the same as in eager. A number does not take part in type promotion as a tensor does. So a
number is cast to the type in which eager computes, and a result is cast to the recorded type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..program.program import Arg, Instruction, Program, resolve_op, slots_of

aten = torch.ops.aten

# For each op, the number arguments that a rule can take as tensors. In-place, foreach and `.out` forms are
# listed under the plain name.
_FREE: dict[str, frozenset[str]] = {
    "add": frozenset({"other", "alpha"}),
    "sub": frozenset({"other", "alpha"}),
    "rsub": frozenset({"other", "alpha"}),
    "mul": frozenset({"other"}),
    "div": frozenset({"other"}),
    "addcmul": frozenset({"value"}),
    "addcdiv": frozenset({"value"}),
    "lerp": frozenset({"weight"}),
    "clamp": frozenset({"min", "max"}),
    "clamp_min": frozenset({"min"}),
    "clamp_max": frozenset({"max"}),
    "fill": frozenset({"value"}),
    "full": frozenset({"fill_value"}),
    "full_like": frozenset({"fill_value"}),
    "scalar_tensor": frozenset({"s"}),
    "masked_fill": frozenset({"value"}),
    "where": frozenset({"self", "other"}),
    "optimize": frozenset({"numbers"}),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), frozenset({"other"})),
}
_FUSED_FREE = frozenset({"lr"})
# The name, in the plain op, of the scalar of a foreach op.
_FOREACH_NAMES = {
    **dict.fromkeys(("add", "sub", "mul", "div"), "other"),
    **dict.fromkeys(("addcmul", "addcdiv"), "value"),
    "lerp": "weight",
    "clamp_min": "min",
    "clamp_max": "max",
    "maximum": "other",
    "minimum": "other",
}


def fixed_slots(program: Program) -> frozenset[int]:
    """The scalar slots whose values are part of the library."""
    fixed = set()
    for instruction in program.instructions:
        if not instruction.slots():
            continue
        for name, arg, is_tensor in _named_arguments(instruction):
            for slot in slots_of(arg):
                is_free = is_tensor or name in _free_names(base_name(instruction.op))
                if not is_free or program.scalars[slot] is complex or _has_out(instruction):
                    fixed.add(slot)
    return frozenset(fixed)


def _free_names(name: str) -> frozenset[str]:
    # The module `fused` decomposes fused optimizers; a schedule changes only their learning rate.
    return _FUSED_FREE if name.startswith("_fused_") else _FREE.get(name, frozenset())


def call_with_scalars(instruction: Instruction, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """Call the op with 0-d tensors in place of its free scalars. `out`: the recorded dtype."""
    name = base_name(instruction.op)
    bound = bind(instruction.op, args, kwargs)
    in_place = resolve_op(instruction.op)._schema.is_mutable  # type: ignore[attr-defined]
    if name in _RULES:
        result = _in_opmath(_RULES[name], bound, out)
    else:
        op = resolve_op(instruction.op)
        if in_place:
            plain = _plain_overload(instruction.op)
            result = _in_opmath(lambda **a: _call_bound(plain, a), bound, out)
        else:
            result = _in_opmath(lambda **a: _call_bound(op, a), bound, out)
    if in_place:
        target = bound["self"]
        target.copy_(result)
        return target
    return result


def expand_foreach(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[dict[str, Any]] | None:
    """The plain op's arguments for each element of a foreach op; None if there is no rule for the op."""
    name = base_name(op)
    if not is_foreach(op) or name not in _FOREACH_NAMES:
        return None
    bound = bind(op, args, kwargs)
    number_name = _FOREACH_NAMES[name]
    renames = {"scalar": number_name, "scalars": number_name, "weight": "weight", "value": "value"}
    if name == "lerp":
        renames["tensors1"] = "end"
    size = len(bound["self"])

    def element(index: int) -> dict[str, Any]:
        chosen = {}
        for key, arg in bound.items():
            chosen[renames.get(key, key)] = arg[index] if isinstance(arg, (list, tuple)) else arg
        return chosen

    return (element(index) for index in range(size))


def run_plain(name: str, bound: dict[str, Any], in_place: bool, dtype: torch.dtype) -> torch.Tensor:
    """Compute one element of a foreach op, with the rule of the plain op."""
    result: torch.Tensor = _in_opmath(_RULES[name], bound, dtype)
    if in_place:
        bound["self"].copy_(result)
        return bound["self"]  # type: ignore[no-any-return]
    return result


def is_foreach(op: str) -> bool:
    """Whether an op works on lists of tensors, such as `aten._foreach_add_.Scalar`."""
    return op.startswith("aten._foreach_")


@functools.cache
def base_name(op: str) -> str:
    """The plain name of an op: `add` for `aten.add_.Tensor` and for `aten._foreach_add_.List`."""
    packet = op.split(".")[1].removeprefix("_foreach_")
    return packet[:-1] if packet.endswith("_") and not packet.endswith("__") else packet


# -- rules ---------------------------------------------------------------------------------------


def _add(self: Any, other: Any, alpha: Any = None) -> Any:
    return self + (other if _is_one(alpha) else other * alpha)


def _sub(self: Any, other: Any, alpha: Any = None) -> Any:
    return self - (other if _is_one(alpha) else other * alpha)


def _rsub(self: Any, other: Any, alpha: Any = None) -> Any:
    return other - (self if _is_one(alpha) else self * alpha)


def _div(self: Any, other: Any, rounding_mode: str | None = None) -> Any:
    return torch.div(self, other, rounding_mode=rounding_mode)


def _addcmul(self: Any, tensor1: Any, tensor2: Any, value: Any = None) -> Any:
    product = tensor1 * tensor2
    return self + (product if _is_one(value) else product * value)


def _addcdiv(self: Any, tensor1: Any, tensor2: Any, value: Any = None) -> Any:
    # In eager's order: (value * tensor1) / tensor2.
    return self + (tensor1 if _is_one(value) else tensor1 * value) / tensor2


def _lerp(self: Any, end: Any, weight: Any) -> Any:
    # Eager's formula, which is exact at both ends. The number alone selects the branch, not each element.
    small = weight.abs() < 0.5
    base = torch.where(small, self, end)
    return base + torch.where(small, weight, weight - 1) * (end - self)


def _clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    return torch.clamp(self, _as_tensor(min, self), _as_tensor(max, self))


def _fill(self: Any, value: Any) -> Any:
    return torch.empty_like(self).copy_(value)


def _full(size: Any, fill_value: Any, dtype: Any = None, **_: Any) -> Any:
    return torch.empty(size, dtype=dtype).copy_(fill_value)


def _full_like(self: Any, fill_value: Any, dtype: Any = None, memory_format: Any = None, **_: Any) -> Any:
    kept = memory_format or torch.preserve_format
    return torch.empty_like(self, dtype=dtype, memory_format=kept).copy_(fill_value)


def _scalar_tensor(s: Any, dtype: Any = None, **_: Any) -> Any:
    return torch.empty((), dtype=dtype).copy_(s)


def _masked_fill(self: Any, mask: Any, value: Any) -> Any:
    return torch.where(mask, value.to(self.dtype), self)


def _where(condition: Any, self: Any, other: Any) -> Any:
    return torch.where(condition, self, other)


def _binary(name: str) -> Callable[..., Any]:
    function = getattr(torch, name)
    return lambda self, other: function(self, other)


_RULES: dict[str, Callable[..., Any]] = {
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "mul": _binary("mul"),
    "div": _div,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "lerp": _lerp,
    "clamp": _clamp,
    "clamp_min": lambda self, min: _clamp(self, min=min),
    "clamp_max": lambda self, max: _clamp(self, max=max),
    "maximum": _binary("maximum"),
    "minimum": _binary("minimum"),
    "fill": _fill,
    "full": _full,
    "full_like": _full_like,
    "scalar_tensor": _scalar_tensor,
    "masked_fill": _masked_fill,
    "where": _where,
    **{name: _binary(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}


def _is_one(value: Any) -> bool:
    return value is None or (not isinstance(value, torch.Tensor) and value == 1)


def _as_tensor(bound: Any, like: torch.Tensor) -> Any:
    if bound is None or isinstance(bound, torch.Tensor):
        return bound
    return torch.full((), bound, dtype=like.dtype)


class FreeScalar:
    """A free scalar before its cast: an element of the library's float64 or int64 vector."""

    __slots__ = ("_vector", "index", "kind")

    def __init__(self, vector: torch.Tensor, index: int, kind: type) -> None:
        self._vector = vector
        self.index = index
        self.kind = kind

    @property
    def tensor(self) -> torch.Tensor:
        """The 0-d tensor in place of a Python number."""
        return self._vector[self.index]


def _in_opmath(call: Callable[..., Any], bound: dict[str, Any], out: torch.dtype) -> Any:
    """Call the rule with free scalars cast to eager's compute type, and cast the result to `out`."""
    tensors = [arg for arg in bound.values() if isinstance(arg, torch.Tensor)]
    kinds = [arg.kind for arg in bound.values() if type(arg) is FreeScalar]
    compute = out
    # A boolean mask only selects elements, so it does not take part in type promotion.
    operands = [t for t in tensors if t.dtype is not torch.bool] or tensors
    if operands and (out is torch.bool or any(t.dtype != out for t in operands)):
        compute = functools.reduce(
            torch.promote_types, (torch.result_type(t, _ONE[k]) for t in operands for k in kinds)
        )
    widened = compute in (torch.bfloat16, torch.float16)
    if widened:
        compute = torch.float32

    def prepare(arg: Any) -> Any:
        if type(arg) is FreeScalar:
            return arg.tensor.to(compute)
        if widened and isinstance(arg, torch.Tensor) and arg.dtype in (torch.bfloat16, torch.float16):
            return arg.to(torch.float32)
        return arg

    result = call(**{name: prepare(arg) for name, arg in bound.items()})
    return result.to(out) if result.dtype != out else result


_ONE: dict[type, Any] = {float: 1.0, int: 1}


def bind(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, by name."""
    names = [argument.name for argument in resolve_op(op)._schema.arguments]  # type: ignore[attr-defined]
    return dict(zip(names, args, strict=False)) | kwargs


def _call_bound(op: Any, bound: dict[str, Any]) -> Any:
    arguments = op._schema.arguments
    positional = [bound[a.name] for a in arguments if not a.kwarg_only and a.name in bound]
    keywords = {a.name: bound[a.name] for a in arguments if a.kwarg_only and a.name in bound}
    return op(*positional, **keywords)


def _plain_overload(op: str) -> Any:
    namespace, packet, overload = op.split(".")
    return resolve_op(f"{namespace}.{packet.removesuffix('_')}.{overload}")


def _named_arguments(instruction: Instruction) -> Iterator[tuple[str, Arg, bool]]:
    """Each argument with its name, and whether the op accepts a tensor in its place."""
    arguments = resolve_op(instruction.op)._schema.arguments  # type: ignore[attr-defined]
    by_name = {argument.name: argument for argument in arguments}
    named = [*zip((a.name for a in arguments), instruction.args, strict=False), *instruction.kwargs]
    is_known_foreach = is_foreach(instruction.op) and base_name(instruction.op) in _FOREACH_NAMES
    for name, arg in named:
        if is_known_foreach and name in ("scalar", "scalars", "value", "weight", "alpha"):
            yield name, arg, True
        else:
            yield name, arg, str(by_name[name].type) in ("Tensor", "Optional[Tensor]")


def _has_out(instruction: Instruction) -> bool:
    schema = resolve_op(instruction.op)._schema  # type: ignore[attr-defined]
    return any(a.is_out for a in schema.arguments)
