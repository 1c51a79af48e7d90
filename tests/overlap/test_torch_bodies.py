"""What torch's own tests of its private overlap check (they skip without a GPU), on the CPU, in our words."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.nn.parallel import DistributedDataParallel

from lazystep.overlap import (
    OptimInBackwardHookState,
    OptimizerHookState,
    apply_optim_in_backward_hook,
    as_functional,
    hook_then_optimizer,
    overlap_optimizer,
)
from tests.pool import Pool, World, raised_by


class LargeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(100, 200, bias=False), nn.Linear(200, 50, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x))


class TwoLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(10, 10, bias=True), nn.Linear(10, 1, bias=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(x)


def equal(first: Any, second: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


# -- the update after a hook ---------------------------------------------------------------------

KINDS: dict[str, Any] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-2}),
}


def hook_parity(world: World, kind: str, view: bool, static: bool, subset: bool) -> dict[str, bool]:
    torch.manual_seed(world.rank)
    model, x = LargeNet(), torch.randn(2, 100)
    options: dict[str, Any] = {"gradient_as_bucket_view": view, "static_graph": static, "bucket_cap_mb": 0.05}
    hooked = DistributedDataParallel(copy.deepcopy(model), process_group=world.group, **options)
    plain = DistributedDataParallel(copy.deepcopy(model), process_group=world.group, **options)
    optimizer_class, arguments = KINDS[kind]
    chosen = [next(hooked.parameters())] if subset else None
    state = OptimizerHookState(as_functional(optimizer_class, **arguments), params=chosen)
    hooked.register_comm_hook(world.group, hook_then_optimizer(default_hooks.allreduce_hook, state))
    optimizer = optimizer_class(list(plain.parameters())[: 1 if subset else None], **arguments)
    before = copy.deepcopy(list(hooked.parameters()))
    for _ in range(6):
        hooked.zero_grad()
        hooked(x).sum().backward()
    for _ in range(6):
        plain.zero_grad()
        plain(x).sum().backward()
        optimizer.step()
    after = list(hooked.parameters())
    return {
        "equal": equal(hooked, plain),
        "first moved": not torch.equal(before[0], after[0]),
        "others moved": not all(map(torch.equal, before[1:], after[1:])),
    }


@pytest.mark.parametrize("subset", [True, False])
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_hook_then_optimizer_matches_optimizer_after_backward(
    pool: Pool, kind: str, view: bool, static: bool, subset: bool
) -> None:
    for seen in pool.run(hook_parity, kind, view, static, subset):
        assert seen == {"equal": True, "first moved": True, "others moved": not subset}


def test_functional_optimizer_without_step_param_is_a_value_error() -> None:
    class Incomplete:
        pass

    with pytest.raises(ValueError, match=r"Incomplete must have a method step_param"):
        OptimizerHookState(Incomplete())  # type: ignore[arg-type]


def unused_parameter(world: World) -> list[str]:
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    ddp = DistributedDataParallel(model, process_group=world.group, find_unused_parameters=True)
    state = OptimizerHookState(as_functional(torch.optim.SGD, lr=0.1))
    ddp.register_comm_hook(world.group, hook_then_optimizer(default_hooks.allreduce_hook, state))
    before = copy.deepcopy(model.state_dict())
    raised = [raised_by(lambda: ddp(torch.randn(2, 4)).sum().backward()) for _ in range(2)]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    return raised


def test_parameter_without_gradient_raises_and_nothing_is_updated(pool: Pool) -> None:
    for raised in pool.run(unused_parameter):
        assert "has no gradient on this rank" in raised[0]
        assert "an earlier update failed" in raised[1]


# -- the optimizer in backward, under DDP --------------------------------------------------------


def in_backward_parity(world: World, kind: str, view: bool, large: bool) -> list[str]:
    torch.manual_seed(world.rank)
    width = 512 if large else 3
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 3))
    options: dict[str, Any] = {"gradient_as_bucket_view": view, "process_group": world.group}
    ours = DistributedDataParallel(copy.deepcopy(model), **options)
    plain = DistributedDataParallel(model, **options)
    optimizer_class = getattr(torch.optim, kind)
    state = OptimInBackwardHookState(optimizer_class(ours.parameters(), lr=0.03), world.group)
    ours.register_comm_hook(state, apply_optim_in_backward_hook(gradient_is_bucket_view=view))
    optimizer = optimizer_class(plain.parameters(), lr=0.03)
    wrong = [] if equal(ours, plain) else ["not equal at the start"]
    for iteration in range(8):
        x = torch.randn(10, 3)
        plain(x).mean().backward()
        optimizer.step()
        ours(x).mean().backward()
        if not equal(ours, plain):
            wrong.append(f"not equal at iteration {iteration}")
        if any(p.grad is not None for p in ours.parameters()):
            wrong.append(f"a gradient is left at iteration {iteration}")
        optimizer.zero_grad()
    return wrong


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_optimizer_in_backward_matches_and_leaves_no_gradients(
    pool: Pool, kind: str, view: bool, large: bool
) -> None:
    assert pool.run(in_backward_parity, kind, view, large) == [[], []]
    if not large:
        assert pool.run(in_backward_parity, kind, view, large, num_ranks=3) == [[], [], []]


def wrong_view(world: World) -> str:
    ddp = DistributedDataParallel(nn.Linear(3, 3), process_group=world.group)
    state = OptimInBackwardHookState(torch.optim.SGD(ddp.parameters(), lr=0.03), world.group)
    ddp.register_comm_hook(state, apply_optim_in_backward_hook(gradient_is_bucket_view=True))
    return raised_by(lambda: ddp(torch.randn(2, 3)).sum().backward())


def test_wrong_gradient_is_bucket_view_is_noticed(pool: Pool) -> None:
    for message in pool.run(wrong_view):
        assert message.startswith("ValueError: ")
        assert "not views" in message


def ignored_parameters(world: World, how: str) -> tuple[Any, bool]:
    torch.manual_seed(5)
    model = TwoLinear()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["a.weight"])
    before = model.a.weight.detach().clone()
    ddp = DistributedDataParallel(model, process_group=world.group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    if how == "hook":
        state = OptimInBackwardHookState(optimizer, world.group)
        ddp.register_comm_hook(state, apply_optim_in_backward_hook(gradient_is_bucket_view=False))
    else:
        overlap_optimizer(ddp, optimizer)
    torch.manual_seed(world.rank)
    a, b = ddp(torch.randn(1, 10))
    (a.transpose(0, 1) @ b).sum().backward()
    if how != "hook":
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, bool((before != model.a.weight).any())


@pytest.mark.parametrize("how", ["hook", "overlap_optimizer"])
def test_ignored_parameter_is_updated_from_the_local_gradient(pool: Pool, how: str) -> None:
    (first, moved), (second, also_moved) = pool.run(ignored_parameters, how)
    assert moved
    assert also_moved
    assert not torch.equal(first["a.weight"], second["a.weight"])
    for name in ("a.bias", "b.weight", "b.bias"):
        assert torch.equal(first[name], second[name])


# -- the name in DDP's log -----------------------------------------------------------------------


def logged_names(world: World) -> list[Any]:
    names = []
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, debugging_hooks.noop_hook):
        ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=world.group)
        names.append(ddp._get_ddp_logging_data().get("comm_hook"))
        wrapped = hook_then_optimizer(hook, OptimizerHookState(as_functional(torch.optim.SGD, lr=0.1)))
        ddp.register_comm_hook(world.group, wrapped)
        names.append(ddp._get_ddp_logging_data()["comm_hook"])
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=world.group)
    overlap_optimizer(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    names.append(ddp._get_ddp_logging_data()["comm_hook"])
    dist.barrier(world.group)
    return names


def test_ddp_logs_the_name_of_the_wrapped_hook(pool: Pool) -> None:
    expected: list[str | None] = []
    for hook in ("allreduce_hook", "fp16_compress_hook", "noop_hook"):
        expected += [None, f"hook_then_optimizer({hook})"]
    expected.append("overlap_optimizer(built-in)")
    assert pool.run(logged_names) == [expected, expected]
