"""Sections that Ctrl-C does not cut in two.

A barrier tells handles which run computes them, and then queues the run. A `KeyboardInterrupt` in between
would leave tensors that wait for a run that was never queued. Inside `uninterrupted` the interrupt waits: it
is raised when the section is over.
"""

from __future__ import annotations

# The functions of `signal` without its enums, which take ten times as long.
import _signal  # type: ignore[import-not-found]
import threading
from types import FrameType
from typing import Any


class uninterrupted:  # noqa: N801 - reads like the context manager that it is
    """Hold SIGINT back for the time of a `with` block. Does nothing outside the main thread.

    A class, not a generator: it stands on the hot path of a barrier, and costs two calls of `sigaction`.
    """

    __slots__ = ("_handler", "_held")

    def __enter__(self) -> None:
        self._handler: Any = None
        self._held: FrameType | bool | None = False
        if threading.get_ident() != _MAIN:
            return  # Python runs handlers on the main thread alone
        handler = _signal.getsignal(_signal.SIGINT)
        if callable(handler):  # else the signal is ignored, or ends the process at once
            self._handler = handler
            _signal.signal(_signal.SIGINT, self._hold)

    def __exit__(self, *_: object) -> None:
        if self._handler is None:
            return
        _signal.signal(_signal.SIGINT, self._handler)
        if self._held is not False:
            self._handler(_signal.SIGINT, self._held)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held = frame


_MAIN = threading.main_thread().ident
