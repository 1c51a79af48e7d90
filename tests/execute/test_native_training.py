"""The benchmark models, 200 steps natively: how far from eager, and how many builds that takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazystep
from benchmarks import models
from lazystep import config
from tests.helpers import count, descend, nightly

pytestmark = pytest.mark.timeout(900)
NUM_STEPS = 200


def train(
    make: Callable[[], models.Workload], device: str
) -> tuple[torch.Tensor, dict[int, list[torch.Tensor]]]:
    """The losses, and the state after 8 steps and after all."""
    torch.manual_seed(0)
    model, make_batch, loss_fn = make()
    model.to(device)
    optimizer = models.make_optimizer(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    losses, states = [], {}
    for number in range(NUM_STEPS):
        x, y = make_batch()
        loss = loss_fn(model(x.to(device)), y.to(device))
        descend(loss, optimizer)
        schedule.step()
        losses.append(loss.detach())
        if device == "lazy":
            lazystep.mark_step()
            if number == 3:
                assert lazystep.wait_for_compile(800)
        if number + 1 in (8, NUM_STEPS):
            tensors = (*model.parameters(), *model.buffers())
            states[number + 1] = [t.detach().cpu().double().flatten() for t in tensors]
    return torch.tensor([loss.item() for loss in losses], dtype=torch.float64), states


# (steps, distance of losses, distance of state): relative to the largest loss, and to the norm of all
# parameters and buffers. The LSTM and the GPT are smooth. The MLP and the conv net have ReLUs: among
# millions of activations some are zero but for rounding, and where one flips, the curves part, as eager's own
# do when an input moves by its last bit. So these are held to the tolerance at the beginning, and to
# the same curve at the end. Norms, not single elements: a gradient that is zero but for rounding (a
# bias that softmax takes out) becomes a step of full length in AdamW, up or down.
WORKLOADS = {
    "mlp": (models.mlp, [(8, 1e-5, 1e-4), (NUM_STEPS, 2e-2, 1.0)]),
    "gpt": (lambda: models.gpt(num_layers=2), [(NUM_STEPS, 1e-5, 1e-4)]),
    "conv": (models.conv, [(8, 1e-5, 1e-4), (NUM_STEPS, 5e-2, 1.0)]),
    "lstm": (models.lstm, [(NUM_STEPS, 1e-5, 1e-4)]),
}


# The others take half a minute to minutes to build.
@pytest.mark.parametrize("name", ["lstm", *nightly(["mlp", "gpt", "conv"])])
def test_two_hundred_native_steps_stay_close_to_eager(name: str, runtime: Any) -> None:
    make, criteria = WORKLOADS[name]
    runtime.programs.clear()
    with config.override(tier="auto", build_after=2):
        losses, states = train(make, "lazy")
        lazystep.wait_device_ops()
    want_losses, want_states = train(make, "cpu")
    for num_steps, loss_tolerance, state_tolerance in criteria:
        loss = distance(losses[:num_steps], want_losses[:num_steps])
        got, want = torch.cat(states[num_steps]), torch.cat(want_states[num_steps])
        state = float((got - want).norm() / want.norm())
        print(f"{name}, {num_steps} steps: losses within {loss:.1e}, state within {state:.1e}")
        assert loss <= loss_tolerance
        assert state <= state_tolerance
    assert count("native_executions") >= NUM_STEPS - 10
    assert count("builds_started") <= 2
    # One execution a step, and one for what the reads in between cut off.
    assert count("programs_executed") <= NUM_STEPS + 4
    assert count("native_mismatches") == 0


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))
