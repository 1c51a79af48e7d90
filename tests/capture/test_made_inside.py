"""Tensors that a step makes inside and keeps, returns or lends to a module: each replay makes its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

import lazystep
from tests.helpers import descend

from .common import captured
from .scenes import Make, Scene, Scenes, check_replays

scene = Scenes()


def _filled(device: str, make: str) -> torch.Tensor:
    return {
        "empty": lambda: torch.empty(3, device=device),
        "empty_strided": lambda: torch.empty_strided((3,), (2,), device=device),
        "new_empty": lambda: torch.zeros(1, device=device).new_empty(3),
        "tensor": lambda: torch.tensor([1.0, 2.0, 3.0], device=device),
    }[make]()


def _kept_memory(make: str) -> Make:
    def scene_on(device: str) -> Scene:
        box = SimpleNamespace(last=None)

        def step(x: torch.Tensor) -> torch.Tensor:
            box.last = memory = _filled(device, make)
            memory[0] = x[1]
            memory[1:] = x[:2] * 2
            return memory

        return Scene(step, kept=lambda: box.last)

    return scene_on


scene.rows(
    memory_that_is_filled=_kept_memory("empty"),
    strided_memory_that_is_filled=_kept_memory("empty_strided"),
    new_memory_that_is_filled=_kept_memory("new_empty"),
    constant_that_is_overwritten=_kept_memory("tensor"),
)


@scene
def draw_that_is_kept_and_returned(device: str) -> Scene:
    box = SimpleNamespace(noise=None)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        box.noise = torch.rand(3, device=device)
        return x * box.noise, box.noise

    return Scene(step, kept=lambda: box.noise)


@scene
def gradient_in_a_layout_of_its_own(device: str) -> Scene:
    # Autograd copies a strided gradient into new memory.
    weight = torch.linspace(0, 1, 8).to(device).requires_grad_()

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        loss = torch.fft.irfft(torch.fft.rfft(weight) * x.sum(), 8).square().sum()
        loss.backward()
        return loss

    return Scene(step, kept=lambda: weight.grad)


@scene
def gradient_penalty(device: str) -> Scene:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        inputs = x.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        loss = (slope.norm() - 1).square()
        descend(loss, optimizer)
        return loss  # its graph still holds `inputs` and the gradient there

    return Scene(step, kept=lambda: list(model.parameters()))


@scene
def parameters_of_an_inner_step(device: str) -> Scene:
    model = nn.Linear(3, 1).to(device)
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        fast = dict(model.named_parameters())
        for _ in range(2):
            inner = functional_call(model, fast, (x,)).square().mean()
            slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {name: p - 0.1 * slope for (name, p), slope in zip(fast.items(), slopes, strict=True)}
        loss = functional_call(model, fast, (x,)).square().mean()
        descend(loss, optimizer)
        return loss

    return Scene(step, kept=lambda: list(model.parameters()))


@scene
def ensemble_of_models(device: str) -> Scene:
    models = [nn.Linear(3, 1).to(device) for _ in range(2)]
    stacked, _ = stack_module_state(models)
    parameters = {name: p.detach().requires_grad_() for name, p in stacked.items()}
    optimizer = torch.optim.Adam(list(parameters.values()))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = vmap(lambda own: functional_call(models[0], own, (x,)))(parameters).square().mean()
        descend(loss, optimizer)
        return loss

    return Scene(step, kept=lambda: list(parameters.values()))


@pytest.mark.parametrize("make", scene.parameters)
def test_step_is_replayed_and_equals_eager(make: Make) -> None:
    check_replays(make)


def test_results_of_two_replays_are_two_tensors() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(3, device="lazy")
        return memory.copy_(x)

    filled = captured(step)
    results = [filled(torch.full((3,), float(number))) for number in range(6)]
    assert filled.num_replayed > 1
    assert [one.tolist() for one in results] == [[number] * 3 for number in range(6)]


def test_leaf_of_a_graph_that_backward_has_not_used_is_refused() -> None:
    weight = nn.Parameter(torch.ones(3).to("lazy"))

    @lazystep.step(audit_every=0)
    def forward(x: torch.Tensor) -> torch.Tensor:
        return (x.detach().clone().requires_grad_() + weight).sum()

    with pytest.warns(lazystep.LazyStepWarning, match="carries a graph"):
        for _ in range(4):
            forward(torch.ones(3)).backward()
    assert forward.num_replayed == 0
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0] * 3
