"""A recording as a `Program`: done once per distinct program, never in the steady state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config import settings
from ..decide.decision import Decision
from ..program.lists import in_pieces
from ..program.program import Arg, Instruction, Program, Ref, ScalarRef, Source, Storage, Value
from ..program.prune import prune
from ..program.schedule import schedule
from ..program.types import TensorType
from ..program.verify import verify

# An op is (decision, operand, ...), an input (type at offset zero, storage number, size of the storage, bytes
# from the first input in the storage to this one). See [Note: offsets] in src/recorder.h.
Entry = tuple[Any, ...]


# The programs of a family have most instructions in common: all of the optimizer's, whose lists are long. So
# they are made once. By decision, operands, first scalar and number of values.
_instructions: dict[tuple[Decision, tuple[int, ...], int, int], Instruction] = {}
_MAX_INSTRUCTIONS = 20_000


def assemble(entries: Sequence[Entry], sources: Sequence[Source | None], outputs: Sequence[int]) -> Program:
    """The program of these entries that returns the values `outputs`: pruned, scheduled, in pieces."""
    values: dict[int, Value] = {}
    storages: list[Storage] = []
    inputs: list[int] = []
    scalars: list[type] = []
    instructions: list[Instruction] = []
    index = 0
    origins: dict[int, int] = {}
    for entry in entries:
        if type(entry[0]) is TensorType:
            origins[entry[1]] = min(origins.get(entry[1], 0), entry[3])
    for entry, source in zip(entries, sources, strict=True):
        head = entry[0]
        if type(head) is TensorType:
            _, number, nbytes, place_in_memory = entry
            if number == len(storages):
                storages.append(Storage(nbytes, True))
            offset, odd_bytes = divmod(place_in_memory - origins[number], head.dtype.itemsize)
            assert not odd_bytes, "views of different sizes of elements have an anchor"
            values[index] = Value(head.at(offset), number)
            inputs.append(index)
            index += 1
            continue
        decision: Decision = head
        operands = entry[1:]
        first_slot = len(scalars)
        scalars += decision.scalar_types

        def new_value(
            type_: TensorType,
            storage: int,
            alias: int,
            decision: Decision = decision,
            operands: tuple[int, ...] = operands,
        ) -> int:
            nonlocal index
            if alias >= 0:
                shift = values[operands[alias]].type.offset - decision.offsets[alias]
                type_ = type_.at(type_.offset + shift)
            values[index] = Value(type_, storage)
            index += 1
            return index - 1

        fresh: dict[int, int] = {}
        results: list[int | None] = []
        for result in decision.results:
            if result is None:
                results.append(None)
            elif result.same >= 0:
                results.append(operands[result.same])
            else:
                if result.alias >= 0:
                    storage = values[operands[result.alias]].storage
                elif result.alias in fresh:
                    storage = fresh[result.alias]
                else:
                    storage = fresh[result.alias] = len(storages)
                    storages.append(Storage(result.nbytes, False))
                results.append(new_value(result.type, storage, result.alias))
        rebinds = []
        for rebind in decision.rebinds:
            storage = values[operands[rebind.alias]].storage
            room = max(storages[storage].nbytes, rebind.nbytes)
            storages[storage] = storages[storage]._replace(nbytes=room)
            rebinds.append((operands[rebind.operand], new_value(rebind.type, storage, rebind.alias)))
        # The results follow from the decision, the operands and the number of values before.
        key = decision, operands, first_slot, index
        instruction = _instructions.get(key)
        if instruction is None or instruction.source != source:
            instruction = Instruction(
                op=decision.op,
                args=_place(decision.args, operands, first_slot),
                kwargs=tuple((name, _place(arg, operands, first_slot)) for name, arg in decision.kwargs),
                results=tuple(results),
                writes=tuple(operands[k] for k in decision.writes),
                rebinds=tuple(rebinds),
                source=source,
            )
            if len(_instructions) >= _MAX_INSTRUCTIONS:
                _instructions.clear()
            _instructions[key] = instruction
        instructions.append(instruction)
    program = Program(
        values, tuple(storages), tuple(inputs), tuple(scalars), tuple(instructions), tuple(outputs)
    )
    if settings.verify_programs:
        verify(program)
    program = in_pieces(schedule(prune(program)))
    return verify(program) if settings.verify_programs else program


def _place(arg: Arg, operands: Sequence[int], first_slot: int) -> Arg:
    """An argument of a decision with the program's own numbers of values and scalars."""
    kind = type(arg)
    if kind is Ref:
        return Ref(operands[arg.value])
    if kind is tuple:
        return tuple([_place(part, operands, first_slot) for part in arg])
    return ScalarRef(arg.slot + first_slot) if kind is ScalarRef else arg
