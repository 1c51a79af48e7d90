"""Ready runs: native steps that the executor thread runs one after the other without the interpreter lock.

See [Note: chain] in chain.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..extensions import RUNNER
from .communicate import Communicated


class ReadyRun(Protocol):
    """A native run whose tensors and numbers were checked when it was queued."""

    is_done: bool
    has_failed: bool
    is_refused: bool  # it has not run, and has to run in Python
    is_as_declared: bool  # the results need no copies, and share no memory with anything else
    error: str
    seconds: float
    communicated: Communicated  # if its program has collectives

    def arguments(self) -> list[torch.Tensor]:
        """All that the library has taken."""

    def returned(self) -> list[torch.Tensor]:
        """What the library has returned."""


class ReadyCall(Protocol):
    """A library together with the state that it has been found to fit."""

    def make_run(self, own: list[torch.Tensor], numbers: list[Any]) -> ReadyRun | None:
        """A run on these tensors; None if tensors or numbers are not those that the call is made for."""


class Chain(Protocol):
    """Hands ready runs to the executor thread, and tells when a run, ready or not, has ended."""

    num_ended: int
    num_unsettled: int  # ready runs that have ended and were not settled
    num_run: int  # ready runs that have ended
    num_returns: int  # how often the executor thread took the interpreter lock after ready runs
    num_wakes: int  # how often a thread took the interpreter lock in `wait_for_ends`

    def open(self, runs: Sequence[ReadyRun], stays_open: bool) -> None:
        """The executor thread is about to call `run`: these come first.

        It comes back behind them, unless `stays_open`.
        """

    def push(self, run: ReadyRun) -> bool:
        """Add a run behind the others. False if the chain is not open."""

    def drain(self) -> None:
        """Let the executor thread come back when the runs in the chain are over."""

    def end_behind(self, last: ReadyRun) -> None:
        """As `drain`, and not later than when `last`, which has been put into the chain, is over."""

    def stop(self) -> None:
        """Let the executor thread come back when the present run is over."""

    def run(self, patience: float) -> bool:
        """Run what is in the chain and what is pushed meanwhile, without the interpreter lock.

        False if nothing came for `patience` seconds.
        """

    def note_end(self) -> None:
        """A run that was not ready has ended."""

    def note_settled(self) -> None:
        """A ready run has been settled."""

    def wait_for_ends(self, wanted: int, timeout: float) -> None:
        """Block until `num_ended` is at least `wanted`, for `timeout` seconds at most."""


_extension = RUNNER.load()


def make_chain() -> Chain:
    """A chain that is not open."""
    chain: Chain = _extension.Chain()
    return chain


def make_ready_call(*arguments: Any) -> ReadyCall:
    """See `ReadyCall` in chain.h."""
    call: ReadyCall = _extension.ReadyCall(*arguments)
    return call
