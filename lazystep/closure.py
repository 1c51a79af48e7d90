"""Handlers of closures: they run closures in order, on the calling thread or on a worker.

`ClosureHandler` runs closures on the calling thread. `AsyncClosureHandler` runs them on one worker
thread, behind a bounded queue. Both are plain Python, do not depend on the lazy device, and can be used on
their own:

    handler = AsyncClosureHandler(max_queue_size=10)
    handler.run(lambda: upload(metrics))
    handler.flush(timeout=30)

Invariants of both: closures run in the order in which they were given. A closure that raises does not stop
the closures behind it. Every error is raised exactly once. No thread waits while it holds a lock.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from . import metrics, timeline
from .config import settings
from .errors import ClosureError, LazyStepError, QueueFullError, WaitTimeoutError, mark_reported
from .openmp import set_num_threads

Closure = Callable[[], Any]


class WhenFull(enum.Enum):
    """What `AsyncClosureHandler.run` does when the queue is full."""

    WAIT = "wait"  # wait until the worker has taken a closure
    DROP_OLDEST = "drop_oldest"  # drop the closure that has waited longest, without running it
    DROP_NEWEST = "drop_newest"  # drop the new closure, without running it
    RAISE = "raise"  # raise QueueFullError, and queue nothing


class ClosureHandler:
    """Runs closures at once, on the calling thread."""

    def run(self, closure: Closure) -> None:
        """Run one closure. Its exception is raised to the caller."""
        _call(closure)

    def __call__(self, closures: Iterable[Closure]) -> None:
        """Run every closure, in order, also after one has raised.

        Then raise the first exception, with its own traceback and the other exceptions as notes.
        """
        first: BaseException | None = None
        for closure in closures:
            try:
                self.run(closure)
            except Exception as error:
                if first is None:
                    first = error
                else:
                    text = "".join(traceback.format_exception(error)).rstrip()
                    first.add_note(f"A closure behind it raised, too:\n{text}")
        if first is not None:
            raise first


class AsyncClosureHandler(ClosureHandler):
    """Runs closures on one worker thread, in order, behind a queue of at most `max_queue_size` closures.

    The worker starts with the first closure, or with `start_event_loop()`, and ends with `close()`. It is a
    daemon thread, so a closure that blocks forever does not keep the process alive.
    """

    def __init__(self, max_queue_size: int = 100, when_full: WhenFull = WhenFull.WAIT) -> None:
        if max_queue_size < 1:
            raise ValueError(f"max_queue_size = {max_queue_size}: expected at least 1")
        self.max_queue_size = max_queue_size
        self.when_full = when_full
        self._reset()
        _handlers.add(self)

    def _reset(self) -> None:
        self._condition = threading.Condition()
        self._queue: deque[Closure] = deque()
        self._running: Closure | None = None
        self._failures: list[ClosureError] = []
        self._worker: threading.Thread | None = None
        self._worker_error: BaseException | None = None
        self._is_closed = False

    # -- the caller's side ---------------------------------------------------------------------

    def start_event_loop(self) -> None:
        """Start the worker if it is not running. Does not wait."""
        with self._condition:
            self._start_worker()

    def run(self, closure: Closure) -> None:
        """Queue one closure. Blocks only if the queue is full and `when_full` is WAIT.

        If an earlier closure has failed, raises its error and queues nothing; the same call can then be
        repeated.
        """
        self.raise_failures()
        self.put(closure)

    def __call__(self, closures: Iterable[Closure]) -> None:
        """Queue closures, in order. If an earlier closure has failed, raises its error and queues nothing."""
        self.raise_failures()
        for closure in closures:
            self.put(closure)

    def put(self, closure: Closure) -> None:
        """Queue one closure, without raising the errors of earlier closures."""
        is_worker = threading.current_thread() is self._worker
        with self._condition:
            if self._is_closed:
                raise LazyStepError(f"{name_of(closure)} came after close(): the worker has ended")
            # The worker must not wait for itself, so closures that a closure adds may exceed the bound.
            if len(self._queue) >= self.max_queue_size and not is_worker and not self._make_room(closure):
                return
            self._queue.append(closure)
            self._start_worker()
            self._condition.notify_all()

    def _make_room(self, closure: Closure) -> bool:
        """Handle a full queue. Returns whether to queue the closure. Waiting releases the lock."""
        if self.when_full is WhenFull.RAISE:
            raise QueueFullError(
                f"{self.max_queue_size} closures are waiting, {name_of(closure)} was not queued. "
                "Report less often, allow a longer queue (max_async_queue), or let it wait or drop."
            )
        if self.when_full is WhenFull.DROP_NEWEST:
            metrics.count("closures_dropped")
            return False
        if self.when_full is WhenFull.DROP_OLDEST:
            metrics.count("closures_dropped")
            self._queue.popleft()
            return True
        metrics.count("closure_queue_waits")
        start = time.perf_counter()
        self._wait_for(lambda: len(self._queue) < self.max_queue_size, settings.wait_timeout)
        end = time.perf_counter()
        metrics.add_seconds("waiting_for_closures", end - start)
        if timeline.active is not None:
            timeline.active.add("wait for a place in the closure queue", "waiting", start, end)
        return True

    def flush(self, timeout: float | None = None) -> None:
        """Block until every queued closure has run, then raise their errors.

        Raises `WaitTimeoutError` after `timeout` seconds (default: the setting `wait_timeout`); the message
        names the running closure and the line that it is at.
        """
        self.wait_idle(timeout)
        self.raise_failures()

    def wait_idle(self, timeout: float | None = None) -> None:
        """Block until every queued closure has run. Their errors stay for the next barrier or flush."""
        if threading.current_thread() is self._worker:
            raise LazyStepError("a closure on the worker thread can't wait for the worker: it is the worker")
        with self._condition:
            self._wait_for(
                lambda: not self._queue and self._running is None,
                settings.wait_timeout if timeout is None else timeout,
            )

    def take_failures(self) -> list[ClosureError]:
        """The failures since the last call. Each failure is returned once."""
        with self._condition:
            failures, self._failures = self._failures, []
        return failures

    def raise_failures(self) -> None:
        """Raise the first failure since the last call, with the other failures as notes."""
        failures = self.take_failures()
        if failures:
            for failure in failures:
                mark_reported(failure)  # and the failed step that a closure has read
            for other in failures[1:]:
                failures[0].add_note(f"also: {other}")
            raise failures[0]

    @property
    def has_failures(self) -> bool:
        """Whether a closure has failed since failures were last raised or taken."""
        return bool(self._failures)

    @property
    def num_waiting(self) -> int:
        """The number of closures in the queue, without the running closure."""
        return len(self._queue)

    def close(self, timeout: float) -> list[str]:
        """Wait up to `timeout` seconds for queued closures, then end the worker.

        Returns the names of the closures that had not finished.
        """
        deadline = time.monotonic() + timeout
        with self._condition:
            if self._worker is not threading.current_thread():
                self._condition.wait_for(
                    lambda: (not self._queue and self._running is None) or not self._worker_lives(), timeout
                )
            dropped = [name_of(c) for c in ([self._running] if self._running else []) + [*self._queue]]
            self._queue.clear()
            self._is_closed = True
            self._condition.notify_all()
            worker = self._worker
        if worker is not None and worker is not threading.current_thread():
            worker.join(max(deadline - time.monotonic(), 0.1) if not dropped else 0.1)
        return dropped

    def _wait_for(self, condition: Callable[[], bool], timeout: float) -> None:
        """Wait until `condition()`, or raise if the worker dies. Needs the lock, and releases it to wait."""
        deadline = time.monotonic() + timeout
        while not condition():
            if not self._worker_lives() and (self._queue or self._running is not None):
                if self._worker_error is not None:
                    error, self._worker_error = self._worker_error, None
                    self._running = None
                    raise LazyStepError(f"the closure worker died: {error!r}; it is restarted") from error
                self._start_worker()
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise WaitTimeoutError(
                    f"closures are not done after {timeout:g} s: {self._describe_running()}"
                )
            self._condition.wait(min(remaining, 0.5))

    def _describe_running(self) -> str:
        running = self._running
        if running is None:
            return f"{len(self._queue)} are waiting"
        frame = sys._current_frames().get(self._worker.ident or 0) if self._worker is not None else None
        stack = "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "unknown"
        return f"{name_of(running)} is running, {len(self._queue)} behind it. It is at:\n{stack}"

    # -- the worker's side ---------------------------------------------------------------------

    def _worker_lives(self) -> bool:
        return self._worker is not None and self._worker.is_alive()

    def _start_worker(self) -> None:
        if not self._worker_lives() and not self._is_closed:
            self._worker = threading.Thread(target=self._work, name="lazystep-closures", daemon=True)
            self._worker.start()

    def _work(self) -> None:
        try:
            # One thread: computations of a closure must not slow down the steps that run beside it.
            set_num_threads(1)
            while True:
                with self._condition:
                    while not self._queue and not self._is_closed:
                        self._condition.wait()
                    if not self._queue:
                        return
                    closure = self._running = self._queue.popleft()
                    self._condition.notify_all()
                failure = self._attempt(closure)
                del closure
                with self._condition:
                    self._running = None
                    if failure is not None:
                        self._failures.append(failure)
                    self._condition.notify_all()
        except BaseException as error:
            # Not a closure's error, which `_attempt` keeps, but an error of the loop: wake waiting threads.
            with self._condition:
                self._worker_error = error
                self._condition.notify_all()

    def _attempt(self, closure: Closure) -> ClosureError | None:
        try:
            _call(closure)
        except BaseException as error:  # SystemExit too: a closure must not end the worker
            metrics.count("closures_failed")
            failure = ClosureError(f"{name_of(closure)} raised {type(error).__name__}: {error}")
            failure.__cause__ = error
            return failure
        metrics.count("closures_run_async")
        return None


def _call(closure: Closure) -> None:
    if timeline.active is None:
        closure()
        return
    function = getattr(closure, "function", getattr(closure, "func", closure))
    args = {name: getattr(closure, name) for name in ("step", "where") if hasattr(closure, name)}
    with timeline.span(getattr(function, "__qualname__", repr(function)), "closure", **args):
        closure()


def name_of(closure: Closure) -> str:
    """The name of a closure in messages: its `description`, or the name and line of its function."""
    description = getattr(closure, "description", None)
    if description is not None:
        return str(description)
    function = getattr(closure, "func", closure)
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", repr(function))
    return f"closure {name}" + (f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else "")


_handlers: weakref.WeakSet[AsyncClosureHandler] = weakref.WeakSet()


def _after_fork() -> None:
    # The worker thread exists only in the parent, and may have held the lock. So the child starts with a new
    # lock and an empty queue; the parent runs the queued closures.
    for handler in list(_handlers):
        handler._reset()


os.register_at_fork(after_in_child=_after_fork)
