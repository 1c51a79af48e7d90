"""Models for the table, each with one thing that is hard for an overlap, and third-party optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Branches(nn.Module):
    """`b` is used on some steps only, on one rank only, or nowhere, as the script says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, use_b: bool) -> Tensor:
        h = self.a(x).tanh()
        return self.c(self.b(h).tanh() if use_b else h)


class Words(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 8, sparse=sparse)
        self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words((x.abs() * 10).long() % 30).mean(1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).tanh()).tanh())


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 4)
        self.middle = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.middle:
            h = checkpoint(layer, h, use_reentrant=self.reentrant)
        return self.last(h)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        images = x.repeat(1, 32).view(-1, 3, 8, 8)
        return self.head(self.body(images).mean((2, 3)))


class Transposed(nn.Module):
    """A dense parameter whose strides are not those of a contiguous one, and one that is not dense."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 6).t())
        self.sliced = nn.Parameter(torch.randn(6, 8)[:, ::2])
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ self.w) + x @ self.sliced


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x.to(torch.complex64) @ self.w).abs())


class TwiceCheckpointed(Checkpointed):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer in [*self.middle, self.middle[0]]:
            h = checkpoint(layer, h, use_reentrant=self.reentrant)
        return self.last(h)


class GroupCounter(torch.optim.Optimizer):
    """Third-party: counts its steps in the group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "num_steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["num_steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["num_steps"])


class SignDescent(torch.optim.Optimizer):
    """Third-party: each parameter by itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    count = self.state[p]["count"] = self.state[p].get("count", 0) + 1
                    p.sub_(p.grad.sign(), alpha=group["lr"] / count)


class DecayAfterwards(torch.optim.SGD):
    """Third-party: calls its base's step, and uses the gradients again afterwards."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - 0.01 * group["lr"])
        return loss
