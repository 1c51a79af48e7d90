"""What torch keeps around a step: hooks, modes, gradients, optimizers."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lazystep
from tests.helpers import descend

from .common import Case, Cases, Function, captured, check_change

case = Cases()


scale = 2
hooks: list[Any] = []


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    yield
    globals().update(scale=2)
    for hook in hooks:
        hook.remove()
    hooks.clear()
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(True)


# -- hooks -----------------------------------------------------------------------------------------


def linear() -> tuple[nn.Linear, Function]:
    model = nn.Linear(3, 1).to("lazy")

    def gradient(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        model(x).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad + 0

    return model, gradient


@case
def forward_hook_is_added() -> Case:
    model = nn.Identity().to("lazy")
    return lambda x: model(x) + 0, lambda: model.register_forward_hook(lambda module, args, out: out * 10)


@case
def forward_hook_is_replaced() -> Case:
    model = nn.Identity().to("lazy")
    first = model.register_forward_hook(lambda module, args, out: out * 2)

    def change() -> None:
        first.remove()
        model.register_forward_hook(lambda module, args, out: out * 3)

    return lambda x: model(x) + 0, change


@case
def global_used_in_a_hook() -> Case:
    model = nn.Identity().to("lazy")
    model.register_forward_hook(lambda module, args, out: out * scale)
    return lambda x: model(x) + 0, lambda: globals().update(scale=3)


@case
def hook_of_all_modules() -> Case:
    model = nn.Identity().to("lazy")

    def change() -> None:
        hooks.append(nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 3))

    return lambda x: model(x) + 0, change


@case
def hook_of_a_parameter() -> Case:
    model, gradient = linear()
    return gradient, lambda: model.weight.register_hook(lambda grad: grad * 3)


@case
def hook_of_a_parameter_is_replaced() -> Case:
    model, gradient = linear()
    first = model.weight.register_hook(lambda grad: grad * 2)

    def change() -> None:
        first.remove()
        model.weight.register_hook(lambda grad: grad * 3)

    return gradient, change


@case
def hook_after_accumulation() -> Case:
    model, gradient = linear()

    def triple(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(3)

    return gradient, lambda: model.weight.register_post_accumulate_grad_hook(triple)


@case
def full_backward_hook() -> Case:
    first, second = nn.Linear(3, 3).to("lazy"), nn.Linear(3, 1).to("lazy")

    def gradient(x: torch.Tensor) -> torch.Tensor:
        first.zero_grad()
        second.zero_grad()
        second(first(x)).sum().backward()
        assert first.weight.grad is not None
        return first.weight.grad + 0

    return gradient, lambda: second.register_full_backward_hook(lambda m, ins, outs: (ins[0] * 3,))


@case
def hook_of_an_optimizer() -> Case:
    model = nn.Linear(3, 1, bias=False).to("lazy")
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        descend(model(x).sum(), optimizer)
        return model.weight.detach() + 0

    return step, lambda: optimizer.register_step_post_hook(lambda o, a, k: model.weight.data.fill_(3.0))


@case
def hook_of_a_plain_tensor() -> Case:
    weight = torch.ones(3).to("lazy").requires_grad_()
    return (
        lambda x: torch.autograd.grad((weight * x).sum(), weight)[0],
        lambda: weight.register_hook(lambda grad: grad * 3),
    )


@case
def hooks_of_saved_tensors() -> Case:
    weight = torch.ones(3, device="lazy").requires_grad_()
    hooks_of_this = torch.autograd.graph.saved_tensors_hooks(lambda t: t * 3, lambda t: t)

    def change() -> None:
        hooks_of_this.__enter__()
        hooks.append(types.SimpleNamespace(remove=lambda: hooks_of_this.__exit__()))

    return lambda x: torch.autograd.grad((weight * x).sum(), weight)[0], change


# -- modes -----------------------------------------------------------------------------------------


@case
def gradients_off() -> Case:
    weight = torch.ones(3, device="lazy", requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = (x * weight).sum()
        return torch.ones(1, device="lazy") * (2.0 if y.requires_grad else 3.0)

    return function, lambda: torch.set_grad_enabled(False)


@case
def default_dtype() -> Case:
    return lambda x: torch.ones(3, device="lazy") / 3 + x, lambda: torch.set_default_dtype(torch.float64)


@case
def gradient_mode_of_a_plain_tensor() -> Case:
    first, second = (torch.ones(3).to("lazy").requires_grad_() for _ in range(2))

    def function(x: torch.Tensor) -> torch.Tensor:
        wanted = [p for p in (first, second) if p.requires_grad]
        gradients = torch.autograd.grad((first * x * second).sum(), wanted)
        return torch.stack(gradients).sum(0)

    return function, lambda: second.requires_grad_(False)


# -- optimizers ------------------------------------------------------------------------------------


@case
def attribute_of_an_optimizer() -> Case:
    class Scaled(torch.optim.SGD):
        scale = 2.0

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(self.scale)
            return super().step(closure)

    weight = nn.Parameter(torch.ones(3).to("lazy"))
    optimizer = Scaled([weight], lr=0.0)

    def function(x: torch.Tensor) -> torch.Tensor:
        (weight * x).sum().backward()
        optimizer.step()
        assert weight.grad is not None
        made = weight.grad + 0
        optimizer.zero_grad()
        return made

    return function, lambda: setattr(optimizer, "scale", 3.0)


@pytest.mark.parametrize("make", case.parameters)
def test_change_is_noticed(make: Callable[[], Case]) -> None:
    check_change(*make())


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer, weight: optimizer.state.clear(),
        lambda optimizer, weight: optimizer.state.pop(weight),
        lambda optimizer, weight: optimizer.state[weight].update(step=torch.tensor(0.0)),
        lambda optimizer, weight: optimizer.param_groups[0].update(lr=torch.tensor(0.5)),
        lambda optimizer, weight: optimizer.load_state_dict(optimizer.state_dict()),
    ],
    ids=["cleared", "removed", "another count", "a tensor as lr", "loaded"],
)
def test_state_of_an_optimizer_that_is_replaced(change: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lazystep.LazyStepWarning)  # a tensor as lr is recorded in each call
        compare_training(
            lambda weight: torch.optim.Adam([weight], lr=0.1),
            lambda optimizer, weight, number: change(optimizer, weight) if number == 6 else None,
        )


def compare_training(make_optimizer: Callable[..., Any], before_step: Callable[..., object]) -> None:
    """Train captured and plain, with something done before each step: both must end with the same weight."""

    def train(decorate: Callable[[Function], Function]) -> list[float]:
        weight = nn.Parameter(torch.ones(3).to("lazy"))
        optimizer = make_optimizer(weight)

        @decorate
        def step(x: torch.Tensor) -> torch.Tensor:
            descend((weight * x).square().sum(), optimizer)
            return weight.detach() + 0

        for number in range(9):
            before_step(optimizer, weight, number)
            made = step(torch.ones(3))
        return made.tolist()

    assert train(lazystep.step(audit_every=0)) == train(lambda f: lambda x: f(x.to("lazy")))


def test_rate_in_a_tensor_that_a_schedule_writes() -> None:
    schedules: dict[Any, Any] = {}

    def make(weight: nn.Parameter) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD([weight], lr=torch.tensor(0.1))  # type: ignore[arg-type]
        schedules[optimizer] = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.1)
        return optimizer

    compare_training(make, lambda optimizer, _, number: schedules[optimizer].step() if number else None)


def test_optimizer_inside_another_one_follows_its_rate() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, params: Any, base: torch.optim.Optimizer) -> None:
            super().__init__(params, {})
            self.base = base

        def step(self, closure: Any = None) -> None:
            self.base.step()

    weight = nn.Parameter(torch.zeros(1).to("lazy"))
    wrapper = Wrapper([weight], torch.optim.SGD([weight], lr=1.0))

    @lazystep.step(audit_every=0, fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        descend((weight * x).sum(), wrapper)
        return weight.detach() + 0

    assert [step(torch.ones(1)).item() for _ in range(5)] == [-1, -2, -3, -4, -5]
    wrapper.base.param_groups[0]["lr"] = 10.0
    assert step(torch.ones(1)).item() == -15
    assert step.num_replayed >= 3


def test_gradient_of_a_plain_tensor_that_is_set_between_calls() -> None:
    weight = torch.ones(2, device="lazy").requires_grad_()

    @lazystep.step(audit_every=0)
    def gradient(x: torch.Tensor) -> torch.Tensor:
        (weight * x).sum().backward()
        assert weight.grad is not None
        made = weight.grad + 0
        weight.grad = None
        return made

    for _ in range(5):
        assert gradient(torch.ones(2)).tolist() == [1, 1]
    assert gradient.num_replayed > 0
    weight.grad = torch.full((2,), 10.0, device="lazy")
    assert gradient(torch.ones(2)).tolist() == [11, 11]
    assert weight.grad is None


def test_plain_tensor_that_is_replaced_in_each_step_is_replayed() -> None:
    state = {"w": torch.ones(2, device="lazy").requires_grad_()}

    @lazystep.step(audit_every=0, fullgraph=True)
    def descend(x: torch.Tensor) -> torch.Tensor:
        weight = state["w"]
        (gradient,) = torch.autograd.grad((weight * x).sum(), weight)
        state["w"] = (weight - 0.5 * gradient).detach().requires_grad_()
        return weight.detach() + 0

    assert [descend(torch.ones(2))[0].item() for _ in range(6)] == [1, 0.5, 0, -0.5, -1, -1.5]
    assert descend.num_replayed == 4
    assert state["w"].requires_grad


def test_device_as_a_context_in_each_iteration() -> None:
    doubled = captured(lambda x: x * 2 + torch.ones(1), fullgraph=True)
    for _ in range(5):
        with torch.device("lazy"):
            assert doubled(torch.ones(1)).item() == 3
    assert doubled.num_replayed == 3
