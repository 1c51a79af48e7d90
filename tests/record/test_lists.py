"""Optimizers, clipping and zeroing record ops on lists by themselves where that changes no bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.testing._internal.common_optimizers import optim_db

import lazystep
from tests.helpers import count

OPTIMS = {info.optim_cls.__name__: info for info in optim_db}
ON_LISTS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "RMSprop", "SGD")


def parameters(device: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = ((33, 17), (9,), (5, 3, 2, 2), (1,), (1100,))
    made = [nn.Parameter(torch.randn(shape, dtype=dtype).to(device)) for shape in shapes]
    made.append(nn.Parameter(torch.randn(17, 33, dtype=dtype).t().to(device)))
    return made


def train(optimizer: torch.optim.Optimizer, owned: list[nn.Parameter], num_steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        for p in owned:
            grad = torch.randn(p.shape, dtype=p.dtype, generator=generator) * 1e-2
            p.grad = torch.empty_like(p).copy_(grad.to(p.device))
        optimizer.step()
        lazystep.mark_step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ON_LISTS)
def test_lists_and_loops_compute_the_same_bits_in_eager(name: str, dtype: torch.dtype) -> None:
    """What the default on lazy tensors relies on. A new torch that fails here leaves the list."""
    info = OPTIMS[name]
    for given in info.optim_inputs_func(device="cpu"):
        if isinstance(given.kwargs.get("lr"), torch.Tensor) or given.kwargs.get("nesterov"):
            continue  # Nesterov's momentum is not on lists: they change the gradients
        outcomes = []
        for foreach in (False, True):
            owned = parameters("cpu", dtype)
            options = {**copy.deepcopy(given.kwargs), "foreach": foreach}
            optimizer = info.optim_cls(owned, **options)
            train(optimizer, owned, 12)
            outcomes.append([*owned, *(p.grad for p in owned)])
        for a, b in zip(*outcomes, strict=True):
            assert torch.equal(a, b), (given.desc, (a - b).abs().max())


@pytest.mark.parametrize("name", ON_LISTS)
def test_default_on_lazy_tensors_is_lists_and_equals_eager_bitwise(name: str) -> None:
    outcomes = []
    for device in ("cpu", "lazy"):
        owned = parameters(device)
        train(OPTIMS[name].optim_cls(owned, lr=0.01), owned, 4)
        outcomes.append([t.detach().cpu() for p in owned for t in (p, p.grad)])
    assert all(map(torch.equal, *outcomes))
    assert "_foreach_" in str(lazystep.debug.last_program())


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda owned: torch.optim.NAdam(owned), torch.float32),
        (lambda owned: torch.optim.RAdam(owned), torch.float32),
        (lambda owned: torch.optim.ASGD(owned), torch.float32),
        (lambda owned: torch.optim.Rprop(owned), torch.float32),
        (lambda owned: torch.optim.SGD(owned, momentum=0.9, nesterov=True), torch.float32),
        (lambda owned: torch.optim.Adagrad(owned), torch.bfloat16),
        (lambda owned: torch.optim.Adam(owned), torch.complex64),
        (lambda owned: torch.optim.SGD(owned, foreach=False), torch.float32),
    ],
    ids=["NAdam", "RAdam", "ASGD", "Rprop", "Nesterov", "bfloat16", "complex64", "foreach=False"],
)
def test_loop_stays_where_lists_would_change_bits(
    make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    outcomes = []
    for device in ("cpu", "lazy"):
        owned = parameters(device, dtype)
        train(make(owned), owned, 4)
        outcomes.append([t.detach().cpu() for p in owned for t in (p, p.grad)])
    assert all(map(torch.equal, *outcomes))
    assert "_foreach_" not in str(lazystep.debug.last_program())


def num_recorded(step: Callable[[], object]) -> int:
    before = count("instructions_recorded")
    held = step()
    lazystep.mark_step()
    del held
    return int(count("instructions_recorded") - before)


def test_instructions_of_a_step_do_not_grow_with_the_parameters() -> None:
    def instructions(num_layers: int, **options: Any) -> int:
        owned = [nn.Parameter(torch.ones(4).to("lazy")) for _ in range(num_layers)]
        for p in owned:
            p.grad = torch.ones(4).to("lazy")
        optimizer = torch.optim.AdamW(owned, **options)

        def step() -> None:
            nn.utils.clip_grad_norm_(owned, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        num_recorded(step)  # makes the state
        return num_recorded(step)

    assert instructions(3) == instructions(30) <= 20
    assert instructions(30, foreach=False) > 30 * 6


def test_zeroing_gradients_is_one_instruction_and_equals_eager() -> None:
    owned = {device: [nn.Parameter(torch.ones(3).to(device)) for _ in range(5)] for device in ("cpu", "lazy")}
    for device, found in owned.items():
        optimizer = torch.optim.SGD(found)
        sum((p * p).sum() for p in found[:4]).backward()  # type: ignore[union-attr]
        lazystep.mark_step()
        if device == "lazy":
            assert num_recorded(lambda o=optimizer: o.zero_grad(set_to_none=False)) == 1  # type: ignore[misc]
        else:
            optimizer.zero_grad(set_to_none=False)
        assert [p.grad is None or p.grad.tolist() for p in found] == [[0.0] * 3] * 4 + [True]
        with_graph = torch.autograd.grad((found[0] ** 3).sum(), found[0], create_graph=True)[0]
        found[0].grad = with_graph
        optimizer.zero_grad(set_to_none=False)
        assert not found[0].grad.requires_grad


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD])
def test_compiled_optimizer_of_cpu_tensors_has_no_break_of_ours(make: Any) -> None:
    owned = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for p in owned:
        p.grad = torch.ones(3)
    optimizer = make(owned, lr=0.1)
    sizes = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        sizes.append(len(graph.graph.nodes))
        return graph

    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own code
        torch.compile(lambda: (optimizer.step(), optimizer.zero_grad(set_to_none=False)), backend=backend)()
    assert len(sizes) == 1
    assert not [reason for reason in counters["graph_break"] if "lazystep" in reason]
    assert [p.grad.tolist() for p in owned if p.grad is not None] == [[0.0] * 3] * 2
