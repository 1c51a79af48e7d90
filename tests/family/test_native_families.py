"""Families as libraries: one build for all members, close to eager, and counted."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import lazystep
from lazystep import config
from tests.helpers import count

from .members import MODELS, Step, gpt, slices

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("own_cache")]


def compare(make: Callable[[str], Step], sizes: list[tuple[int, ...]], num_before: int) -> None:
    """Train on the device and eagerly. A wait for the build follows the first steps; no step waits."""
    losses: dict[str, list[torch.Tensor]] = {}
    for device in ("cpu", "lazy"):
        torch.manual_seed(0)
        step = make(device)
        losses[device] = []
        for number, size in enumerate(sizes):
            losses[device].append(step(*size).detach())
            lazystep.mark_step()
            if number == num_before and device == "lazy":
                assert lazystep.wait_for_compile(500)
                lazystep.metrics.reset()
    lazystep.wait_device_ops()
    eager, lazy = torch.stack(losses["cpu"]), torch.stack([loss.cpu() for loss in losses["lazy"]])
    torch.testing.assert_close(lazy, eager, rtol=2e-4, atol=2e-4)
    assert count("executor_waits_for_compile") == 0
    assert count("native_mismatches") == count("family_mismatches") == 0


@pytest.mark.parametrize(
    ("num_steps", "num_lengths"), [(160, 8), pytest.param(2000, 32, marks=pytest.mark.nightly)]
)
def test_gpt_of_many_lengths_has_one_library(num_steps: int, num_lengths: int) -> None:
    chosen = random.Random(0)
    lengths = [chosen.choice(range(4, 4 + num_lengths)) for _ in range(num_steps)]
    with config.override(build_after=3):
        compare(gpt, [(3, length) for length in lengths], num_before=12)
    assert count("builds_started") + 1 <= 3  # one before the counters were set to zero
    num_native = count("native_executions") + count("native_checks")
    assert num_native == num_steps - 13  # every step after the wait
    assert count("native_executions") >= 0.95 * (num_steps - 13 - num_lengths)
    # Another process finds the library, and needs no check for sizes that agreed.
    lazystep.runtime.runtime.programs.clear()
    tiers = lazystep.runtime.runtime.tiers
    tiers.families = type(tiers.families)(tiers.builder)
    lazystep.metrics.reset()
    step = gpt("lazy")
    losses = []  # held, as in the steps above: a result that nobody holds is not computed
    for length in (4, 40, 4, 40):  # the first program makes the optimizer's state
        losses.append(step(3, length).detach())
        lazystep.mark_step()
    lazystep.wait_device_ops()
    assert (count("native_executions"), count("native_checks"), count("builds_started")) == (2, 1, 0)


def test_slices_have_a_library_with_a_carrier() -> None:
    sizes = [(start,) for start in (4, 8, 12, 16, 20, 24, 28, 4, 8, 32, 36, 4)]
    compare(slices, sizes, num_before=5)
    assert count("native_executions") + count("native_checks") >= 5
    assert count("builds_started") == 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["bert", "conv", "lstm", "projected lstm", "graph", "odd sizes"])
def test_model_has_a_family_library(name: str) -> None:
    make, sizes = MODELS[name]
    compare(make, [*sizes[:3], *sizes[:3], *sizes, *sizes], num_before=5)
    assert count("native_executions") + count("native_checks") >= len(sizes), lazystep.debug.explain()
