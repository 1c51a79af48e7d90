"""Steps that change a setting: a module's mode, `requires_grad`, a seed, a hook, the environment."""

from __future__ import annotations

import contextvars
import os
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers import descend

from .scenes import Scene, Scenes, check_right_or_refused

scene = Scenes()


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USERS_COUNT", "1")


@scene
def mode_is_toggled(device: str) -> Scene:
    model = nn.Sequential(nn.Dropout(1.0), nn.Softmax(0)).to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        model.train(not model.training)
        return y

    return Scene(step, kept=lambda: model[0].training)


@scene
def mode_is_restored(device: str) -> Scene:
    model = nn.Sequential(nn.Dropout(1.0), nn.Softmax(0)).to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        was = model.training
        model.eval()
        y = model(x)
        model.train(was)
        return y + model(x)

    return Scene(step, lambda: model.eval(), kept=lambda: model[0].training)


@scene
def mode_is_left(device: str) -> Scene:
    model = nn.Sequential(nn.Dropout(1.0), nn.Softmax(0)).to(device)
    return Scene(lambda x: model.eval()(x), lambda: model.train(), kept=lambda: model[0].training)


def with_weights(step: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[str], Scene]:
    def make(device: str) -> Scene:
        weight = torch.ones(3).to(device).requires_grad_()
        other = torch.full((3,), 2.0).to(device).requires_grad_()

        def function(x: torch.Tensor) -> Any:
            step(weight, other)
            (x * weight * other).sum().backward()
            made = [None if w.grad is None else w.grad + 0 for w in (weight, other)]
            weight.grad = other.grad = None
            return made

        return Scene(
            function,
            lambda: weight.requires_grad_(True),
            kept=lambda: (weight.requires_grad, other.requires_grad),
        )

    return make


def freeze_alternately(weight: torch.Tensor, other: torch.Tensor) -> None:
    weight.requires_grad_(not weight.requires_grad)


def freeze(weight: torch.Tensor, other: torch.Tensor) -> None:
    weight.requires_grad_(False)


def thaw_what_was_frozen(weight: torch.Tensor, other: torch.Tensor) -> None:
    weight.requires_grad = not other.requires_grad or not weight.requires_grad


scene.rows(
    requires_grad_toggled=with_weights(freeze_alternately),
    requires_grad_frozen=with_weights(freeze),
    requires_grad_assigned=with_weights(thaw_what_was_frozen),
)


@scene
def frozen_after_a_few_steps(device: str) -> Scene:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    box = types.SimpleNamespace(steps=0)

    def step(x: torch.Tensor) -> torch.Tensor:
        box.steps += 1
        if box.steps == 8:
            model[0].requires_grad_(False)
        loss = model(x).square().sum()
        descend(loss, optimizer)
        return loss.detach()

    return Scene(step, kept=lambda: (model[0].weight + 0, model[0].weight.requires_grad))


def seed_first(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(5)
    return nn.functional.dropout(x, 0.5)


def seed_last(x: torch.Tensor) -> torch.Tensor:
    y = x * torch.rand(3, device=x.device)
    torch.manual_seed(5)
    return y


def seed_without_a_draw(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(5)
    return x * 2


def seed_between_draws(x: torch.Tensor) -> torch.Tensor:
    y = x * torch.rand(3, device=x.device)
    torch.manual_seed(5)
    return y * torch.rand(3, device=x.device)


def state_put_back(x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    y = x * torch.rand(3, device=x.device)
    torch.set_rng_state(state)
    return y * torch.rand(3, device=x.device)


def seed_of_the_default_generator(x: torch.Tensor) -> torch.Tensor:
    torch.default_generator.manual_seed(5)
    return x * torch.rand(3, device=x.device)


SEEDING = [seed_first, seed_last, seed_without_a_draw, seed_between_draws] + [
    state_put_back,
    seed_of_the_default_generator,
]


@pytest.mark.parametrize("is_drawn_outside", [False, True])
@pytest.mark.parametrize("step", SEEDING)
def test_seed_that_is_set_inside(step: Callable[..., Any], is_drawn_outside: bool) -> None:
    kept = (lambda: torch.rand(1)) if is_drawn_outside else torch.initial_seed
    check_right_or_refused(lambda device: Scene(step, lambda: torch.manual_seed(9), kept))


@scene
def forked_generator(device: str) -> Scene:
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            y = torch.rand(3, device=x.device)
        return x * y + torch.rand(3, device=x.device)

    return Scene(step, kept=lambda: torch.rand(1))


@scene
def python_seeded_inside(device: str) -> Scene:
    def step(x: torch.Tensor) -> torch.Tensor:
        random.seed(5)
        np.random.seed(5)
        return x * 2

    return Scene(step, kept=lambda: (random.random(), np.random.rand()))


@scene
def default_dtype_set_inside(device: str) -> Scene:
    def step(x: torch.Tensor) -> torch.Tensor:
        was = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        y = torch.ones(3, device=x.device) / 3 + x
        torch.set_default_dtype(was)
        return y

    return Scene(step, kept=torch.get_default_dtype)


@scene
def hook_added_inside(device: str) -> Scene:
    weight = torch.ones(3).to(device).requires_grad_()

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.register_hook(lambda gradient: gradient * 2)
        return torch.autograd.grad((weight * x).sum(), weight)[0]

    return Scene(step)


@scene
def group_option_changed_inside(device: str) -> Scene:
    weight = torch.ones(3).to(device).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1, weight_decay=0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        descend((weight * x).sum(), optimizer)
        optimizer.param_groups[0]["weight_decay"] *= 0.5
        return weight.detach() + 0

    return Scene(step, kept=lambda: optimizer.param_groups[0]["weight_decay"])


@scene
def flag_of_a_group_toggled_inside(device: str) -> Scene:
    weight = torch.ones(3).to(device).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1, maximize=False)

    def step(x: torch.Tensor) -> torch.Tensor:
        descend((weight * x).sum(), optimizer)
        group = optimizer.param_groups[0]
        group["maximize"] = not group["maximize"]
        return weight.detach() + 0

    return Scene(step, kept=lambda: optimizer.param_groups[0]["maximize"])


@scene
def variable_of_the_environment(device: str) -> Scene:
    os.environ["USERS_COUNT"] = "1"

    def step(x: torch.Tensor) -> torch.Tensor:
        count = int(os.environ["USERS_COUNT"])
        os.environ["USERS_COUNT"] = str(count + 1)
        return x * count

    return Scene(step, kept=lambda: os.environ["USERS_COUNT"])


@scene
def context_variable(device: str) -> Scene:
    variable = contextvars.ContextVar("variable", default=1)

    def step(x: torch.Tensor) -> torch.Tensor:
        variable.set(variable.get() % 3 + 1)
        return x * variable.get()

    return Scene(step, kept=variable.get)


@pytest.mark.parametrize("make", scene.parameters)
def test_write_is_repeated_or_refused(make: Callable[[str], Scene]) -> None:
    check_right_or_refused(make)
