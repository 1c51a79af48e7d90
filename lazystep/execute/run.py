"""One queued execution of a program: what goes in, what comes out, and how it ended."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from .. import timeline
from ..config import settings
from ..errors import LazyStepError, StepError, WaitTimeoutError, was_told
from ..openmp import release_pool
from ..program.program import Number
from .chain import ReadyRun
from .executable import Executable, InstructionError
from .threads import flushes_denormals


class Inputs(Protocol):
    """Where a run takes its inputs from: the recorder's handles."""

    def tensors(self) -> list[torch.Tensor]:
        """The real tensors, in program order."""


class Outputs(Protocol):
    """Where a run puts its outputs: the recorder's handles."""

    def deliver(self, tensors: list[torch.Tensor]) -> None:
        """Take the real tensors, in program order."""


class RunMemory(Protocol):
    """The memory that a run reads and writes."""

    def before_run(self) -> LazyStepError | None:
        """The run is about to write. Returns the earlier failure that one of its inputs inherits."""

    def on_failure(self, error: LazyStepError, position: int) -> None:
        """The run has failed; the instructions before `position` have run."""


class Ready(Protocol):
    """That a run needs nothing of Python's but to be settled: see [Note: chain] in chain.h."""

    @property
    def run(self) -> ReadyRun:
        """What the executor thread runs."""

    @property
    def is_valid(self) -> bool:
        """Whether it may still go without Python."""

    def settle(self) -> list[torch.Tensor]:
        """The outputs of the run, which has ended. Raises `InstructionError` if it has failed."""


class Runner(Protocol):
    """The executor that a run is queued at, as far as the run needs to know it."""

    def settle(self) -> None:
        """Settle the ready runs that have ended."""

    def begin_wait(self, run: Run) -> None:
        """The calling thread is going to wait for a run in Python: the end of the run must be told there."""

    def end_wait(self, run: Run) -> None:
        """It does not wait any more."""

    def run_up_to(self, run: Run) -> bool:
        """Run queued steps here, up to `run`, if that is better than to wait. Whether `run` has ended."""

    def note_read(self, step: int) -> None:
        """The calling thread needs a step that has ended already."""

    def before_end(self) -> None:
        """The running step is about to end, which wakes the threads that wait for it."""


class RunState(enum.Enum):
    """The life of a run."""

    QUEUED = "queued"  # made by the barrier, waits for its turn
    RUNNING = "running"  # the executor has taken it
    DONE = "done"  # every output has its tensor
    FAILED = "failed"  # `error` says why; outputs have no tensor


class Run:
    """A program with its inputs. Made by the barrier, run by the executor, waited for by reads."""

    def __init__(
        self,
        executable: Executable,
        inputs: Inputs,
        scalars: Callable[[], list[Number]],
        outputs: Outputs,
        step: int,
        memory: RunMemory,
    ) -> None:
        """`scalars` is called on the executor thread: making Python numbers takes time."""
        # As the training thread has it now: how work is split decides the last bits of a reduction.
        self.num_threads = torch.get_num_threads()
        self.flushes_denormals = flushes_denormals()
        self.executable = executable
        self.step = step
        self.state = RunState.QUEUED
        self.error: LazyStepError | None = None
        # None once the run has begun, or has ended: a finished run lives as long as the memory that it wrote.
        self._inputs: Inputs | None = inputs
        self._scalars: Callable[[], list[Number]] | None = scalars
        self._outputs: Outputs | None = outputs
        self._memory: RunMemory | None = memory
        # Held until the run has ended. A bare lock: an Event is made of three objects, once per step.
        self._finished = threading.Lock()
        self._finished.acquire()
        self.is_finished = False
        self.runner: Runner | None = None  # set when the run is queued
        # Set while the run may go without Python.
        self.ready: Ready | None = None
        self._num_told = LazyStepError.num_told  # failures that the user had seen when it was made
        self.num_failed = 0  # runs that had failed when it was made ready

    def execute(self) -> LazyStepError | None:
        """Run on the calling thread. Returns a new failure; None also where an untold one is the cause."""
        handles, self._inputs = self._inputs, None
        self.ready = None
        scalars, memory = self._scalars, self._memory
        assert handles is not None, "a run is executed once"
        assert scalars is not None
        assert memory is not None
        self.state = RunState.RUNNING
        inherited = memory.before_run()
        if inherited is not None:
            return self._inherit(inherited)
        inputs = handles.tensors()
        # The list is all that holds the inputs now, besides handles that the user still has.
        del handles
        try:
            tensors = self.executable.run(inputs, scalars())
        except InstructionError as error:
            return self._stop(error)
        self._deliver(tensors)
        del tensors  # a thread that wakes now may count the references to an output
        self._finish(RunState.DONE)
        return None

    def settle(self) -> LazyStepError | None:
        """Take over the results of a ready run that has ended. Returns its failure, or None."""
        ready, self.ready = self.ready, None
        assert ready is not None
        try:
            self._deliver(ready.settle())
        except InstructionError as error:
            return self._stop(error)
        self._finish(RunState.DONE)
        return None

    def _deliver(self, tensors: list[torch.Tensor]) -> None:
        if self._outputs is not None:  # None if the run was abandoned meanwhile
            self._outputs.deliver(tensors)

    def _inherit(self, error: LazyStepError) -> LazyStepError | None:
        """End because of an earlier failure. It is a new one for a loop that was told and goes on.

        Without that, a loop that reads nothing would do nothing from then on, and not know it.
        """
        if not was_told(error, self._num_told):
            self._fail(error, -1)
            return None
        failure = StepError(f"step {self.step} did not run: {error}")
        failure.__cause__ = error
        self._fail(failure, -1)
        return failure

    def _stop(self, error: InstructionError) -> LazyStepError:
        failure = self._describe(error)
        last = len(self.executable.program.instructions)
        started = last if error.all_started else error.position
        self._fail(failure, 0 if error.none_started else started)
        return failure

    def abandon(self, reason: str, cause: LazyStepError | None = None) -> None:
        """End without having run."""
        error = StepError(f"step {self.step} did not run: {reason}")
        error.__cause__ = cause
        self._fail(error, -1)

    def wait(self) -> None:
        """Block until the run has ended, or run it here: see [Note: one pool] in executor.py.

        Waiting for another thread is bounded by the setting `wait_timeout`.
        """
        if self.runner is not None:
            if not self.is_finished:
                self.runner.settle()
            if self.is_finished:
                self.runner.note_read(self.step)
        if self.is_finished:
            return
        if timeline.active is None:
            self._wait()
            return
        with timeline.span(f"wait for step {self.step}", "waiting", step=self.step):
            self._wait()

    def _wait(self) -> None:
        if self.runner is not None and self.runner.run_up_to(self):
            return
        release_pool()
        if self.runner is None:
            self._wait_here()
            return
        self.runner.begin_wait(self)
        try:
            self._wait_here()
        finally:
            self.runner.end_wait(self)

    def _wait_here(self) -> None:
        deadline = time.monotonic() + settings.wait_timeout
        while not self.is_finished:
            if self._finished.acquire(timeout=min(1.0, max(deadline - time.monotonic(), 0.0))):
                self._finished.release()
            elif time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"step {self.step} is still {self.state.value} after {settings.wait_timeout:g} s "
                    "(setting wait_timeout)"
                )

    def _describe(self, error: InstructionError) -> StepError:
        instruction = self.executable.program.instructions[error.position]
        cause = error.__cause__
        native = " (native)" if error.all_started else ""
        failure = StepError(
            f"step {self.step}{native} failed in {instruction.op}, recorded at {instruction.where}: "
            f"{type(cause).__name__}: {cause}"
        )
        failure.__cause__ = cause
        return failure

    def _fail(self, error: LazyStepError, position: int) -> None:
        self.error = error
        if self._memory is not None:
            self._memory.on_failure(error, position)
        self._finish(RunState.FAILED)

    def _finish(self, state: RunState) -> None:
        if self.runner is not None:
            self.runner.before_end()
        self.state = state
        self._inputs = self._scalars = self._outputs = self._memory = self.ready = None
        has_ended, self.is_finished = self.is_finished, True
        if not has_ended:  # one that was abandoned while it ran ends a second time
            self._finished.release()
