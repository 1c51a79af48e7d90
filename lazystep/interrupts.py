"""Sections that Ctrl-C, or another signal, does not cut in two.

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


class undisturbed:  # noqa: N801 - see above
    """Hold back every signal that has a handler in Python, for the time of a `with` block.

    For a thread that runs a step by itself: an exception of a handler, such as a time limit by SIGALRM, would
    leave a half step. Does nothing outside the main thread.
    """

    __slots__ = ("_handlers", "_held")

    def __enter__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._held: list[tuple[int, FrameType | None]] = []
        if threading.get_ident() != _MAIN:
            return
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                _signal.signal(number, self._hold)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            _signal.signal(number, handler)
        self._handle(self._held)

    def _handle(self, held: list[tuple[int, FrameType | None]]) -> None:
        """Call the handlers of the signals that came, in order, also behind one that raises."""
        if held:
            number, frame = held[0]
            try:
                self._handlers[number](number, frame)
            finally:
                self._handle(held[1:])

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if all(number != earlier for earlier, _ in self._held):
            self._held.append((number, frame))


_SIGNALS = sorted(_signal.valid_signals())
_MAIN = threading.main_thread().ident
