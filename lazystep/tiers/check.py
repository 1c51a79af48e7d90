"""Checking a library: it runs beside the reference executable on the same inputs, and must agree with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from .. import metrics
from ..execute.compare import Results, describe, differences, perturb
from ..execute.native import NativeExecutable, UnfitError
from ..execute.reference import ReferenceExecutable
from ..program.program import Number, Program


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
) -> Checked:
    """Run both executables on the same inputs and compare. The inputs are updated by the reference alone.

    Raises `UnfitError`, with the inputs untouched, if they do not fit the library.
    """
    program = reference.program
    written = program.storage_writes()
    before = copy_written(program, inputs, written)
    copies = copy_written(program, inputs, written)
    state = list(inputs)
    metrics.count("native_checks")
    try:
        actual = results_of(program, copies, native.run(list(copies), scalars), written)
    except UnfitError:
        raise
    except Exception as error:
        # On copies: nothing is lost. If memory has run out, the reference will say so itself.
        reason = str(error.__cause__ or error).partition("\n")[0]
        return Checked(reference.run(inputs, scalars), failure=reason)
    outputs = reference.run(inputs, scalars)
    expected = results_of(program, state, outputs, written)

    def perturbed() -> Results:
        metrics.count("native_checks_perturbed")
        moved = _perturbed_inputs(program, before)
        return results_of(program, moved, reference.run(list(moved), scalars), written)

    found = differences(program, expected, actual, perturbed)
    return Checked(outputs, mismatch=describe(program, found) if found else "")


def copy_written(
    program: Program, inputs: Sequence[torch.Tensor], written: Mapping[int, int]
) -> list[torch.Tensor]:
    """The inputs, with copies of the memory that the program writes."""
    memory: dict[int, torch.UntypedStorage] = {}
    copies = []
    for value, tensor in zip(program.inputs, inputs, strict=True):
        storage = program.values[value].storage
        if storage in written:
            if storage not in memory:
                memory[storage] = tensor.untyped_storage().clone()
            like = torch.empty(0, dtype=tensor.dtype)
            tensor = like.set_(memory[storage], tensor.storage_offset(), tensor.shape, tensor.stride())
        copies.append(tensor)
    return copies


def results_of(
    program: Program,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    written: Mapping[int, int],
) -> Results:
    """Everything that a run has changed: its outputs and the inputs that it has written, by value."""
    results = list(zip(program.outputs, outputs, strict=True))
    for value, tensor in zip(program.inputs, inputs, strict=True):
        if program.values[value].storage in written:
            results.append((value, tensor))
    return results


def _perturbed_inputs(program: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs with noise in their last bits.

    The noise is added by storage: views of one memory that come apart would seem to be very sensitive.
    """
    generator = torch.Generator().manual_seed(0)
    memory: dict[int, torch.Tensor] = {}
    moved = []
    for value, tensor in zip(program.inputs, inputs, strict=True):
        number = program.values[value].storage
        if number not in memory:
            storage = tensor.untyped_storage()
            size = storage.nbytes() // tensor.dtype.itemsize
            row = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (size,), (1,))
            memory[number] = perturb(row, generator)
        moved.append(memory[number].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    return moved
