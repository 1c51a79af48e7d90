"""Checking a library: it runs before the reference executable on the same inputs, and must agree with it.

Both update the step's own state, one after the other. The library is first. Then its results are set aside,
the state from before the step is put back, and the reference computes the results that count. So a check
needs no second state in memory: see `kept.py` for where the copies are.

A step with collectives runs on all ranks once, so a check must not communicate twice, nor send what an
unchecked library has computed. There the reference is first. The library gets the results of its collectives
from a tape, and what it would have sent is compared with what the reference has sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from .. import metrics
from ..execute.communicate import Tape, sends_own, taping
from ..execute.compare import Results, describe, differences, distance, perturb_
from ..execute.executable import InstructionError
from ..execute.native import NativeExecutable, UnfitError
from ..execute.reference import ReferenceExecutable
from ..program.collectives import launches_of, operand_of
from ..program.program import Number, Program
from .kept import KeptMemory


class Checked(NamedTuple):
    """The results of a checked run, which are the reference's, and how the library did.

    `failure`: the library's error, empty if it ran. `mismatch`: where it disagreed, empty if nowhere.
    """

    outputs: list[torch.Tensor]
    failure: str = ""
    mismatch: str = ""


def run_checked(
    native: NativeExecutable,
    reference: ReferenceExecutable,
    inputs: list[torch.Tensor],
    scalars: Sequence[Number],
    directory: Path | None = None,
) -> Checked:
    """Run both executables on the same inputs and compare. The inputs end as the reference leaves them.

    `directory`: where large copies may be. Raises `UnfitError`, with the inputs untouched, if they do not fit
    the library; `NoRoomError`, with the inputs untouched, if there is no room for copies.
    """
    check = _Check(reference, list(inputs), scalars)
    with KeptMemory(check.num_bytes(), directory) as kept:
        metrics.count("native_checks")
        try:
            return check.run(native, inputs, kept)
        except OSError as error:
            # The copy of the state can't be read again, so the state is lost.
            last = len(reference.program.instructions) - 1
            raise InstructionError(last, all_started=True) from error


class _Check:
    """One check. `inputs` are the tensors that both executables update."""

    def __init__(
        self, reference: ReferenceExecutable, inputs: list[torch.Tensor], scalars: Sequence[Number]
    ) -> None:
        self.reference = reference
        self.program: Program = reference.program
        self.launches = launches_of(self.program)
        self.inputs = inputs
        self.scalars = scalars
        self.tape = Tape()  # of the reference, if the step communicates
        written = self.program.storage_writes()
        # A tensor of each storage that the step writes, by the number of the storage.
        self.state: dict[int, torch.Tensor] = {}
        for value, tensor in zip(self.program.inputs, inputs, strict=True):
            number = self.program.values[value].storage
            if number in written:
                self.state.setdefault(number, tensor)

    def num_bytes(self) -> int:
        """The size of all copies: the state twice, or three times, and the library's other results."""
        state = sum(tensor.untyped_storage().nbytes() for tensor in self.state.values())
        numbers = {self.program.values[value].storage for value in self.program.outputs}
        made = (self.program.storages[n] for n in numbers)
        num_states = 3 if self.launches else 2
        return num_states * state + sum(storage.nbytes for storage in made if not storage.is_input)

    def run(self, native: NativeExecutable, inputs: list[torch.Tensor], kept: KeptMemory) -> Checked:
        for number, tensor in self.state.items():
            kept.keep(("before", number), tensor.untyped_storage())
        if self.launches:
            return self._run_reference_first(native, inputs, kept)
        try:
            actual = self._set_aside(native.run(list(self.inputs), self.scalars), kept)
        except UnfitError:
            raise
        except Exception as error:
            # Nothing is lost. If memory has run out, the reference will say so itself.
            self._put_back(kept)
            return Checked(self.reference.run(inputs, self.scalars), failure=_reason(error))
        self._put_back(kept)
        outputs = self.reference.run(inputs, self.scalars)
        return self._compare(outputs, self._results(outputs), actual, kept)

    def _run_reference_first(
        self, native: NativeExecutable, inputs: list[torch.Tensor], kept: KeptMemory
    ) -> Checked:
        native.check_fit(inputs)
        with taping() as self.tape:
            outputs = self.reference.run(inputs, self.scalars)
        for number, tensor in self.state.items():
            kept.keep(("reference", number), tensor.untyped_storage())
        self._put_back(kept)
        failure = ""
        try:
            with taping(self.tape) as replayed:
                results = self._set_aside(native.run(list(self.inputs), self.scalars), kept)
        except Exception as error:
            failure = _reason(error)
        for number, tensor in self.state.items():
            kept.restore(("reference", number), tensor.untyped_storage())
        if failure:
            return Checked(outputs, failure=failure)
        expected = [*self._results(outputs), *self._sent(self.tape)]
        return self._compare(outputs, expected, itertools.chain(results, self._sent(replayed)), kept)

    def _compare(
        self,
        outputs: list[torch.Tensor],
        expected: Results,
        actual: Iterable[tuple[int, torch.Tensor]],
        kept: KeptMemory,
    ) -> Checked:
        def moves(numbers: Sequence[int]) -> list[float]:
            return self._moves(numbers, expected, kept)

        found = differences(self.program, expected, actual, moves)
        return Checked(outputs, mismatch=describe(self.program, found) if found else "")

    def _sent(self, tape: Tape) -> Results:
        """What a run has sent to other ranks, by value."""
        pairs = zip(self.launches, tape.sent, strict=True)
        return [(operand_of(launch), tensor) for launch, tensor in pairs if sends_own(launch)]

    def _put_back(self, kept: KeptMemory) -> None:
        for number, tensor in self.state.items():
            kept.restore(("before", number), tensor.untyped_storage())

    def _set_aside(self, outputs: list[torch.Tensor], kept: KeptMemory) -> Iterator[tuple[int, torch.Tensor]]:
        """Copy the library's results. Returns them one after the other, each loaded when it is needed."""
        for number, tensor in self.state.items():
            kept.keep(("after", number), tensor.untyped_storage())
        inputs = {tensor.untyped_storage().data_ptr() for tensor in self.inputs if tensor.numel()}
        places: list[tuple[int, torch.Tensor | None, Hashable, _Geometry]] = []
        for value, tensor in self._results(outputs):
            number, geometry = self.program.values[value].storage, _Geometry.of(tensor)
            if number in self.state:
                places.append((value, None, ("after", number), geometry))
            elif not tensor.numel() or tensor.untyped_storage().data_ptr() in inputs:
                places.append((value, tensor, None, geometry))  # neither executable writes this memory
            else:
                key = "result", tensor.untyped_storage().data_ptr()
                kept.keep(key, tensor.untyped_storage())
                places.append((value, None, key, geometry))

        def results() -> Iterator[tuple[int, torch.Tensor]]:
            for value, tensor, key, geometry in places:
                yield value, tensor if tensor is not None else geometry.view_of(kept.load(key))

        return results()

    def _results(self, outputs: Sequence[torch.Tensor]) -> Results:
        """Everything that a run has changed: its outputs and the inputs that it has written, by value."""
        results = list(zip(self.program.outputs, outputs, strict=True))
        for value, tensor in zip(self.program.inputs, self.inputs, strict=True):
            if self.program.values[value].storage in self.state:
                results.append((value, tensor))
        return results

    def _moves(self, numbers: Sequence[int], expected: Results, kept: KeptMemory) -> list[float]:
        """How far results of the reference move if the last bits of the inputs change.

        The state takes part in this run, and is afterwards as the reference has left it.
        """
        metrics.count("native_checks_perturbed")
        generator = torch.Generator().manual_seed(0)
        moved = self._moved_inputs(generator)
        changed = []
        try:
            for number, tensor in self.state.items():
                storage = tensor.untyped_storage()
                before = kept.load(("before", number))
                kept.keep(("before", number), storage)  # from here on, the state from after the step
                changed.append((number, storage))
                perturb_(_row(before, tensor.dtype), generator)
                storage.copy_(before)
            with taping(self.tape) as replayed:
                results = self._results(self.reference.run(list(moved), self.scalars))
            num_results = len(results)
            results = [*results, *self._sent(replayed)]
            found = []
            for n in numbers:
                value, tensor = expected[n]
                number = self.program.values[value].storage
                if number in self.state and n < num_results:
                    tensor = _Geometry.of(tensor).view_of(kept.load(("before", number)))
                found.append(distance(tensor, results[n][1]))
            return found
        except InstructionError:
            return [0.0] * len(numbers)  # no result at all: rounding explains nothing
        finally:
            for number, storage in changed:
                kept.restore(("before", number), storage)

    def _moved_inputs(self, generator: torch.Generator) -> list[torch.Tensor]:
        """The inputs, with noise in the last bits of copies of those that the step does not write.

        The noise is added by storage: views of one memory that come apart would seem to be very sensitive.
        """
        memory: dict[int, torch.UntypedStorage] = {}
        moved = []
        for value, tensor in zip(self.program.inputs, self.inputs, strict=True):
            number = self.program.values[value].storage
            if number not in self.state and tensor.dtype.is_floating_point:
                if number not in memory:
                    memory[number] = tensor.untyped_storage().clone()
                    perturb_(_row(memory[number], tensor.dtype), generator)
                tensor = _Geometry.of(tensor).view_of(memory[number])
            moved.append(tensor)
        return moved


class _Geometry(NamedTuple):
    """How a tensor looks at its storage."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Geometry:
        return cls(tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def view_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


def _reason(error: Exception) -> str:
    return str(error.__cause__ or error).partition("\n")[0]


def _row(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))
