"""The executor: one thread that runs queued steps, first in, first out, and gives way to a thread that waits.

Steps run one at a time, because in-place updates are right only in order, and because two OpenMP pools slow
each other down: see openmp.py. The thread starts with the first step and ends with the process, within a
deadline.

[Note: one pool]
A thread that reads the results of each step wants to compute with them, and then a pool of its own. So:
- The executor gives its pool back before it wakes the thread that waits for the last queued step, when such a
  thread comes later, or when it has had nothing to do for a while. It does not do so between two steps.
- While the executor has no pool, the thread that queued a step and waits for it runs it by itself, on its own
  pool. If that thread has waited some times in a row, the executor leaves it a head start.
- A thread that does not wait loses nothing: the executor runs its steps.

A step that runs on the waiting thread equals one that runs on the executor thread: torch's thread-local state
and its number of threads are the executor's, signals wait until the step is over, and failures are kept in
the same list. A step may run there only if it can't block, so only if all its ops are torch's own:
`wait_timeout` bounds a wait for another thread, not the computation of a step.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from .. import metrics, timeline
from ..config import settings
from ..errors import LazyStepError, WaitTimeoutError
from ..interrupts import undisturbed
from ..openmp import are_barriers_sleeping, release_pool
from .chain import make_chain
from .malloc import share_heaps
from .run import Run
from .threads import ThreadState, current_state, flushes_denormals, make_bell

# Seconds without a step after which the executor gives its pool back. Longer than a training thread needs to
# record the next step of a small model.
_POOL_PATIENCE = 0.02
# Seconds that the executor leaves to a thread that is expected to wait for the step that it has queued.
_HEAD_START = 0.005
# A thread is expected to wait if it has done so this many times in a row. After a head start that was of no
# use it takes twice as many, up to the second number.
_NUM_WAITS, _MAX_NUM_WAITS = 2, 1024
# Seconds for which a thread waits for a place before it looks for signals.
_LOOK_AROUND = 0.05
# Behind every step.
_LAST = float("inf")
# A thread that waits may queue two steps before: a sync closure's computations are a program of their own.
_MAX_UNREAD = 2


class Executor:
    """Runs steps in the order in which they were submitted.

    Errors are kept until `take_failures`. A failed step does not stop the steps behind it; a later step that
    depends on it fails by itself.
    """

    def __init__(self, may_run_here: Callable[[], bool] = lambda: True) -> None:
        """`may_run_here`: whether the calling thread, which waits, may run a step by itself now."""
        self._may_run_here = may_run_here
        # Notified at the end of each step, for threads that wait. The executor thread sleeps at the bell.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._bell = make_bell()
        # Runs without Python: they stay in the queue until they are settled. See [Note: chain] in chain.h.
        self._chain = make_chain()
        self._is_chained = False  # the executor thread is in the chain, or about to be
        # The steps that threads wait for in Python: the executor thread comes back behind each.
        self._awaited: list[float] = []
        # Runs that have failed. A run that is made ready has no input of a run that failed before.
        self.num_failed = 0
        self._queue: deque[Run] = deque()
        self._running: Run | None = None
        self._runner = 0  # the thread that runs it, 0 for none
        self.failures: list[LazyStepError] = []  # for `take_failures`
        self._thread: threading.Thread | None = None
        self._closed = False
        # torch's state of the executor thread, in which another thread runs a step.
        self._state: ThreadState | None = None
        self._has_pool = False  # the executor thread has run a step since it gave its pool back
        # The thread that has queued the last step, and how it goes about waiting.
        self._submitter = 0
        self._last_step = 0
        self._num_unread = 0  # steps that it has queued since it last waited for all of them
        self._num_awaited = 0  # how often in a row it has waited for all of them
        self._num_needed = _NUM_WAITS
        self._held_until = 0.0  # the executor leaves the one queued step to its submitter until then

    # -- the training thread's side ----------------------------------------------------------

    def has_room(self) -> bool:
        """Whether another step may be submitted within the bound on steps in flight."""
        # As `num_in_flight`, without a call: each replay asks.
        running = self._running is not None
        return len(self._queue) + running - self._chain.num_unsettled < settings.max_in_flight

    @property
    def num_in_flight(self) -> int:
        """The number of steps that are queued or running."""
        return len(self._queue) + (self._running is not None) - self._chain.num_unsettled

    def submit(self, run: Run) -> None:
        """Queue a step. Never waits: callers wait for room first, outside of their locks.

        After `close`, for example in an `atexit` handler, the step runs on the calling thread: the
        interpreter no longer starts threads then.
        """
        with self._lock:  # itself: the condition's methods are Python, and a replay pays for each call
            if self._chain.num_unsettled:
                self._settle()
            if not self._closed:
                if self._thread is None:
                    share_heaps()
                    thread = threading.Thread(target=self._work, name="lazystep-executor", daemon=True)
                    thread.start()
                    self._thread = thread
                self._num_unread += 1
                if self._num_unread > _MAX_UNREAD:
                    self._num_awaited = 0
                self._submitter = threading.get_ident()
                self._last_step = run.step
                run.runner = self
                if run.num_failed != self.num_failed:
                    run.ready = None  # an input may be half updated since
                was_empty = not self._queue
                self._queue.append(run)
                if self._is_chained:
                    # Not valid any more if the executor thread has just run the program in another way.
                    if run.ready is None or not run.ready.is_valid or not self._chain.push(run.ready.run):
                        self._chain.drain()
                elif was_empty:
                    is_free = self._running is None and not self._has_pool
                    head_start = _HEAD_START if is_free and self.expects_wait else 0.0
                    self._held_until = time.monotonic() + head_start if head_start else 0.0
                    self._bell.ring(head_start)
                return
        failure = _execute(run)
        if failure is not None:
            with self._condition:
                self._keep(failure)

    @property
    def takes_ready(self) -> bool:
        """Whether the next step is of use as a ready run: the executor thread is in the chain, or busy."""
        return self._is_chained or self._running is not None or bool(self._queue)

    @property
    def expects_wait(self) -> bool:
        """Whether the thread that has queued the last steps has waited for each, and keeps its pool."""
        return self._num_awaited >= self._num_needed

    def wait_for_room(self) -> None:
        """Block until half of the places for steps are free, at most for the setting `wait_timeout`.

        A thread that has slept finds nothing of what it needs in the processor's caches, and pays some
        hundred microseconds for it. So it wakes for several steps, not for one.
        """
        self._wake_executor()
        half = settings.max_in_flight // 2
        what = f"a place among {settings.max_in_flight} steps in flight"
        self._wait(lambda: self.num_in_flight <= half, what, self._wait_without_python)

    def wait_idle(self) -> None:
        """Block until every submitted step has ended, at most for the setting `wait_timeout`."""
        self._wait(lambda: self.num_in_flight == 0, "queued steps", self._wait_in_python, self._last_step)
        self.settle()

    def note_read(self, step: int) -> None:
        """The calling thread needs this step: if it has queued it as the last one, it waits for all."""
        if step == self._last_step and threading.get_ident() == self._submitter:
            self._num_awaited += self._num_unread > 0
            self._num_unread = 0
            if self._has_pool and self._running is None:
                # It has ended already: now the executor gives its pool back.
                self._bell.ring(0.0)
                self._chain.drain()

    def run_up_to(self, run: Run) -> bool:
        """Run queued steps on the calling thread, up to `run`, if that is better than to wait.

        False if another thread runs the step, or will run it. See [Note: one pool]. Not bounded by the
        setting `wait_timeout`, and a signal is handled when the step that runs is over.
        """
        if self._runner == threading.get_ident():
            # Finalizers, for example, can come here. Waiting would be for ever.
            raise LazyStepError(f"step {self._running_step()} can't wait for step {run.step} while it runs")
        self._run_here(run.step)
        return run.is_finished

    def before_end(self) -> None:
        """A step is about to end, which wakes waiting threads: give the pool back if one waits for all."""
        here = threading.get_ident()
        is_executor = self._thread is not None and here == self._runner == self._thread.ident
        if is_executor and not self._queue and (self._num_unread == 0 or self.expects_wait):
            self._give_pool_back()

    def settle(self) -> None:
        """Settle the runs that have ended without Python, so far as none has failed. From any thread."""
        if self._chain.num_unsettled:
            with undisturbed(), self._condition:
                self._settle()

    def begin_wait(self, run: Run | None = None) -> None:
        """The calling thread is going to wait in Python for `run`, or for all runs.

        The executor thread comes back there behind them.
        """
        with self._condition:
            self._awaited.append(_LAST if run is None else run.step)
            ready = run.ready if run is not None else None
            if ready is not None:
                self._chain.end_behind(ready.run)
            else:
                self._chain.drain()

    def end_wait(self, run: Run | None = None) -> None:
        """The calling thread does not wait any more."""
        with self._condition:
            self._awaited.remove(_LAST if run is None else run.step)

    def take_failures(self) -> list[LazyStepError]:
        """The failures since the last call that no read has reported. Each failure is returned once."""
        with self._condition:
            failures, self.failures = self.failures, []
        # Looked at here and not where a read reports: the read may wake before the failure is in the list.
        return [failure for failure in failures if not failure.is_reported]

    def _keep(self, failure: LazyStepError) -> None:
        """Keep a failure for `take_failures`. Needs the lock."""
        metrics.count("steps_failed")
        self.failures.append(failure)

    def close(self, timeout: float) -> list[Run]:
        """Wait up to `timeout` seconds for queued steps, then end the thread. Returns the dropped steps."""
        deadline = time.monotonic() + timeout
        self.begin_wait()
        with self._condition:
            self._condition.wait_for(lambda: self.num_in_flight == 0, timeout)
            self._settle()
            self._closed = True
            self._chain.stop()
            dropped = [*([self._running] if self._running else []), *self._queue]
            self._queue.clear()
            self._bell.ring(0.0)
            self._condition.notify_all()
            thread = self._thread
        for run in dropped:
            run.abandon(f"the process ended and {timeout:g} s (setting exit_timeout) were over")
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0.1) if not dropped else 0.1)
        return dropped

    def _wait(
        self,
        condition: Callable[[], bool],
        what: str,
        block: Callable[[Callable[[], bool]], bool],
        last_step: int | None = None,
    ) -> None:
        """Block until `condition()`. With `last_step`, run the steps up to it here if that is better."""
        if condition():
            if last_step is not None:
                self.note_read(last_step)
            return
        if self._runner == threading.get_ident():
            raise LazyStepError(f"a thread that runs a step can't wait for {what}: it would wait for itself")
        start = time.perf_counter()
        if last_step is not None:
            self._run_here(last_step)
        done = condition()
        if not done:
            release_pool()  # a waiting thread does not need its pool
            done = block(condition)
        end = time.perf_counter()
        metrics.add_seconds("waiting", end - start)
        if timeline.active is not None:
            timeline.active.add(f"wait for {what}", "waiting", start, end)
        if not done:
            raise WaitTimeoutError(
                f"waited {settings.wait_timeout:g} s (setting wait_timeout) for {what}; "
                f"{self.num_in_flight} steps are still in flight"
            )

    def _wait_in_python(self, condition: Callable[[], bool]) -> bool:
        """Block until `condition()`, at most for the setting `wait_timeout`. Whether it holds."""
        self.begin_wait()
        try:
            with self._condition:
                return self._condition.wait_for(condition, settings.wait_timeout)
        finally:
            self.end_wait()

    def _wait_without_python(self, condition: Callable[[], bool]) -> bool:
        """As above, for half of the places: the executor thread stays without Python, this one wakes once."""
        deadline = time.monotonic() + settings.wait_timeout
        while True:
            ended = self._chain.num_ended  # first: a run that ends now counts as one of those to wait for
            if condition():
                return True
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                return False
            wanted = ended + self.num_in_flight - settings.max_in_flight // 2
            self._chain.wait_for_ends(wanted, min(seconds, _LOOK_AROUND))

    # -- running -----------------------------------------------------------------------------

    def _work(self) -> None:
        """The executor thread: run what is queued, sleep, and end when the executor is closed."""
        self._state = current_state()
        run: Run | None = None
        failure: LazyStepError | None = None
        while True:
            # One locked section for the end of a step and the start of the next. Between two sections, a
            # thread that waited for the first step would take the interpreter lock.
            with self._condition:
                if run is not None:
                    self._end(failure, run)
                if self._open_chain(run):
                    run = None
                else:
                    run = self._take()
                if run is None and self._closed:
                    return
            if run is not None:
                failure = _execute(run)
                continue
            if self._is_chained:
                is_awake = self._chain.run(_POOL_PATIENCE)
                self._leave_chain()
            else:
                is_awake = self._bell.wait(_POOL_PATIENCE if self._has_pool else None)
            if not self._queue and (self._num_unread == 0 or not is_awake):
                self._give_pool_back()

    def _open_chain(self, last: Run | None) -> bool:
        """Whether the executor thread goes on without Python: with the next runs, or to wait for some.

        `last`: the run that it has just ended. Needs the lock.
        """
        if self._closed or not self._has_pool or self._running is not None:
            return False
        runs = []
        for run in self._queue:
            if run.ready is None or not run.ready.is_valid:
                break
            runs.append(run.ready.run)
            if run.step in self._awaited:
                break
        if not runs:
            is_idle = not self._queue and not self._awaited and self._num_unread > 0
            if not is_idle or last is None or not last.executable.is_licensed:
                return False
        self._chain.open(runs, stays_open=len(runs) == len(self._queue) and not self._awaited)
        self._is_chained = True
        return True

    def _leave_chain(self) -> None:
        """The executor thread is back from the chain."""
        failed: Run | None = None
        with self._condition:
            self._is_chained = False
            self._settle(is_last=True)
            if self._queue and (ready := self._queue[0].ready) is not None:
                if ready.run.has_failed:
                    failed = self._running = self._queue.popleft()
                    self._runner = threading.get_ident()
                elif ready.run.is_refused:
                    self._queue[0].ready = None
            self._condition.notify_all()
        if failed is not None:
            failure = _settle(failed)  # without the lock: to find the op that failed takes as long as a step
            with self._condition:
                self._end(failure, failed)

    def _settle(self, is_last: bool = False) -> None:
        """Settle the runs that have ended without Python, up to one that has failed. Needs the lock.

        `is_last`: no other run is in the chain, so that the pool is given back before anybody wakes.
        """
        if not self._chain.num_unsettled:
            return
        done = []
        while self._queue and (ready := self._queue[0].ready) is not None and ready.run.is_done:
            done.append(self._queue.popleft())
            self._chain.note_settled()
        if is_last and not self._queue and (self._num_unread == 0 or self.expects_wait):
            self._give_pool_back()
        for run in done:
            failure = _settle(run)
            if failure is not None:
                self._end(failure, run)

    def _run_here(self, step: int) -> None:
        """Run queued steps up to the one with this number, as long as the calling thread may."""
        if threading.get_ident() != self._submitter:
            return
        self.note_read(step)
        is_allowed = settings.tier != "native" and sys.gettrace() is None and self._may_run_here()
        try:
            while is_allowed and self._running is None and not self._has_pool:
                with undisturbed():
                    with self._condition:
                        run = self._take(up_to=step)
                    if run is None:
                        break
                    assert self._state is not None
                    metrics.count("steps_run_while_waiting")
                    self._state.call(functools.partial(self._run_and_restore, run))
                    del run
        finally:
            self._wake_executor()  # also after a signal, which is handled between two steps

    def _wake_executor(self) -> None:
        """End a head start: the calling thread does not run the queued steps."""
        if self._queue:
            self._held_until = 0.0
            self._bell.ring(0.0)

    def _take(self, up_to: int | None = None) -> Run | None:
        """Begin the next step, as the executor thread or, with `up_to`, as a thread that waits for that step.

        None if there is none, or it is another thread's turn. Needs the lock.
        """
        if self._running is not None or not self._queue:
            return None
        run = self._queue[0]
        if up_to is None:
            if self._held_until:
                if time.monotonic() < self._held_until:
                    return None
                # The head start was of no use. It takes more waits until the next one.
                self._num_needed = min(2 * self._num_needed, _MAX_NUM_WAITS)
                self._num_awaited = 0
            self._has_pool = True
        else:
            if self._has_pool or self._closed or self._state is None or run.step > up_to:
                return None
            if not run.executable.runs_anywhere:
                return None
            self._bell.stop()
            if self._held_until:
                self._num_needed = max(self._num_needed // 2, _NUM_WAITS)
        self._held_until = 0.0
        self._running = self._queue.popleft()
        self._runner = threading.get_ident()
        return run

    def _end(self, failure: LazyStepError | None, run: Run) -> None:
        """End the running step: keep its failure and wake who waits. Needs the lock."""
        self._running = None
        self._runner = 0
        if failure is not None:
            self._keep(failure)
        if run.error is not None:
            # Runs that were made ready before do not know of memory that is half updated since.
            self.num_failed += 1
            for queued in self._queue:
                queued.ready = None
        self._chain.note_end()
        self._condition.notify_all()

    def _run_and_restore(self, run: Run) -> None:
        """Run a step on a thread that is not the executor's and has a number of threads of its own."""
        before, flushed = torch.get_num_threads(), flushes_denormals()
        failure: LazyStepError | None = None
        try:
            failure = _execute(run)
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)
            if flushes_denormals() != flushed:
                torch.set_flush_denormal(flushed)
            with self._condition:
                self._end(failure, run)

    def _give_pool_back(self) -> None:
        if self._has_pool and not are_barriers_sleeping():
            release_pool()
            self._has_pool = False
            metrics.count("pools_given_back")

    def _running_step(self) -> int:
        running = self._running
        return running.step if running is not None else 0


def _execute(run: Run) -> LazyStepError | None:
    """Run a step on the calling thread. Returns its failure, or None."""
    # `set_num_threads` on the training thread does not change this thread's number, nor does the other one.
    if torch.get_num_threads() != run.num_threads:
        torch.set_num_threads(run.num_threads)
    if flushes_denormals() != run.flushes_denormals:
        torch.set_flush_denormal(run.flushes_denormals)
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


def _settle(run: Run) -> LazyStepError | None:
    """Do for a run that has ended without Python what follows a run. Returns its failure, or None."""
    ready = run.ready
    assert ready is not None
    seconds = ready.run.seconds
    try:
        failure = run.settle()
    except BaseException as error:  # see `_execute`
        failure = LazyStepError(f"step {run.step} failed inside lazystep: {error!r}")
        failure.__cause__ = error
        run.abandon(str(failure), failure)
    metrics.add_seconds("executing", seconds)
    metrics.count("programs_executed")
    metrics.count("instructions_executed", len(run.executable.program.instructions))
    return failure


def report_dropped(dropped: list[Run]) -> None:
    """Print the steps that did not run before the process ended."""
    for run in dropped:
        size = len(run.executable.program.instructions)
        print(f"lazystep: step {run.step} ({size} instructions) was dropped at exit", file=sys.stderr)
