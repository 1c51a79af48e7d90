"""The memory that a run writes: kept for snapshots before the run, marked after a failure."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import LazyStepError, StepError
from ..program.program import Program
from ._recorder import BoundInputs, Written
from .handle import Handle, Handles
from .snapshot import preserve_snapshots


class WrittenMemory:
    """The memory that one run of a program writes. See `RunMemory` in execute/run.py."""

    def __init__(self, inputs: Handles[Handle] | BoundInputs, written: Written, program: Program) -> None:
        self._inputs: Handles[Handle] | BoundInputs | None = inputs
        self._written = written
        self._program = program

    def before_run(self) -> LazyStepError | None:
        """Copy the values that snapshots still need. Returns the earlier failure that an input inherits."""
        inputs, self._inputs = self._inputs, None
        assert inputs is not None, "a run begins once"
        error = find_error(inputs.suspects())
        if error is None:
            preserve_snapshots(self._written.with_snapshots())
        return error

    def on_failure(self, error: LazyStepError, position: int) -> None:
        """Mark the memory that an instruction before or at `position` may have written."""
        for number, first_write in self._program.storage_writes().items():
            memory = self._written.get(number)
            if first_write <= position and memory is not None:
                damage = StepError(
                    f"this tensor was left half updated by a failed step ({error}). "
                    "Overwrite it as a whole (load_state_dict, copy_, zero_) or make it anew before going on."
                )
                damage.__cause__ = error
                memory.error = damage


def find_error(handles: Iterable[Handle]) -> LazyStepError | None:
    """The failure that one of these values inherits: half updated memory, or a step that never made it."""
    for handle in handles:
        if handle.memory.error is not None:
            return handle.memory.error
        if handle.tensor is None and handle.run is not None and handle.run.error is not None:
            return handle.run.error
    return None


def find_unreported(handles: Iterable[Handle]) -> LazyStepError | None:
    """The failure of a step that was to write one of these values, if nobody has been told of it yet."""
    for handle in handles:
        run = handle.memory.run
        if run is not None and run.error is not None and not run.error.is_reported:
            return run.error
    return None
