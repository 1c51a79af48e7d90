"""Whether overlap pays is measured, and decided alike on all ranks. The clocks are invented."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lazystep import metrics
from lazystep.overlap import overlap_optimizer
from lazystep.overlap.choice import MAX_ROUNDS, MIN_ROUNDS, NUM_WARM_UPS, Choice
from tests.helpers import descend
from tests.pool import Pool, World, raised_by

from .test_overlap_optimizer import make, train
from .training import largest_difference, tensors_in

EARLIEST = NUM_WARM_UPS + 2 * MIN_ROUNDS
LATEST = NUM_WARM_UPS + 2 * MAX_ROUNDS


class Clock:
    """A clock that goes on by a given time between a backward and the end of its step."""

    def __init__(self, in_backward: Callable[[int], float], in_step: Callable[[int], float]) -> None:
        self.now = 1.0
        self.seconds = {True: in_backward, False: in_step}

    def run(self, choice: Choice, num_passes: int) -> list[bool]:
        """The loop of a rank that hears nobody else; says which passes overlap."""
        found = []
        for number in range(num_passes):
            choice.begin()
            found.append(choice.overlaps)
            self.now += self.seconds[choice.overlaps](number)
            choice.stepped()
            choice.hear(*choice.report())
        return found


def measured(
    in_backward: Callable[[int], float], in_step: Callable[[int], float]
) -> tuple[Choice, list[bool]]:
    clock = Clock(in_backward, in_step)
    choice = Choice(None, lambda: clock.now)
    return choice, clock.run(choice, LATEST + 5)


@pytest.mark.parametrize(("in_backward", "in_step"), [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0)])
def test_a_clear_difference_is_decided_after_as_many_passes_of_each_kind(
    in_backward: float, in_step: float
) -> None:
    choice, passes = measured(lambda _: in_backward, lambda _: in_step)
    assert all(passes[:NUM_WARM_UPS])
    tried = passes[NUM_WARM_UPS:EARLIEST]
    assert tried.count(True) == tried.count(False) == MIN_ROUNDS
    assert choice.decision is not None
    assert choice.decision.num_rounds == MIN_ROUNDS
    assert (choice.decision.in_backward, choice.decision.in_step) == (in_backward, in_step)
    assert choice.decision.overlaps == (in_backward < in_step), "a tie does not pay"
    assert set(passes[EARLIEST + 1 :]) == {choice.decision.overlaps}


@pytest.mark.parametrize(("gain", "pays"), [(-0.04, False), (0.0, False), (0.07, True)])
def test_a_few_percent_are_found_in_noise(gain: float, pays: bool) -> None:
    wrong = 0
    for seed in range(200):
        draw = random.Random(seed)

        def noisy(seconds: float, draw: random.Random = draw) -> float:
            # Most passes vary by 5 %, and each tenth is delayed by something else.
            return seconds * draw.gauss(1.0, 0.05) + (seconds if draw.random() < 0.1 else 0.0)

        choice, _ = measured(lambda _, n=noisy: n(1.0 - gain), lambda _, n=noisy: n(1.0))
        assert choice.decision is not None
        wrong += choice.decision.overlaps != pays
    # Of 200. A tie is the hardest case: the one that costs nothing.
    assert wrong <= (40 if gain == 0.0 else 5)


@pytest.mark.parametrize(("in_backward", "pays"), [(0.99, False), (0.97, True)])
def test_a_gain_within_the_margin_is_a_tie(in_backward: float, pays: bool) -> None:
    choice, _ = measured(lambda _: in_backward, lambda _: 1.0)
    assert choice.decision is not None
    assert choice.decision.num_won == (MIN_ROUNDS if pays else 0)
    assert choice.decision.overlaps == pays


def test_more_rounds_are_made_while_they_contradict_each_other() -> None:
    choice, passes = measured(lambda number: 1.0 + 0.5 * (number // 2 % 3 == 0), lambda _: 1.1)
    assert choice.decision is not None
    assert MIN_ROUNDS < choice.decision.num_rounds <= MAX_ROUNDS
    assert choice.decision.overlaps, "two rounds of three"
    contradicting, passes = measured(lambda number: 1.0 + 0.5 * (number // 2 % 2), lambda _: 1.1)
    assert contradicting.decision is not None
    assert contradicting.decision.num_rounds == MAX_ROUNDS
    assert passes[NUM_WARM_UPS:LATEST].count(False) == MAX_ROUNDS
    assert not contradicting.decision.overlaps


def test_time_that_plain_ddp_would_not_take_is_left_out_of_its_passes() -> None:
    now = [1.0]
    choice = Choice(None, lambda: now[0])
    for _ in range(EARLIEST + 1):
        choice.begin()
        with choice.leaving_out():
            now[0] += 0.5
        now[0] += 0.7 if choice.overlaps else 1.0
        choice.stepped()
        choice.hear(*choice.report())
    assert choice.decision is not None
    assert choice.decision.in_backward == pytest.approx(1.2)
    assert choice.decision.in_step == pytest.approx(1.0)
    assert not choice.decision.overlaps


def test_time_behind_the_step_counts_if_the_pass_has_made_it_necessary() -> None:
    now = [1.0]
    choice = Choice(None, lambda: now[0])
    for _ in range(EARLIEST + 1):
        choice.begin()
        now[0] += 0.9 if choice.overlaps else 1.0
        choice.stepped()
        if choice.overlaps:
            with choice.adding():
                now[0] += 0.2
        now[0] += 5.0  # data loading and forward
        choice.hear(*choice.report())
    assert choice.decision is not None
    assert choice.decision.in_backward == pytest.approx(1.1)
    assert choice.decision.in_step == pytest.approx(1.0)
    assert not choice.decision.overlaps


def test_a_forced_choice_measures_nothing() -> None:
    for forced in (True, False):
        choice = Choice(forced, lambda: 1 / 0)
        for _ in range(EARLIEST + 2):
            choice.begin()
            with choice.leaving_out():
                pass
            choice.stepped()
            with choice.adding():
                pass
            assert choice.overlaps == forced
            assert not choice.hear(1.0, 0.0)
        assert choice.report() == (0.0, 0.0)


def test_a_loop_that_never_steps_decides_nothing_and_ends_the_trial() -> None:
    choice = Choice(None, lambda: 1.0)
    for _ in range(LATEST + 3):
        choice.begin()
        assert not any(number > 0 for number in choice.report())
        choice.hear(*choice.report())
    assert choice.decision is None
    assert choice.overlaps


def test_a_pass_that_one_rank_has_not_measured_counts_on_none() -> None:
    choice = Choice(None)
    for _ in range(MIN_ROUNDS):
        choice.hear(1.0, 0.0)
        choice.hear(math.nan, 3.0)
    assert choice.decision is None
    for _ in range(MIN_ROUNDS):
        choice.hear(0.0, 3.0)
    assert choice.decision is not None
    assert choice.decision.overlaps


# -- on ranks ----------------------------------------------------------------------------------------------


class Layers(torch.nn.Module):
    """Layers of two types, if asked for, and one that is only used in some steps."""

    def __init__(self, is_mixed: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))
        if is_mixed:
            self.layers[1].double()
            self.layers[3].double()
        self.num_used = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: self.num_used]:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x


def make_layers(world: World, is_mixed: bool, **options: Any) -> tuple[DistributedDataParallel, Any]:
    torch.manual_seed(3)
    # A bucket for each layer: the sum of three ranks depends on an element's place in its bucket.
    ddp = DistributedDataParallel(
        Layers(is_mixed), process_group=world.group, bucket_cap_mb=6 * 7 * 4 / 2**20, **options
    )
    return ddp, torch.optim.AdamW(ddp.parameters())


def train_layers(ddp: Any, optimizer: Any, steps: range, world: World) -> None:
    for step in steps:
        torch.manual_seed(10 * step + world.rank)
        if ddp.find_unused_parameters:
            ddp.module.num_used = 4 - (step + world.rank) % 3
        if not ddp.static_graph:
            with ddp.no_sync():
                ddp(torch.randn(4, 6)).square().mean().backward()
        descend(ddp(torch.randn(4, 6)).square().mean(), optimizer)


def decide(world: World, slow_in_backward: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Only rank 1 sees a difference: the other one's clock stands still apart from a tick."""
    is_mixed = options.pop("is_mixed", False)
    plain, plain_optimizer = make_layers(world, is_mixed, **options)
    ours, optimizer = make_layers(world, is_mixed, **options)
    metrics.reset()
    handle = overlap_optimizer(ours, optimizer)
    choice = handle._engine.choice
    now = [1.0]

    def clock() -> float:
        slow = world.rank == 1 and choice.overlaps == slow_in_backward
        now[0] += 10.0 if slow else 1.0
        return now[0]

    choice._clock = clock
    train_layers(ours, optimizer, range(EARLIEST), world)
    undecided = handle.decision
    train_layers(ours, optimizer, range(EARLIEST, EARLIEST + 3), world)
    before = handle.statistics
    train_layers(ours, optimizer, range(EARLIEST + 3, EARLIEST + 6), world)
    after = handle.statistics
    train_layers(plain, plain_optimizer, range(EARLIEST + 6), world)
    both = [
        tensors_in([model.state_dict(), opt.state_dict()["state"], [p.grad for p in model.parameters()]])
        for model, opt in ((plain, plain_optimizer), (ours, optimizer))
    ]
    return {
        "undecided": undecided is None,
        "overlaps": handle.decision is not None and handle.decision.overlaps,
        "in backward": after.parameters_updated - before.parameters_updated,
        "in step": after.parameters_left - before.parameters_left,
        "buckets": after.buckets - before.buckets,
        "decisions": metrics.counter_value("overlap_decisions"),
        "given back": metrics.counter_value("overlap_hooks_given_back"),
        "difference": max(largest_difference(a, b) for a, b in zip(*both, strict=True)),
        "num_parameters": len(list(ours.parameters())),
    }


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("slow_in_backward", [False, True])
def test_all_ranks_decide_alike_and_the_bits_stay(pool: Pool, num_ranks: int, slow_in_backward: bool) -> None:
    first, *others = pool.run(decide, slow_in_backward, {}, num_ranks=num_ranks, timeout=120)
    assert all(other == first for other in others)
    assert first["undecided"]
    assert first["overlaps"] is not slow_in_backward
    updates = 3 * first["num_parameters"]
    assert (first["in backward"], first["in step"]) == ((0, updates) if slow_in_backward else (updates, 0))
    assert first["decisions"] == 1
    # Switched off, the model is plain DDP again: no bucket comes to us.
    assert (first["given back"], first["buckets"]) == ((1, 0) if slow_in_backward else (0, 12))
    assert first["difference"] == 0


def wait_long(world: World) -> list[float]:
    """Messages of other ranks come late, by a clock that goes on in nothing else but single ticks."""
    ddp, optimizer = make(world)
    handle = overlap_optimizer(ddp, optimizer)
    engine, now = handle._engine, [1.0]
    check = engine.peers.check

    def slow_check(wait: bool) -> None:
        check(wait)
        now[0] += 50.0 if wait else 0.0

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    engine.choice._clock = clock
    engine.peers.check = slow_check  # type: ignore[method-assign]
    train(ddp, optimizer, range(EARLIEST + 2), world)
    assert handle.decision is not None
    return [handle.decision.in_backward, handle.decision.in_step, float(handle.decision.overlaps)]


def test_the_wait_for_other_ranks_before_forward_counts_against_overlap(pool: Pool) -> None:
    for in_backward, in_step, overlaps in pool.run(wait_long, timeout=120):
        assert in_backward > 2 * 50.0, "of both ranks"
        assert in_step < 50.0
        assert not overlaps


GIVEN_BACK = {
    "mixed types": {"is_mixed": True},
    "unused": {"find_unused_parameters": True},
}
KEPT = {
    "views": {"gradient_as_bucket_view": True},
    "batched": {"batched_grad_copy": True},
    "static": {"static_graph": True},
}


@pytest.mark.parametrize("name", [*KEPT, *GIVEN_BACK])
def test_the_hook_stays_where_a_new_reducer_would_differ_or_gain_nothing(pool: Pool, name: str) -> None:
    for rank in pool.run(decide, True, (KEPT | GIVEN_BACK)[name], num_ranks=3, timeout=120):
        assert rank["overlaps"] is False
        assert rank["given back"] == (name in GIVEN_BACK)
        assert rank["difference"] == 0


def choose_again(world: World) -> list[tuple[int, int]]:
    """Off, removed, and on again: the updates in backward, and those in step, of each part."""
    ddp, optimizer = make(world)
    found = []
    for overlap in (True, False, True, False):
        handle = overlap_optimizer(ddp, optimizer, overlap=overlap)
        before = handle.statistics
        train(ddp, optimizer, range(4), world)
        found.append(
            (
                handle.statistics.parameters_updated - before.parameters_updated,
                handle.statistics.parameters_left - before.parameters_left,
            )
        )
        handle.remove()
    return found


def test_a_model_without_our_hook_takes_it_again(pool: Pool) -> None:
    for found in pool.run(choose_again):
        updates = found[0][0]
        assert found == [(updates, 0), (0, updates)] * 2
        assert updates > 0


def force(world: World, overlap: bool) -> tuple[int, int]:
    ddp, optimizer = make(world)
    handle = overlap_optimizer(ddp, optimizer, overlap=overlap)
    train(ddp, optimizer, range(3), world)
    return handle.statistics.parameters_updated, handle.statistics.parameters_left


def differ(world: World) -> str:
    ddp, optimizer = make(world)
    return raised_by(lambda: overlap_optimizer(ddp, optimizer, overlap=world.rank == 0))


def test_it_can_be_forced_on_and_off_on_all_ranks_alike(pool: Pool) -> None:
    (on, _), (off, _) = pool.run(force, True), pool.run(force, False)
    assert on[1] == off[0] == 0
    assert on[0] == off[1] > 0
    for raised in pool.run(differ):
        assert "overlap differs between ranks" in raised
