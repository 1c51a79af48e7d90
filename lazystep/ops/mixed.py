"""Calls with lazy tensors and tensors of other devices: taken in, made elsewhere, or refused."""

from __future__ import annotations

from typing import Any

import torch

from ..eager import eager_dispatch
from ..errors import DeviceMismatchError, UnsupportedError
from ..record.recorder import Recorder
from ..record.source import user_line
from ..record.tensor import handle_of, is_lazy
from .host import CPU, from_host, run_on_host

_aten = torch.ops.aten

# Arguments that may be CPU tensors of any size beside lazy ones, as they may beside CUDA tensors.
_HOST_INDICES = {_aten.index.Tensor: 1, _aten.index_put.default: 1}
_HOST_INDICES |= {_aten.index_put_.default: 1, _aten._index_put_impl_.default: 1}


def run_mixed(
    recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
) -> Any:
    """Run a call that the recorder has no key for. CPU scalars and index tensors are copied in first.

    `reason`: why the call runs on the host, if no tensor of another device is in the way.
    """
    device = kwargs.get("device")
    if device is not None and device.type != "lazy":
        return make_elsewhere(func, args, kwargs)
    arguments = func._schema.arguments
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    index_position = _HOST_INDICES.get(func, -1)
    num_taken = 0

    def take(arg: Any, name: str, position: int) -> Any:
        if type(arg) is list or type(arg) is tuple:
            return [take(a, name, position) for a in arg]
        if not isinstance(arg, torch.Tensor) or is_lazy(arg):
            return arg
        may_mix = arg.device.type == "cpu" and (arg.dim() == 0 or position == index_position)
        if may_mix and name not in written and arg.layout is torch.strided:
            nonlocal num_taken
            num_taken += 1
            return from_host(arg)
        raise mismatch(func, args, kwargs, name, arg)

    taken = tuple(take(a, arguments[i].name, i) for i, a in enumerate(args))
    taken_kwargs = {k: take(v, k, -1) for k, v in kwargs.items()}
    if not num_taken:
        return run_on_host(recorder, func, args, kwargs, reason)
    return func(*taken, **taken_kwargs)


def mismatch(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, tensor: torch.Tensor
) -> Exception:
    """The error for a tensor of another device in the argument `name`."""
    where: list[str] = []
    names = [a.name for a in func._schema.arguments]
    for label, arg in [*zip(names, args, strict=False), *kwargs.items()]:
        for leaf in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(leaf, torch.Tensor):
                where.append(f"{label} {list(leaf.shape)} on {leaf.device}")
    text = f"{func} at {user_line()}: all tensors must be on one device, but {', '.join(where)}. "
    if tensor.layout is not torch.strided:
        text += f"{tensor.layout} tensors have no place on the lazy device: compute with them on the CPU."
        return UnsupportedError(text)
    return DeviceMismatchError(text + f'Move {name!r} with .to("lazy").')


def make_elsewhere(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor of another device from the type of a lazy one, as `zeros_like(lazy, device="cpu")` makes."""

    def stand_in(arg: Any) -> Any:
        if not is_lazy(arg):
            return arg
        type_ = handle_of(arg).type
        return torch.empty_strided(type_.shape, type_.stride, dtype=type_.dtype, device=CPU)

    with eager_dispatch():
        return func(*(stand_in(a) for a in args), **kwargs)
