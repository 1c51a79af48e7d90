"""Collectives as instructions: a launch, which returns at once, and a wait for its result.

    lazystep.all_reduce_(x, "sum", group)     # launched: the memory of x belongs to the network now
    lazystep.wait_(x)                         # x holds the sum

Each op names its process group. Launches are effects: pruning never removes one, and every rank launches them
in the order in which they were recorded, whatever executable runs the program. A wait is recorded right
behind its launch; `schedule` moves it behind the launches that follow.

Here the ops are declared, so that shape inference, `verify` and the builder know them, and those that take
their place in graphs that are compiled: see `compile/collectives.py`. `execute/communicate.py` has the
kernels that talk to other ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .program import Instruction, Program

# Kept for the life of the process: dropping a Library removes its ops.
_library = torch.library.Library("lazystep", "FRAGMENT")
_library.define("all_reduce_(Tensor(a!) x, str op, str group) -> Tensor(a!)")
_library.define("broadcast_(Tensor(a!) x, int root, str group) -> Tensor(a!)")
_library.define("all_gather_(Tensor(a!) out, Tensor x, str group) -> Tensor(a!)")
_library.define("reduce_scatter_(Tensor(a!) out, Tensor x, str op, str group) -> Tensor(a!)")
_library.define("wait_(Tensor(a!) x) -> Tensor(a!)")
# In libraries only. All of them write `order`, so the compiler keeps them in order. A wait takes the operand
# of its launch, too: until then its memory belongs to the network. `what`: see `sequence_of`.
_library.define("launch(Tensor(a!) order, Tensor(b!) out, Tensor? operand, str what) -> ()")
_library.define("wait(Tensor(a!) order, Tensor(b!) out, Tensor? operand, str what) -> ()")
# The same without mutation, for tracing.
_library.define("launched(Tensor order, Tensor out, Tensor? operand, str what) -> (Tensor, Tensor)")
_library.define("waited(Tensor order, Tensor out, Tensor? operand, str what) -> (Tensor, Tensor)")


def _returns_first(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x


def _returns_new(order: torch.Tensor, out: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(order), torch.empty_strided(
        out.shape, out.stride(), dtype=out.dtype, device=out.device
    )


LAUNCHES = tuple(
    f"lazystep.{name}.default" for name in ("all_reduce_", "broadcast_", "all_gather_", "reduce_scatter_")
)
ALL_REDUCE = "lazystep.all_reduce_.default"
BROADCAST = "lazystep.broadcast_.default"
WAIT = "lazystep.wait_.default"
for _name in (*LAUNCHES, WAIT):
    _library.impl(_name.split(".")[1], _returns_first, "Meta")
for _name in ("launched", "waited"):
    _library.impl(_name, _returns_new, "Meta")
for _name in ("launch", "wait"):
    _library.impl(_name, lambda *_: None, "Meta")


def is_launch(instruction: Instruction) -> bool:
    """Whether an instruction launches a collective."""
    return instruction.op in LAUNCHES


def is_effect(instruction: Instruction) -> bool:
    """Whether an instruction must run even if nothing uses its result: other ranks rely on it."""
    return instruction.op in LAUNCHES or instruction.op == WAIT


def group_of(instruction: Instruction) -> str:
    """The name of the process group of a launch; empty for any other instruction."""
    group: str = instruction.args[-1] if is_launch(instruction) else ""
    return group


def launches_of(program: Program) -> list[Instruction]:
    """The launches of a program, in order."""
    return [instruction for instruction in program.instructions if is_launch(instruction)]


def operand_of(launch: Instruction) -> int:
    """The value that a launch sends."""
    return list(launch.reads())[-1]  # the only one, or the one behind the value that is written


def sequence_of(program: Program) -> list[tuple[int, Instruction, str]]:
    """The launches and waits of a program in order: the number of the launch, the instruction, its text."""
    numbers: dict[int, int] = {}  # by the storage that the network writes
    found: list[tuple[int, Instruction, str]] = []
    num_launches = 0
    for instruction in program.instructions:
        if not is_effect(instruction):
            continue
        storage = program.values[instruction.args[0].value].storage
        if is_launch(instruction):
            numbers[storage] = num_launches
            num_launches += 1
        number = numbers[storage]
        found.append((number, instruction, _text(number, instruction)))
    return found


def _text(number: int, instruction: Instruction) -> str:
    """A launch or wait as one text of a library: the number of the launch, the op, its details, its group."""
    kind = instruction.op.split(".")[1]
    if instruction.op == WAIT:
        return f"{number} {kind}"
    details = [str(arg) for arg in instruction.args[1:-1] if isinstance(arg, (str, int))]
    return " ".join([str(number), kind, "".join(details) or "-", group_of(instruction)])


def describe(program: Program, launch: Instruction) -> str:
    """A launch in words that must be the same on all ranks: what, how much, in which group."""
    target = program.values[launch.args[0].value].type
    literals = [repr(arg) for arg in launch.args[1:] if isinstance(arg, (str, int))]
    size = math.prod(target.shape)
    return f"{launch.op.split('.')[1].rstrip('_')}({size} x {target.dtype}, {', '.join(literals)})"
