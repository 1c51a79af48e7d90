"""Tensors on the host that a captured step uses: constants where they provably are, noticed where not."""

from __future__ import annotations

import time
import types

import numpy as np
import pytest
import torch

import lazystep

from .common import NUM_CALLS, captured


def test_host_tensor_made_inside() -> None:
    def host() -> torch.Tensor:
        return torch.tensor([1.0, 2.0])

    constant = captured(lambda x: (x * host().to("lazy")).sum())
    for _ in range(NUM_CALLS):
        assert constant(torch.ones(2)).item() == 3
    assert constant.num_replayed >= NUM_CALLS - 2

    @lazystep.step(audit_every=0)
    def varying(x: torch.Tensor) -> torch.Tensor:
        return (x + torch.tensor([time.perf_counter()], dtype=torch.float64).to("lazy")).sum()

    with pytest.warns(lazystep.LazyStepWarning, match=r"it calls time\.perf_counter at .*test_host_tensors"):
        assert len({varying(torch.zeros(1)).item() for _ in range(5)}) == 5


def test_constant_that_is_written_inside_starts_anew() -> None:
    @lazystep.step(audit_every=0)
    def count_up(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(2).to("lazy")
        total += x
        return total * 1

    assert [count_up(torch.full((2,), 2.0))[0].item() for _ in range(NUM_CALLS)] == [2.0] * NUM_CALLS
    assert count_up.num_replayed >= NUM_CALLS - 3


def test_constant_that_is_returned_belongs_to_the_caller() -> None:
    view_of_a_constant = captured(lambda x: (torch.arange(4.0).to("lazy").view(2, 2), x + 1))
    for _ in range(NUM_CALLS):
        view, _ = view_of_a_constant(torch.ones(1))
        assert view.sum().item() == 6
        view.zero_()  # must not reach the next call's
    assert view_of_a_constant.num_replayed >= NUM_CALLS - 3


@pytest.mark.parametrize("change", ["in place", "another tensor", "another at the same address"])
def test_tensor_on_the_host_that_changes_between_calls_is_noticed(change: str) -> None:
    box = types.SimpleNamespace(mask=torch.ones(2))
    masked = captured(lambda x: (x * box.mask.to("lazy")).sum())
    for number in range(4):
        for _ in range(NUM_CALLS):
            assert masked(torch.ones(2)).item() == 2 * (number + 1)
        if change == "in place":
            box.mask += 1
        elif change == "another tensor":
            box.mask = box.mask + 1
        else:
            box.mask = None  # its memory, and with it its id, is free for the next one
            box.mask = torch.full((2,), number + 2.0)
    assert masked.num_replayed >= 4 * (NUM_CALLS - 3)


@pytest.mark.parametrize("in_place", [True, False])
def test_array_that_is_filled_anew_is_noticed(in_place: bool) -> None:
    total = captured(lambda array: torch.from_numpy(array).to("lazy").sum())
    array = np.zeros(3)
    for number in range(4):
        array = array if in_place else np.zeros(3)
        array[:] = number
        for _ in range(NUM_CALLS):
            assert total(array).item() == 3 * number
    assert total.num_replayed >= 4 * (NUM_CALLS - 3)


def test_tensor_on_the_host_that_the_step_changes_is_refused() -> None:
    seen = torch.zeros(1)

    @lazystep.step
    def counted(x: torch.Tensor) -> torch.Tensor:
        seen.add_(1)
        return x * 2

    with pytest.warns(lazystep.LazyStepWarning, match="a CPU tensor"):
        for _ in range(NUM_CALLS):
            counted(torch.ones(1))
    assert seen.item() == NUM_CALLS


def test_draws_on_the_host_are_refused_even_if_they_come_out_equal() -> None:
    masked = lazystep.step(lambda x: x * torch.bernoulli(torch.zeros(2)).to("lazy"))
    torch.manual_seed(0)
    for _ in range(NUM_CALLS):
        torch.bernoulli(torch.zeros(2))
    after = torch.get_rng_state()
    torch.manual_seed(0)
    with pytest.warns(lazystep.LazyStepWarning, match="random numbers on the CPU"):
        for _ in range(NUM_CALLS):
            masked(torch.ones(2))
    assert torch.equal(torch.get_rng_state(), after)
    assert masked.num_replayed == 0


def test_tensor_of_one_element_with_a_stride_of_zero() -> None:
    box = types.SimpleNamespace(value=torch.tensor(4.0).expand(3))
    run = captured(lambda x: x * box.value.to(x.device))
    for number in range(8):
        if number == 4:
            box.value = box.value[:1]
        assert run(torch.ones(3)).tolist() == [4.0] * 3
    assert run.num_replayed > 3, run.explain()
