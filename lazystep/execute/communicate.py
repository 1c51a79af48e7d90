"""The kernels of collectives: they launch on the executor thread and wait there.

`InFlight` holds the launched collectives of the running step, by the memory that the network writes. A failed
one is an error that names the collective, its size and its group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import metrics, timeline
from ..errors import CollectiveError
from ..process_groups import StepGroup, find_group
from ..program.collectives import LAUNCHES  # noqa: F401 - declares the ops


class _Launched(NamedTuple):
    label: str
    group: StepGroup
    work: dist.Work
    started: float


class InFlight:
    """The collectives of the running step that have been launched and not been waited for."""

    def __init__(self) -> None:
        self._launched: dict[int, _Launched] = {}

    def launch(self, target: Tensor, name: str, group: str, start: Callable[[StepGroup], Any]) -> Tensor:
        """Start a collective that writes `target`. Does not wait."""
        found = find_group(group)
        label = f"{name} of {target.numel()} x {target.dtype} over the {found.size} ranks of {found.name!r}"
        if found.failure:
            raise CollectiveError(f"{label}: the process group is broken. {found.failure}")
        begun = time.perf_counter()
        try:
            work = start(found)
        except RuntimeError as error:
            raise _failed(label, found, error) from None
        metrics.count("collectives_launched")
        self._launched[target.untyped_storage()._cdata] = _Launched(label, found, work, begun)
        return target

    def wait(self, target: Tensor) -> Tensor:
        """Block until the collective that writes `target` has ended, at most for the group's time-out."""
        self._finish(self._launched.pop(target.untyped_storage()._cdata))
        return target

    def forget(self) -> None:
        """The step has ended. What is still under way, because the step has failed, holds its own memory."""
        self._launched.clear()

    def _finish(self, launched: _Launched) -> None:
        try:
            launched.work.wait(launched.group.timeout)
        except RuntimeError as error:
            raise _failed(launched.label, launched.group, error) from None
        if timeline.active is not None:
            timeline.active.add(launched.label, "collective", launched.started, time.perf_counter())


def _failed(label: str, group: StepGroup, error: RuntimeError) -> CollectiveError:
    reason = str(error).partition("\n")[0]
    group.failure = f"It failed in {label}: {reason}"
    return CollectiveError(
        f"{label} failed on rank {group.rank}: {reason}. Another rank has ended, hangs or is slower than the "
        f"group's time-out of {group.timeout.total_seconds():g} s. Start over with a new process group."
    )


in_flight = InFlight()

_REDUCE_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


def _all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    options = dist.AllreduceOptions()
    options.reduceOp = _REDUCE_OPS[op]
    return in_flight.launch(x, "all_reduce", group, lambda to: to.backend.allreduce([x], options))


def _broadcast(x: Tensor, root: int, group: str) -> Tensor:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return in_flight.launch(x, "broadcast", group, lambda to: to.backend.broadcast([x], options))


def _all_gather(out: Tensor, x: Tensor, group: str) -> Tensor:
    # As rows: gloo compares shapes, and only sizes matter.
    def start(to: StepGroup) -> Any:
        return to.backend._allgather_base(out.view(-1), x.view(-1))

    return in_flight.launch(out, "all_gather", group, start)


def _reduce_scatter(out: Tensor, x: Tensor, op: str, group: str) -> Tensor:
    options = dist.ReduceScatterOptions()
    options.reduceOp = _REDUCE_OPS[op]

    def start(to: StepGroup) -> Any:
        return to.backend._reduce_scatter_base(out.view(-1), x.view(-1), options)

    return in_flight.launch(out, "reduce_scatter", group, start)


# Kept for the life of the process: dropping a Library removes its kernels.
_library = torch.library.Library("lazystep", "IMPL")
_library.impl("all_reduce_", _all_reduce, "CPU")
_library.impl("broadcast_", _broadcast, "CPU")
_library.impl("all_gather_", _all_gather, "CPU")
_library.impl("reduce_scatter_", _reduce_scatter, "CPU")
_library.impl("wait_", in_flight.wait, "CPU")
