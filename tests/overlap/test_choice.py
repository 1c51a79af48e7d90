"""Whether overlap pays is measured, and decided alike on all ranks. The clocks are invented."""

from __future__ import annotations

from typing import Any

import pytest

from lazystep import metrics
from lazystep.overlap import overlap_optimizer
from lazystep.overlap.choice import NUM_ROUNDS, NUM_WARM_UPS, Choice
from tests.pool import Pool, World, raised_by

from .test_overlap_optimizer import make, train
from .training import largest_difference, tensors_in

NUM_TRIED = NUM_WARM_UPS + 2 * NUM_ROUNDS


class Clock:
    """A clock that goes on by a given time between a backward and the end of its step."""

    def __init__(self, in_backward: float, in_step: float) -> None:
        self.now = 1.0
        self.seconds = {True: in_backward, False: in_step}

    def run(self, choice: Choice, num_passes: int) -> list[bool]:
        """The loop of a rank that hears nobody else; says which passes overlap."""
        found = []
        for _ in range(num_passes):
            choice.begin()
            found.append(choice.overlaps)
            self.now += self.seconds[choice.overlaps]
            choice.stepped()
            choice.hear(*choice.report())
        return found


def measured(in_backward: float, in_step: float) -> tuple[Choice, list[bool]]:
    clock = Clock(in_backward, in_step)
    choice = Choice(None, lambda: clock.now)
    return choice, clock.run(choice, NUM_TRIED + 5)


@pytest.mark.parametrize(("in_backward", "in_step"), [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0)])
def test_the_faster_way_is_taken_after_as_many_passes_of_each_kind(
    in_backward: float, in_step: float
) -> None:
    choice, passes = measured(in_backward, in_step)
    assert all(passes[:NUM_WARM_UPS])
    tried = passes[NUM_WARM_UPS:NUM_TRIED]
    assert tried.count(True) == tried.count(False) == NUM_ROUNDS
    assert choice.decision is not None
    assert choice.decision.overlaps == (in_backward <= in_step)
    assert passes[-4:] == [choice.decision.overlaps] * 4


def test_a_forced_choice_measures_nothing() -> None:
    for forced in (True, False):
        choice = Choice(forced, lambda: 1 / 0)
        for _ in range(NUM_TRIED + 2):
            choice.begin()
            choice.stepped()
            assert choice.overlaps == forced
            assert not choice.hear(1.0, 2.0)
        assert choice.report() == (0.0, 0.0)


def test_a_loop_that_never_steps_decides_nothing() -> None:
    choice = Choice(None, lambda: 1.0)
    for _ in range(NUM_TRIED + 3):
        choice.begin()
        assert choice.report() == (0.0, 0.0)
    assert choice.decision is None
    assert choice.overlaps


def decide(world: World, slow_in_backward: bool) -> dict[str, Any]:
    """Only rank 1 sees a difference: the other one's clock stands still apart from a tick."""
    plain, plain_optimizer = make(world)
    ours, optimizer = make(world)
    metrics.reset()
    handle = overlap_optimizer(ours, optimizer)
    choice = handle._engine.choice
    now = [1.0]

    def clock() -> float:
        slow = world.rank == 1 and choice.overlaps == slow_in_backward
        now[0] += 10.0 if slow else 1.0
        return now[0]

    choice._clock = clock
    train(ours, optimizer, range(NUM_TRIED), world)
    undecided = handle.decision
    train(ours, optimizer, range(NUM_TRIED, NUM_TRIED + 3), world)
    before = handle.statistics
    train(ours, optimizer, range(NUM_TRIED + 3, NUM_TRIED + 6), world)
    after = handle.statistics
    train(plain, plain_optimizer, range(NUM_TRIED + 6), world)
    state = zip(tensors_in(plain.state_dict()), tensors_in(ours.state_dict()), strict=True)
    return {
        "undecided": undecided is None,
        "overlaps": handle.decision is not None and handle.decision.overlaps,
        "in backward": after.parameters_updated - before.parameters_updated,
        "in step": after.parameters_left - before.parameters_left,
        "decisions": metrics.counter_value("overlap_decisions"),
        "difference": max(largest_difference(a, b) for a, b in state),
        "num_parameters": len(list(ours.parameters())),
    }


@pytest.mark.parametrize("slow_in_backward", [False, True])
def test_all_ranks_decide_alike_and_the_bits_stay(pool: Pool, slow_in_backward: bool) -> None:
    first, second = pool.run(decide, slow_in_backward, timeout=120)
    assert first == second
    assert first["undecided"]
    assert first["overlaps"] is not slow_in_backward
    updates = 3 * first["num_parameters"]
    assert (first["in backward"], first["in step"]) == ((0, updates) if slow_in_backward else (updates, 0))
    assert first["decisions"] == 1
    assert first["difference"] == 0


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
