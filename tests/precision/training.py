"""Training loops in other types than float32, on the CPU and on the lazy device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import lazystep
from benchmarks import models

Modify = Callable[[torch.Tensor, int], torch.Tensor]


class Precision(NamedTuple):
    """In which types a model is trained."""

    autocast: torch.dtype | None = None  # of the forward pass
    model: torch.dtype = torch.float32
    has_masters: bool = False  # float32 copies of the parameters, which the optimizer updates


PRECISIONS = {
    "autocast to bfloat16": Precision(autocast=torch.bfloat16),
    "autocast to float16": Precision(autocast=torch.float16),
    "bfloat16": Precision(model=torch.bfloat16),
    "float16": Precision(model=torch.float16),
    "bfloat16 with float32 masters": Precision(model=torch.bfloat16, has_masters=True),
}

WORKLOADS: dict[str, Callable[[], models.Workload]] = {
    "mlp": lambda: models.mlp(num_layers=3, width=32, batch_size=8),
    "gpt with dropout": lambda: models.gpt(
        num_layers=2, width=32, num_heads=2, batch_size=2, num_tokens=16, dropout=0.1
    ),
    "conv": lambda: models.conv(batch_size=4, image_size=8),
    "lstm": lambda: models.lstm(num_steps=6, width=16, batch_size=4),
    "transformer": lambda: _transformer(),
}


class _Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.layers(x))
        return out


def _transformer(width: int = 16) -> models.Workload:
    def make_batch(generator: torch.Generator | None = None) -> models.Batch:
        x = torch.randn(4, 6, width, generator=generator)
        return x, x.roll(1, dims=1)

    return models.Workload(_Encoder(width), make_batch, nn.functional.mse_loss)


class Trained(NamedTuple):
    """What training has come to, on the CPU."""

    losses: list[float]
    state: list[torch.Tensor]
    optimizer: list[Any]
    scaler: dict[str, Any]
    step: Any  # the step function, if it was captured
    num_waits: float  # synchronizations in the steps


class Training:
    """A model, its optimizer and one step of training it."""

    def __init__(
        self,
        make: Callable[[], models.Workload],
        device: str,
        precision: Precision,
        make_optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
        scaler: torch.amp.GradScaler | None = None,
        clip: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.precision = precision
        self.model, self.make_batch, self.loss_fn = make()
        self.model.to(device, precision.model)
        self.parameters = list(self.model.parameters())
        if precision.has_masters:
            self.masters = [p.detach().float().requires_grad_() for p in self.parameters]
        else:
            self.masters = self.parameters
        self.optimizer = make_optimizer(self.masters)
        self.scaler = scaler
        self.clip = clip

    def step(self, x: torch.Tensor, y: torch.Tensor, blow_up: torch.Tensor) -> torch.Tensor:
        """Forward, backward, update. `blow_up` multiplies the loss: infinity makes gradients overflow."""
        dtype = self.precision.autocast
        with torch.autocast(self.device, dtype) if dtype else contextlib.nullcontext():
            loss = self.loss_fn(self.model(x), y)
        total = loss if self.scaler is None else self.scaler.scale(loss * blow_up)
        total.backward()
        if self.precision.has_masters:
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
        if self.clip:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.masters, 0.1)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        if self.precision.has_masters:
            with torch.no_grad():
                for master, parameter in zip(self.masters, self.parameters, strict=True):
                    parameter.copy_(master)
                    parameter.grad = None
        return loss.detach()


def train(
    training: Training, num_steps: int, *, captured: bool = False, overflows: tuple[int, ...] = ()
) -> Trained:
    """Train for some steps. Batches are sampled on the host between them."""
    device = training.device
    is_lazy = device == "lazy"
    step: Any = lazystep.step(training.step, audit_every=0) if captured else training.step
    losses = []
    waits_before = lazystep.metrics.counter_value("synchronizations")
    for number in range(num_steps):
        x, y = training.make_batch()
        if x.is_floating_point():
            x = x.to(training.precision.model)
        if y.is_floating_point():
            y = y.to(training.precision.model)
        blow_up = torch.tensor(float("inf") if number in overflows else 1.0)
        losses.append(step(x.to(device), y.to(device), blow_up.to(device)))
        if is_lazy and not captured:
            lazystep.mark_step()
    num_waits = lazystep.metrics.counter_value("synchronizations") - waits_before
    state = [t.detach().cpu() for t in [*training.model.parameters(), *training.model.buffers()]]
    states = training.optimizer.state_dict()["state"].values()
    optimizer = [t.cpu() if isinstance(t, torch.Tensor) else t for one in states for t in one.values()]
    scaler = {} if training.scaler is None else training.scaler.state_dict()
    return Trained([loss.item() for loss in losses], state, optimizer, scaler, step, num_waits)


def same(a: Any, b: Any) -> bool:
    """Whether two values of trainings are the same bits. NaN is NaN."""
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and torch.equal(a.nan_to_num(nan=-7.0), b.nan_to_num(nan=-7.0))
    return repr(a) == repr(b)


def check_same(want: Trained, got: Trained) -> None:
    """Losses, parameters, optimizer and scaler are the same, bit for bit."""
    assert list(map(repr, got.losses)) == list(map(repr, want.losses))
    assert len(want.state) == len(got.state)
    assert all(map(same, want.state, got.state))
    assert len(want.optimizer) == len(got.optimizer)
    assert all(map(same, want.optimizer, got.optimizer))
    assert got.scaler == want.scaler
