"""How the executor thread sleeps, how a thread that waits runs a step by itself, and how threads end."""

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
flushes_denormals: Callable[[], bool] = _extension.flushes_denormals
"""Whether the calling thread takes very small numbers for zero: `torch.set_flush_denormal`."""
prepare_exit: Callable[[bool], None] = _extension.prepare_exit
"""Let daemon threads outlive the interpreter. True if one is still at work. See [Note: exit] in exit.h."""


def make_bell() -> Bell:
    """A bell that does not ring."""
    bell: Bell = _extension.Bell()
    return bell


def current_state() -> ThreadState:
    """The state of the calling thread, as it is now."""
    state: ThreadState = _extension.ThreadState()
    return state
