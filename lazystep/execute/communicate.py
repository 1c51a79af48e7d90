"""The kernels of collectives: they launch on the executor thread and wait there.

The reference executable and native libraries run the same kernels. `InFlight` holds the launched collectives
of the running step, by the memory that the network writes. A failed one is an error that names the
collective, its size and its group.

A step that is run again, to check a library, must not communicate: the other ranks run it once. So the first
run is taped, and later ones get their results from the tape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import metrics, timeline
from ..errors import CollectiveError
from ..process_groups import StepGroup, find_group
from ..program.collectives import BROADCAST, group_of
from ..program.program import Instruction


class _Launched(NamedTuple):
    label: str
    group: StepGroup
    work: dist.Work
    started: float
    number: int  # of the launch in its step


class Tape:
    """The collectives of one run, in the order of their launches: what was sent, and what came back."""

    def __init__(self, source: Tape | None = None) -> None:
        """`source`: where results come from, instead of other ranks."""
        self.source = source
        self.sent: list[Tensor] = []
        self.received: dict[int, Tensor] = {}
        self._numbers: dict[int, int] = {}  # of the launches under way, by the memory that is written

    def launch(self, target: Tensor, operand: Tensor) -> None:
        """Keep what is sent. Without other ranks, spoil the target: nothing may read it before the wait."""
        self._numbers[_memory_of(target)] = len(self.sent)
        self.sent.append(operand.clone())
        if self.source is not None and target.dtype.is_floating_point:
            target.fill_(float("nan"))

    def wait(self, target: Tensor) -> None:
        """Keep what has come, or take it from the source."""
        number = self._numbers.pop(_memory_of(target))
        if self.source is None:
            self.received[number] = target.clone()
        else:
            target.copy_(self.source.received[number].view(target.shape))


class InFlight:
    """The collectives of the running step that have been launched and not been waited for."""

    def __init__(self) -> None:
        self._launched: dict[int, _Launched] = {}
        self._tape: Tape | None = None
        self.num_launched = 0  # in this step
        # What failed inside of a library, which can't raise it: the number of the launch, and the error.
        self.failure: tuple[int, Exception] | None = None

    @contextmanager
    def taping(self, source: Tape | None = None) -> Iterator[Tape]:
        """Tape the collectives of the run inside the block. With `source`, they do not communicate."""
        self._tape = Tape(source)
        try:
            yield self._tape
        finally:
            self._tape = None

    def launch(
        self,
        target: Tensor,
        name: str,
        group: str,
        start: Callable[[StepGroup], Any],
        operand: Tensor | None = None,
    ) -> Tensor:
        """Start a collective that sends `operand`, or the target, and writes `target`. Does not wait."""
        if self._tape is not None:
            self._tape.launch(target, target if operand is None else operand)
            if self._tape.source is not None:
                return target
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
        self._launched[_memory_of(target)] = _Launched(label, found, work, begun, self.num_launched)
        self.num_launched += 1
        return target

    def wait(self, target: Tensor) -> Tensor:
        """Block until the collective that writes `target` has ended, at most for the group's time-out."""
        if self._tape is None or self._tape.source is None:
            self._finish(self._launched.pop(_memory_of(target)))
        if self._tape is not None:
            self._tape.wait(target)
        return target

    @property
    def num_pending(self) -> int:
        """How many collectives have been launched and not been waited for."""
        return len(self._launched)

    def forget(self) -> None:
        """The step has ended. What is still under way, because the step has failed, holds its own memory."""
        self._launched.clear()
        self.num_launched = 0
        self.failure = None

    def _finish(self, launched: _Launched) -> None:
        waiting = time.perf_counter()
        try:
            launched.work.wait(launched.group.timeout)
        except RuntimeError as error:
            raise _failed(launched.label, launched.group, error) from None
        if timeline.active is not None:
            end = time.perf_counter()
            # Collectives overlap with each other, so each has a row: of its number in the step.
            timeline.active.add_to_row(
                f"collective {launched.number}",
                launched.label,
                "collective",
                launched.started,
                end,
                waited=end - waiting,
            )


def _memory_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


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

    return in_flight.launch(out, "all_gather", group, start, x)


def _reduce_scatter(out: Tensor, x: Tensor, op: str, group: str) -> Tensor:
    options = dist.ReduceScatterOptions()
    options.reduceOp = _REDUCE_OPS[op]

    def start(to: StepGroup) -> Any:
        return to.backend._reduce_scatter_base(out.view(-1), x.view(-1), options)

    return in_flight.launch(out, "reduce_scatter", group, start, x)


def sends_own(launch: Instruction) -> bool:
    """Whether this rank sends the operand of a launch. A broadcast overwrites it except at the root."""
    return launch.op != BROADCAST or launch.args[1] == find_group(group_of(launch)).rank


# -- in libraries ------------------------------------------------------------------------------------


def _launch(_order: Tensor, out: Tensor, operand: Tensor | None, what: str) -> None:
    number, kind, detail, group = what.split(" ", 3)
    with _noting_failure(int(number)):
        if kind == "all_reduce_":
            _all_reduce(out, detail, group)
        elif kind == "broadcast_":
            _broadcast(out, int(detail), group)
        elif kind == "all_gather_":
            assert operand is not None
            _all_gather(out, operand, group)
        else:
            assert operand is not None
            _reduce_scatter(out, operand, detail, group)


def _wait(_order: Tensor, out: Tensor, _operand: Tensor | None, what: str) -> None:
    with _noting_failure(int(what.partition(" ")[0])):
        in_flight.wait(out)


@contextmanager
def _noting_failure(number: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        in_flight.failure = number, error
        raise


# Kept for the life of the process: dropping a Library removes its kernels.
_library = torch.library.Library("lazystep", "IMPL")
_library.impl("all_reduce_", _all_reduce, "CPU")
_library.impl("broadcast_", _broadcast, "CPU")
_library.impl("all_gather_", _all_gather, "CPU")
_library.impl("reduce_scatter_", _reduce_scatter, "CPU")
_library.impl("wait_", lambda x: in_flight.wait(x), "CPU")
_library.impl("launch", _launch, "CPU")
_library.impl("wait", _wait, "CPU")
