"""Where a tensor begins in its memory is no part of a program: slices of a dataset share one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazystep
from lazystep import metrics
from tests.capture.common import captured

NUM_OFFSETS = 100
DATA = torch.linspace(-3, 3, 1200).reshape(120, 10)

SLICES: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "slice": lambda data, i: data[i : i + 5],
    "narrow": lambda data, i: data.narrow(0, i, 5),
    "row": lambda data, i: data[i],
    "negative": lambda data, i: data[i - 110 : i - 105],
    "step": lambda data, i: data[i : i + 10 : 2],
    "view_of_slice": lambda data, i: data[i : i + 5].t()[2:4],
    "slice_of_slice": lambda data, i: data[i : i + 8][1:4, 2:],
    "last_dimension": lambda data, i: data[i : i + 20, i % 4 : i % 4 + 5],
    "empty": lambda data, i: data[i:i],
}


@pytest.mark.parametrize("take", SLICES.values(), ids=SLICES)
def test_slices_at_all_offsets_are_one_program_in_a_plain_loop(
    take: Callable[[torch.Tensor, int], torch.Tensor],
) -> None:
    data, num_misses = DATA.clone().to("lazy"), 0
    for i in range(NUM_OFFSETS):
        before = metrics.counter_value("cache_misses")
        got, want = take(data, i), take(DATA, i)
        result = (got.exp() * 2).sum() + got.mean()
        lazystep.mark_step()
        num_misses += metrics.counter_value("cache_misses") - before
        assert (got.shape, got.stride(), got.storage_offset()) == (
            want.shape,
            want.stride(),
            want.storage_offset(),
        )
        assert torch.equal(result.cpu(), (want.exp() * 2).sum() + want.mean()) or want.numel() == 0
        assert torch.equal(got.cpu(), want)
    assert num_misses <= 1


def test_tokens_and_their_successors_are_one_program() -> None:
    tokens = torch.arange(500) % 17
    lazy, table = tokens.to("lazy"), torch.randn(17, 4)
    lazy_table = table.to("lazy")
    num_misses = []
    for i in range(NUM_OFFSETS):
        before = metrics.counter_value("cache_misses")
        x, y = lazy[i : i + 8], lazy[i + 1 : i + 9]
        loss = torch.nn.functional.cross_entropy(lazy_table[x] @ lazy_table.t(), y)
        lazystep.mark_step()
        num_misses.append(metrics.counter_value("cache_misses") - before)
        logits = table[tokens[i : i + 8]] @ table.t()
        assert loss.item() == torch.nn.functional.cross_entropy(logits, tokens[i + 1 : i + 9]).item()
    assert sum(num_misses) <= 1


def test_rows_are_written_by_one_program() -> None:
    """A ring buffer: the row is another one in each step."""
    buffer, lazy = torch.zeros(10, 4), torch.zeros(10, 4).to("lazy")
    before = metrics.counter_value("cache_misses")
    for i in range(30):
        row = torch.full((4,), float(i))
        buffer[i % 10] = row
        lazy[i % 10] = row.to("lazy")
        lazystep.mark_step()
    assert torch.equal(lazy.cpu(), buffer)
    assert metrics.counter_value("cache_misses") - before <= 1


def test_a_window_and_its_memory_are_written_in_order() -> None:
    data, eager = DATA.clone().to("lazy"), DATA.clone()
    for i in range(6):
        for one in (data, eager):
            window = one[i : i + 3]
            window.add_(1)
            one.mul_(0.5)
            window[1].sub_(window[2])
            one[i + 1 : i + 4].copy_(one[i + 10 : i + 13] * 2)
        if i % 2:
            lazystep.mark_step()
        assert torch.equal(window, one[i : i + 3])
        assert torch.equal(data.cpu(), eager)


def test_window_of_a_value_that_is_still_queued() -> None:
    data = DATA.to("lazy") * 2
    lazystep.mark_step()
    window = data[7:9]
    del data
    assert torch.equal(window.cpu(), DATA[7:9] * 2)


def test_window_of_a_failed_step_raises_its_error() -> None:
    failed = DATA.to("lazy").index_select(0, torch.tensor([500]).to("lazy"))
    lazystep.mark_step()
    window = failed[0:1]
    with pytest.raises(lazystep.StepError, match="index_select"):
        window.cpu()


def test_out_of_range_raises_at_the_line_as_in_eager() -> None:
    data = DATA.to("lazy")
    with pytest.raises(IndexError, match=r"out of bounds|out of range"):
        data.select(0, 500)
    with pytest.raises(RuntimeError, match="exceeds dimension"):
        data.narrow(0, 118, 5)
    with pytest.raises(IndexError, match="Dimension out of range"):
        data.select(5, 0)


def test_a_fresh_allocation_is_not_filled_behind_its_window() -> None:
    data = torch.empty(6, device="lazy")
    window = data[2:4]
    data.copy_(torch.arange(6.0))
    window += 1
    assert data.tolist() == [0.0, 1.0, 3.0, 4.0, 4.0, 5.0]


ABSOLUTE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as_strided": lambda x: x.as_strided((2, 2), (1, 3), 7) + 1,
    "as_strided_here": lambda x: x.as_strided((2, 2), (1, 3)) + 1,
    "as_strided_scatter": lambda x: x.as_strided_scatter(torch.zeros(2, 2).to(x.device), (2, 2), (1, 3), 35),
    "as_strided_in_place": lambda x: x.detach().as_strided_((2, 2), (1, 3), 7) + 1,
    "other_elements": lambda x: x.view(torch.int16)[:, 1:5] + 1,
    "two_sizes": lambda x: x.view(torch.int16)[1] + x[1:, :5].repeat(1, 4)[0].int(),
    "out": lambda x: torch.exp(x, out=x[0:0].new_empty(0)) + x,
    "resized": lambda x: x[:1].clone().resize_(3) * 0,
    "conjugate": lambda x: torch.view_as_complex(x[:2, :2].reshape(2, 2)).conj().resolve_conj().real,
    "transposed_in_place": lambda x: x.detach().t_()[1:3] * 2,
    "unfold": lambda x: x.unfold(1, 3, 2).sum(2),
    "diagonal": lambda x: x.diagonal(1) * 3,
}


@pytest.mark.filterwarnings("ignore:.*is recorded in each call")
@pytest.mark.parametrize("body", ABSOLUTE.values(), ids=ABSOLUTE)
def test_ops_on_slices_equal_eager(body: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Plain and captured, also ops that take an offset into the memory as a whole."""
    data = DATA.clone().to("lazy")
    step = captured(body)
    for i in (3, 3, 3, 3, 4, 5, 6, 3, 4, 0):
        want = body(DATA.clone()[i : i + 4])
        assert torch.equal(step(data[i : i + 4]).cpu(), want)
        assert torch.equal(body(data[i : i + 4]).cpu(), want)
        lazystep.mark_step()
    assert torch.equal(data.cpu(), DATA)


def _steps(model: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, x[1:]

    return step


def test_captured_step_on_slices_has_one_capture_for_all_offsets() -> None:
    torch.manual_seed(0)
    target, model = torch.randn(120, 1), torch.nn.Linear(10, 1)
    lazy_model = copy.deepcopy(model).to("lazy")
    eager, step = _steps(model), captured(_steps(lazy_model))
    data, lazy_target = DATA.to("lazy"), target.to("lazy")
    for i in range(NUM_OFFSETS):
        want, rest = eager(DATA[i : i + 8], target[i : i + 8])
        got, lazy_rest = step(data[i : i + 8], lazy_target[i : i + 8])
        assert got.item() == want.item()
        # A view of the argument is a view of the dataset.
        assert lazy_rest.storage_offset() == rest.storage_offset()
        assert torch.equal(lazy_rest.cpu(), rest)
    assert (step.num_recorded, step.num_replayed) == (3, NUM_OFFSETS - 3)
    assert "1 capture" in step.explain()
    for a, b in zip(model.parameters(), lazy_model.parameters(), strict=True):
        assert torch.equal(a, b.cpu())


def test_captured_step_writes_the_slice_that_it_is_given() -> None:
    data, eager = DATA.clone().to("lazy"), DATA.clone()
    step = captured(lambda x: x.mul_(2).sum())
    for i in range(20):
        assert step(data[i : i + 3]).item() == eager[i : i + 3].mul_(2).sum().item()
        assert torch.equal(data.cpu(), eager)
    assert step.num_replayed >= 17, step.explain()


def test_captured_step_notices_that_a_slice_shares_memory_with_state() -> None:
    other, eager = DATA.clone().to("lazy"), DATA.clone()
    data = DATA.clone().to("lazy")

    def body(x: torch.Tensor) -> torch.Tensor:
        data.add_(1)
        return x.sum()

    step, copied = captured(body), DATA.clone()
    for i in (1, 2, 3, 4, 5):
        eager.add_(1)
        assert step(other[i : i + 3]).item() == copied[i : i + 3].sum().item()
    assert step.num_replayed > 0
    for i in (1, 2, 3, 3, 3, 3, 2):
        eager.add_(1)
        assert step(data[i : i + 3]).item() == eager[i : i + 3].sum().item()
    for i in (4, 5):
        eager.add_(1)
        assert step(other[i : i + 3]).item() == copied[i : i + 3].sum().item()


def test_two_slices_of_one_memory_replay_at_one_distance() -> None:
    data = DATA.clone().to("lazy")
    step = captured(lambda x, y: x.mul_(2) + y)
    eager = DATA.clone()
    for i, distance in [
        (1, 4),
        (2, 4),
        (3, 4),
        (9, 4),
        (9, 5),
        (10, 5),
        (11, 5),
        (12, 5),
        (5, 4),
        (9, -5),
        (2, 4),
    ]:
        x, y = eager[i : i + 2], eager[i + distance : i + distance + 2]
        want = x.mul_(2) + y
        assert torch.equal(step(data[i : i + 2], data[i + distance : i + distance + 2]).cpu(), want)
        assert torch.equal(data.cpu(), eager)
    assert step.num_replayed >= 4, step.explain()


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x * x.storage_offset(),
        lambda x: x * x[1:].storage_offset(),
        lambda x: x * torch.Tensor.storage_offset(x),
        lambda x: x * getattr(x, "storage_offset")(),  # noqa: B009
    ],
)
def test_a_step_that_asks_for_the_offset_has_a_capture_for_each(
    body: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    data, step = DATA.to("lazy"), captured(body)
    for i in (3, 3, 3, 3, 5, 5, 5, 5, 3, 7, 5):
        assert torch.equal(step(data[i : i + 2]).cpu(), body(DATA[i : i + 2]))
    assert step.num_replayed >= 4, step.explain()


def test_as_strided_on_a_slice_is_refused_with_the_remedy() -> None:
    data = DATA.to("lazy")
    step = captured(lambda x: x.as_strided((2,), (1,), 7) + 1, fullgraph=True)
    with pytest.raises(lazystep.CaptureError, match=r"x\.clone\(\)"):
        _call(step, data[3:5])


def _call(step: Any, x: torch.Tensor) -> None:
    for _ in range(4):
        step(x)
