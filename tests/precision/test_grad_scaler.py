"""`torch.amp.GradScaler` on the lazy device: scale, growth and skipped updates are eager's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazystep

from ..helpers import count
from .training import PRECISIONS, WORKLOADS, Training, check_same, train

NUM_STEPS = 15
OVERFLOWS = (0, 1, 5, 9)
# A first step that overflows leaves torch's fused SGD with uninitialized momentum, in eager as well.
LATER_OVERFLOWS = (3, 5, 9)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adam fused, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}
# They count steps on the host, so the host has to know whether a step was skipped.
ON_HOST = {"AdamW", "RMSprop"}


def trained(device: str, name: str, *, clip: bool, captured: bool = False, scaler_device: str = "") -> Any:
    scaler = torch.amp.GradScaler(scaler_device or device, init_scale=1024.0, growth_interval=3)
    precision = PRECISIONS["autocast to float16"]
    training = Training(WORKLOADS["mlp"], device, precision, OPTIMIZERS[name], scaler, clip)
    return train(
        training,
        NUM_STEPS,
        captured=captured,
        overflows=LATER_OVERFLOWS if name == "SGD fused" else OVERFLOWS,
    )


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("captured", [False, True], ids=["plain", "captured"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_that_overflow_equal_eager_bitwise(name: str, captured: bool, clip: bool) -> None:
    want = trained("cpu", name, clip=clip)
    assert want.scaler["_growth_tracker"] != NUM_STEPS % 3, "no step has overflowed"
    with warnings.catch_warnings():
        # The flag is read in steps that make state, and in each step by optimizers that count on the host.
        warnings.filterwarnings("ignore", ".*it waits for a value", lazystep.LazyStepWarning)
        got = trained("lazy", name, clip=clip, captured=captured, scaler_device="cpu" if clip else "lazy")
    check_same(want, got)
    if captured:
        assert (got.step.num_replayed == 0) == (name in ON_HOST), got.step.explain()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_one_program_without_a_synchronization(name: str) -> None:
    scaler = torch.amp.GradScaler("lazy", init_scale=1024.0, growth_interval=3)
    training = Training(
        WORKLOADS["mlp"], "lazy", PRECISIONS["autocast to bfloat16"], OPTIMIZERS[name], scaler
    )
    x, y = training.make_batch()

    def steps(number: int, blow_up: float) -> None:
        for _ in range(number):
            training.step(x.to("lazy"), y.to("lazy"), torch.tensor(blow_up).to("lazy"))
            lazystep.mark_step()

    steps(3, 1.0)
    lazystep.wait_device_ops()
    lazystep.metrics.reset()
    steps(4, 1.0)
    steps(2, float("inf"))
    lazystep.wait_device_ops()
    if name in ON_HOST:
        assert count("synchronizations") == 6
    else:
        assert count("synchronizations") == 0
        assert count("programs_executed") == 6
        assert count("cache_misses") == 0
