"""A value as of a barrier, for a closure that looks at it later.

An async closure runs while later steps update tensors in place. A snapshot makes sure that the closure sees
the value of its own step. It copies the value in two cases only: before the executor runs a step that
writes the memory, and when the closure comes first while something else still holds that memory.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable

import torch

from .. import metrics
from ..eager import eager_dispatch
from ..errors import LazyStepError
from ..program.types import tensor_type
from .handle import Handle, Memory

# Guards the list of snapshots of every `Memory`: three threads add to the lists and take from them.
_registry = threading.Lock()


class Snapshot:
    """The value that a handle has at this barrier. Taken on the training thread, after the barrier."""

    __slots__ = ("_handle", "_lock", "_runs", "_tensor")

    def __init__(self, handle: Handle) -> None:
        handle.pristine = False  # from now on the host may not fill it directly
        self._handle: Handle | None = handle
        self._runs = [run for run in (handle.run, handle.memory.run) if run is not None]
        self._tensor: torch.Tensor | None = None
        # Held for a copy, by the executor or by the reader; never while waiting for a step.
        self._lock = threading.Lock()
        memory = handle.memory
        with _registry:
            memory.snapshots = [*memory.snapshots, self]

    @property
    def is_due(self) -> bool:
        """Whether the value is there: every step that it depends on has run."""
        return all(run.is_finished for run in self._runs)

    @property
    def error(self) -> LazyStepError | None:
        """Why a step that makes or writes the value failed. The value may be that of before."""
        return next((run.error for run in self._runs if run.error is not None), None)

    def preserve(self) -> bool:
        """Copy the value before its memory is written. Returns whether a copy was needed.

        Called where the write is about to happen, under `eager_dispatch`.
        """
        with self._lock:
            if self._handle is None or self._tensor is not None or self._handle.tensor is None:
                return False
            self._tensor = self._copy(self._handle.tensor)
            self._handle = None
            return True

    def take(self) -> torch.Tensor:
        """The value as a CPU tensor that nothing else writes. Waits for its step; raises its error."""
        for run in self._runs:
            run.wait()
        with self._lock:
            if self._tensor is None:
                assert self._handle is not None
                handle, self._handle = self._handle, None
                try:
                    if handle.memory.error is not None:
                        raise handle.memory.error
                    if handle.tensor is None:
                        raise next(run.error for run in self._runs if run.error is not None)
                    # Counted in this frame: what a call to a Python function holds changes as it gets hot.
                    is_ours_alone = sys.getrefcount(handle) == _OWN_REFERENCES and handle.is_alone
                    if is_ours_alone:
                        self._tensor = handle.tensor
                    else:
                        metrics.count("snapshot_copies")
                        with eager_dispatch():
                            self._tensor = self._copy(handle.tensor)
                finally:
                    # Not before the copy is there: a step that is about to write finds the snapshot, and
                    # waits for its lock.
                    with _registry:
                        handle.memory.snapshots = [s for s in handle.memory.snapshots if s is not self]
            return self._tensor

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        # Under `eager_dispatch`.
        return tensor.clone()


def preserve_snapshots(memories: Iterable[Memory]) -> None:
    """Copy the values that snapshots still need of memory that is about to be written."""
    watched = [memory for memory in memories if memory.snapshots]
    if not watched:
        return
    num_copies = 0
    # Entered once and counted once: a checkpoint has a snapshot of each tensor of the state.
    with eager_dispatch():
        for memory in watched:
            with _registry:
                # A snapshot whose own step has not run yet wants what that step is about to write.
                due = [s for s in memory.snapshots if s.is_due]
                memory.snapshots = [s for s in memory.snapshots if s not in due]
            for snapshot in due:
                num_copies += snapshot.preserve()
    if num_copies:
        metrics.count("snapshot_copies", num_copies)


def _count_own_references() -> int:
    # Measured, not assumed: how many references an expression holds differs between Python releases.
    handle = Handle(tensor_type(torch.float32, (), ()), Memory(0))
    return sys.getrefcount(handle)


_OWN_REFERENCES = _count_own_references()
