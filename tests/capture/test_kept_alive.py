"""What a step keeps alive: neither its owner nor arguments and results."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import lazystep
from tests.helpers import descend

from .common import captured

NUM_CALLS = 30
X = torch.ones(3)


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(3, 1).to("lazy")
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    @lazystep.step(audit_every=0)
    def train(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        descend(loss, self.optimizer)
        return loss.detach()


@pytest.mark.parametrize("num_calls", [1, 2, 6])
def test_step_that_is_a_method_does_not_keep_its_owner(num_calls: int) -> None:
    trainer = Trainer()
    for _ in range(num_calls):
        trainer.train(X)
    parts = [weakref.ref(part) for part in (trainer, trainer.model, trainer.optimizer)]
    del trainer
    gc.collect()
    assert [part() for part in parts] == [None] * 3


def test_owners_have_captures_of_their_own_after_others_have_gone() -> None:
    """A new object may get the address of a dead one: it must not get its captures."""
    for _ in range(5):
        trainer = Trainer()
        plain = Trainer()
        plain.model.load_state_dict(trainer.model.state_dict())
        for _ in range(5):
            want = Trainer.train.__wrapped__(plain, X.to("lazy"))  # type: ignore[attr-defined]
            assert trainer.train(X).item() == want.item()
        assert trainer.train.num_recorded <= 3, trainer.train.explain()
        del trainer, plain
        gc.collect()


def test_method_of_an_object_is_one_step() -> None:
    trainer = Trainer()
    assert trainer.train is trainer.train
    one = weakref.ref(trainer.train)
    gc.collect()
    trainer.train(X)
    assert one() is trainer.train


class SlotsTrainer:
    __slots__ = ("scale",)

    @lazystep.step(audit_every=0)
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale  # type: ignore[attr-defined]


def test_method_of_an_object_without_weak_references() -> None:
    one, other = SlotsTrainer(), SlotsTrainer()
    one.scale, other.scale = 2.0, 3.0
    for _ in range(4):
        assert one.double(X).tolist() == [2.0] * 3
        assert other.double(X).tolist() == [3.0] * 3
    assert one.double.num_replayed > 0


@dataclasses.dataclass
class ComparedTrainer:
    """Equal objects, which can't be keys of a dict."""

    scale: float = 2.0

    @lazystep.step(audit_every=0)
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_methods_of_equal_objects_are_steps_of_their_own() -> None:
    one, other = ComparedTrainer(), ComparedTrainer()
    for _ in range(4):
        one.double(X)
        other.double(X)
    assert one.double is not other.double
    other.scale = 3.0
    assert one.double(X).tolist() == [2.0] * 3
    assert other.double(X).tolist() == [3.0] * 3


def test_step_that_is_gone_keeps_nothing() -> None:
    def use() -> list[weakref.ref[Any]]:
        model = nn.Linear(3, 1).to("lazy")
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.ones(3).to("lazy")

        @lazystep.step(audit_every=0)
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            descend(loss, optimizer)
            return loss.detach()

        results = [step(batch) for _ in range(6)]
        assert step.num_replayed > 0
        return [weakref.ref(part) for part in (step, model, optimizer, batch, results[0])]

    parts = use()
    lazystep.wait_device_ops()
    gc.collect()
    assert [part() for part in parts] == [None] * 5


def test_capture_does_not_keep_arguments_and_results() -> None:
    step = captured(lambda x: x * 2)
    parts = []
    for _ in range(6):
        x = torch.ones(3).to("lazy")
        y = step(x)
        parts += [weakref.ref(x), weakref.ref(y)]
    del x, y
    lazystep.wait_device_ops()
    gc.collect()
    assert [part() for part in parts] == [None] * len(parts)
