"""Random numbers and fresh memory: made on the host while recording, and inputs of the program.

Random numbers are drawn now, in eager's place in the generator's stream. C++ does the common cases by
itself (record/src/host.cpp), unless the step has an observer.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import metrics
from ..eager import eager_dispatch, serial_dispatch
from ..program.types import TensorType
from ..record import observer
from ..record.handle import Handle, adopt_host_tensor
from ..record.observer import Draw
from ..record.recorder import Recorder
from ..record.tensor import find_handle, handle_of, wrap
from .handlers import handles
from .host import CPU
from .mixed import make_elsewhere
from .sparse import wrap_any

_aten = torch.ops.aten


def draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw random numbers now. An in-place draw into a tensor that is in use becomes a recorded copy."""
    metrics.count("random_draws")
    written: torch.Tensor | None = None

    def to_real(arg: Any) -> Any:
        nonlocal written
        handle = find_handle(arg)
        if handle is not None:
            if func._schema.is_mutable:
                written = arg
                if handle.pristine:
                    return handle.tensor
            return _empty_of(handle.type)
        return CPU if type(arg) is torch.device and arg.type == "lazy" else arg

    with serial_dispatch():
        real_args = [to_real(a) for a in args]
        out = func(*real_args, **{k: to_real(v) for k, v in kwargs.items()})
        if written is not None and handle_of(written).pristine:
            _tell_observer(handle_of(written), func, args, kwargs)
            return written
        drawn = wrap(adopt_host_tensor(out))
    _tell_observer(handle_of(drawn), func, args, kwargs)
    return drawn if written is None else _aten.copy_.default(written, drawn)


@handles(
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_permuted.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)
def _empty(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate on the host right away: a copy from the host or a draw follows in most cases."""
    device = kwargs.get("device")
    if device is not None and device.type != "lazy":
        return make_elsewhere(func, args, kwargs)
    out = make_elsewhere(func, args, {**kwargs, "device": CPU})
    with eager_dispatch():
        handle = adopt_host_tensor(out)
        handle.pristine = out.layout is torch.strided
    tensor = wrap_any(handle)
    # Again means memory with these strides. `empty_like` would give it others where elements are not dense.
    _tell_observer(handle, lambda memory: memory, (tensor,), {})
    return tensor


def _empty_of(type_: TensorType) -> torch.Tensor:
    return torch.empty_strided(type_.shape, type_.stride, dtype=type_.dtype, device=CPU)


def _tell_observer(handle: Handle, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    watching = observer.current()
    if watching is None:
        return

    def template(arg: Any) -> Any:
        if type(arg) is torch.device:
            return CPU
        lazy = find_handle(arg)
        return arg if lazy is None else lazy.type

    fixed_args = [template(a) for a in args]
    fixed_kwargs = {name: template(a) for name, a in kwargs.items()}

    def fresh(arg: Any) -> Any:
        return _empty_of(arg) if type(arg) is TensorType else arg

    def again() -> torch.Tensor:
        with serial_dispatch():
            drawn: torch.Tensor = func(
                *(fresh(a) for a in fixed_args), **{name: fresh(a) for name, a in fixed_kwargs.items()}
            )
            return drawn

    watching.on_draw(Draw(handle, again, kwargs.get("generator")))
