"""What can run a program. The reference executable is the oracle; native ones must agree with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..program.program import Program


class Executable(Protocol):
    """Runs one program, any number of times, on one thread at a time."""

    program: Program
    number: int  # of the program, in the order in which programs appeared
    tier: str  # of the last run: reference, native, or checked (both)
    # Whether a thread that waits may run it. Only torch's own ops: others may block or know their thread.
    runs_anywhere: bool

    @property
    def is_licensed(self) -> bool:
        """Whether a run like the last one may go without Python: see [Note: chain] in chain.h."""

    def run(self, inputs: list[torch.Tensor], scalars: Sequence[Any]) -> list[torch.Tensor]:
        """Run once and return the outputs. Written inputs are updated in place.

        Empties `inputs`, so that a tensor nobody else holds is freed at its last use.
        Raises `InstructionError` where an op fails.
        """


class InstructionError(Exception):
    """An op of a program failed. `__cause__` is its error.

    Instructions before `position` have run; with `all_started`, as a library runs them in an order
    of its own, any may have; with `none_started`, none has.
    """

    def __init__(self, position: int, all_started: bool = False, none_started: bool = False) -> None:
        super().__init__(position)
        self.position = position
        self.all_started = all_started
        self.none_started = none_started
