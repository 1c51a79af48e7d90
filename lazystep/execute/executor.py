"""The executor: one thread that runs queued steps, first in, first out.

There is one thread because in-place updates are right only in order, and because only one thread may own an
OpenMP pool. It starts with the first step and ends with the process, within a deadline.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque

import torch

from .. import metrics, timeline
from ..config import settings
from ..errors import LazyStepError, WaitTimeoutError
from ..openmp import release_pool
from .run import Run


class Executor:
    """Runs steps in the order in which they were submitted.

    Errors are kept until `take_failures`. A failed step does not stop the steps behind it; a later step that
    depends on it fails by itself.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._queue: deque[Run] = deque()
        self._running: Run | None = None
        self._failures: list[LazyStepError] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    # -- the training thread's side ----------------------------------------------------------

    def has_room(self) -> bool:
        """Whether another step may be submitted within the bound on steps in flight."""
        return self.num_in_flight < settings.max_in_flight

    @property
    def num_in_flight(self) -> int:
        """The number of steps that are queued or running."""
        return len(self._queue) + (self._running is not None)

    def submit(self, run: Run) -> None:
        """Queue a step. Never waits: callers wait for room first, outside of their locks.

        After `close`, for example in an `atexit` handler, the step runs on the calling thread: the
        interpreter no longer starts threads then.
        """
        with self._condition:
            if not self._closed:
                self._queue.append(run)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="lazystep-executor", daemon=True)
                    self._thread.start()
                self._condition.notify_all()
                return
        failure = _execute(run)
        if failure is not None:
            with self._condition:
                self._keep(failure)

    def wait_for_room(self) -> None:
        """Block until a step may be submitted, at most for the setting `wait_timeout`."""
        self._wait(self.has_room, f"a place among {settings.max_in_flight} steps in flight")

    def wait_idle(self) -> None:
        """Block until every submitted step has ended, at most for the setting `wait_timeout`."""
        self._wait(lambda: self.num_in_flight == 0, "queued steps")

    def take_failures(self) -> list[LazyStepError]:
        """The failures since the last call that no read has reported. Each failure is returned once."""
        if not self._failures:
            return []
        with self._condition:
            failures, self._failures = self._failures, []
        # Looked at here and not where a read reports: the read may wake before the failure is in the list.
        return [failure for failure in failures if not failure.is_reported]

    def _keep(self, failure: LazyStepError) -> None:
        """Keep a failure for `take_failures`. Needs the lock."""
        metrics.count("steps_failed")
        self._failures.append(failure)

    def close(self, timeout: float) -> list[Run]:
        """Wait up to `timeout` seconds for queued steps, then end the thread. Returns the dropped steps."""
        deadline = time.monotonic() + timeout
        with self._condition:
            self._condition.wait_for(lambda: self.num_in_flight == 0, timeout)
            self._closed = True
            dropped = [*([self._running] if self._running else []), *self._queue]
            self._queue.clear()
            self._condition.notify_all()
            thread = self._thread
        for run in dropped:
            run.abandon(f"the process ended and {timeout:g} s (setting exit_timeout) were over")
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0.1) if not dropped else 0.1)
        return dropped

    def _wait(self, condition: object, what: str) -> None:
        assert callable(condition)
        if condition():
            return
        if threading.current_thread() is self._thread:
            raise LazyStepError(f"the executor thread can't wait for {what}: it would wait for itself")
        release_pool()  # a waiting thread does not need its pool
        start = time.perf_counter()
        with self._condition:
            done = self._condition.wait_for(condition, settings.wait_timeout)
        end = time.perf_counter()
        metrics.add_seconds("waiting", end - start)
        if timeline.active is not None:
            timeline.active.add(f"wait for {what}", "waiting", start, end)
        if not done:
            raise WaitTimeoutError(
                f"waited {settings.wait_timeout:g} s (setting wait_timeout) for {what}; "
                f"{self.num_in_flight} steps are still in flight"
            )

    # -- the executor thread's side ----------------------------------------------------------

    def _work(self) -> None:
        failure: LazyStepError | None = None
        while True:
            # One locked section for the end of a step and the start of the next. Between two sections, a
            # thread that waited for the first step would take the interpreter lock.
            with self._condition:
                self._running = None
                if failure is not None:
                    self._keep(failure)
                self._condition.notify_all()
                while not self._queue and not self._closed:
                    self._condition.wait()
                if not self._queue:
                    return
                run = self._running = self._queue.popleft()
            failure = _execute(run)
            del run


def _execute(run: Run) -> LazyStepError | None:
    """Run a step on the calling thread. Returns its failure, or None."""
    # `set_num_threads` on the training thread does not change this thread's number.
    if torch.get_num_threads() != run.num_threads:
        torch.set_num_threads(run.num_threads)
    start = time.perf_counter()
    failure: LazyStepError | None
    try:
        failure = run.execute()
    except BaseException as error:  # a bug of lazystep: it must end the step, not the thread
        failure = LazyStepError(f"step {run.step} failed inside lazystep: {error!r}")
        failure.__cause__ = error
        run.abandon(str(failure), failure)
    end = time.perf_counter()
    metrics.add_seconds("executing", end - start)
    if timeline.active is not None:
        args = {"step": run.step, "tier": run.executable.tier, "program": run.executable.number}
        timeline.active.add(f"step {run.step}", "execution", start, end, **args)
    metrics.count("programs_executed")
    metrics.count("instructions_executed", len(run.executable.program.instructions))
    return failure


def report_dropped(dropped: list[Run]) -> None:
    """Print the steps that did not run before the process ended."""
    for run in dropped:
        size = len(run.executable.program.instructions)
        print(f"lazystep: step {run.step} ({size} instructions) was dropped at exit", file=sys.stderr)
