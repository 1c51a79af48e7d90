"""On how many threads a library runs: one or all, whichever is faster here and now.

Small steps lose to the barriers between threads. So do large ones beside a neighbour that computes: a thread
spins at a barrier while the one that it waits for has no processor. Neighbours come and go, so the choice
is made again when runs have become slow, and once more later, in case it was the neighbour.
"""

from __future__ import annotations

from collections.abc import Collection

_FIRST_TRIES, _TRIES = 6, 3  # runs per count; the first ones are slow whatever the count
_SLOW = 1.6  # times as long as usual
_PATIENCE = 4  # slow runs in a row
_FIRST_RETRY, _LAST_RETRY = 64, 1024  # runs


class ThreadChoice:
    """Ask `next` before each run, and tell `took` after it."""

    def __init__(self, counts: Collection[int]) -> None:
        self._counts = sorted(set(counts))
        self._shortest_ever = float("inf")
        self._retry_after = _FIRST_RETRY
        self._begin(_FIRST_TRIES)

    def _begin(self, num_tries: int) -> None:
        self._shortest = dict.fromkeys(self._counts, float("inf"))
        self._chosen = self._counts[0] if len(self._counts) == 1 else 0
        self._num_trials = 0
        self._num_trials_needed = num_tries * len(self._counts)
        self._num_slow = 0
        self._num_until_retry = -1  # never

    def next(self) -> int:
        """The number of threads for the next run."""
        return self._chosen or self._counts[self._num_trials % len(self._counts)]

    def took(self, seconds: float) -> None:
        """Tell how long the run on `next()` threads has taken."""
        if len(self._counts) == 1:
            return
        if not self._chosen:
            self._compare(seconds)
            return
        self._num_until_retry -= 1
        is_slow = seconds > _SLOW * self._shortest[self._chosen]
        self._num_slow = self._num_slow + 1 if is_slow else 0
        if self._num_slow == _PATIENCE or self._num_until_retry == 0:
            self._begin(_TRIES)

    def _compare(self, seconds: float) -> None:
        count = self.next()
        self._shortest[count] = min(self._shortest[count], seconds)
        self._num_trials += 1
        if self._num_trials < self._num_trials_needed:
            return
        self._chosen = min(self._counts, key=self._shortest.__getitem__)
        shortest = self._shortest[self._chosen]
        self._shortest_ever = min(self._shortest_ever, shortest)
        if shortest > _SLOW * self._shortest_ever:
            self._num_until_retry = self._retry_after
            self._retry_after = min(2 * self._retry_after, _LAST_RETRY)
        else:
            self._retry_after = _FIRST_RETRY
