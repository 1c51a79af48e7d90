"""An observer looks on while a call is recorded: that is how a step is captured.

There is one observer at a time, and it observes one call. The recorder tells it of the call's
draws. The context tells it of closures. The barrier tells it of programs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from ..program.program import Number
from . import _recorder
from ._recorder import Cut
from .handle import Handle, Handles


class Draw(NamedTuple):
    """Random numbers or fresh memory from the host: the handle that got them, and how to get them again.

    `generator` is the one that the caller gave, None for torch's default generator. `state`: the generator's
    behind the draw, if the observer has noted it.
    """

    handle: Handle
    again: Callable[[], torch.Tensor]
    generator: torch.Generator | None
    state: torch.Tensor | None = None


class StepObserver(Protocol):
    """What the observer of a step is told."""

    def on_draw(self, draw: Draw) -> None:
        """Random numbers were drawn, or fresh memory was allocated, on the host."""

    def on_host_copy(self, handle: Handle) -> None:
        """Fresh memory has been filled from the host: it is no draw any more."""

    def on_attributes(self, tensor: torch.Tensor) -> None:
        """Code of ours copies the attributes that the user has set on a tensor."""

    def on_storage(self, asked: str) -> None:
        """Something of the memory of a tensor is asked for that its type does not say, such as an address."""

    def on_read(self, handle: Handle) -> torch.Tensor | None:
        """The call needs a value now. Returns a copy of it if it can be had without a barrier."""

    def on_closure(self, added: Any) -> None:
        """A closure was added to the step."""

    def on_exchange(self, reason: str) -> None:
        """The call has asked other ranks something, which no replay does."""

    def on_cut(self, cut: Cut, outputs: Handles[Handle | None], scalars: list[Number]) -> list[Number]:
        """A recording is about to be queued, with these outputs. Returns the numbers that it runs on."""


# How long a step waits for an observed call of another thread. That call may itself wait for this thread.
_PATIENCE = 1.0

_changed = threading.Condition()
_observer: StepObserver | None = None


def current() -> StepObserver | None:
    """The observer of the call that this thread works for, if there is one."""
    return _observer if _observer is not None and _recorder.is_in_observed_call() else None


def anywhere() -> StepObserver | None:
    """The observer of a call on any thread: the current recording may have ops of that call."""
    return _observer


def wait_for_other_threads() -> None:
    """Block while a call of another thread is observed, a second at most: a barrier would cut it in two."""
    if _observer is None or _recorder.is_in_observed_call():
        return
    with _changed:
        _changed.wait_for(lambda: _observer is None, _PATIENCE)


@contextmanager
def observing(observer: StepObserver) -> Iterator[bool]:
    """Let `observer` look on inside the block. False, and nothing is observed, if another thread has one.

    Waits for the other thread's call, for a second at most.
    """
    global _observer
    with _changed:
        is_free = _changed.wait_for(lambda: _observer is None, _PATIENCE)
        if is_free:
            _observer = observer
    if not is_free:
        yield False
        return
    _recorder.begin_observed_call()
    try:
        yield True
    finally:
        _recorder.end_observed_call()
        with _changed:
            _observer = None
            _changed.notify_all()
