"""One queued execution of a program: what goes in, what comes out, and how it ended."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .. import timeline
from ..config import settings
from ..errors import LazyStepError, StepError, WaitTimeoutError
from ..openmp import release_pool
from .executable import Executable, InstructionError


class Cell(Protocol):
    """Where a run takes an input from or puts an output: the recorder's handles."""

    tensor: torch.Tensor | None


class StateOwner(Protocol):
    """Who owns the memory that a run reads and writes."""

    def find_error(self, cells: Sequence[Cell]) -> LazyStepError | None:
        """The earlier failure that left one of these inputs without a value or half updated."""

    def before_run(self) -> None:
        """The run is about to write its inputs."""

    def on_failure(self, error: LazyStepError, position: int) -> None:
        """The run has failed; the instructions before `position` have run."""


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
        inputs: Sequence[Cell],
        scalars: Any,
        outputs: Sequence[Cell | None],
        step: int,
        state: StateOwner,
    ) -> None:
        # As the training thread has it now: how work is split decides the last bits of a reduction.
        self.num_threads = torch.get_num_threads()
        self.executable = executable
        self.step = step
        self.state = RunState.QUEUED
        self.error: LazyStepError | None = None
        self._inputs = inputs
        self._scalars = scalars
        self._outputs = outputs
        self._state: StateOwner | None = state
        # Held until the run has ended. A bare lock: an Event is made of three objects, once per step.
        self._finished = threading.Lock()
        self._finished.acquire()
        self.is_finished = False

    def execute(self) -> LazyStepError | None:
        """Run on the calling thread. Returns a new failure; None also where an earlier one is the cause."""
        assert self._state is not None, "a run is executed once"
        self.state = RunState.RUNNING
        cells, self._inputs = self._inputs, ()
        inherited = self._state.find_error(cells)
        if inherited is not None:
            self._fail(inherited, -1)
            return None
        self._state.before_run()
        inputs = _tensors_of(cells)
        # The list is all that holds the inputs now, besides handles that the user still has.
        del cells
        try:
            tensors = self.executable.run(inputs, list_of_scalars(self._scalars))
        except InstructionError as error:
            failure = self._describe(error)
            last = len(self.executable.program.instructions)
            self._fail(failure, last if error.all_started else error.position)
            return failure
        self._deliver(tensors)
        self._finish(RunState.DONE)
        return None

    def _deliver(self, tensors: list[torch.Tensor]) -> None:
        # A frame of its own: whoever wakes when the run is done must not find a last output held here.
        deliver = getattr(self._outputs, "deliver", None)
        if deliver is not None:  # cells that do it at once
            deliver(tensors)
            return
        for cell, tensor in zip(self._outputs, tensors, strict=True):
            if cell is not None:
                cell.tensor = tensor

    def abandon(self, reason: str) -> None:
        """End without having run."""
        self._fail(StepError(f"step {self.step} did not run: {reason}"), -1)

    def wait(self) -> None:
        """Block until the run has ended. Bounded by the setting `wait_timeout`."""
        if self.is_finished:
            return
        release_pool()
        if timeline.active is None:
            self._wait()
            return
        with timeline.span(f"wait for step {self.step}", "waiting", step=self.step):
            self._wait()

    def _wait(self) -> None:
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
        if self._state is not None:
            self._state.on_failure(error, position)
        self._finish(RunState.FAILED)

    def _finish(self, state: RunState) -> None:
        self.state = state
        self._inputs = self._scalars = self._outputs = ()
        # A finished run lives as long as the storages it wrote; what it needed to run need not.
        self._state = None
        has_ended, self.is_finished = self.is_finished, True
        if not has_ended:  # one that was abandoned while it ran ends a second time
            self._finished.release()


def _tensors_of(cells: Sequence[Cell]) -> list[torch.Tensor]:
    tensors = getattr(cells, "tensors", None)
    if tensors is not None:  # cells that do it at once
        found: list[torch.Tensor] = tensors()
        return found
    return [_tensor_of(cell) for cell in cells]


def list_of_scalars(scalars: Any) -> list[Any]:
    """The numbers of a run, which a recorder may have kept as something else than Python objects."""
    found: list[Any] = scalars if type(scalars) is list else scalars.tolist()
    return found


def _tensor_of(cell: Cell) -> torch.Tensor:
    assert cell.tensor is not None, "an input of a run has neither a tensor nor an error"
    return cell.tensor
