"""Generators that go back to an earlier state of the same call: checkpointing draws the same again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lazystep
from tests.helpers import descend

from .common import captured
from .scenes import Make, Scene, Scenes, check_replays

scene = Scenes()


def _checkpointed(use_reentrant: bool, num_blocks: int) -> Make:
    def scene_on(device: str) -> Scene:
        blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_blocks)).to(device)
        optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)

        def block(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(torch.tanh(layer(F.dropout(x, 0.2))), 0.5)

        def step(x: torch.Tensor) -> torch.Tensor:
            hidden = x.requires_grad_() if use_reentrant else x
            for layer in blocks:
                hidden = checkpoint(block, layer, hidden, use_reentrant=use_reentrant)
            loss = (hidden * torch.rand(4, device=device)).square().mean()
            descend(loss, optimizer)
            return loss

        def arguments(number: int) -> tuple[torch.Tensor, ...]:
            return ((torch.linspace(-1, 1, 12).view(3, 4) + number).to(device),)

        # What the host draws next shows where the generator is.
        return Scene(step, kept=lambda: (list(blocks.parameters()), torch.rand(2)), arguments=arguments)

    return scene_on


scene.rows(
    one_block=_checkpointed(False, 1),
    three_blocks=_checkpointed(False, 3),
    reentrant=_checkpointed(True, 2),
)


@scene
def draws_of_two_generators(device: str) -> Scene:
    other = torch.Generator().manual_seed(3)
    layer = nn.Linear(3, 3).to(device)

    def block(x: torch.Tensor) -> torch.Tensor:
        own = torch.rand(3, generator=other).to(device) if device == "cpu" else _rand(other)
        return F.dropout(layer(x), 0.5) * own.mean()

    def _rand(generator: torch.Generator) -> torch.Tensor:
        return torch.rand(3, device="lazy", generator=generator)

    def step(x: torch.Tensor) -> torch.Tensor:
        layer.zero_grad()
        # Only the default generator is put back: the other one goes on when the block is computed again.
        loss = checkpoint(block, x, use_reentrant=False, determinism_check="none").square().mean()
        loss.backward()
        return loss

    return Scene(step, kept=lambda: (layer.weight.grad, torch.rand(2), torch.rand(2, generator=other)))


@pytest.mark.parametrize("make", scene.parameters)
def test_checkpointed_step_is_replayed_and_equals_eager(make: Make) -> None:
    check_replays(make)


def test_audits_of_a_checkpointed_step_find_nothing() -> None:
    layer = nn.Linear(3, 3).to("lazy")

    @lazystep.step(audit_every=2, fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        layer.zero_grad()
        loss = checkpoint(lambda x: F.dropout(layer(x), 0.5), x, use_reentrant=False).square().mean()
        loss.backward()
        return loss

    for _ in range(9):
        step(torch.ones(2, 3))
    assert step.num_replayed >= 3
    assert lazystep.metrics.counter_value("captures_audited") >= 2


def test_seed_in_a_fork_is_refused() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(5)
            noise = torch.rand(3, device="lazy")
        return x * noise * torch.rand(3, device="lazy")

    seeded = captured(step)
    with pytest.warns(lazystep.LazyStepWarning, match="not replayed"):
        for number in range(5):
            torch.manual_seed(number)
            got = seeded(torch.ones(3))
            torch.manual_seed(number)
            assert torch.equal(got.cpu(), step(torch.ones(3).to("lazy")).cpu())
    assert seeded.num_replayed == 0


def test_generator_of_the_users_is_replayed_and_audited() -> None:
    def outcome(device: str) -> tuple[list[list[float]], list[float], int]:
        generator = torch.Generator().manual_seed(3)

        def step(x: torch.Tensor) -> torch.Tensor:
            return x * torch.rand(3, device=device, generator=generator)

        call = lazystep.step(audit_every=4, fullgraph=True)(step) if device == "lazy" else step
        results = [call(torch.ones(3)).tolist() for _ in range(12)]
        return results, torch.rand(2, generator=generator).tolist(), getattr(call, "num_replayed", 0)

    wanted, got = outcome("cpu"), outcome("lazy")
    assert got[:2] == wanted[:2]
    assert got[2] >= 5
