"""Models trained under autocast and in other types than float32: losses and parameters are eager's."""

from __future__ import annotations

import itertools

import pytest
import torch

import lazystep

from ..helpers import count
from .training import PRECISIONS, WORKLOADS, Training, check_same, train

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


def check(name: str, precision: str, captured: bool, num_steps: int) -> None:
    want = train(Training(WORKLOADS[name], "cpu", PRECISIONS[precision]), num_steps)
    lazystep.metrics.reset()
    lazy = Training(WORKLOADS[name], "lazy", PRECISIONS[precision])
    got = train(lazy, num_steps, captured=captured)
    check_same(want, got)
    assert torch.isfinite(torch.tensor(want.losses)).all() or precision == "float16"
    if captured:
        assert got.step.num_replayed >= num_steps - 5, got.step.explain()
    else:
        # The first step makes the state of the optimizer, the second uses it for the first time.
        assert count("cache_misses") <= 4
