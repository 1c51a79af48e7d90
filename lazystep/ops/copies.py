"""Copies between the host and the lazy device, and writes that cover a tensor as a whole."""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import make_contiguous_strides_for

from .. import metrics
from ..eager import serial_dispatch
from ..errors import report
from ..record import observer
from ..record.handle import Handle, adopt_host_tensor
from ..record.recorder import Recorder
from ..record.source import user_line
from ..record.tensor import handle_of, is_lazy
from .handlers import handles
from .host import CPU, from_host, known_values, run_on_host
from .mixed import mismatch
from .sparse import wrap_any

_aten = torch.ops.aten


@handles(_aten.copy_.default)
def _copy(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if not is_lazy(target):
        return _copy_to_host(recorder, func, target, source)
    handle = handle_of(target)
    if not is_lazy(source):
        if source.device.type != "cpu":
            raise mismatch(func, args, kwargs, "src", source)
        if handle.pristine:
            assert handle.tensor is not None
            with serial_dispatch():
                handle.tensor.copy_(source)
            watching = observer.current()
            if watching is not None:
                watching.on_host_copy(handle)
            return target
        source = from_host(source)
    if torch.strided is not target.layout or torch.strided is not source.layout:
        return run_on_host(recorder, func, (target, source), {}, "sparse tensor")
    _forgive(handle)
    return func(target, source)


@handles(_aten.zero_.default, _aten.fill_.Scalar)
def _fill(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].layout is not torch.strided:
        return run_on_host(recorder, func, args, kwargs, "sparse tensor")
    _forgive(handle_of(args[0]))
    return func(*args, **kwargs)


def _forgive(handle: Handle) -> None:
    """Forget that a failed step left this memory half updated, if it is about to be overwritten as a whole.

    Raises the failure if only a part is overwritten.
    """
    error = handle.memory.error
    if error is None:
        return
    type_ = handle.type
    is_dense = type_.offset == 0 and type_.stride == make_contiguous_strides_for(type_.shape)
    if not is_dense or type_.extent != handle.memory.nbytes:
        raise report(error)
    handle.memory.error = None


def _copy_to_host(recorder: Recorder, func: Any, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Give the caller's CPU tensor the values now."""
    metrics.count_synchronization("to host", user_line())
    with recorder.reading([handle_of(source)]), serial_dispatch():
        func(target, handle_of(source).tensor)
    return target


@handles(_aten._to_copy.default)
def _to_copy(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A copy from the host or to it, or of a sparse tensor: C++ records all others."""
    source = args[0]
    device = kwargs.get("device")
    if not is_lazy(source):
        with serial_dispatch():
            moved = func(source, **{**kwargs, "device": CPU, "non_blocking": False})
            return wrap_any(adopt_host_tensor(moved))
    if device is None or device.type == "lazy":
        return run_on_host(recorder, func, args, kwargs, "sparse tensor")
    if device.type == "meta":
        type_ = handle_of(source).type
        return torch.empty_strided(
            type_.shape, type_.stride, dtype=kwargs.get("dtype") or type_.dtype, device=device
        )
    known = known_values([source])
    if known is not None:
        with serial_dispatch():
            return func(known[id(source)], **kwargs)
    metrics.count_synchronization("to host", user_line())
    with recorder.reading([handle_of(source)]), serial_dispatch():
        return func(handle_of(source).tensor, **kwargs)
