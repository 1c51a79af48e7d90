"""Somebody who looks on while a step is recorded: a captured step.

There is one observer at a time. The recorder tells it of draws, the step's context of closures, the barrier
of programs.
"""

from __future__ import annotations

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

    `generator` is the one that the caller gave, None for torch's default generator.
    """

    handle: Handle
    again: Callable[[], torch.Tensor]
    generator: torch.Generator | None


class StepObserver(Protocol):
    """What the observer of a step is told."""

    def on_draw(self, draw: Draw) -> None:
        """Random numbers were drawn, or fresh memory was allocated, on the host."""

    def on_host_copy(self, handle: Handle) -> None:
        """Fresh memory has been filled from the host: it is no draw any more."""

    def on_closure(self, added: Any) -> None:
        """A closure was added to the step."""

    def on_cut(self, cut: Cut, outputs: Handles[Handle | None], scalars: list[Number]) -> list[Number]:
        """A recording is about to be queued, with these outputs. Returns the numbers that it runs on."""


_current: StepObserver | None = None


def current() -> StepObserver | None:
    """The observer of the step that is being recorded."""
    return _current


@contextmanager
def observing(observer: StepObserver) -> Iterator[None]:
    """Let `observer` look on inside the block. C++ leaves draws and allocations to Python meanwhile."""
    global _current
    _current = observer
    _recorder.set_observed(True)
    try:
        yield
    finally:
        _current = None
        _recorder.set_observed(False)
