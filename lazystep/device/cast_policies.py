"""What autocast does with the operands of each op on the CPU, found out from torch itself.

torch keeps its policies in C++, one kernel per op at the dispatch key `AutocastCPU`, and says nowhere which
kernel has which. So each kernel is called with tensors that have no memory and that only note in which data
type they reach the op. The op itself never runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..record._recorder import CastTo

KEY = "AutocastCPU"
Policy = tuple[CastTo, torch.dtype]


def names_of_cast_ops() -> list[str]:
    """The ops that autocast casts on the CPU, such as `aten::mm`."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return [name for name in torch._C._dispatch_get_all_op_names() if has_kernel(name, KEY)]


def policy_of(func: Any) -> Policy | None:
    """What autocast casts the operands of an op to; None if it is none of the known policies."""
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    # The type of all operands, the type of autocast, and what the op then gets.
    seen = tuple(_type_at_op(func, given, lower) for given, lower in ((f32, bf16), (bf16, bf16), (f32, f16)))
    if seen == (bf16, bf16, f16):
        return CastTo.LOWER, f32
    if seen == (f32, bf16, f32):
        return CastTo.PROMOTE, f32
    if seen[0] is not None and seen.count(seen[0]) == len(seen):
        return CastTo.FIXED, seen[0]
    return None


class _ReachedError(Exception):
    """The op was reached: there is nothing more to see."""


class _Probe(torch.Tensor):
    """A CPU tensor without memory. Casts of it are probes, too; the op that is looked at raises."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.to.dtype:
            return _make_probe(args[1])
        if func is torch.ops.aten._to_copy.default:
            return _make_probe(kwargs["dtype"])
        types_seen = {t.dtype for t in _tensors_in([*args, *(kwargs or {}).values()])}
        raise _ReachedError(func, types_seen)


def _make_probe(dtype: torch.dtype) -> torch.Tensor:
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        _Probe, (0,), dtype=dtype, device=torch.device("cpu")
    )
    return made


def _type_at_op(func: Any, given: torch.dtype, lower: torch.dtype) -> torch.dtype | None:
    """In which type operands of type `given` reach the op under autocast to `lower`; None if in several."""
    arguments = [(a, _stand_in(a.type, given)) for a in func._schema.arguments]
    args = [value for argument, value in arguments if not argument.kwarg_only]
    kwargs = {a.name: value for a, value in arguments if a.kwarg_only and not a.has_default_value()}
    try:
        # Under inference mode a composite reaches the probe whole.
        with torch.inference_mode(), torch.autocast("cpu", lower, cache_enabled=False):
            func(*args, **kwargs)
    except _ReachedError as reached:
        reached_func, types = reached.args
        return next(iter(types)) if reached_func is func and len(types) == 1 else None
    except Exception:
        return None  # the kernel does more than to cast
    return None


_STAND_INS = {"IntType": 0, "FloatType": 0.0, "BoolType": False, "NumberType": 0.0, "StringType": ""}


def _stand_in(type_: Any, dtype: torch.dtype) -> Any:
    kind = type_.kind()
    if kind == "TensorType":
        return _make_probe(dtype)
    if kind == "OptionalType":
        return _stand_in(type_.getElementType(), dtype) if "Tensor" in str(type_) else None
    if kind == "ListType":
        return [_stand_in(type_.getElementType(), dtype)]
    return _STAND_INS[kind]


def _tensors_in(args: Sequence[Any]) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, (list, tuple)):
            yield from _tensors_in(arg)
        elif isinstance(arg, torch.Tensor):
            yield arg
