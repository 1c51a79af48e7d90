"""`torch.func` transforms of functions that enter autocast: a wrapped lazy tensor is cast as in eager."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import func, nn
from torch.autograd import forward_ad

import lazystep
from lazystep.record import _recorder

from ..conformance.compare import tree_difference
from ..helpers import count
from .cases import Cases

BF16, F16 = torch.bfloat16, torch.float16
case = CASES = Cases()


def data(d: str, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(d)


def weight_and_input(d: str) -> tuple[torch.Tensor, torch.Tensor]:
    return data(d, 6, 3), data(d, 5, 6, seed=1)


def loss_of(d: str, dtype: torch.dtype = BF16, **options: Any) -> Callable[..., torch.Tensor]:
    def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(d, dtype, **options):
            return (x @ weight).float().square().sum()

    return loss


def product_of(d: str) -> Callable[..., torch.Tensor]:
    def product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(d, BF16):
            return x @ weight

    return product


def module(d: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)).to(d)
    return made, {name: p.detach() for name, p in made.named_parameters()}


def loss_of_module(d: str, model: nn.Module) -> Callable[..., torch.Tensor]:
    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(d, BF16):
            out: torch.Tensor = func.functional_call(model, parameters, (x,)).float().square().mean()
        return out

    return loss


@case
def grad(d: str) -> Any:
    return [func.grad(loss_of(d, dtype), argnums=(0, 1))(*weight_and_input(d)) for dtype in (BF16, F16)]


@case
def grad_without_kept_casts(d: str) -> Any:
    return func.grad(loss_of(d, cache_enabled=False))(*weight_and_input(d))


@case
def grad_under_autocast(d: str) -> Any:
    with torch.autocast(d, BF16):
        return func.grad(lambda w, x: (x @ w).float().square().sum())(*weight_and_input(d))


@case
def grad_that_switches_autocast_off(d: str) -> Any:
    with torch.autocast(d, BF16):
        return func.grad(loss_of(d, enabled=False))(*weight_and_input(d))


@case
def grad_of_every_policy(d: str) -> Any:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(d, BF16):
            out = x @ w
            classes = torch.zeros(5, dtype=torch.long, device=d)
            losses = F.mse_loss(out, torch.zeros(5, 3, device=d)) + F.cross_entropy(out, classes)
            return losses + torch.cat([out, w]).float().square().sum() + F.softmax(out, -1).square().sum()

    return func.grad(loss, argnums=(0, 1))(*weight_and_input(d))


@case
def grad_beside_a_parameter(d: str) -> Any:
    weight = nn.Parameter(data(d, 6, 3))

    def loss(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(d, BF16):
            return (x @ weight).float().square().sum() + (x @ weight).float().sum()

    return func.grad(loss)(data(d, 5, 6))


@case
def grad_of_a_module(d: str) -> Any:
    model, parameters = module(d)
    return func.grad_and_value(loss_of_module(d, model))(parameters, data(d, 5, 6))


@case
def gradients_of_each_sample(d: str) -> Any:
    model, parameters = module(d)
    return func.vmap(func.grad(loss_of_module(d, model)), in_dims=(None, 0))(parameters, data(d, 5, 6))


@case
def vjp(d: str) -> Any:
    out, pull = func.vjp(product_of(d), *weight_and_input(d))
    return out, pull(torch.ones_like(out))


@case
def jvp(d: str) -> Any:
    return func.jvp(loss_of(d), weight_and_input(d), (data(d, 6, 3, seed=2), data(d, 5, 6, seed=3)))


@case
def linearized(d: str) -> Any:
    weight, x = weight_and_input(d)
    out, push = func.linearize(lambda w: loss_of(d)(w, x), weight)
    return out, push(weight * 2)


@case
def dual_numbers(d: str) -> Any:
    weight, x = weight_and_input(d)
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(loss_of(d)(forward_ad.make_dual(weight, weight * 2), x))


@case
def vmap(d: str) -> Any:
    weights, inputs = data(d, 4, 6, 3), data(d, 4, 5, 6, seed=1)
    both = func.vmap(product_of(d))(weights, inputs)
    return both, func.vmap(product_of(d), in_dims=(None, 0))(weights[0], inputs)


@case
def grad_of_vmap(d: str) -> Any:
    mapped = func.vmap(loss_of(d), in_dims=(None, 0))
    return func.grad(lambda w, x: mapped(w, x).sum())(data(d, 6, 3), data(d, 4, 5, 6, seed=1))


@case
def jacobians(d: str) -> Any:
    return [transform(product_of(d))(*weight_and_input(d)) for transform in (func.jacrev, func.jacfwd)]


@case
def hessian(d: str) -> Any:
    return func.hessian(loss_of(d))(data(d, 3, 2), data(d, 4, 3, seed=1))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr")  # torch's own, of `linearize`
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, of forward mode
@pytest.mark.parametrize("name", CASES)
def test_transform_equals_eager_bitwise(name: str) -> None:
    want = CASES[name]("cpu")
    lazystep.metrics.reset()
    got = CASES[name]("lazy")
    # Forward mode asks how much memory a tensor has, with autocast or without, which waits.
    assert count("synchronizations") == 0 or name in ("jvp", "dual_numbers", "linearized")
    assert tree_difference(want, got) is None


def test_step_with_a_transform_equals_eager_bitwise() -> None:
    def run(d: str, captured: bool) -> Any:
        model, _ = module(d)
        parameters = dict(model.named_parameters())
        gradient = func.grad(loss_of_module(d, model))

        def step(x: torch.Tensor) -> None:
            found = gradient({name: p.detach() for name, p in parameters.items()}, x)
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter -= 0.1 * found[name]

        run_step: Any = lazystep.step(step, audit_every=0) if captured else step
        for number in range(8):
            run_step(data(d, 5, 6, seed=number))
            if d == "lazy" and not captured:
                lazystep.mark_step()
        return [p.detach() for p in parameters.values()]

    want = run("cpu", False)
    for captured in (False, True):
        got = run("lazy", captured)
        assert tree_difference(want, got) is None


def test_tensors_of_the_cpu_are_cast_by_torch_alone() -> None:
    weight, x = nn.Parameter(data("cpu", 6, 3)), data("cpu", 5, 6)
    with torch.autocast("cpu", BF16):
        out = torch.cat([x @ weight, x @ weight])
        assert _recorder.num_casts() == 0  # kept in torch's own cache
    assert out.dtype is BF16
    with torch.autocast("cpu", enabled=False):
        assert (x @ weight).dtype is torch.float32


FIRST_BLOCK_IN_A_TRANSFORM = """
import torch, lazystep
layer = torch.nn.Linear(3, 2).to("lazy")
x = torch.ones(4, 3).to("lazy")
def loss(weight):
    with torch.autocast("lazy"):
        return torch.nn.functional.linear(x, weight).float().sum()
torch.func.grad(loss)(layer.weight.detach())
with torch.autocast("lazy"):
    print(type(layer(x).grad_fn.next_functions[2][0].next_functions[0][0]).__name__)
"""


def test_policies_are_found_inside_a_transform() -> None:
    out = subprocess.run([sys.executable, "-c", FIRST_BLOCK_IN_A_TRANSFORM], capture_output=True, text=True)
    # The cast of the weight, and not of its transpose, which is not kept.
    assert out.stdout.strip() == "ToCopyBackward0", out.stderr
