"""Training runs that are done twice in one process, plain and overlapped, and compared to the bit.

A *script* is an ordinary training loop written against a `Run`. With `run.overlapped` false, `run.overlap`
does nothing and the loop is the baseline: plain DDP, then `optimizer.step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lazystep.errors import LazyStepError
from lazystep.overlap import OverlapHandle, overlap_optimizer
from tests.pool import World

NUM_STEPS = 8
# Small enough for the tiny models here to have several buckets.
BUCKET_CAP_MB = 0.0006

Optimizers = Callable[[Iterable[Any]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.02),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.02, fused=True),
}


def mlp() -> nn.Module:
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(16, 4))


@dataclass
class Run:
    """One run of a script: makes its parts, and collects what must be equal."""

    world: World
    overlapped: bool
    make_optimizer: Optimizers
    handles: list[OverlapHandle] = field(default_factory=list)
    watched: list[Any] = field(default_factory=list)
    seen: list[Tensor] = field(default_factory=list)
    stage: str = "set-up"
    keep: list[Any] = field(default_factory=list)

    def ddp(self, model: nn.Module, **options: Any) -> DistributedDataParallel:
        """The model under DDP, with several buckets; its state will be compared."""
        options.setdefault("bucket_cap_mb", BUCKET_CAP_MB)
        made = DistributedDataParallel(model, process_group=self.world.group, **options)
        self.watched.append(made.module)
        return made

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """The row's optimizer; its state will be compared."""
        made = self.make_optimizer(params)
        self.watched.append(made)
        return made

    def overlap(self, ddp: DistributedDataParallel, optimizer: Any, **options: Any) -> OverlapHandle | None:
        """Overlap, unless this is the baseline."""
        if not self.overlapped:
            return None
        self.stage = "set-up"
        handle = overlap_optimizer(ddp, optimizer, **options)
        self.handles.append(handle)
        return handle

    def batch(self, step: int, *shape: int) -> Tensor:
        """This rank's input of this step: the same in both runs."""
        generator = torch.Generator().manual_seed(1000 * step + self.world.rank)
        return torch.randn(*(shape or (4, 6)), generator=generator)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Backward; the loss will be compared."""
        self.seen.append(loss.detach().clone())
        self.stage = "backward"
        loss.backward(**options)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step and clear the gradients."""
        self.stage = "step"
        optimizer.step()
        optimizer.zero_grad()

    def train(
        self, ddp: Callable[..., Any], *optimizers: torch.optim.Optimizer, steps: Iterable[int] = ()
    ) -> None:
        """The ordinary loop."""
        for step in steps or range(NUM_STEPS):
            self.backward(ddp(self.batch(step)).square().mean())
            for optimizer in optimizers:
                self.step(optimizer)

    def state(self) -> list[Tensor]:
        """Everything that must be equal."""
        return [*self.seen, *(t for thing in self.watched for t in tensors_in(thing.state_dict()))]


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.detach()
    elif isinstance(value, dict):
        for key in sorted(value, key=str):  # early steps make state in another order
            yield from tensors_in(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, (int, float)):
        yield torch.tensor(float(value), dtype=torch.float64)


@dataclass
class Outcome:
    """What came of a script on one rank."""

    verdict: str  # equal, different, refused
    stage: str = ""
    message: str = ""
    difference: float = 0.0
    num_tensors: int = 0
    updated: int = 0
    left: int = 0


Script = Callable[[Run], None]


def compare(world: World, script: Script, optimizer: str | Optimizers) -> Outcome:
    """Run a script plain, then overlapped, and compare all state to the bit."""
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    plain, ours = Run(world, False, make), Run(world, True, make)
    torch.manual_seed(7)
    try:
        script(plain)
        baseline = ""
    except Exception as error:
        baseline = f"; the baseline: {type(error).__name__}: {error}".partition("\n")[0]
    torch.manual_seed(7)
    try:
        script(ours)
    except Exception as error:
        if not baseline and not isinstance(error, (LazyStepError, ValueError, TypeError)):
            raise
        return Outcome("refused", ours.stage, f"{type(error).__name__}: {error}{baseline}")
    if baseline:
        return Outcome("different", message=f"ours went through{baseline}")
    before, after = plain.state(), ours.state()
    if len(before) != len(after):
        return Outcome("different", message=f"{len(before)} tensors of state, ours {len(after)}")
    differences = [largest_difference(a, b) for a, b in zip(before, after, strict=True)]
    statistics = [handle.statistics for handle in ours.handles]
    return Outcome(
        "equal" if not any(differences) else "different",
        difference=max(differences),
        num_tensors=len(before),
        updated=max((s.parameters_updated for s in statistics), default=0),
        left=max((s.parameters_left for s in statistics), default=0),
    )


def largest_difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all()):
        return 0.0
    return float((a - b).abs().max()) or float("inf")
