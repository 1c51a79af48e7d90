"""The rows of the parity table: ordinary data-parallel loops, each written once for any device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import lazystep
from tests.pool import World

NUM_STEPS = 6
# RAdam computes its sixth step in another way than those before: as many more, to be captured again.
MORE_STEPS = {"RAdam": 6}
# Several buckets for a model of a few thousand parameters.
BUCKET_CAP_MB = 0.004


class Branches(nn.Module):
    """Uses one of two layers, by step and rank; a third one never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.idle = (nn.Linear(6, 6) for _ in range(4))
        self.takes_left = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.left(x) if self.takes_left else self.right(x)


class Alternating(Branches):
    """Takes the other layer in each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.takes_left = not self.takes_left
        return super().forward(x)


class TwoOutputs(Branches):
    """Returns a second output, of a layer that nothing else uses."""

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return found, self.idle(found)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def mlp() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 6)]
    return nn.Sequential(*layers)


def frozen() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)  # type: ignore[union-attr]
    return model


def conv() -> nn.Module:
    model = nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(8, 6)
    )
    return model.to(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Case:
    """A loop. `options` are DDP's; the functions change what a plain loop does."""

    model: Callable[[], nn.Module] = mlp
    options: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    clip: float = 0.0
    schedule: bool = False
    ema: bool = False
    zero_to_none: bool = True
    zero_outside: bool = False
    hook: Any = None
    branches: bool = False
    branches_by_rank: bool = False
    more_steps: int = 0
    evaluates: bool = False
    autocast: torch.dtype | None = None
    shards: bool = False  # the state of the optimizer, on the lazy device
    scales: bool = False  # with a GradScaler; a gradient of rank 1 overflows once
    loss: Callable[[Any], Tensor] = lambda out: out.square().mean()
    # Why a captured step records each call, in the words of `explain()`; empty if it is replayed.
    not_replayed: str = ""


CASES: dict[str, Case] = {
    "plain": Case(),
    "one bucket": Case(options={"bucket_cap_mb": 25}),
    "a bucket for each parameter": Case(options={"bucket_cap_mb": 1e-5}),
    "two limits for buckets": Case(options={"bucket_cap_mb": None, "bucket_cap_mb_list": [1, 25]}),
    "gradient_as_bucket_view": Case(options={"gradient_as_bucket_view": True}),
    "gradient_as_bucket_view, zero_grad(set_to_none=False)": Case(
        options={"gradient_as_bucket_view": True}, zero_to_none=False
    ),
    "zero_grad(set_to_none=False)": Case(zero_to_none=False),
    "zero_grad before the step": Case(zero_outside=True),
    "batched_grad_copy": Case(options={"batched_grad_copy": True}),
    "static_graph": Case(options={"static_graph": True}),
    "static_graph, fp16_compress_hook": Case(
        options={"static_graph": True}, hook=default_hooks.fp16_compress_hook
    ),
    "static_graph, parameters that are never used": Case(model=Branches, options={"static_graph": True}),
    "static_graph, other layers on each rank": Case(
        model=Branches, options={"static_graph": True}, branches_by_rank=True
    ),
    "static_graph, other layers on each rank, zero_grad(set_to_none=False)": Case(
        model=Branches,
        options={"static_graph": True},
        branches_by_rank=True,
        zero_to_none=False,
        more_steps=2,  # the buckets are made anew in the third one
    ),
    "accumulation under no_sync": Case(accumulate=3),
    "clip_grad_norm_": Case(clip=0.1),
    "schedule": Case(schedule=True),
    "EMA of the parameters": Case(ema=True),
    "frozen parameters": Case(model=frozen),
    "tied weights": Case(model=Tied),
    "channels_last, batch norm, buffers": Case(model=conv),
    "batch norm without forward_sync_buffers": Case(model=conv, options={"forward_sync_buffers": False}),
    "batch norm, evaluation in between": Case(model=conv, evaluates=True),
    "autocast to bfloat16": Case(autocast=torch.bfloat16),
    "autocast to float16, GradScaler, an overflow on one rank": Case(autocast=torch.float16, scales=True),
    "allreduce_hook": Case(hook=default_hooks.allreduce_hook),
    "fp16_compress_hook": Case(hook=default_hooks.fp16_compress_hook),
    "find_unused_parameters, all used": Case(
        options={"find_unused_parameters": True}, not_replayed="asks the other ranks"
    ),
    "find_unused_parameters, other layers on each rank": Case(
        model=Branches,
        options={"find_unused_parameters": True},
        branches=True,
        not_replayed="asks the other ranks",
    ),
    "find_unused_parameters, an output that is not part of the loss": Case(
        model=TwoOutputs,
        options={"find_unused_parameters": True},
        loss=lambda out: out[0].square().mean(),
        not_replayed="asks the other ranks",
    ),
    "find_unused_parameters, a layer used under no_sync only": Case(
        model=Alternating,
        options={"find_unused_parameters": True},
        accumulate=2,
        not_replayed="asks the other ranks",
    ),
    "sharded state": Case(shards=True),
    "sharded state, clip_grad_norm_, schedule": Case(shards=True, clip=0.1, schedule=True),
    "sharded state, frozen parameters": Case(shards=True, model=frozen),
    "sharded state, channels_last, batch norm": Case(shards=True, model=conv),
    "sharded state, zero_grad(set_to_none=False), accumulation": Case(
        shards=True, zero_to_none=False, accumulate=2
    ),
    "sharded state, autocast to float16, GradScaler, an overflow on one rank": Case(
        shards=True, autocast=torch.float16, scales=True
    ),
    "sharded state, find_unused_parameters, other layers on each rank": Case(
        model=Branches,
        options={"find_unused_parameters": True},
        branches=True,
        shards=True,
        not_replayed="asks the other ranks",
    ),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW, a loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    # With the default eps, torch's own training doubles a difference of one bit in every few steps.
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True, eps=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
}
# The rest of those whose state can be sharded.
MORE_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@dataclass
class Trained:
    """What a loop has left behind on one rank."""

    values: list[Tensor]
    explanation: str = ""
    num_replayed: int = 0


def train(
    world: World,
    case: Case,
    optimizer: str,
    device: str,
    captured: bool = False,
    num_steps: int = NUM_STEPS,
    before_step: Callable[[int], None] = lambda number: None,
) -> Trained:
    """Run a loop, and return all losses, parameters, buffers, gradients and optimizer state."""
    torch.manual_seed(world.rank)  # other parameters on each rank: DDP takes rank 0's
    model = case.model().to(device)
    options = {"bucket_cap_mb": BUCKET_CAP_MB, **case.options}
    if case.shards and device == "lazy":
        options["shard_optimizer_state"] = True
    ddp = DistributedDataParallel(model, process_group=world.group, **options)
    if case.hook is not None:
        ddp.register_comm_hook(world.group, case.hook)
    opt = {**OPTIMIZERS, **MORE_OPTIMIZERS}[optimizer]([p for p in ddp.parameters() if p.requires_grad])
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=3, enabled=case.scales)
    ema = torch.optim.swa_utils.AveragedModel(model) if case.ema else None

    def step(*batches: Tensor) -> Tensor:
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                with torch.autocast(device, case.autocast, enabled=case.autocast is not None):
                    loss = case.loss(ddp(batch))
                scaler.scale(loss).backward()
        if case.clip:
            nn.utils.clip_grad_norm_(ddp.parameters(), case.clip)
        scaler.step(opt)
        scaler.update()
        if not case.zero_outside:
            opt.zero_grad(set_to_none=case.zero_to_none)
        return loss.detach()

    if case.branches_by_rank:
        model.takes_left = world.rank != 1  # type: ignore[assignment]

    run: Any = lazystep.step(audit_every=0)(step) if captured else step
    losses = []
    for number, batches in enumerate(_batches(world, case, num_steps)):
        before_step(number)
        if case.branches:
            model.takes_left = (number + world.rank) % 2 == 0  # type: ignore[assignment]
        if case.zero_outside:
            opt.zero_grad()
        losses.append(run(*(batch.to(device) for batch in batches)))
        if case.schedule:
            schedule.step()
        if ema is not None:
            ema.update_parameters(model)
        if device == "lazy" and not captured:
            lazystep.mark_step()
        if case.evaluates:
            ddp.eval()
            with torch.no_grad():
                losses.append(ddp(batches[0].to(device)).sum())
            ddp.train()
    states = opt.state_dict()["state"]
    state = [v for n in sorted(states) for v in states[n].values() if isinstance(v, Tensor)]
    found = [*losses, *ddp.state_dict().values(), *state]
    found += [p.grad for p in ddp.parameters() if p.grad is not None]
    found += list(ema.parameters()) if ema is not None else []
    found += [torch.tensor(scaler.get_scale())]
    explained = run.explain() if captured else ""
    return Trained([t.detach().cpu() for t in found], explained, run.num_replayed if captured else 0)


def _batches(world: World, case: Case, num_steps: int) -> Iterator[list[Tensor]]:
    data = torch.Generator().manual_seed(100 + world.rank)
    for number in range(num_steps):
        size = 1e30 if case.scales and number == 2 and world.rank == 1 else 1.0
        yield [size * torch.randn(4, 6, generator=data) for _ in range(case.accumulate)]


def compare(world: World, name: str, optimizer: str) -> dict[str, Any]:
    """One row on this rank: plain and captured steps against torch's DDP on the CPU."""
    case = CASES[name]
    num_steps = NUM_STEPS + case.more_steps + MORE_STEPS.get(optimizer, 0)
    expected = train(world, case, optimizer, "cpu", num_steps=num_steps)
    found: dict[str, Any] = {"num_tensors": len(expected.values)}
    for kind, captured in (("plain", False), ("captured", True)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lazystep.LazyStepWarning)  # a step that is not replayed
            actual = train(world, case, optimizer, "lazy", captured, num_steps)
        found[kind] = [
            n
            for n, (a, b) in enumerate(zip(expected.values, actual.values, strict=True))
            if not torch.equal(a.nan_to_num(0.5), b.nan_to_num(0.5)) or a.dtype != b.dtype
        ]
        found["explanation"] = actual.explanation
        found["num_replayed"] = actual.num_replayed
    return found
