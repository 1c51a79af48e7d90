"""Running a program twice on the same inputs, in tests that compare a lowered graph with the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lazystep.compile.lower import lower
from lazystep.compile.scalars import fixed_slots
from lazystep.execute.compare import Results, perturb_
from lazystep.program.program import Program
from lazystep.program.serialize import from_json, to_json
from lazystep.program.signature import Signature, signature_of


def lower_for(program: Program, scalars: Sequence[Any]) -> tuple[torch.fx.GraphModule, Signature]:
    """The program's lowered graph for these scalars, from its text as the builder gets it."""
    slots = fixed_slots(program)
    signature = signature_of(program, slots)
    graph, _ = lower(from_json(to_json(program)), signature, {slot: scalars[slot] for slot in slots})
    return graph, signature


def copy_inputs(program: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of the inputs that share memory as the inputs do."""
    memory: dict[int, torch.UntypedStorage] = {}
    copies = []
    for value, tensor in zip(program.inputs, inputs, strict=True):
        number = program.values[value].storage
        if number not in memory:
            memory[number] = tensor.untyped_storage().clone()
        copies.append(_view(tensor, memory[number]))
    return copies


def perturb_inputs(program: Program, inputs: Sequence[torch.Tensor]) -> None:
    """Noise in the last bits of the inputs, once for each memory."""
    generator = torch.Generator().manual_seed(0)
    known = set()
    for value, tensor in zip(program.inputs, inputs, strict=True):
        number = program.values[value].storage
        if number not in known:
            known.add(number)
            storage = tensor.untyped_storage()
            row = torch.empty(0, dtype=tensor.dtype)
            perturb_(row.set_(storage, 0, (storage.nbytes() // tensor.itemsize,), (1,)), generator)


def results_of(program: Program, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Results:
    """Everything that a run has changed: its outputs and the inputs that it has written, by value."""
    written = program.storage_writes()
    results = list(zip(program.outputs, outputs, strict=True))
    for value, tensor in zip(program.inputs, inputs, strict=True):
        if program.values[value].storage in written:
            results.append((value, tensor))
    return results


def _view(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    like = torch.empty(0, dtype=tensor.dtype)
    return like.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
