"""Every optimizer of PyTorch's optimizer database: lazy equals eager bit for bit over five steps.

Each configuration of the database runs with each implementation that the optimizer has: a loop over
parameters, `foreach`, `fused`, `differentiable`, `capturable`; with complex parameters; with sparse
gradients. Parameters and the optimizer's whole state are compared, after a barrier per step. Where
eager refuses a configuration on the CPU, as it does every `capturable`, lazy must refuse it too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, OptimizerInfo, optim_db

import lazystep

from .compare import Outcome, copy_inputs, device_run_difference, difference
from .conftest import Counts

NUM_STEPS = 5

OPTIMS = {info.optim_cls.__name__: info for info in optim_db}


def implementations(info: OptimizerInfo) -> dict[str, dict[str, bool]]:
    """Name to the arguments that choose it."""
    found: dict[str, dict[str, bool]] = {}
    if not info.only_supports_sparse_grads:
        found["loop"] = {}  # what eager chooses by itself on the CPU
        if "foreach" in info.supported_impls:
            found["foreach"] = {"foreach": True}
        if "cpu" in info.supports_fused_on:
            found["fused"] = {"fused": True}
        if "differentiable" in info.supported_impls:
            found["differentiable"] = {"differentiable": True}
        if info.has_capturable_arg:
            found["capturable"] = {"capturable": True}  # eager refuses it on the CPU
        if info.supports_complex:
            found["complex"] = {}
    if info.supports_sparse or info.only_supports_sparse_grads:
        found["sparse"] = {}
    return found


CASES = [(name, kind) for name, info in OPTIMS.items() for kind in implementations(info)]


class ComplexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


class SparseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.abs().mul(3).long() % 7)


def make_net(name: str, kind: str) -> nn.Module:
    if kind == "sparse":
        return SparseNet()
    if kind == "complex":
        return ComplexNet()
    has_bias = name != "Muon"  # takes matrices only
    return nn.Sequential(nn.Linear(6, 8, bias=has_bias), nn.Tanh(), nn.Linear(8, 3, bias=has_bias))


def train(name: str, kind: str, options: dict[str, Any], device: str) -> Callable[[], Any]:
    """The function that trains for a few steps and returns losses, parameters and optimizer state."""

    def run() -> Any:
        net = make_net(name, kind).to(device)
        x = torch.randn(10, 6).to(device)
        params = list(net.parameters())
        if kind == "differentiable":
            return differentiable_steps(params, options)
        optimizer = OPTIMS[name].optim_cls(params, **copy.deepcopy(options))
        losses = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            return loss

        for _ in range(NUM_STEPS):
            losses.append(optimizer.step(closure))
            lazystep.mark_step()
        return {"losses": losses, "parameters": params, "state": optimizer.state_dict()}

    def differentiable_steps(params: list[nn.Parameter], options: dict[str, Any]) -> Any:
        """Steps that autograd sees: on clones, whose gradients go back to the parameters."""
        clones = [p.clone() for p in params]
        optimizer = OPTIMS[name].optim_cls(clones, **copy.deepcopy(options))
        for _ in range(NUM_STEPS):
            for clone in clones:
                clone.grad = torch.randn(clone.shape).to(device)
            optimizer.step()
            lazystep.mark_step()
        grads = torch.autograd.grad([c.sum() for c in clones], params, allow_unused=True)
        return {"parameters": clones, "gradients": grads, "state": optimizer.state_dict()}

    return run


@pytest.mark.parametrize(("name", "kind"), CASES, ids=[f"{name}-{kind}" for name, kind in CASES])
def test_optimizer_equals_eager_bitwise(name: str, kind: str, counts: Counts) -> None:
    differences = []
    for given in OPTIMS[name].optim_inputs_func(device="cpu"):
        options = {**given.kwargs, **implementations(OPTIMS[name])[kind]}
        if name == "LBFGS":
            options["max_iter"] = 6  # each iteration reads the loss
        eager = Outcome(train(name, kind, options, "cpu"), "cpu")
        lazy = Outcome(train(name, kind, options, "lazy"), "lazy")
        counts.add(kind if eager.error is None else f"{kind}, error")
        found = difference(eager, lazy)
        if found:
            differences.append(f"{given.desc}: {found}")
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize("name", [name for name, info in OPTIMS.items() if info.optim_error_inputs_func])
def test_optimizer_raises_where_eager_does(name: str, counts: Counts) -> None:
    info = OPTIMS[name]
    for error in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        given = error.optimizer_error_input
        if error.error_on is not OptimizerErrorEnum.CONSTRUCTION_ERROR:
            continue  # its gradients are made by the database for CPU parameters

        def make(device: str, given: Any = given) -> None:
            params = given.params if given.params is not None else [nn.Parameter(torch.ones(2, 2))]
            info.optim_cls(to_device(params, device), **given.kwargs)

        found = device_run_difference(make)
        assert not found, f"{given.desc}: {found}"
        counts.add("error inputs")


def to_device(params: Any, device: str) -> Any:
    """Parameters of an error input, in whatever shape they come."""
    return params if device == "cpu" else copy_inputs(params, device)
