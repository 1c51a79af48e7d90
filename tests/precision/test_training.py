"""Models trained under autocast and in other types than float32: losses and parameters are eager's."""

from __future__ import annotations

import itertools

import pytest
import torch

import lazystep

from ..helpers import count
from .training import PRECISIONS, WORKLOADS, Trained, Training, check_same, train

IN_SUITE = 8
# Convolutions in float16 take seconds on a processor without instructions for them.
PAIRS = [
    *((name, "autocast to bfloat16") for name in WORKLOADS),
    *((name, "autocast to float16") for name in WORKLOADS if name != "conv"),
    *(("transformer", precision) for precision in PRECISIONS if "autocast" not in precision),
]
NIGHTLY = list(itertools.product(WORKLOADS, PRECISIONS))


@pytest.mark.parametrize("captured", [False, True], ids=["plain", "captured"])
@pytest.mark.parametrize(("name", "precision"), PAIRS)
def test_training_equals_eager_bitwise(name: str, precision: str, captured: bool) -> None:
    check(name, precision, captured, IN_SUITE)


@pytest.mark.nightly
@pytest.mark.parametrize("captured", [False, True], ids=["plain", "captured"])
@pytest.mark.parametrize(("name", "precision"), NIGHTLY)
def test_hundred_steps_equal_eager_bitwise(name: str, precision: str, captured: bool) -> None:
    check(name, precision, captured, 100)


# The first steps that update, one after the other, and the last one.
OVERFLOWS = (0, 1, 30, 31, 60, 99)


# Steps that make the optimizer's state are not captured. The first steps do, until one does not overflow.
@pytest.mark.filterwarnings("ignore:Training.step is recorded in each call")
@pytest.mark.nightly
@pytest.mark.parametrize("captured", [False, True], ids=["plain", "captured"])
@pytest.mark.parametrize("precision", ["autocast to bfloat16", "autocast to float16"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_hundred_steps_with_overflows_equal_eager_bitwise(name: str, precision: str, captured: bool) -> None:
    got = check(name, precision, captured, 100, OVERFLOWS)
    assert got.scaler["scale"] != 64.0


def check(
    name: str, precision: str, captured: bool, num_steps: int, overflows: tuple[int, ...] = ()
) -> Trained:
    def make(device: str) -> Training:
        scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=10) if overflows else None
        return Training(WORKLOADS[name], device, PRECISIONS[precision], scaler=scaler)

    want = train(make("cpu"), num_steps, overflows=overflows)
    lazystep.metrics.reset()
    got = train(make("lazy"), num_steps, captured=captured, overflows=overflows)
    check_same(want, got)
    # A step that makes the optimizer's state reads whether it is skipped.
    assert got.num_waits == (3 if overflows else 0)
    assert torch.isfinite(torch.tensor(want.losses)).all() or precision == "float16"
    if captured:
        assert got.step.num_replayed >= num_steps - (8 if overflows else 5), got.step.explain()
    else:
        # The first step makes the state of the optimizer, the second uses it for the first time.
        assert count("cache_misses") <= (5 if overflows else 4)
    return got
