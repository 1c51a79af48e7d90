"""Whether updates are made inside backward or left to `step()`: measured, then decided once for all ranks.

Overlap hides updates behind reductions. On a fast link there is little to hide, and updates then only
compete with reductions for the cores. Both ways give the same bits, so a model may change between them.

The first backward passes overlap. Then passes of both kinds take turns, and each is timed from its first
reduction to the end of `step()`: data loading and forward are the same in both. Each rank announces its two
medians together with the outcome of its updates. The sums are the same on all ranks; the smaller one wins.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

# Passes that overlap before the trial, and passes of each kind in it.
NUM_WARM_UPS = 10
NUM_ROUNDS = 6
_LAST = NUM_WARM_UPS + 2 * NUM_ROUNDS


class Decision(NamedTuple):
    """What was measured, in seconds summed over all ranks, and which way is taken from then on.

    print(handle.decision)      # Decision(in_backward=0.21, in_step=0.19, overlaps=False)
    """

    in_backward: float
    in_step: float
    overlaps: bool


class Choice:
    """Says before each backward whether it updates parameters. `forced`: always, never, or (None) measure."""

    def __init__(self, forced: bool | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.forced = forced
        self.overlaps = forced is not False
        self.decision: Decision | None = None
        self._clock = clock
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._start = 0.0
        self._end = 0.0
        self._number = 0

    def begin(self) -> None:
        """The first bucket of a backward is ready. Counts backward passes, which all ranks have alike."""
        if self.forced is not None or self.decision is not None:
            return
        if NUM_WARM_UPS < self._number <= _LAST and self._end > self._start:
            self._times[self.overlaps].append(self._end - self._start)
        self._number += 1
        is_trial = NUM_WARM_UPS < self._number <= _LAST
        self.overlaps = not is_trial or (self._number - NUM_WARM_UPS) % 2 == 0
        self._start = self._clock()

    def stepped(self) -> None:
        """An optimizer has finished `step()`."""
        if self.forced is None and self.decision is None:
            self._end = self._clock()

    def report(self) -> tuple[float, float]:
        """What this rank announces in this backward: its two medians behind the last round, else zeros."""
        if self.decision is not None or self._number != _LAST + 1 or not all(self._times.values()):
            return 0.0, 0.0
        return statistics.median(self._times[True]), statistics.median(self._times[False])

    def hear(self, in_backward: float, in_step: float) -> bool:
        """Take the announced sums of all ranks. Returns whether they have decided."""
        if self.forced is not None or self.decision is not None or not (in_backward and in_step):
            return False
        self.overlaps = in_backward <= in_step
        self.decision = Decision(in_backward, in_step, self.overlaps)
        return True
