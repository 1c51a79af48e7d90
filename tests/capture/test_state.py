"""State that a captured step carries from call to call: rebound, in tuples, moved from place to place."""

from __future__ import annotations

import types
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn

import lazystep

from .common import NUM_CALLS, captured


def test_value_that_is_rebound_in_each_step_goes_on() -> None:
    class Recurrent:
        hidden = torch.zeros(2).to("lazy")

        def __init__(self) -> None:
            self.hidden = torch.zeros(2).to("lazy")

        @lazystep.step(audit_every=0)
        def advance(self, x: torch.Tensor) -> torch.Tensor:
            self.hidden = self.hidden * 0.5 + x
            return self.hidden.sum()

    model, want = Recurrent(), 0.0
    seen = []
    for number in range(NUM_CALLS):
        want = want * 0.5 + number
        seen.append(model.advance(torch.full((2,), float(number))))
        assert model.hidden[0].item() == want
    assert model.advance.num_replayed >= NUM_CALLS - 3
    model.hidden = torch.zeros(2).to("lazy")  # a reset between two calls
    assert model.advance(torch.ones(2)).item() == 2.0


def test_value_that_a_class_holds_goes_on() -> None:
    class Shared:
        hidden = torch.zeros(2).to("lazy")

    @lazystep.step(audit_every=0, fullgraph=True)
    def advance(x: torch.Tensor) -> torch.Tensor:
        Shared.hidden = Shared.hidden + x
        return Shared.hidden.sum()

    assert [advance(torch.ones(2)).item() for _ in range(5)] == [2, 4, 6, 8, 10]
    assert Shared.hidden.tolist() == [5, 5]
    assert advance.num_replayed == 3


class HiddenState(NamedTuple):
    hidden: torch.Tensor
    cell: torch.Tensor
    inner: tuple[torch.Tensor, int]


@pytest.mark.parametrize("kind", ["tuple", "named tuple"])
def test_state_in_a_tuple_goes_on(kind: str) -> None:
    class Reader(nn.Module):
        state: Any

        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, (hidden, cell) = self.lstm(x, tuple(self.state[:2]))
            hidden, cell = hidden.detach(), cell.detach()
            if kind == "tuple":
                self.state = (hidden, cell)
            else:
                self.state = HiddenState(hidden, cell, (self.state.inner[0] + 1, 3))
            return y.sum()

    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Reader().to(device)
        zeros = torch.zeros(1, 2, 4).to(device)
        model.state = (zeros, zeros)
        if kind == "named tuple":
            model.state = HiddenState(zeros, zeros, (zeros, 3))

        def read(x: torch.Tensor) -> torch.Tensor:
            loss = model(x)
            loss.backward()
            model.zero_grad()
            return loss

        step = lazystep.step(audit_every=0)(read) if device == "lazy" else read
        outputs = [step(torch.randn(5, 2, 3).to(device)) for _ in range(NUM_CALLS)]
        if device == "lazy":
            assert step.num_replayed >= NUM_CALLS - 3
        if kind == "named tuple":
            assert type(model.state) is HiddenState
            outputs.append(model.state.inner[0])
        return [value.detach().cpu() for value in [*outputs, *model.state[:2]]]

    for want, got in zip(run("cpu"), run("lazy"), strict=True):
        assert torch.equal(want, got)


def test_tuple_with_tensors_that_becomes_longer_is_noticed() -> None:
    box = types.SimpleNamespace(parts=(torch.ones(2).to("lazy"),))
    total = captured(lambda x: x + sum(part.sum() for part in box.parts))
    for number in range(1, 4):
        for _ in range(NUM_CALLS):
            assert total(torch.zeros(1)).item() == 2 * number
        box.parts = (*box.parts, torch.ones(2).to("lazy"))
    assert total.num_replayed >= 3 * (NUM_CALLS - 3)


def shift(s: Any, x: torch.Tensor) -> torch.Tensor:
    s.third, s.second = s.second, s.first
    s.first = x * 1.0
    return s.first.sum() + 10 * s.second.sum() + 100 * s.third.sum()


def swap(s: Any, x: torch.Tensor) -> torch.Tensor:
    s.first, s.second = s.second, s.first
    s.first.add_(x)
    return s.first.sum() * 2 + s.second.sum()


def keep_last(s: Any, x: torch.Tensor) -> torch.Tensor:
    s.second = s.first
    s.first = s.first * 0.5 + x
    return s.second.sum() + s.first.sum()


def keep_last_detached(s: Any, x: torch.Tensor) -> torch.Tensor:
    s.second = s.first.detach()
    s.first = s.first * 0.5 + x
    return s.second.sum() + s.first.sum()


def rotate_pair(s: Any, x: torch.Tensor) -> torch.Tensor:
    s.pair = (s.pair[1], s.pair[0] + x)
    return s.pair[0].sum() * 2 + s.pair[1].sum()


@pytest.mark.parametrize("function", [shift, swap, keep_last, keep_last_detached, rotate_pair])
def test_state_that_moves_from_place_to_place(function: Any) -> None:
    def run(device: str) -> tuple[list[float], list[list[float]], int]:
        first, second, third = (torch.full((2,), float(n)).to(device) for n in range(3))
        state = types.SimpleNamespace(first=first, second=second, third=third, pair=(first + 3, second + 4))

        def call(x: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, function(state, x))

        step: Any = lazystep.step(fullgraph=True, audit_every=0)(call) if device == "lazy" else call
        results = [step(torch.full((2,), float(n)).to(device)).item() for n in range(NUM_CALLS)]
        kept = [t.tolist() for t in (state.first, state.second, state.third, *state.pair)]
        return results, kept, step.num_replayed if device == "lazy" else 0

    want, want_kept, _ = run("cpu")
    got, kept, num_replayed = run("lazy")
    assert (got, kept) == (want, want_kept)
    assert num_replayed >= NUM_CALLS - 4


def test_kept_constant_is_not_one_tensor_for_all_replays() -> None:
    state = types.SimpleNamespace(total=torch.ones(2).to("lazy"))

    @lazystep.step(audit_every=0)
    def step(x: torch.Tensor) -> torch.Tensor:
        state.total.add_(x)
        result = state.total.sum()
        state.total = torch.ones(2).to("lazy")
        return result

    with pytest.warns(lazystep.LazyStepWarning, match="in 'total' it keeps a tensor that"):
        got = [step(torch.full((2,), float(n))).item() for n in range(NUM_CALLS)]
    assert got == [2.0 + 2 * n for n in range(NUM_CALLS)]


def test_state_of_another_type_is_not_replayed_at_the_second_call_either() -> None:
    weight = nn.Parameter(torch.ones(2).to("lazy"))
    scaled = captured(lambda x: (x * weight).sum().detach())
    for _ in range(4):
        assert scaled(torch.ones(2)).item() == 2
    weight.data = torch.full((2, 2), 3.0).to("lazy")
    for _ in range(6):
        assert scaled(torch.ones(2)).item() == 12
    weight.data = torch.ones(2).to("lazy")
    assert scaled(torch.ones(2)).item() == 2
