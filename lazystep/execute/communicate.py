"""The collectives of the running step, as Python sees them: what has failed, tapes, the timeline.

The kernels are in communicate.h. They launch and wait on the executor thread, without the interpreter lock,
for the reference executable and for native libraries.

A step that is run again, to check a library, must not communicate: the other ranks run it once. So the first
run is taped, and later ones get their results from the tape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import metrics, timeline
from ..errors import CollectiveError
from ..extensions import RUNNER
from ..process_groups import find_group
from ..program.collectives import BROADCAST, group_of
from ..program.program import Instruction

_extension = RUNNER.load()


class Launch(Protocol):
    """A launched collective. Times are in seconds, as `time.perf_counter` gives them."""

    number: int  # in its step
    kind: str
    size: int
    dtype: torch.dtype
    group: str
    started: float
    waiting: float
    ended: float


class Communicated(Protocol):
    """What the collectives of one run were."""

    num_launched: int
    num_pending: int  # that have not been waited for
    ended: Sequence[Launch]
    failed: tuple[Launch, str] | None  # and why


class Observer(Protocol):
    """Hears of each launch and wait, on the thread that runs the step."""

    def launch(self, target: Tensor, operand: Tensor) -> None:
        """A collective that sends `operand` and writes `target` is about to be launched."""

    def wait(self, target: Tensor) -> None:
        """The collective that writes `target` has ended."""


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


@contextmanager
def observed(observer: Observer, is_silent: bool = False) -> Iterator[None]:
    """Tell `observer` of the collectives of the run inside the block. If `is_silent`, nothing is sent."""
    _extension.observe_collectives(observer, is_silent)
    try:
        yield
    finally:
        _extension.observe_collectives(None, False)


@contextmanager
def taping(source: Tape | None = None) -> Iterator[Tape]:
    """Tape the collectives of the run inside the block. With `source`, they do not communicate."""
    tape = Tape(source)
    with observed(tape, is_silent=source is not None):
        yield tape


def num_pending() -> int:
    """How many collectives of the running step have been launched and not been waited for."""
    found: int = _extension.num_pending()
    return found


def take_communicated() -> Communicated:
    """What the collectives of the run that has ended were. Those under way hold their own memory."""
    found: Communicated = _extension.take_communicated()
    return found


def note(communicated: Communicated) -> None:
    """Count the collectives of a run, and show them in the timeline."""
    if communicated.num_launched:
        metrics.count("collectives_launched", communicated.num_launched)
    if timeline.active is None:
        return
    for launch in communicated.ended:
        # Collectives overlap with each other, so each has a row: of its number in the step.
        timeline.active.add_to_row(
            f"collective {launch.number}",
            _label(launch),
            "collective",
            launch.started,
            launch.ended,
            waited=launch.ended - launch.waiting,
        )


def failure_of(launch: Launch, error: str) -> CollectiveError:
    """The error of a failed collective. Its group can't be used any more."""
    group = find_group(launch.group)
    reason = error.partition("\n")[0]
    group.fail(f"It failed in {_label(launch)}: {reason}")
    return CollectiveError(
        f"{_label(launch)} failed on rank {group.rank}: {reason}. Another rank has ended, hangs or is slower "
        f"than the group's time-out of {group.timeout.total_seconds():g} s. Start over with a new process "
        "group."
    )


def sends_own(launch: Instruction) -> bool:
    """Whether this rank sends the operand of a launch. A broadcast overwrites it except at the root."""
    return launch.op != BROADCAST or launch.args[1] == find_group(group_of(launch)).rank


def _label(launch: Launch) -> str:
    size = find_group(launch.group).size
    return f"{launch.kind} of {launch.size} x {launch.dtype} over the {size} ranks of {launch.group!r}"


def _memory_of(tensor: Tensor) -> int:
    memory: Any = tensor.untyped_storage()._cdata
    return int(memory)
