"""Whether updates are made inside backward or left to `step()`: measured, then decided once for all ranks.

Overlap hides updates behind reductions. On a fast link there is little to hide, and updates then only
compete with reductions for the cores. Both ways give the same bits, so a model may change between them.

The first backward passes overlap. Then passes of both kinds take turns: two of them are a round. Each is
timed from its first reduction to the end of `step()`: data loading and forward are the same in both. The
wait for the other ranks' messages before the next forward counts as well. If our hook can be given back, a
pass without overlap is timed without that wait, and without the scaling of buckets: plain DDP has neither.
So overlap is compared with plain DDP, and not with our hook that does nothing useful.

Each rank announces its time together with the outcome of its next updates. All ranks hear the same sums, so
they count the same rounds won by overlap, and decide in the same announcement: as soon as chance would
hardly explain the count, and at the latest after `MAX_ROUNDS` by the majority. Overlap wins a round if it is
faster by more than `MARGIN`. So plain DDP wins a tie.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

# Passes that overlap before the trial, and the rounds in it.
NUM_WARM_UPS = 10
MIN_ROUNDS = 8
MAX_ROUNDS = 32
# Two equal ways would give so uneven a count in fewer than one of a hundred trials.
CHANCE = 0.01
# How much faster overlap must be: a pass of ours also has costs that are not timed apart, the calls of a hook
# in Python and an announcement. If both ways are equal and passes vary by 5 %, overlap stays on in about one
# of ten trials. Without a margin it was two of five.
MARGIN = 0.02


class Decision(NamedTuple):
    """What was measured, and which way is taken from then on.

    The seconds are of a median pass, summed over all ranks. Overlap was clearly faster in `num_won` of
    `num_rounds`.

    print(handle.decision)      # Decision(in_backward=0.21, in_step=0.19, overlaps=False, ...)
    """

    in_backward: float
    in_step: float
    overlaps: bool
    num_won: int
    num_rounds: int


class Choice:
    """Says before each backward whether it updates parameters. `forced`: always, never, or (None) measure."""

    def __init__(self, forced: bool | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.forced = forced
        self.overlaps = forced is not False
        self.decision: Decision | None = None
        self._clock = clock
        self._start = 0.0
        self._end = 0.0
        self._left_out = 0.0
        self._number = 0  # backward passes that have begun
        self._report = 0.0, 0.0
        self._heard: dict[bool, list[float]] = {True: [], False: []}
        self._num_heard = 0

    @property
    def is_settled(self) -> bool:
        """Whether nothing is measured (any more)."""
        return self.forced is not None or self.decision is not None

    @property
    def _is_trial(self) -> bool:
        return 0 < self._number - NUM_WARM_UPS <= 2 * MAX_ROUNDS

    def begin(self) -> None:
        """The first bucket of a backward is ready. Counts backward passes, which all ranks have alike."""
        if self.is_settled:
            return
        self._report = self._time_of_last_pass() if self._is_trial else (0.0, 0.0)
        self._number += 1
        self.overlaps = not self._is_trial or (self._number - NUM_WARM_UPS) % 2 == 0
        self._left_out = 0.0
        self._start = self._clock()

    def _time_of_last_pass(self) -> tuple[float, float]:
        if self._end <= self._start:  # no step() has ended: the sum over all ranks has to be dropped
            return math.nan, math.nan
        seconds = self._end - self._start
        return (seconds, 0.0) if self.overlaps else (0.0, max(seconds - self._left_out, 1e-9))

    @contextlib.contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Around work that plain DDP would not do."""
        if self.is_settled:
            yield
            return
        start = self._clock()
        yield
        self._left_out += self._clock() - start

    def stepped(self) -> None:
        """An optimizer has finished `step()`."""
        if not self.is_settled:
            self._end = self._clock()

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """Around work behind `step()` that the pass has made necessary."""
        if self.is_settled:
            yield
            return
        start = self._clock()
        yield
        self._end += self._clock() - start

    def report(self) -> tuple[float, float]:
        """What this rank announces in this backward: the time of its last pass, in backward or in step."""
        return (0.0, 0.0) if self.is_settled else self._report

    def hear(self, in_backward: float, in_step: float) -> bool:
        """Take the sums over all ranks of one announcement. Returns whether they have decided."""
        if self.is_settled or (in_backward == 0 and in_step == 0):
            return False
        self._num_heard += 1
        if not math.isnan(in_backward + in_step):
            self._heard[in_backward > 0].append(in_backward or in_step)
        rounds = list(zip(self._heard[True], self._heard[False], strict=False))
        num_won = sum(overlapped * (1.0 + MARGIN) < plain for overlapped, plain in rounds)
        is_last = self._num_heard == 2 * MAX_ROUNDS
        if len(rounds) < MIN_ROUNDS or not (is_last or _chance(num_won, len(rounds)) < CHANCE):
            return False
        self.overlaps = 2 * num_won > len(rounds)
        in_backward, in_step = (statistics.median(self._heard[kind]) for kind in (True, False))
        self.decision = Decision(in_backward, in_step, self.overlaps, num_won, len(rounds))
        return True


def _chance(num_won: int, num_rounds: int) -> float:
    """How probable so uneven a count is, in either direction, if both ways are equally fast."""
    fewer = min(num_won, num_rounds - num_won)
    return 2.0 * sum(math.comb(num_rounds, number) for number in range(fewer + 1)) / (1 << num_rounds)
