"""Large updates on lists are taken piece by piece: few intermediate results at a time, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lazystep
from lazystep.program import lists
from lazystep.program.lists import in_pieces
from lazystep.program.program import Instruction, Program, Ref, Storage, Value
from lazystep.program.types import type_of
from lazystep.program.verify import verify

TYPE = type_of(torch.empty(4))


def update(num_elements: int, nbytes: int) -> Program:
    """`b = sqrt(a); p += b` for lists of parameters `p` and state `a`."""
    n = num_elements
    p, a, b = range(n), range(n, 2 * n), range(2 * n, 3 * n)
    refs = {name: tuple(map(Ref, values)) for name, values in (("p", p), ("a", a), ("b", b))}
    instructions = (
        Instruction("aten._foreach_sqrt.default", (refs["a"],), (), tuple(b), (), (), None),
        Instruction("aten._foreach_add_.List", (refs["p"], refs["b"]), (), (None,), tuple(p), (), None),
    )
    values = {value: Value(TYPE, value) for value in range(3 * n)}
    storages = tuple(Storage(nbytes, value < 2 * n) for value in range(3 * n))
    return verify(Program(values, storages, tuple(range(2 * n)), (), instructions, ()))


def shape(program: Program) -> list[tuple[str, list[int]]]:
    return [(one.op.split(".")[1], [ref.value for ref in one.args[0]]) for one in program.instructions]


def test_small_update_stays_whole() -> None:
    program = update(3, 16)
    assert in_pieces(program) is program


def test_large_update_is_taken_piece_by_piece() -> None:
    found = verify(in_pieces(update(5, lists._PIECE // 2)))
    assert shape(found) == [
        ("_foreach_sqrt", [5, 6]),
        ("_foreach_add_", [0, 1]),
        ("_foreach_sqrt", [7, 8]),
        ("_foreach_add_", [2, 3]),
        ("_foreach_sqrt", [9]),
        ("_foreach_add_", [4]),
    ]
    assert [one.writes for one in found.instructions] == [(), (0, 1), (), (2, 3), (), (4,)]


def test_elements_that_share_memory_stay_together() -> None:
    program = update(4, lists._PIECE)
    values = {**program.values, 3: Value(TYPE, 2)}  # two parameters in one memory
    shared = Program(values, program.storages, program.inputs, (), program.instructions, ())
    assert in_pieces(shared) is shared


@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}])
def test_training_in_pieces_equals_eager_bitwise(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "_PIECE", 64)
    outcomes = []
    for device in ("cpu", "lazy"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 4), nn.Linear(4, 1)).to(device)
        optimizer = torch.optim.Adam(model.parameters(), **options)
        for _ in range(4):
            model(torch.ones(2, 3).to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            lazystep.mark_step()
        outcomes.append([p.detach().cpu() for p in model.parameters()])
    assert all(map(torch.equal, *outcomes))
    roots = [line for line in str(lazystep.debug.last_program()).splitlines() if "_foreach_sqrt" in line]
    assert len(roots) > 1
