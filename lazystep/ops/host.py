"""Ops that need values: they run on real tensors, on the calling thread, now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import metrics
from ..eager import eager_dispatch, serial_dispatch
from ..errors import UnsupportedError
from ..program.types import type_of
from ..record import observer
from ..record.handle import HostWrite, Memory, adopt_host_tensor
from ..record.recorder import Recorder
from ..record.snapshot import preserve_snapshots
from ..record.source import is_in_distributions, user_line
from ..record.tensor import handle_of, is_lazy, wrap
from .sparse import retype_any, wrap_any

CPU = torch.device("cpu")


def from_host(tensor: torch.Tensor) -> torch.Tensor:
    """A lazy tensor with a copy of the values that a host tensor has now."""
    with serial_dispatch():
        return wrap_any(adopt_host_tensor(tensor.detach().clone()))


def run_on_host(
    recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
) -> Any:
    """Run an op on the real tensors behind its operands. Synchronizes, and counts that with the line.

    Waits for its operands; for everything queued if it writes one, since queued steps may read it.
    """
    lazy = list(_lazy_tensors([*args, *kwargs.values()]))
    # The schemas of collectives do not say that they write. Functional ones do not write, but like the others
    # they must run in each step, and in order: a captured step may not take values that it knows.
    writes = func._schema.is_mutable or func.namespace in ("c10d", "_c10d_functional")
    if lazy and not writes and reason != "sparse tensor":
        known = known_values(lazy)
        if known is not None:
            with eager_dispatch():
                return _Results(func, [], writes).to_lazy(_call(func, args, kwargs, lambda t: known[id(t)]))
    if lazy:
        if reason == "item" and _is_looking_for_nan():
            reason = metrics.LOOKS_FOR_NAN
        elif is_in_distributions():
            reason += (
                " in torch.distributions, which checks what it gets unless it is told validate_args=False"
            )
        metrics.count_synchronization(reason, user_line())
        if writes:
            recorder.barrier.synchronize_all()
            preserve_snapshots(handle_of(t).memory for t in lazy)
            for tensor in lazy:
                handle_of(tensor).memory.run = HostWrite()
    # Sparse kernels look at `requires_grad` to decide what to save for backward.
    needs_grad = reason == "sparse tensor" and not writes
    # By tensor identity: an alias per operand, since the op may change its metadata.
    aliases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def alias_of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in aliases:
            real = handle_of(tensor).tensor
            assert real is not None
            alias = real.detach()
            if needs_grad and tensor.requires_grad:
                alias.requires_grad_()
            aliases[id(tensor)] = tensor, alias
        return aliases[id(tensor)][1]

    with recorder.reading([handle_of(t) for t in lazy]), eager_dispatch():
        out = _call(func, args, kwargs, alias_of)
        return _Results(func, list(aliases.values()), writes).to_lazy(out)


def _is_looking_for_nan() -> bool:
    """Whether backward runs in anomaly mode, which reads each gradient: no line of the user's shows that."""
    checks = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    return checks and torch._C._current_graph_task_id() != -1


def known_values(tensors: list[torch.Tensor]) -> dict[int, torch.Tensor] | None:
    """Copies of the values, by the tensors' ids, if a captured step knows them without a barrier."""
    watching = observer.current()
    if watching is None:
        return None
    known = {}
    for tensor in tensors:
        value = watching.on_read(handle_of(tensor))
        if value is None:
            return None
        known[id(tensor)] = value
    return known


def _call(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], real_of: Callable[[torch.Tensor], torch.Tensor]
) -> Any:
    real_args = [_replace(a, real_of) for a in args]
    return func(*real_args, **{k: _replace(v, real_of) for k, v in kwargs.items()})


def _replace(arg: Any, real_of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """An argument with real tensors in the place of lazy ones, and the CPU in the place of their device."""
    if is_lazy(arg):
        return real_of(arg)
    if type(arg) is list or type(arg) is tuple:
        return [_replace(a, real_of) for a in arg]
    return CPU if type(arg) is torch.device and arg.type == "lazy" else arg


def _lazy_tensors(args: Any) -> Any:
    for arg in args:
        if is_lazy(arg):
            yield arg
        elif type(arg) is list or type(arg) is tuple:
            yield from _lazy_tensors(arg)


class _Results:
    """Makes lazy tensors of what an op returned, and gives written operands their new metadata."""

    def __init__(self, func: Any, aliases: list[tuple[torch.Tensor, torch.Tensor]], writes: bool) -> None:
        self._func = func
        self._aliases = aliases
        self._memories: dict[int, Memory] = {}
        for tensor, real in aliases:
            handle = handle_of(tensor)
            assert handle.tensor is not None
            if handle.type.layout is not torch.strided:
                if writes:
                    retype_any(tensor, adopt_host_tensor(real))
                continue
            self._memories[handle.tensor.untyped_storage()._cdata] = handle.memory
            handle.memory.nbytes = handle.tensor.untyped_storage().nbytes()
            if writes and type_of(real) is not handle.type:
                cdata = real.untyped_storage()._cdata
                retype_any(tensor, adopt_host_tensor(real, self._memories.get(cdata)))

    def to_lazy(self, leaf: Any) -> Any:
        """A result, or a list or tuple of results, on the lazy device."""
        if type(leaf) is list:
            return [self.to_lazy(e) for e in leaf]
        if isinstance(leaf, tuple):
            return tuple(map(self.to_lazy, leaf))
        if not isinstance(leaf, torch.Tensor):
            return leaf
        for tensor, real in self._aliases:
            if real is leaf:
                return tensor
        if leaf.is_quantized or leaf.is_mkldnn or leaf.is_nested:
            raise UnsupportedError(
                f"{self._func} at {user_line()}: the lazy device has no quantized, nested or mkldnn tensors. "
                "Move the tensor to the CPU first: .cpu()"
            )
        if leaf.layout is not torch.strided:
            return wrap_any(adopt_host_tensor(leaf))
        cdata = leaf.untyped_storage()._cdata
        handle = adopt_host_tensor(leaf, self._memories.get(cdata))
        self._memories[cdata] = handle.memory
        return wrap(handle)
