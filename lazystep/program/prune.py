"""Pruning: removes instructions whose results no output and no input storage needs."""

from __future__ import annotations

import dataclasses

from .collectives import is_effect
from .program import Program


def prune(program: Program, keeps_effects: bool = True) -> Program:
    """`program` without the instructions that neither an output nor an input storage depends on.

    Without `keeps_effects`, only the outputs count: what is left makes them, and perhaps nothing else.

    An instruction stays if it makes a needed value, or if it writes an input storage or the storage of a
    needed value. A collective always stays: other ranks take part in it. Random numbers are drawn while
    recording, so an unused dropout has already advanced the generator and can be removed. Inputs and
    scalars keep their positions, because callers pass them by position.
    """
    values = program.values
    needed = set(program.outputs)
    live_storages = {values[v].storage for v in needed}
    if keeps_effects:
        live_storages |= {n for n, storage in enumerate(program.storages) if storage.is_input}
    kept = []
    for instruction in reversed(program.instructions):
        reads = instruction.reads()
        if needed.isdisjoint(instruction.defines()):
            writes_live = any(values[v].storage in live_storages for v in instruction.writes)
            if not (writes_live or (keeps_effects and is_effect(instruction))):
                continue
        kept.append(instruction)
        needed.update(reads)
        live_storages.update([values[value].storage for value in reads])
    kept.reverse()
    return dataclasses.replace(program, instructions=tuple(kept))
