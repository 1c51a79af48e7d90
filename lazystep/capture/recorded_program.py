"""The program of a recorded call, and its outputs that no replay could deliver."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from typing import NamedTuple

from ..record._recorder import KnownRecording
from ..record.handle import Handle
from ..tiers.program_cache import Variant


class RecordedProgram(NamedTuple):
    """The program of a recorded call, with the handles that went into its run and came out of it."""

    known: KnownRecording
    variant: Variant
    inputs: list[Handle]
    outputs: list[Handle | None]

    def drop_lost_outputs(self, owned: Collection[Handle]) -> str:
        """Let go of outputs that are not `owned`. Returns the maker of one that is still kept, or nothing.

        Only if there are such outputs: collects garbage, and blocks until the step that makes them has run.
        """
        lost = [
            (position, handle.weakly())
            for position, handle in enumerate(self.outputs)
            if handle is not None and handle not in owned
        ]
        if not lost:
            return ""
        for position, _ in lost:
            self.outputs[position] = None
        gc.collect()  # only a reference cycle may be holding the value
        for position, reference in lost:
            if reference() is not None:
                _wait_for_maker(reference)  # the queued step holds its outputs, too
            if reference() is not None:
                return str(self.variant.executable.program.maker_of(self.variant.outputs[position]))
        return ""


def _wait_for_maker(reference: Callable[[], Handle | None]) -> None:
    """Block until the step that makes a value has run or failed."""
    handle = reference()
    run = None if handle is None else handle.run
    del handle
    if run is not None:
        run.wait()
