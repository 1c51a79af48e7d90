"""Ready runs of a captured step: see [Note: chain] in execute/chain.h.

A replay that follows a native run of the same program mostly has the same state and library. Then its tensors
and numbers are checked on the training thread, and nothing is left to do in Python before the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from . import timeline
from .config import settings
from .execute.chain import ReadyCall, ReadyRun
from .record._recorder import Binding, Bound, State
from .tiers.loaded import Licence
from .tiers.tiered import TieredExecutable


class Ready(NamedTuple):
    """A run that needs no Python, and what it takes to settle it."""

    run: ReadyRun
    licence: Licence

    @property
    def is_valid(self) -> bool:
        """Whether no other kind of run of the program has come between."""
        return self.licence.is_valid

    def settle(self) -> list[torch.Tensor]:
        """The outputs of the run, which has ended. Raises `InstructionError` if it has failed."""
        return self.licence.settle(self.run)


class ReadyReplays:
    """Makes the ready runs of one captured step. Belongs to the thread that holds the recorder's lock."""

    def __init__(
        self, executable: TieredExecutable, state: State, places: Sequence[int], own: Sequence[int]
    ) -> None:
        """`places`: where in a replay's list of numbers each scalar of the program is.

        `own`: positions of the inputs that each replay has its own of.
        """
        self._executable = executable
        self._state = state
        self._places = places
        self._own = own
        # The call for this state and library; None if it can't be made.
        self._bound: Bound | None = None
        self._licence: Licence | None = None
        self._call: ReadyCall | None = None

    def make(self, numbers: list[Any], binding: Binding) -> Ready | None:
        """The run of a replay that has been committed; None if it needs Python. Does not wait."""
        licence = self._executable.licence
        if licence is not self._licence or binding.bound is not self._bound:
            self._call = self._licence = self._bound = None  # do not keep tensors that are not used any more
        if licence is None or timeline.active is not None:
            return None
        if settings.tier == "reference" or settings.check_native.isdigit():
            return None
        if torch.get_num_threads() != licence.num_threads:
            return None
        tensors = binding.own_tensors()
        if tensors is None:
            return None
        if self._licence is None:
            inputs = self._state.tensors()
            if inputs is None:
                return None  # a tensor is not there yet
            library, agreements = licence.library, licence.agreements()
            if agreements is None:
                return None
            self._call = library.native.make_ready_call(
                inputs, self._own, self._places, licence.fixed, library.threads, agreements
            )
            self._licence, self._bound = licence, binding.bound
        run = self._call.make_run(tensors, numbers) if self._call is not None else None
        return None if run is None else Ready(run, licence)
