"""Values that a step reads in mid-call: replayed if they last, and never replayed wrongly."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lazystep
from tests.helpers import count

from .common import captured
from .scenes import NUM_AFTER, NUM_BEFORE, Scene, check_right

MASK = nn.Transformer.generate_square_subsequent_mask(3)


class Model(nn.Module):
    """Holds a mask, and looks at its values in each call."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.register_buffer("mask", MASK.clone())
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("gate", torch.tensor([True, False]))
        self.weight = nn.Parameter(torch.ones(3))
        self.rate = 0.5
        self.to(device)


Read = Callable[[Model, torch.Tensor], Any]
READS: dict[str, Read] = {
    "item": lambda m, x: x * m.scale.item(),
    "branch": lambda m, x: x * 2 if m.gate.any() else x,
    "comparison": lambda m, x: x * 2 if bool((m.mask == m.mask.triu(1)).all()) else x,
    "part": lambda m, x: x * float(m.mask[:2, :2].exp().sum()),
    "list": lambda m, x: x * sum(m.gate.tolist()),
    "to the host": lambda m, x: x * m.scale.cpu(),
    "positions": lambda m, x: x * m.gate.nonzero().numel(),
    "size": lambda m, x: x * m.mask.new_ones(int(m.scale)).sum(),
    "made inside": lambda m, x: x * torch.arange(4.0, device=x.device).sum().item() + m.scale.item(),
    "made on the host": lambda m, x: x * torch.tensor([3.0]).to(x.device).mul(m.scale).item(),
    "numpy": lambda m, x: x * float(m.scale.detach().cpu().numpy()),
}
CHANGES: dict[str, Callable[[Model], Any]] = {
    "nothing": lambda m: None,
    "in place": lambda m: (m.mask.fill_(0), m.scale.mul_(2), m.gate.zero_()),
    "a part": lambda m: (m.mask[0].fill_(1), m.gate[:1].zero_(), m.scale[None].add_(1)),
    "data": lambda m: (m.mask.data.zero_(), m.scale.data.add_(1), m.gate.data.logical_not_()),
    "copy": lambda m: (m.mask.copy_(torch.ones(3, 3)), m.scale.copy_(torch.tensor(5.0)), m.gate.fill_(False)),
    "new tensors": lambda m: (
        setattr(m, "mask", m.mask.exp()),
        setattr(m, "scale", m.scale + 1),
        setattr(m, "gate", ~m.gate),
    ),
    "state dict": lambda m: m.load_state_dict(
        {
            "mask": torch.ones(3, 3),
            "scale": torch.tensor(7.0),
            "gate": torch.tensor([False, False]),
            "weight": torch.ones(3),
        }
    ),
    "on the host": lambda m: (
        m.mask.masked_scatter_(m.mask > 9, m.mask),
        m.scale.set_(torch.tensor(3.0).to(m.scale.device)),  # type: ignore[call-overload]
        m.gate.index_put_((torch.tensor([0, 1]).to(m.gate.device),), torch.tensor(False).to(m.gate.device)),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("read", READS)
def test_value_of_a_buffer(read: str, change: str) -> None:
    def make(device: str) -> Scene:
        model = Model(device)
        return Scene(
            lambda x: READS[read](model, x * model.weight).detach() * 1,
            change=lambda: CHANGES[change](model),
            arguments=lambda number: (torch.full((3,), number + 1.0).to(device),),
        )

    step, replays = check_right(make)
    assert replays[NUM_BEFORE - 1] >= NUM_BEFORE - 4, step.explain()
    assert replays[-1] - replays[NUM_BEFORE - 1] >= NUM_AFTER - 4, step.explain()


def test_argument_that_stays_is_rested_on_and_a_new_one_is_not() -> None:
    x = torch.arange(3.0).to("lazy")
    first, second = MASK.to("lazy"), torch.zeros(3, 3).to("lazy")
    step = captured(lambda x, mask: x * 2 if bool((mask == 0).all()) else x)
    for _ in range(6):
        assert step(x, first).tolist() == [0, 1, 2]
    assert step.num_replayed == 3
    assert step(x, second).tolist() == [0, 2, 4]
    second.fill_(1)
    assert step(x, second).tolist() == [0, 1, 2]
    assert step(x, first).tolist() == [0, 1, 2]
    assert step.num_replayed == 4


def test_argument_that_is_another_one_in_each_call_is_waited_for() -> None:
    step = captured(lambda x: x * 2 if x.sum() > 3 else x)
    with pytest.warns(lazystep.LazyStepWarning, match=r"waits for a value.*test_lasting\.py"):
        for number in range(6):
            x = torch.full((2,), float(number))
            want = (x * 2 if x.sum() > 3 else x).tolist()
            assert step(x.to("lazy")).tolist() == want
    assert step.num_replayed == 0


def test_value_that_another_captured_step_writes() -> None:
    model = Model("lazy")
    read = captured(lambda x: x * model.scale.item())

    @lazystep.step(audit_every=0)
    def write(x: torch.Tensor) -> torch.Tensor:
        model.scale.add_(x.sum())
        return model.scale * 1

    x = torch.ones(2).to("lazy")
    for number in range(8):
        want = 2.0 + 2 * number
        assert read(x).tolist() == [want, want]
        assert read(x).tolist() == [want, want]
        write(x)
    assert write.num_replayed > 0


NEVER: dict[str, tuple[Read, str]] = {
    "written after the read": (lambda m, x: (x * m.scale.item(), m.scale.add_(1))[0], "and then changes it"),
    "written before the read": (lambda m, x: (m.scale.add_(1), x * m.scale.item())[1], "waits for a value"),
    "drawn": (lambda m, x: x * torch.rand(2, device=x.device).sum().item(), "waits for a value"),
    "weighted by a number": (lambda m, x: x * (m.scale * m.rate).item(), "waits for a value"),
    "trained": (
        lambda m, x: ((x * m.weight.sum().item()).sum(), m.weight.data.mul_(0.9))[0],
        "and then changes it",
    ),
}


@pytest.mark.parametrize("kind", NEVER)
def test_value_that_does_not_last_is_a_reason(kind: str) -> None:
    read, reason = NEVER[kind]

    def make(device: str) -> Scene:
        model = Model(device)

        def arguments(number: int) -> tuple[torch.Tensor]:
            model.rate = 0.5 + number
            return (torch.full((3,), number + 1.0).to(device),)

        return Scene(lambda x: read(model, x), arguments=arguments)

    step, replays = check_right(make)
    assert replays[-1] == 0
    assert reason in step.explain()


def test_reading_a_value_that_lasts_cuts_nothing_and_audits_agree() -> None:
    model = Model("lazy")
    step = lazystep.step(lambda x: x * 2 if bool((model.mask == 0).all()) else x)
    x = torch.ones(3).to("lazy")
    lazystep.mark_step(wait=True)
    before = count("programs_recorded") + count("programs_replayed"), lazystep.metrics.synchronizations()
    for _ in range(40):
        step(x)
    assert count("programs_recorded") + count("programs_replayed") - before[0] == 40
    assert lazystep.metrics.synchronizations() == before[1]
    assert count("captures_audited") >= 4
    assert step.num_replayed == 40 - 2 - count("captures_audited")
    assert count("lasting_values_read") == step.num_recorded


def test_read_of_a_value_that_a_failed_step_has_left_half_updated_raises() -> None:
    model = Model("lazy")
    step = captured(lambda x: x * model.scale.item())
    x = torch.ones(3).to("lazy")
    for _ in range(4):
        step(x)
    index = torch.tensor([7]).to("lazy")
    model.scale.mul_(3)
    bad = model.mask[0].index_select(0, index)
    model.scale.add_(bad.sum())
    with pytest.raises(lazystep.LazyStepError):
        lazystep.mark_step(wait=True)
    with pytest.raises(lazystep.LazyStepError, match="half updated"):
        step(x)


def test_memory_that_the_host_fills_again_after_the_read() -> None:
    scale = torch.empty((), device="lazy")
    scale.copy_(torch.tensor(2.0))
    step = captured(lambda x: x * scale.item())
    x = torch.ones(2).to("lazy")
    for number in range(9):
        if number % 3 == 0:
            scale.copy_(torch.tensor(float(number)))
        assert step(x).tolist() == [number // 3 * 3.0] * 2
    assert step.num_replayed > 0


def test_new_capture_says_which_value_has_changed() -> None:
    model = Model("lazy")
    step = captured(lambda x: x * model.scale.item())
    x = torch.ones(3).to("lazy")
    for number in range(8):
        if number == 4:
            model.scale.add_(1)
        step(x)
    assert "captured anew: the value that is read at" in step.explain()
    assert "test_lasting.py" in step.explain()


@pytest.mark.filterwarnings("ignore:.*waits for a value:lazystep.LazyStepWarning")
def test_result_of_a_call_that_is_not_captured_is_freed_without_the_collector() -> None:
    """It has the whole graph of the step."""
    layer = nn.Linear(3, 3).to("lazy")

    @lazystep.step
    def forward(x: torch.Tensor) -> torch.Tensor:
        result = layer(x)
        assert result.sum().item() != 0.123
        return result

    gc.collect()
    gc.disable()
    try:
        results = [weakref.ref(forward(torch.randn(2, 3))) for _ in range(4)]
        assert [one() for one in results] == [None] * 4
    finally:
        gc.enable()
    assert forward.num_replayed == 0
