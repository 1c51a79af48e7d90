"""How the executor thread sleeps, and how a thread that waits for a step runs it by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..extensions import RUNNER


class Bell(Protocol):
    """Wakes one thread. While the thread sleeps, it has no use for the interpreter lock."""

    def ring(self, delay: float) -> None:
        """Wake the thread in `delay` seconds, or when it next waits. Does not wait."""

    def stop(self) -> bool:
        """Take back a ring that the thread has not heard; whether there was one."""

    def wait(self, timeout: float | None) -> bool:
        """Block until it rings. False after `timeout` seconds."""


class ThreadState(Protocol):
    """What torch keeps per thread: modes, excluded dispatch keys, whether gradients are on."""

    def call(self, function: Callable[[], Any]) -> Any:
        """Call `function` in this state. The calling thread has its own state again afterwards."""


_extension = RUNNER.load()


def make_bell() -> Bell:
    """A bell that does not ring."""
    bell: Bell = _extension.Bell()
    return bell


def current_state() -> ThreadState:
    """The state of the calling thread, as it is now."""
    state: ThreadState = _extension.ThreadState()
    return state
