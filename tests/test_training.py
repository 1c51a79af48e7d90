"""The benchmark models, trained for a hundred steps: losses and parameters are eager's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import lazystep
from benchmarks import models
from lazystep import metrics

NUM_STEPS = 100


def train(
    make: Callable[[], models.Workload], device: str, foreach: bool | None
) -> tuple[list[float], list[torch.Tensor]]:
    """Batches are sampled on the host between steps, from the generator that dropout draws from."""
    torch.manual_seed(0)
    model, make_batch, loss_fn = make()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    losses = []
    for _ in range(NUM_STEPS):
        x, y = make_batch()
        loss = loss_fn(model(x.to(device)), y.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if device == "lazy":
            lazystep.mark_step()
        losses.append(loss.detach())
    state = [*model.parameters(), *model.buffers()]
    return [loss.item() for loss in losses], [t.detach().cpu() for t in state]


WORKLOADS = {
    "mlp": models.mlp,
    "gpt with dropout": lambda: models.gpt(num_layers=2, dropout=0.1),
    "gpt": lambda: models.gpt(num_layers=2),
    "conv": models.conv,
    "lstm": models.lstm,
}


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_on_two_threads(name: str) -> None:
    test_hundred_steps_equal_eager_bitwise(name)


@pytest.mark.parametrize("name", WORKLOADS)
def test_hundred_steps_equal_eager_bitwise(name: str) -> None:
    foreach = True if name == "lstm" else None
    want_losses, want_state = train(WORKLOADS[name], "cpu", foreach)
    got_losses, got_state = train(WORKLOADS[name], "lazy", foreach)
    assert got_losses == want_losses
    for got, want in zip(got_state, want_state, strict=True):
        assert torch.equal(got, want)
    # The first step makes the optimizer's state; from the second on every step is one known program.
    assert metrics.counter_value("cache_misses") <= 4
    assert metrics.counter_value("cache_hits") >= NUM_STEPS - 3
    assert metrics.counter_value("layout_repairs") == 0
    # One program a step, and the reads at the end: nothing inside a step waits for values.
    assert metrics.counter_value("programs_executed") <= NUM_STEPS + 2
