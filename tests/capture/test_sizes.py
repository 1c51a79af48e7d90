"""Captured steps whose sizes vary: a new size is witnessed once, and compared once if need be."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lazystep

from ..helpers import count, descend


def trainer(
    device: str, loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> Callable[..., torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, x)
        descend(loss, optimizer)
        return loss

    return train


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model(x)
    return y.view(-1, 2).square().mean() + y[1:].sum() * 0.01


def both(step: Callable[..., torch.Tensor], eager: Callable[..., torch.Tensor], *sizes: int) -> None:
    for size in sizes:
        x = torch.randn(size, 4)
        assert torch.equal(step(x).cpu(), eager(x))


def test_new_size_is_captured_by_its_first_call_and_the_first_one_is_compared_with_its_second() -> None:
    step = lazystep.step(trainer("lazy", square))
    eager = trainer("cpu", square)
    both(step, eager, 5, 5, 5, 5)  # the first one makes the optimizer's state
    lazystep.metrics.reset()
    recorded = step.num_recorded
    for size in (7, 12, 9):
        both(step, eager, size)
        assert step.num_recorded == (recorded := recorded + 1)
        if size == 7:
            both(step, eager, size)  # recorded without a witness, and compared
            assert step.num_recorded == (recorded := recorded + 1)
        both(step, eager, *[size] * 6)
        assert step.num_recorded == recorded
    assert (count("captures_from_one_call"), count("captures"), count("captures_audited")) == (3, 3, 1)
    assert count("captures_outdated") == 0


def test_first_calls_of_different_sizes_explain_each_other() -> None:
    step = lazystep.step(trainer("lazy", square), audit_every=0)
    both(step, trainer("cpu", square), 5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7, 8, 9)
    # 5 makes the state, 6 shows the places; 7, 8 and 9 are captured at once and then compared.
    assert count("captures_from_one_call") >= 3
    assert step.num_replayed >= 3


def test_many_sizes_in_any_order_with_fullgraph() -> None:
    chosen = random.Random(1)
    sizes = [chosen.choice(range(3, 17)) for _ in range(80)]
    step = lazystep.step(trainer("lazy", square), fullgraph=True)
    both(step, trainer("cpu", square), *sizes)
    assert step.num_recorded <= 2 * 14 + 12  # also the early audits of captures from two calls
    assert count("captures_dropped") == 0


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda model, x: model(x).sum() / x.shape[0],
        lambda model, x: (model(x) * torch.arange(len(x))[:, None].to(x.device)).sum(),
        lambda model, x: model(x).sum() * (2.0 if len(x) > 8 else 0.5),
    ],
    ids=["a number", "a tensor from the host", "a branch"],
)
def test_what_depends_on_the_size_is_right(loss_of: Callable[..., torch.Tensor]) -> None:
    step = lazystep.step(trainer("lazy", loss_of))
    both(step, trainer("cpu", loss_of), *[5, 7, 9, 12] * 6)
    assert step.num_replayed >= 4


def test_state_that_changes_between_the_calls_of_a_size_is_followed() -> None:
    held = {"lazy": 1.0, "cpu": 1.0}

    def of(device: str) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
        return lambda model, x: model(x).sum() * held[device]

    step = lazystep.step(trainer("lazy", of("lazy")))
    eager = trainer("cpu", of("cpu"))
    both(step, eager, 5, 5, 5)
    for size in (7, 9) * 4:
        held["lazy"] = held["cpu"] = held["cpu"] + 0.5
        both(step, eager, size)
    assert step.num_replayed >= 4


USES: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "an integer": lambda x, number: x.roll(number, 0) * x,
    "a number": lambda x, number: x * (number * 0.5),
    "a tensor from the host": lambda x, number: x * torch.full((len(x), 1), float(number)).to(x.device),
}


@pytest.mark.filterwarnings("ignore:.*is recorded in each call")
@pytest.mark.parametrize("name", USES)
def test_what_nobody_sees_is_not_taken_for_a_matter_of_size(name: str) -> None:
    """One call can't tell where a number comes from, so the second one is compared before any replay."""
    table = torch.ones(20_000, dtype=torch.int64)  # too large to compare in each call
    memory = table.numpy()  # torch does not notice what NumPy writes

    @lazystep.step(audit_every=0)
    def step(x: torch.Tensor) -> torch.Tensor:
        return USES[name](x, table[0].item())

    for size, number in ((6, 1), (6, 1), (6, 1), (8, 1), (8, 2), (8, 3), (8, 4)):
        memory[0] = number
        x = torch.randn(size, 2)
        assert torch.equal(step(x).cpu(), USES[name](x, number))
    assert "not confirmed by the next" in step.explain()


def test_sizes_that_never_come_again_are_soon_recorded_without_a_witness() -> None:
    step = lazystep.step(max_captures=4)(trainer("lazy", square))
    eager = trainer("cpu", square)
    with pytest.warns(lazystep.LazyStepWarning):
        both(step, eager, *range(3, 43))
    assert count("captures") <= 4 + 8
    assert len(step._captures) <= 4 + 17
    # One that comes again all the time is captured in the end.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lazystep.LazyStepWarning)
        both(step, eager, *[100] * 50)
    assert step.num_replayed >= 4


def test_outlines_keep_no_tensors_alive() -> None:
    step = lazystep.step(trainer("lazy", square))
    for size in (5, 5, 5, 7, 7, 9, 9):
        step(torch.randn(size, 4))
    lazystep.wait_device_ops()
    for outline in step._outlines:
        leaves = [leaf for added in outline.added for leaf in (*added.args, *added.kwargs.values())]
        assert not any(isinstance(leaf, torch.Tensor) for leaf in (*outline.result_leaves, *leaves))
