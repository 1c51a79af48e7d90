"""A library in use, and the licence to run it without Python."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from .. import metrics
from ..compile.cache import Library
from ..config import settings
from ..execute.chain import ReadyRun
from ..execute.executable import InstructionError
from ..execute.native import NativeExecutable
from ..execute.thread_choice import make_thread_choice
from ..program.program import Number
from .agreement import Communication
from .families import Served


class LoadedLibrary:
    """A library in use, and on how many threads it runs now. `served`: the member, if it is a family's."""

    def __init__(self, native: NativeExecutable, library: Library, served: Served | None = None) -> None:
        self.native = native
        self.library = library
        self.served = served
        self.num_runs = 0
        has_choice = settings.tune_threads and native.num_threads > 1
        counts = [native.num_threads, 1] if has_choice else [native.num_threads]
        like = served.family_library.threads if served is not None else None
        self.threads = make_thread_choice(counts, like)
        if served is not None:
            served.family_library.threads = self.threads

    @property
    def is_checked(self) -> bool:
        """Whether it has agreed with the reference, now or in an earlier process."""
        return (self.served.tag if self.served is not None else "") in self.library.checked

    def run(self, inputs: list[torch.Tensor], scalars: Sequence[Number]) -> list[torch.Tensor]:
        """See `Executable.run`. Raises `UnfitError` before anything has run."""
        self.num_runs += 1
        num_threads = self.threads.next()
        if num_threads != self.native.num_threads:
            # The executor sets its count again before the next step that needs it.
            torch.set_num_threads(num_threads)
        outputs = self.native.run(inputs, scalars)
        self.threads.took(self.native.seconds)
        return outputs


class Licensed(Protocol):
    """What a licence asks of the executable that it is for, and changes in it."""

    tier: str
    num_runs: int
    num_native_runs: int
    licence: Licence | None


class Licence:
    """Lets runs of a program go without Python: see [Note: chain] in execute/chain.h.

    For one library, one set of fixed scalars and one number of threads. Valid from a native run to the next
    run of another kind.
    """

    def __init__(
        self,
        executable: Licensed,
        library: LoadedLibrary,
        fixed: Mapping[int, Number],
        num_threads: int,
        communication: Communication | None,
    ) -> None:
        self._executable = weakref.ref(executable)
        self._communication = communication
        self.library = library
        self.fixed = fixed
        self.num_threads = num_threads  # as the training thread has it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Licence) and (self.library is other.library and self.fixed is other.fixed)

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_valid(self) -> bool:
        """Whether the program's last run was one that this licence is for."""
        executable = self._executable()
        return executable is not None and executable.licence is self

    def agreements(self) -> list[tuple[Any, int]] | None:
        """See `Communication.agreements`; empty for a program without collectives."""
        return self._communication.agreements() if self._communication is not None else []

    def settle(self, run: ReadyRun) -> list[torch.Tensor]:
        """Do for a run without Python what a run does besides. Its outputs; raises `InstructionError`."""
        executable = self._executable()
        if executable is not None:
            executable.num_runs += 1
            executable.tier = "native"
        self.library.num_runs += 1
        failure: InstructionError | None = None
        try:
            outputs = self.library.native.outputs_of(run, self.fixed)
        except InstructionError as error:
            failure = error
            raise
        finally:
            if self._communication is not None:
                self._communication.end(run.communicated, failure)
        if executable is not None:
            executable.num_native_runs += 1
        metrics.count("native_executions")
        return outputs
