"""The benchmark models, 200 steps natively: how far from eager, and how many builds that takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import lazystep
from benchmarks import models
from lazystep import config, metrics
from lazystep.barrier import runtime

pytestmark = pytest.mark.timeout(900)
NUM_STEPS = 200


def train(make: Callable[[], models.Workload], device: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    model, make_batch, loss_fn = make()
    model.to(device)
    optimizer = models.make_optimizer(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    losses = []
    for number in range(NUM_STEPS):
        x, y = make_batch()
        loss = loss_fn(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
        if device == "lazy":
            lazystep.mark_step()
            if number == 3:
                assert lazystep.wait_for_compile(800)
    state = [t.detach().cpu().double() for t in (*model.parameters(), *model.buffers())]
    return torch.tensor([loss.item() for loss in losses], dtype=torch.float64), state


# Relative to the largest loss and to the largest element of each tensor. AdamW divides by the square
# root of a running mean that starts at zero, so early rounding grows with the steps (the README's
# table of tolerances has what was measured).
WORKLOADS = {
    "mlp": (models.mlp, 1e-5, 1e-4),
    "gpt": (lambda: models.gpt(num_layers=2), 1e-5, 1e-4),
    "conv": (models.conv, 1e-5, 1e-4),
    "lstm": (models.lstm, 1e-5, 1e-4),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_two_hundred_native_steps_stay_close_to_eager(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    make, loss_tolerance, state_tolerance = WORKLOADS[name]
    runtime.programs.clear()
    with config.override(tier="auto", build_after=2):
        losses, state = train(make, "lazy")
        lazystep.wait_device_ops()
    want_losses, want_state = train(make, "cpu")
    loss_distance = float((losses - want_losses).abs().max() / want_losses.abs().max())
    state_distance = max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))
        for a, b in zip(state, want_state, strict=True)
    )
    record_property("loss_distance", loss_distance)
    record_property("state_distance", state_distance)
    print(f"{name}: losses within {loss_distance:.1e}, state within {state_distance:.1e}")
    assert metrics.counter_value("native_executions") >= NUM_STEPS - 10
    assert metrics.counter_value("builds_started") <= 2
    assert metrics.counter_value("programs_executed") <= NUM_STEPS + 2
    assert metrics.counter_value("native_mismatches") == 0
    assert loss_distance <= loss_tolerance
    assert state_distance <= state_tolerance
