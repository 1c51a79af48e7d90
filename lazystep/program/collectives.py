"""Collectives as instructions: a launch, which returns at once, and a wait for its result.

    lazystep.all_reduce_(x, "sum", group)     # launched: the memory of x belongs to the network now
    lazystep.wait_(x)                         # x holds the sum

Each op names its process group. Launches are effects: pruning never removes one, and every rank launches them
in the order in which they were recorded, whatever executable runs the program. A wait is recorded right
behind its launch; `schedule` moves it to the first use.

Here the ops are declared, so that shape inference, `verify` and the builder know them.
`execute/communicate.py` has the kernels that talk to other ranks.
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


def _returns_first(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x


LAUNCHES = tuple(
    f"lazystep.{name}.default" for name in ("all_reduce_", "broadcast_", "all_gather_", "reduce_scatter_")
)
WAIT = "lazystep.wait_.default"
for _name in (*LAUNCHES, WAIT):
    _library.impl(_name.split(".")[1], _returns_first, "Meta")


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


def describe(program: Program, launch: Instruction) -> str:
    """A launch in words that must be the same on all ranks: what, how much, in which group."""
    target = program.values[launch.args[0].value].type
    literals = [repr(arg) for arg in launch.args[1:] if isinstance(arg, (str, int))]
    size = math.prod(target.shape)
    return f"{launch.op.split('.')[1].rstrip('_')}({size} x {target.dtype}, {', '.join(literals)})"
