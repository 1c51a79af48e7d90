"""Ops that several threads use for the first time, all at once: each is decided as on one thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from lazystep.decide.decide import decide
from lazystep.decide.decision import Action, Operand
from lazystep.decide.facts import OpFacts
from lazystep.program.types import type_of
from tests.capture.test_threads import run_threads

aten = torch.ops.aten
# Too large to be tried: they are inferred on fake tensors.
SIZE = 3000
OPS = [aten.tanh.default, aten.cumsum.default, aten.sort.default, aten.logit.default]


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_op_that_all_threads_use_first_is_inferred_in_each() -> None:
    def decide_all(_: int) -> list[tuple[str, Action, str]]:
        large = torch.empty(SIZE, SIZE, device="meta")
        operand = Operand(type_of(large), large.numel() * 4)
        decisions = []
        for _ in range(5):
            for op in OPS:
                args = (operand, 0) if op is aten.cumsum.default else (operand,)
                decided = decide(OpFacts(op), args, {})
                decisions.append((decided.op, decided.action, decided.reason))
        return decisions

    for decisions in run_threads(decide_all):
        assert {(action, reason) for _, action, reason in decisions} == {(Action.RECORD, "")}, decisions
