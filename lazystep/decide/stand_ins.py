"""Stand-ins for the operands of a call: real or fake CPU tensors on which an op shows what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..program.types import type_of
from .decision import Decision, Operand, Rebind, Result


def call(
    func: Any,
    tensors: list[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str = "cpu",
) -> Any:
    """Call `func` with the operands among its arguments replaced by tensors, in order."""
    remaining = iter(tensors)

    def fill(arg: Any) -> Any:
        if type(arg) is Operand:
            return next(remaining)
        if type(arg) is list or type(arg) is tuple:
            return [fill(a) for a in arg]
        return torch.device(device) if type(arg) is torch.device else arg

    filled = [fill(a) for a in args]
    return func(*filled, **{k: fill(v) for k, v in kwargs.items()})


def describe(
    decision: Decision, operands: list[Operand], tensors: list[torch.Tensor], storages: list[int], out: Any
) -> None:
    """Note in `decision` what a call did. `tensors` were its operands, `storages` the operands' storages."""
    rebinds = []
    for k in decision.writes:
        type_, storage = type_of(tensors[k]), tensors[k].untyped_storage()
        if storage._cdata not in storages:
            raise NotImplementedError(f"{decision.op} gives an argument a storage from nowhere")
        alias = storages.index(storage._cdata) if storage._cdata != storages[k] else k
        if type_ is not operands[k].type or alias != k or storage.nbytes() > operands[k].nbytes:
            # What it needs, not what there was: the decision holds for memory of other sizes, too.
            rebinds.append(Rebind(k, type_, alias, type_.extent))
    decision.rebinds = tuple(rebinds)

    decision.structure = "one" if not isinstance(out, (tuple, list)) else type(out).__name__
    if decision.structure not in ("one", "list"):
        decision.structure = "tuple"  # named tuples too
    results: list[Result | None] = []
    fresh: list[int] = []
    for t in [out] if decision.structure == "one" else out:
        if t is None:
            results.append(None)
            continue
        if not isinstance(t, torch.Tensor) or t.layout is not torch.strided:
            raise NotImplementedError(f"{decision.op} returns something else than strided tensors")
        same = next((k for k, tensor in enumerate(tensors) if tensor is t), -1)
        storage = t.untyped_storage()
        if storage._cdata in storages:
            alias = storages.index(storage._cdata)
        else:
            if storage._cdata not in fresh:
                fresh.append(storage._cdata)
            alias = -1 - fresh.index(storage._cdata)
        results.append(Result(type_of(t), same, alias, storage.nbytes()))
    decision.results = tuple(results)


def make_all(operands: list[Operand], factory: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """A tensor per operand, in memory that `factory` makes. Operands of one group share their memory."""
    bases: dict[int, torch.Tensor] = {}
    tensors = []
    for operand in operands:
        tensor = make(operand, factory)
        if operand.group >= 0:
            base = bases.setdefault(operand.group, tensor)
            tensor.set_(base.untyped_storage(), operand.type.offset, operand.type.shape, operand.type.stride)
        tensors.append(tensor)
    return tensors


def make(operand: Operand, factory: Callable[..., torch.Tensor], device: str = "cpu") -> torch.Tensor:
    """A tensor of the operand's type, in memory of the operand's size that `factory` makes."""
    type_ = operand.type
    count = -(-operand.nbytes // type_.dtype.itemsize)
    base = factory(count, dtype=type_.dtype, device=device)
    tensor = base.as_strided(type_.shape, type_.stride, type_.offset)
    if type_.conj:
        torch._C._set_conj(tensor, True)
    if type_.neg:
        torch._C._set_neg(tensor, True)
    return tensor
