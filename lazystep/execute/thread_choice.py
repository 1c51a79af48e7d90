"""Chooses on how many threads a library runs: one or all, whichever is faster at present.

A small step can lose more time at barriers between threads than the threads save. So can a large step while
another process computes: a thread spins at a barrier while the thread that it waits for has no processor.
Other processes come and go, so the counts are measured again when runs have become slow. As long as even the
fastest count is slow, they are measured again at growing intervals, until the other process is gone.
"""

from __future__ import annotations

from collections.abc import Collection

_FIRST_TURNS, _TURNS = 6, 3  # measured runs per count; the first runs are slow on any count
_SLOW = 1.6  # a run is slow if it takes this many times as long as the shortest
_PATIENCE = 4  # slow runs in a row before the counts are measured again
_FIRST_REPEAT, _LAST_REPEAT = 64, 1024  # runs until the next measurement, after a slow one


class ThreadChoice:
    """Chooses between thread counts: call `next` before each run, and `took` after it."""

    def __init__(self, counts: Collection[int], like: ThreadChoice | None = None) -> None:
        """`like`: the choice for a similar library, which is kept until runs become slow."""
        self._counts = sorted(set(counts))
        self._shortest_ever = float("inf")
        self._repeat_after = _FIRST_REPEAT
        self._chosen = 0  # the count that is used; 0 while counts are being compared
        self._begin(_FIRST_TURNS)
        if like is not None and like._chosen in self._counts:
            self._chosen = like._chosen

    def _begin(self, num_turns: int) -> None:
        self._shortest = dict.fromkeys(self._counts, float("inf"))
        self._chosen = self._counts[0] if len(self._counts) == 1 else 0
        self._num_measurements = 0
        self._num_measurements_needed = num_turns * len(self._counts)
        self._num_slow = 0
        self._num_until_repeat = -1  # never

    @property
    def is_made(self) -> bool:
        """Whether `next` returns the same number until `took` is told of slow runs."""
        return self._chosen != 0

    def next(self) -> int:
        """The number of threads for the next run."""
        return self._chosen or self._counts[self._num_measurements % len(self._counts)]

    def took(self, seconds: float) -> None:
        """Report how long the run on `next()` threads has taken."""
        if len(self._counts) == 1:
            return
        if not self._chosen:
            self._compare(seconds)
            return
        self._num_until_repeat -= 1
        if self._shortest[self._chosen] == float("inf"):  # taken over from another library
            self._shortest[self._chosen] = seconds
        is_slow = seconds > _SLOW * self._shortest[self._chosen]
        self._num_slow = self._num_slow + 1 if is_slow else 0
        if self._num_slow == _PATIENCE or self._num_until_repeat == 0:
            self._begin(_TURNS)

    def _compare(self, seconds: float) -> None:
        count = self.next()
        self._shortest[count] = min(self._shortest[count], seconds)
        self._num_measurements += 1
        if self._num_measurements < self._num_measurements_needed:
            return
        self._chosen = min(self._counts, key=self._shortest.__getitem__)
        shortest = self._shortest[self._chosen]
        self._shortest_ever = min(self._shortest_ever, shortest)
        if shortest > _SLOW * self._shortest_ever:
            self._num_until_repeat = self._repeat_after
            self._repeat_after = min(2 * self._repeat_after, _LAST_REPEAT)
        else:
            self._repeat_after = _FIRST_REPEAT
