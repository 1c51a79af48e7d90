"""The time of many training steps, also if not all of them can be run."""

from __future__ import annotations

import time


class TrainingTime:
    """Counts steps until there are enough, or until the time is up; then the rest is extrapolated.

    `seconds` is the time of all steps, `slowest` that of the slowest one, as the training thread sees it.
    """

    def __init__(self, num_steps: int, max_seconds: float) -> None:
        self.num_run = 0
        self.slowest = 0.0
        self.seconds = 0.0
        self._num_steps = num_steps
        self._max_seconds = max_seconds
        self._start = time.perf_counter()
        self._ends: list[float] = []

    def goes_on(self) -> bool:
        """Whether another step is to be run."""
        is_late = time.perf_counter() - self._start > self._max_seconds and self.num_run >= 4
        return self.num_run < self._num_steps and not is_late

    def add(self, seconds: float) -> None:
        """A step has been run."""
        self.num_run += 1
        self.slowest = max(self.slowest, seconds)
        self._ends.append(time.perf_counter())

    def end(self) -> TrainingTime:
        """The last step's loss is known. Steps that were not run are taken to be like the last quarter."""
        now = time.perf_counter()
        self.seconds = now - self._start
        num_last = max(self.num_run // 4, 1)
        begin = self._ends[-num_last - 1] if self.num_run > num_last else self._start
        self.seconds += (self._num_steps - self.num_run) * (now - begin) / num_last
        return self

    def numbers(self, name: str) -> dict[str, float]:
        """The numbers of a cold start, by name."""
        quantities = {"total": self.seconds, "slowest": self.slowest, "steps run": self.num_run}
        return {f"{quantity}, {name}": value for quantity, value in quantities.items()}
