"""On how many threads a library runs: one or all, whichever is faster at present. See thread_choice.h."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from ..extensions import RUNNER


class ThreadChoice(Protocol):
    """Chooses between thread counts: `next` is asked before each run, and `took` is told after it.

    Runs without Python do both in C++.
    """

    def next(self) -> int:
        """The number of threads for the next run."""

    def took(self, seconds: float) -> None:
        """Report how long the run on `next()` threads has taken."""


_extension = RUNNER.load()


def make_thread_choice(counts: Collection[int], like: ThreadChoice | None = None) -> ThreadChoice:
    """A choice between these counts. `like`: that of a similar library, kept until runs become slow."""
    choice: ThreadChoice = _extension.ThreadChoice(list(counts), like)
    return choice
