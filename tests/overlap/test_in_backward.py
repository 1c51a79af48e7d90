"""`optimizer_in_backward`: equal to the plain loop, gradients freed as they are used, refusals."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lazystep import metrics
from lazystep.errors import OverlapError, UnsupportedError
from lazystep.overlap import optimizer_in_backward
from tests.helpers import descend

from .models import Checkpointed, DecayAfterwards, GroupCounter, SignDescent, Tied
from .table import TORCH_OPTIMIZERS, forms_of
from .training import largest_difference, mlp, tensors_in

NUM_STEPS = 8


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Any = range(NUM_STEPS)) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in steps:
        torch.manual_seed(step)
        descend(model(torch.randn(4, 6)).square().mean(), optimizer)
        scheduler.step()


def state_of(*things: Any) -> list[torch.Tensor]:
    return [tensor for thing in things for tensor in tensors_in(thing.state_dict())]


def assert_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert len(first) == len(second) > 0
    assert max(map(largest_difference, first, second)) == 0


def in_backward(kind: Any = torch.optim.SGD, **options: Any) -> tuple[nn.Module, Any, Any]:
    """A model, its optimizer and the handle."""
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.1)
    return model, optimizer, optimizer_in_backward(model, optimizer, **options)


def compare(model: nn.Module, make: Any, **options: Any) -> Any:
    ours = copy.deepcopy(model)
    plain_optimizer, optimizer = make(model.parameters()), make(ours.parameters())
    handle = optimizer_in_backward(ours, optimizer, **options)
    train(model, plain_optimizer)
    train(ours, optimizer)
    assert_equal(state_of(model, plain_optimizer), state_of(ours, optimizer))
    return handle


@pytest.mark.parametrize("gather_bytes", [0, 600, 1 << 30])
@pytest.mark.parametrize(("name", "form"), [(n, f) for n in TORCH_OPTIMIZERS for f in forms_of(n)])
def test_torch_optimizer_is_equal_to_the_plain_loop(name: str, form: str, gather_bytes: int) -> None:
    options = {**TORCH_OPTIMIZERS[name], **({} if form == "default" else {form: True})}
    model = mlp()
    if name == "Muon":
        model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))
    handle = compare(model, lambda p: getattr(torch.optim, name)(p, **options), gather_bytes=gather_bytes)
    assert handle.num_updated == NUM_STEPS * len(list(model.parameters()))
    assert metrics.counter_value("overlap_parameters_updated") == handle.num_updated


@pytest.mark.parametrize("model", [Tied(), Checkpointed(reentrant=False)], ids=["tied", "checkpointed"])
def test_model_is_equal_to_the_plain_loop(model: nn.Module) -> None:
    compare(model, lambda p: torch.optim.AdamW(p, lr=0.01))


def test_each_gradient_is_freed_before_the_next_parameter_gets_one() -> None:
    model, _, _ = in_backward(torch.optim.AdamW)
    alive: list[int] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(q.grad is not None for q in model.parameters()))
        )
    model(torch.randn(4, 6)).sum().backward()
    assert alive == [0] * 8, "ours ran first and had freed it"


def test_gradients_gather_up_to_a_size() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))  # 256 bytes each
    updates: list[int] = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            updates.append(sum(len(group["params"]) for group in self.param_groups))
            return super().step(closure)

    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer_in_backward(model, optimizer, gather_bytes=1000, per_parameter=True)
    model(torch.randn(4, 8)).sum().backward()
    assert updates == [4, 2], "four reach the size, two are left at the end"


def test_parameters_outside_the_model_and_without_gradient_are_left_to_step() -> None:
    model, outside = mlp(), nn.Parameter(torch.ones(4))
    reference, reference_outside = copy.deepcopy(model), nn.Parameter(torch.ones(4))
    ours = torch.optim.SGD([*model.parameters()], lr=0.1, momentum=0.9)
    optimizer_in_backward(model, ours)
    ours.add_param_group({"params": [outside]})  # no hook on this one
    plain = torch.optim.SGD(
        [{"params": [*reference.parameters()]}, {"params": [reference_outside]}], 0.1, 0.9
    )
    for step in range(4):
        for net, scale, optimizer in ((model, outside, ours), (reference, reference_outside, plain)):
            torch.manual_seed(step)
            descend((net(torch.randn(4, 6)) * scale).square().mean(), optimizer)
    assert torch.equal(outside, reference_outside)
    assert not torch.equal(outside, torch.ones(4))
    assert_equal(state_of(model), state_of(reference))


def test_state_dict_resumes_without_it_and_back() -> None:
    def make(in_backward: bool, saved: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if in_backward:
            optimizer_in_backward(model, optimizer)
        if saved:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        return model, optimizer

    results = []
    for first in (False, True):
        for second in (False, True):
            model, optimizer = make(first)
            train(model, optimizer, range(4))
            model, optimizer = make(second, copy.deepcopy((model.state_dict(), optimizer.state_dict())))
            train(model, optimizer, range(4, 8))
            results.append(state_of(model, optimizer))
    for result in results[1:]:
        assert_equal(result, results[0])


def test_second_backward_before_step_raises_and_poisons() -> None:
    model, optimizer, _ = in_backward()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    loss = model(torch.randn(4, 6)).sum()
    second = model(torch.randn(4, 6)).sum()
    loss.backward()
    # The second graph holds the old weights: autograd itself refuses before we do. A new one is ours.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()
    with pytest.raises(OverlapError, match=r"a second gradient for 6\.\w+ before optimizer\.step\(\)"):
        model(torch.randn(4, 6)).sum().backward()
    with pytest.raises(OverlapError, match="an earlier step failed"):
        model(torch.randn(4, 6))
    with pytest.raises(OverlapError, match="an earlier step failed"):
        optimizer.step()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    optimizer.zero_grad()
    train(model, optimizer, range(2))


def test_reentrant_checkpoint_of_a_layer_used_twice_raises() -> None:
    """torch's own `_apply_optimizer_in_backward` steps such a layer twice, silently."""
    layer, head = nn.Linear(6, 6), nn.Linear(6, 1)
    model = nn.Sequential(layer, head)
    optimizer_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
    h = torch.randn(4, 6, requires_grad=True)
    for _ in range(2):
        h = checkpoint(layer, h, use_reentrant=True)
    with pytest.raises((OverlapError, RuntimeError), match=r"a second gradient|modified by an inplace"):
        head(h).sum().backward()


def test_error_of_the_update_keeps_its_type_and_names_the_parameter() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ArithmeticError("no")

    model, _, _ = in_backward(Failing, per_parameter=True)
    with pytest.raises(ArithmeticError, match="no") as caught:
        model(torch.randn(4, 6)).sum().backward()
    assert any("updating 6." in note for note in caught.value.__notes__)
    with pytest.raises(OverlapError, match="ArithmeticError: no"):
        model(torch.randn(4, 6))


def test_create_graph_is_refused() -> None:
    model, _, _ = in_backward()
    with warnings.catch_warnings():
        # torch warns of it once in a process, so another test may have been the first.
        warnings.filterwarnings("ignore", message=".*create_graph", category=UserWarning)
        with pytest.raises(OverlapError, match="create_graph"):
            model(torch.randn(4, 6)).sum().backward(create_graph=True)


@pytest.mark.parametrize("gather_bytes", [0, 1 << 30])
@pytest.mark.parametrize(
    "kind", [SignDescent, partial(DecayAfterwards, lr=0.1, momentum=0.9)], ids=["own", "subclass"]
)
def test_declared_third_party_optimizer_is_equal(kind: Any, gather_bytes: int) -> None:
    compare(mlp(), kind, per_parameter=True, gather_bytes=gather_bytes)


def test_refusals_at_set_up() -> None:
    model = mlp()
    with pytest.raises(UnsupportedError, match="LBFGS"):
        optimizer_in_backward(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UnsupportedError, match="per_parameter=True"):
        optimizer_in_backward(model, SignDescent(model.parameters()))
    with pytest.raises(UnsupportedError, match="differentiable"):
        optimizer_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True))
    with pytest.raises(TypeError, match="Optimizer"):
        optimizer_in_backward(model, object())  # type: ignore[arg-type]


def test_counter_of_a_group_is_noticed() -> None:
    model = mlp()
    optimizer_in_backward(model, GroupCounter(model.parameters()), per_parameter=True)
    with pytest.raises(OverlapError, match="num_steps"):
        model(torch.randn(4, 6)).sum().backward()


def test_grad_scaler_is_refused_by_itself() -> None:
    """There are no gradients to unscale, and torch's scaler says so."""
    model, optimizer, _ = in_backward()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(4, 6)).sum()).backward()
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(optimizer)


def test_remove_gives_the_plain_loop_back() -> None:
    model, optimizer, handle = in_backward()
    model(torch.randn(4, 6)).sum().backward()
    with pytest.raises(OverlapError, match=r"call optimizer.step\(\) before remove"):
        handle.remove()
    optimizer.step()
    handle.remove()
    model(torch.randn(4, 6)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert handle.num_updated == 8


def test_model_and_optimizer_are_freed() -> None:
    model, optimizer, handle = in_backward()
    train(model, optimizer, range(1))
    references = [weakref.ref(thing) for thing in (model, optimizer, handle)]
    del model, optimizer, handle
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
