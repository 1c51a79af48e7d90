"""Autocast and GradScaler change between the calls of a captured step: eager's results, without audits."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import lazystep

from ..conformance.compare import tree_difference
from .cases import CapturedCases

BF16, F16 = torch.bfloat16, torch.float16
INF = float("inf")
# Each takes a device and a decorator of the step, and returns what came out, and the step.
case = CapturedCases()


def net(d: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)).to(d)


def data(d: str, seed: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)).to(d)


def grow(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


@case(8)
def block_around_some_calls(d: str, decorate: Any) -> Any:
    model = net(d)
    step = decorate(lambda x: model(x).float().detach())
    out = []
    for number in range(16):
        with torch.autocast(d, BF16, enabled=number // 4 % 2 == 1, cache_enabled=False):
            out.append(step(data(d, number)))
    return out, step


@case(10)
def block_that_is_off_around_some_calls(d: str, decorate: Any) -> Any:
    """Also a block that is off keeps the casts of the blocks inside it, here stale ones."""
    model = net(d)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(d, BF16):
            out = model(x)
        grow(model)
        return out.detach()

    run, out = decorate(step), []
    for number in range(12):
        with torch.autocast(d, enabled=False) if number in (6, 7, 8) else contextlib.nullcontext():
            out += [run(data(d, number)), run(data(d, number))]
    return out, run


@case(4)
def cast_that_another_thread_keeps(d: str, decorate: Any) -> Any:
    """Eager's cache is of all threads: the step gets the other thread's cast, which is stale."""
    model = net(d)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(d, BF16):
            return model(x).detach()

    run, out = decorate(step), []
    with ThreadPoolExecutor(1) as other:
        for number in range(10):
            block = torch.autocast(d, BF16)
            if number in (6, 7):
                other.submit(block.__enter__).result()
                other.submit(model, data(d, 99)).result()
                grow(model)
            out.append(run(data(d, number)))
            if number in (6, 7):
                other.submit(block.__exit__, None, None, None).result()
    return out, run


@case(6)
def types_and_switches_that_the_step_reads(d: str, decorate: Any) -> Any:
    model, options = net(d), {"dtype": BF16, "enabled": True, "cache_enabled": True}

    def step(x: torch.Tensor) -> Any:
        with torch.autocast(d, **options):  # type: ignore[arg-type]
            outer = model(x)
            with torch.autocast(d, enabled=False):
                inner = model(x)
        return outer.detach(), inner.detach()

    run, out = decorate(step), []
    changes = [{}, {"dtype": F16}, {"enabled": False}, {"enabled": True, "cache_enabled": False}]
    for number in range(16):
        options.update(changes[number // 4])  # type: ignore[arg-type]
        out.append(run(data(d, number)))
    return out, run


@case(4)
def exception_in_some_calls(d: str, decorate: Any) -> Any:
    model, fails = net(d), [False]

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(d, BF16):
            out = model(x)
            if fails[0]:
                raise ArithmeticError
        return out.detach()

    run, out = decorate(step), []
    for number in range(10):
        fails[0] = number in (3, 7)
        with contextlib.suppress(ArithmeticError):
            out.append(run(data(d, number)))
        out += [torch.is_autocast_enabled("cpu"), data(d, 0) @ data(d, 0).t()]
    return out, run


@case(12)
def another_thread_under_autocast(d: str, decorate: Any) -> Any:
    model, ends = net(d), threading.Event()

    def busy() -> None:
        weight = nn.Parameter(torch.randn(6, 6))
        while not ends.is_set():
            with torch.autocast(d, F16):
                assert (weight @ weight).dtype is F16

    def step(x: torch.Tensor) -> Any:
        plain = model(x)
        with torch.autocast(d, BF16):
            cast = model(x)
        return plain.detach(), cast.detach(), torch.is_autocast_enabled("cpu")

    run = decorate(step)
    with ThreadPoolExecutor(1) as other:
        future = other.submit(busy)
        try:
            out = [run(data(d, number)) for number in range(16)]
        finally:
            ends.set()
        future.result()
    return out, run


class Scaled:
    """A model with a GradScaler. `around` is called before each step."""

    def __init__(self, d: str) -> None:
        self.device = d
        self.model = net(d)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler(d, init_scale=64.0, growth_interval=3)
        self.second = net(d)
        self.second_optimizer = torch.optim.SGD(self.second.parameters(), lr=0.1, momentum=0.9)
        self.new_scale: float | None = None
        self.unscales = 0
        self.is_both = False

    def step(self, x: torch.Tensor, blow_up: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, F16):
            loss = self.model(x).float().square().mean() * blow_up
            other = self.second(x).float().square().mean()
        self.scaler.scale(loss).backward()
        for _ in range(self.unscales):
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        if self.is_both:
            self.scaler.scale(other).backward()
            self.scaler.step(self.second_optimizer)
        self.scaler.update(self.new_scale)
        self.optimizer.zero_grad()
        self.second_optimizer.zero_grad()
        return loss.detach()

    def run(self, decorate: Any, around: Callable[[int], None]) -> Any:
        run, out = decorate(self.step), []
        for number in range(16):
            around(number)
            blow_up = torch.tensor(INF if number in (4, 10) else 1.0).to(self.device)
            try:
                out.append(run(data(self.device, number), blow_up))
            except RuntimeError as error:
                out.append(str(error)[:40])  # "unscale_() has already been called"
                self.scaler.update()
                self.optimizer.zero_grad()
        states = [*self.optimizer.state.values(), *self.second_optimizer.state.values()]
        tensors = [*self.model.parameters(), *self.second.parameters()]
        state = [value.cpu() for state in states for value in state.values() if value is not None]
        return (out, tensors, state, self.scaler.state_dict()), run


@case(8)
def scaler_that_is_loaded(d: str, decorate: Any) -> Any:
    scaled, saved = Scaled(d), {}

    def around(number: int) -> None:
        if number == 3:
            saved.update(copy.deepcopy(scaled.scaler.state_dict()))
        if number in (8, 12):
            scaled.scaler.load_state_dict(saved | {"growth_interval": number - 6, "backoff_factor": 0.25})

    return scaled.run(decorate, around)


@case(8)
def scale_that_is_set_inside_and_outside(d: str, decorate: Any) -> Any:
    scaled = Scaled(d)

    def around(number: int) -> None:
        scaled.new_scale = 32.0 if number > 12 else None
        if number in (7, 9):
            scaled.scaler.update(float(2**number))

    return scaled.run(decorate, around)


@case(6)
def gradients_that_are_unscaled_once_and_twice(d: str, decorate: Any) -> Any:
    scaled = Scaled(d)

    def around(number: int) -> None:
        scaled.unscales = 2 if number == 9 else int(number > 6)

    return scaled.run(decorate, around)


@case(6)
def two_optimizers_and_one_scaler(d: str, decorate: Any) -> Any:
    scaled = Scaled(d)

    def around(number: int) -> None:
        scaled.is_both = number % 3 != 0

    return scaled.run(decorate, around)


@pytest.mark.filterwarnings("ignore:.*recorded in each call", "ignore:.*it waits for a value")
@pytest.mark.parametrize("name", case)
def test_captured_step_equals_eager_bitwise(name: str) -> None:
    run, num_replayed = case[name]
    want, _ = run("cpu", lambda step: step)
    got, step = run("lazy", lambda step: lazystep.step(step, audit_every=0))
    assert tree_difference(want, got) is None
    assert step.num_replayed >= num_replayed, step.explain()
