"""Checks the invariants of a program. Tests run this after every transformation."""

from __future__ import annotations

from .program import LIST_OPS, Program, slots_of


def verify(program: Program) -> Program:
    """Return `program`, or raise an `AssertionError` that names the instruction with a broken invariant."""
    defined: set[int] = set()
    users: dict[int, list[str]] = {}  # by slot, the ops that take it

    for value in program.inputs:
        _check(value in program.values, "input", f"%{value} has no type")
        _check(value not in defined, "input", f"%{value} is listed twice")
        storage = program.values[value].storage
        _check(
            program.storages[storage].is_input, "input", f"%{value} lives in a storage made by the program"
        )
        defined.add(value)

    for position, instruction in enumerate(program.instructions):
        where = f"instruction {position} ({instruction.op})"
        reads = list(instruction.reads())
        for value in reads:
            _check(value in defined, where, f"%{value} is used before it is defined")
        for value in instruction.writes:
            _check(value in reads, where, f"%{value} is written but is not an argument")
        for argument, value in instruction.rebinds:
            _check(argument in reads, where, f"%{argument} is rebound but is not an argument")
            _check(value not in reads, where, f"%{argument} is rebound to another argument")
        for value in instruction.defines():
            _check(value not in defined, where, f"%{value} is defined twice")
            _check(value in program.values, where, f"%{value} has no type")
            defined.add(value)
        for result in instruction.results:
            _check(result is None or result in defined, where, f"result %{result} is not defined")
        for argument in (instruction.args, *(arg for _, arg in instruction.kwargs)):
            for slot in slots_of(argument):
                users.setdefault(slot, []).append(instruction.op)

    for slot, ops in users.items():
        _check(0 <= slot < len(program.scalars), "scalars", f"slot {slot} does not exist")
        # Parts of one list op, see `schedule`, share its scalars.
        is_split = len(set(ops)) == 1 and ops[0].startswith(LIST_OPS)
        _check(is_split or len(ops) == 1, "scalars", "a slot is used twice: equal scalars are never merged")

    for value in program.outputs:
        _check(value in defined, "outputs", f"%{value} is not defined")
    _check(len(set(program.outputs)) == len(program.outputs), "outputs", "a value is listed twice")

    for value in defined:
        type_, storage = program.values[value]
        _check(0 <= storage < len(program.storages), f"%{value}", f"storage {storage} does not exist")
        room = program.storages[storage].nbytes
        _check(type_.extent <= room, f"%{value}", f"{type_} reaches past its storage of {room} bytes")
    return program


def _check(condition: bool, where: str, what: str) -> None:
    if not condition:
        raise AssertionError(f"invalid program: {where}: {what}")
