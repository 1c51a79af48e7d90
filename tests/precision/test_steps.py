"""Autocast and GradScaler in unusual places of a step: eager's results, plain and captured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lazystep

from ..conformance.compare import tree_difference
from .cases import CapturedCases

BF16, F16 = torch.bfloat16, torch.float16
INF = float("inf")


class Setting:
    """A model, an optimizer, a scaler, and the steps of a case."""

    def __init__(self, device: str, decorate: Callable[[Any], Any]) -> None:
        torch.manual_seed(0)
        self.d = device
        self.decorate = decorate
        self.model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)).to(device)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=3)
        self.beside: list[Any] = []  # what else is compared in the end
        self.num_replayed = 0

    def data(self, seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(*(shape or (5, 6)), generator=torch.Generator().manual_seed(seed)).to(self.d)

    def update(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def run(
        self, step: Callable[..., Any], num_calls: int = 11, before: Callable[[int], None] = lambda _: None
    ) -> Any:
        """Call the step with data and a factor, which is infinite in some calls."""
        run, results = self.decorate(step), []
        for number in range(num_calls):
            before(number)
            factor = torch.tensor(INF if number in (0, 8) else 1.0).to(self.d)
            results.append(run(self.data(number), factor))
        self.num_replayed = getattr(run, "num_replayed", 0)
        state = [list(one.values()) for one in self.optimizer.state.values()]
        state = [[x.cpu() if isinstance(x, torch.Tensor) else x for x in one] for one in state]
        tensors = [parameter.detach() for parameter in self.model.parameters()]
        return results, tensors, state, self.scaler.state_dict(), self.beside


case = CapturedCases()


# -- blocks that are entered in hooks and generators -----------------------------------------------------


@case(4)
def block_in_hooks_of_modules(s: Setting) -> Any:
    blocks: list[Any] = []

    def enter(module: Any, args: Any) -> None:
        blocks.append(torch.autocast(s.d, BF16))
        blocks[-1].__enter__()

    def leave(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        blocks.pop().__exit__(None, None, None)
        return out.float() @ out.float().t()[:, :1]

    s.model.register_forward_pre_hook(enter)
    s.model.register_forward_hook(leave)

    def step(x: torch.Tensor, factor: torch.Tensor) -> Any:
        out = s.model(x)
        s.update(out.square().mean() * factor)
        return out.detach()

    return s.run(step)


@case(4)
def block_in_hooks_of_gradients(s: Setting) -> Any:
    mixing = s.data(99, 8, 8)

    def mix(grad: torch.Tensor) -> torch.Tensor:
        with torch.autocast(s.d, BF16):
            return (mixing @ grad).float()

    def square(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.autocast(s.d, F16):
            parameter.grad.copy_(parameter.grad @ parameter.grad.t() @ parameter.grad)

    s.model[0].weight.register_hook(mix)
    s.model[3].weight.register_post_accumulate_grad_hook(square)

    def step(x: torch.Tensor, factor: torch.Tensor) -> Any:
        loss = s.model(x).square().mean() * factor
        s.update(loss)
        return loss.detach()

    return s.run(step)


@case(5)
def generator_that_holds_a_block(s: Setting) -> Any:
    def layers(x: torch.Tensor) -> Iterator[torch.Tensor]:
        with torch.autocast(s.d, BF16):
            for layer in s.model:
                x = layer(x)
                yield x

    def step(x: torch.Tensor, factor: torch.Tensor) -> Any:
        found: list[Any] = []
        for out in layers(x):
            found += [out.detach(), torch.is_autocast_enabled("cpu"), x @ x.t()]
        left = layers(x)
        next(left)
        found.append(x @ x.t())
        left.close()
        return found, x @ x.t()

    return s.run(step)


@case(3)
def generator_that_holds_a_block_across_calls(s: Setting) -> Any:
    def hold() -> Iterator[None]:
        with torch.autocast(s.d, BF16):
            yield

    held = [hold()]

    def before(number: int) -> None:
        if number == 5:
            next(held[0])
        if number == 8:
            held[0].close()
        with torch.no_grad():
            s.model[0].weight.mul_(1.1)  # a kept cast is stale

    return s.run(lambda x, _: (s.model(x).detach(), x @ x.t()), 12, before)


@case(0)
def generator_that_the_step_advances(s: Setting) -> Any:
    def blocks() -> Iterator[bool]:
        while True:
            with torch.autocast(s.d, BF16):
                yield True
            yield False

    held = blocks()
    results = s.run(lambda x, _: (next(held), s.model(x).detach()))
    held.close()
    return results


@case(0)
def type_that_the_step_leaves_changed(s: Setting) -> Any:
    def step(x: torch.Tensor, factor: torch.Tensor) -> Any:
        with torch.autocast(s.d):
            out = s.model(x).detach()
        torch.set_autocast_dtype(s.d, F16 if out.dtype is BF16 else BF16)
        return out

    try:
        return s.run(step)
    finally:
        torch.set_autocast_dtype(s.d, BF16)


@case(4)
def tensors_that_are_saved_in_another_type(s: Setting) -> Any:
    def pack(tensor: torch.Tensor) -> Any:
        return tensor.dtype, tensor.to(BF16) if tensor.is_floating_point() else tensor

    def step(x: torch.Tensor, factor: torch.Tensor) -> Any:
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1].to(packed[0]))
        with hooks, torch.autocast(s.d, F16):
            loss = s.model(x).float().square().mean() * factor
        s.update(loss)
        return loss.detach()

    return s.run(step)


@case(4)
def part_that_is_computed_again(s: Setting) -> Any:
    def step(x: torch.Tensor, factor: torch.Tensor) -> Any:
        with torch.autocast(s.d, F16):
            out = checkpoint(s.model, x, use_reentrant=False, preserve_rng_state=False)
        s.update(out.float().square().mean() * factor)
        return out.detach()

    return s.run(step)


# -- GradScaler ---------------------------------------------------------------------------------------------


@case(4)
def lists_of_losses(s: Setting) -> Any:
    def step(x: torch.Tensor, factor: torch.Tensor) -> Any:
        with torch.autocast(s.d, F16):
            out = s.model(x).float()
        losses = [out.square().mean() * factor, out.abs().mean()]
        first, second = s.scaler.scale(losses)
        nested = s.scaler.scale((losses[0], [losses[1]]))
        torch.autograd.backward([first + nested[1][0], second + nested[0]])
        s.scaler.step(s.optimizer)
        s.scaler.update()
        s.optimizer.zero_grad()
        return first.detach(), second.detach()

    return s.run(step)


@case(4)
def penalty_of_gradients(s: Setting) -> Any:
    def step(x: torch.Tensor, factor: torch.Tensor) -> Any:
        with torch.autocast(s.d, F16):
            loss = s.model(x).float().square().mean() * factor
        grads = torch.autograd.grad(s.scaler.scale(loss), list(s.model.parameters()), create_graph=True)
        inverse = 1.0 / s.scaler._get_scale_async()  # type: ignore[operator]
        with torch.autocast(s.d, F16):
            penalty = torch.stack([(grad * inverse).square().sum() for grad in grads]).sum().sqrt()
        s.update(loss + penalty)
        return loss.detach(), penalty.detach()

    return s.run(step)


@case(0)
def penalty_of_gradients_with_a_scale_that_is_read(s: Setting) -> Any:
    def step(x: torch.Tensor, factor: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        with torch.autocast(s.d, F16):
            loss = s.model(x).float().square().mean() * factor
        (grad,) = torch.autograd.grad(s.scaler.scale(loss), x, create_graph=True)
        penalty = ((grad * (1.0 / s.scaler.get_scale())).norm(2, 1) - 1).square().mean()
        s.update(loss + penalty)
        return loss.detach(), penalty.detach()

    return s.run(step)


@case(4)
def scale_that_is_changed_in_place(s: Setting) -> Any:
    def before(number: int) -> None:
        if number == 4:
            s.scaler._scale.mul_(4)  # type: ignore[union-attr]
        if number == 7:
            s.scaler._growth_tracker.fill_(2)  # type: ignore[union-attr]

    def step(x: torch.Tensor, factor: torch.Tensor) -> Any:
        with torch.autocast(s.d, F16):
            loss = s.model(x).float().square().mean() * factor
        s.update(loss)
        s.scaler._scale.clamp_(8.0, 128.0)  # type: ignore[union-attr]
        return loss.detach()

    return s.run(step, before=before)


@case(3)
def parameters_without_gradients(s: Setting) -> Any:
    s.model[0].weight.requires_grad_(False)
    uses_all = [True]

    def before(number: int) -> None:
        uses_all[0] = number < 6
        s.model[1].weight.requires_grad_(number != 4)

    def step(x: torch.Tensor, factor: torch.Tensor) -> Any:
        with torch.autocast(s.d, F16):
            out = s.model(x) if uses_all[0] else s.model[0](x)
        s.scaler.scale(out.float().square().mean() * factor).backward()
        s.scaler.unscale_(s.optimizer)
        norm = nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)
        s.scaler.step(s.optimizer)
        s.scaler.update()
        s.optimizer.zero_grad()
        return norm

    return s.run(step, 14, before)


@case(4)
def overflow_in_one_of_two_optimizers(s: Setting) -> Any:
    other = copy.deepcopy(s.model)
    second = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    s.beside = [parameter.detach() for parameter in other.parameters()]

    def step(x: torch.Tensor, factor: torch.Tensor) -> Any:
        with torch.autocast(s.d, F16):
            losses = [s.model(x).float().square().mean() * factor, other(x).float().square().mean()]
        torch.autograd.backward(s.scaler.scale(losses))
        s.scaler.step(second)
        s.scaler.step(s.optimizer)
        s.scaler.update()
        s.optimizer.zero_grad()
        second.zero_grad()
        return [loss.detach() for loss in losses]

    return s.run(step)


@case(4)
def scale_that_grows_in_each_step_until_it_overflows(s: Setting) -> Any:
    s.scaler = torch.amp.GradScaler(s.d, init_scale=2.0**100, growth_factor=16.0, growth_interval=1)

    def step(x: torch.Tensor, factor: torch.Tensor) -> Any:
        with torch.autocast(s.d, BF16):
            loss = s.model(x).float().square().mean() * factor
        s.update(loss)
        return loss.detach()

    return s.run(step, 14)


@case(8)
def scaler_that_is_switched_off(s: Setting) -> Any:
    def before(number: int) -> None:
        s.scaler._enabled = number // 4 != 1

    def step(x: torch.Tensor, factor: torch.Tensor) -> Any:
        with torch.autocast(s.d, F16, enabled=s.scaler.is_enabled()):
            loss = s.model(x).float().square().mean()
        s.update(loss)
        return loss.detach()

    return s.run(step, 16, before)


@case(0)
def sparse_gradients(s: Setting) -> Any:
    table = nn.Embedding(10, 6, sparse=True).to(s.d)
    second = torch.optim.SGD(table.parameters(), lr=5.0)
    s.beside = [table.weight.detach()]

    def step(x: torch.Tensor, factor: torch.Tensor) -> Any:
        rows = (x[:, 0].abs() * 5).long().clamp(max=9)
        with torch.autocast(s.d, F16):
            loss = s.model(table(rows)).float().square().mean() * factor
        s.scaler.scale(loss).backward()
        s.scaler.step(second)
        second.zero_grad()
        s.scaler.step(s.optimizer)
        s.scaler.update()
        s.optimizer.zero_grad()
        return loss.detach()

    return s.run(step)


@case(4)
def float32_masters_of_a_bfloat16_model(s: Setting) -> Any:
    s.model.to(BF16)
    masters = [p.detach().float().requires_grad_() for p in s.model.parameters()]
    average = [p.detach().clone() for p in s.model.parameters()]
    s.optimizer = torch.optim.AdamW(masters, lr=0.01, foreach=True)
    s.beside = [*average, *(master.detach() for master in masters)]

    def step(x: torch.Tensor, factor: torch.Tensor) -> Any:
        s.scaler.scale(s.model(x.to(BF16)).float().square().mean() * factor).backward()
        for master, parameter in zip(masters, s.model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        s.scaler.unscale_(s.optimizer)
        norm = nn.utils.clip_grad_norm_(masters, 0.5)
        s.scaler.step(s.optimizer)
        s.scaler.update()
        with torch.no_grad():
            torch._foreach_copy_(list(s.model.parameters()), masters)
            torch._foreach_lerp_(average, list(s.model.parameters()), 0.1)
        return norm

    return s.run(step)


def plain(step: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        result = step(*args)
        lazystep.mark_step()
        return result

    return run


@pytest.mark.filterwarnings("ignore:.*recorded in each call", "ignore:.*it waits for a value")
@pytest.mark.parametrize("captured", [False, True], ids=["plain", "captured"])
@pytest.mark.parametrize("name", case)
def test_step_equals_eager_bitwise(name: str, captured: bool) -> None:
    run, num_replayed = case[name]
    want = run(Setting("cpu", lambda step: step))
    setting = Setting("lazy", (lambda step: lazystep.step(step, audit_every=0)) if captured else plain)
    got = run(setting)
    assert tree_difference(want, got) is None
    assert not captured or setting.num_replayed >= num_replayed
