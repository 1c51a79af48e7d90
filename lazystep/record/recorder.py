"""The recorder's Python side: the lock for cuts and reads, and reading values.

C++ appends ops to the current recording by itself, under a lock of its own. A recording is a list of entries:
an op is its decision and the numbers of its operands, an input is its type and its storage. Entries hold no
values and no numbers that vary, so the list of entries *is* the program's key, built while recording. See
[Note: following] in src/recorder.h for why a repeated step costs no comparison of whole keys.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ..config import watch
from ..errors import ForkError
from . import _recorder
from .handle import Handle
from .source import user_line


class Barrier(Protocol):
    """What the recorder asks of the barrier, which stands above it."""

    def on_first_op(self) -> None:
        """The first op of the process is about to be recorded."""

    def synchronize(self, handles: Sequence[Handle]) -> None:
        """Run the current recording if one of these values needs it, and wait for the values."""

    def flush(self) -> object:
        """Queue the current recording. Waits for a place among the steps in flight, and for no value."""

    def synchronize_all(self) -> None:
        """Run the current recording and wait for every queued step."""

    def drain(self) -> None:
        """Run the current recording and wait for every queued step. Raises no step's failure."""

    def on_full(self) -> None:
        """The current recording has reached the setting `max_instructions`."""


class Recorder:
    """The process's recorder. Every method may be called from any thread."""

    def __init__(self, barrier: Barrier) -> None:
        self.barrier = barrier
        # Held for a cut or a read, never while waiting for anything.
        self.lock = threading.RLock()
        self.is_forked = False  # this process is a forked child of the one that has the executor thread
        watch("max_instructions", _recorder.set_max_entries)

    @property
    def num_entries(self) -> int:
        """How many entries the current recording has."""
        return _recorder.num_entries()

    @contextmanager
    def reading(self, handles: Sequence[Handle]) -> Iterator[None]:
        """Wait for these values, then hold them still: no step that writes them starts inside the block.

        Waits without the lock, and looks again under it, since another thread may have queued a step.
        """
        while True:
            self.barrier.synchronize(handles)
            with self.lock:
                runs = [run for h in handles for run in (h.run, h.memory.run) if run is not None]
                if all(run.is_finished for run in runs):
                    yield
                    return

    # -- a forked child ------------------------------------------------------------------------

    def refuse_after_fork(self) -> None:
        """Make every lazy op and every barrier of this process raise `ForkError`."""
        self.is_forked = True
        _recorder.refuse()

    def check_fork(self) -> None:
        """Raise `ForkError` in a forked child: the executor thread has stayed in the parent."""
        if self.is_forked:
            raise ForkError(
                f"a lazy tensor was used in a forked child, at {user_line(2)}: the executor thread stayed in "
                'the parent. Use CPU tensors in workers and .to("lazy") in the parent, or start workers with '
                '"spawn".'
            )
