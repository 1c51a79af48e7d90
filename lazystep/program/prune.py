"""Dead instructions: what nobody looks at afterwards is not run."""

from __future__ import annotations

import dataclasses

from .program import Program


def prune(program: Program) -> Program:
    """`program` without the instructions that neither an output nor an input storage depends on.

    An instruction stays if it makes a value that is needed, or if it writes into a storage that is
    an input or that a needed value lives in. Random numbers are drawn while recording, so a dropout
    that nobody uses has already advanced the stream and may go. Inputs and scalars keep their
    positions: they are the caller's side of the program.
    """
    values = program.values
    needed = set(program.outputs)
    live_storages = {values[v].storage for v in needed}
    live_storages |= {n for n, storage in enumerate(program.storages) if storage.is_input}
    kept = []
    for instruction in reversed(program.instructions):
        is_needed = any(v in needed for v in instruction.defines())
        writes_live = any(values[v].storage in live_storages for v in instruction.writes)
        if not (is_needed or writes_live):
            continue
        kept.append(instruction)
        for value in instruction.reads():
            needed.add(value)
            live_storages.add(values[value].storage)
    kept.reverse()
    return dataclasses.replace(program, instructions=tuple(kept))
