"""Models whose shapes vary, as steps of one or two sizes; and what their programs were, with their inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lazystep
from benchmarks import models
from lazystep.compile.scalars import fixed_slots
from lazystep.compile.symbolic import guards_of, lower_family
from lazystep.execute.native import NativeExecutable
from lazystep.execute.reference import ReferenceExecutable
from lazystep.family.fit import Fit, fit
from lazystep.family.plan import Region
from lazystep.family.skeleton import Skeleton, skeleton_of
from lazystep.program.program import Program
from lazystep.program.signature import Signature, signature_of
from lazystep.tiers.check import run_checked
from lazystep.tiers.families import FamilyLibrary, Served
from lazystep.tiers.tiered import TieredExecutable

from ..helpers import descend

# A step of some sizes, on a device.
Step = Callable[..., Tensor]


def tokens(*shape: int) -> Tensor:
    return torch.randint(64, shape)


def train(model: nn.Module, device: str, loss_of: Callable[..., Tensor]) -> Step:
    model.to(device)
    optimizer = models.make_optimizer(model)

    def step(*sizes: int) -> Tensor:
        loss = loss_of(*sizes)
        descend(loss, optimizer)
        return loss

    return step


def gpt(device: str) -> Step:
    """Batches and lengths of tokens."""
    model, _, loss_fn = models.gpt(num_layers=1, width=16, num_heads=2, num_tokens=64)

    def loss_of(batch: int, length: int) -> Tensor:
        x = tokens(batch, length + 1)
        return loss_fn(model(x[:, :-1].contiguous().to(device)), x[:, 1:].contiguous().to(device))

    return train(model, device, loss_of)


class Bert(nn.Module):
    """An encoder layer with a padding mask, and a head for masked tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(64, 16), nn.Embedding(64, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, activation="gelu")
        self.head = nn.Linear(16, 64)

    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        hidden = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        logits: Tensor = self.head(self.layer(hidden, src_key_padding_mask=is_padding))
        return logits


def bert(device: str) -> Step:
    """Lengths of padded sentences."""
    model = Bert()

    def loss_of(length: int) -> Tensor:
        x = tokens(3, length)
        is_padding = torch.arange(length)[None] >= torch.tensor([length, length - 1, length // 2])[:, None]
        target = x.masked_fill(is_padding, -100)
        logits = model(x.to(device), is_padding.to(device))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten().to(device))

    return train(model, device, loss_of)


def conv(device: str) -> Step:
    """Batch sizes, also the last odd one."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 5),
    )

    def loss_of(batch: int) -> Tensor:
        return F.cross_entropy(model(torch.randn(batch, 3, 8, 8).to(device)), (tokens(batch) % 5).to(device))

    return train(model, device, loss_of)


def lstm(device: str) -> Step:
    """Batches and lengths of sequences, with dropout between the layers."""
    model = nn.LSTM(5, 6, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)

    def loss_of(batch: int, length: int) -> Tensor:
        y, (_, cell) = model(torch.randn(batch, length, 5).to(device))
        return y.square().mean() + cell.square().mean()

    return train(model, device, loss_of)


def projected_lstm(device: str) -> Step:
    """Batches of sequences of one length: torch computes an LSTM with projections op by op."""
    model = nn.LSTM(5, 6, num_layers=2, proj_size=3, bidirectional=True)

    def loss_of(batch: int) -> Tensor:
        with warnings.catch_warnings():  # of oneDNN, which has no projections
            warnings.simplefilter("ignore")
            y, (hidden, cell) = model(torch.randn(3, batch, 5).to(device))
        return y.square().mean() + hidden.square().mean() + cell.square().mean()

    return train(model, device, loss_of)


class Graph(nn.Module):
    """Sums the messages along edges, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = layer(x)
            x = torch.zeros_like(x).index_add(0, target, x.index_select(0, source)).relu() + x
        return x


def graph(device: str) -> Step:
    """Numbers of nodes and edges."""
    model = Graph()

    def loss_of(nodes: int, edges: int) -> Tensor:
        source, target = torch.randint(nodes, (2, edges))
        x = torch.randn(nodes, 6)
        return model(x.to(device), source.to(device), target.to(device)).square().mean()

    return train(model, device, loss_of)


def slices(device: str) -> Step:
    """Offsets of slices of a result. Slices of an input are one program, whatever their offset."""
    data = torch.randn(40, 6).to(device)
    model = nn.Linear(6, 2)

    def loss_of(start: int) -> Tensor:
        return model((data * 1.5)[start : start + 4]).square().mean()

    return train(model, device, loss_of)


def odd_sizes(device: str) -> Step:
    """Heights of images that are halved, rounded up, and padded to a multiple."""
    model = nn.Sequential(nn.Conv1d(2, 3, 3, stride=2, padding=1), nn.Tanh())

    def loss_of(length: int) -> Tensor:
        y = model(F.pad(torch.randn(2, 2, length).to(device), (0, -length % 4)))
        return y[:, :, -1].sum() + y.square().mean()

    return train(model, device, loss_of)


MODELS: dict[str, tuple[Callable[[str], Step], list[tuple[int, ...]]]] = {
    # The first three sizes are fitted.
    "gpt": (gpt, [(3, 8), (2, 13), (4, 5), (5, 9), (2, 30)]),
    "bert": (bert, [(8,), (13,), (6,), (21,)]),
    "conv": (conv, [(4,), (7,), (5,), (3,), (8,)]),
    "lstm": (lstm, [(3, 8), (2, 13), (4, 5), (5, 9), (2, 30)]),
    "projected lstm": (projected_lstm, [(4,), (7,), (5,), (3,), (8,)]),
    "graph": (graph, [(5, 12), (9, 17), (7, 30), (20, 8)]),
    "slices": (slices, [(4,), (12,), (20,), (33,)]),
    "odd sizes": (odd_sizes, [(9,), (10,), (15,), (11,), (21,)]),
}


class Recorded(NamedTuple):
    """A program as it ran, taken apart, with copies of its inputs."""

    program: Program
    signature: Signature
    fixed: dict[int, Any]
    inputs: list[Tensor]
    scalars: list[Any]

    @property
    def skeleton(self) -> Skeleton:
        return skeleton_of(self.program, self.signature, self.fixed)


@contextmanager
def recorded_runs() -> Iterator[list[Recorded]]:
    """The programs that run inside the block."""
    found: list[Recorded] = []
    run = TieredExecutable.run

    def noting(self: TieredExecutable, inputs: list[Tensor], scalars: Sequence[Any]) -> list[Tensor]:
        signature = signature_of(self.program, fixed_slots(self.program))
        fixed = {slot: scalars[slot] for slot in signature.fixed}
        memory: dict[int, Any] = {}
        copies = []
        for tensor in inputs:
            storage = tensor.untyped_storage()
            copy = memory.setdefault(storage._cdata, storage.clone())
            like = torch.empty(0, dtype=tensor.dtype)
            copies.append(like.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride()))
        found.append(Recorded(self.program, signature, fixed, copies, list(scalars)))
        return run(self, inputs, scalars)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TieredExecutable, "run", noting)
        yield found
        lazystep.wait_device_ops()


def members_of(make: Callable[[str], Step], sizes: Sequence[tuple[int, ...]]) -> list[Recorded]:
    """The second program of each size: the first one may make the optimizer's state."""
    torch.manual_seed(0)
    step = make("lazy")
    with recorded_runs() as runs:
        for size in sizes:
            for _ in range(2):
                step(*size)
                lazystep.mark_step()
    return runs[1::2]


def lowered(members: Sequence[Recorded], found: Fit, first: Recorded) -> tuple[Region, Callable[..., Any]]:
    """The graph of a family, and where it holds: as the builder makes it, without Inductor."""
    made = lower_family(first.program, first.signature, first.fixed, found, first.skeleton.numbers)
    bound = [found.bind(one.skeleton.numbers) for one in members]
    region = Region(found, tuple(guards_of(made, [values for values in bound if values is not None])))
    return region, lambda flat: list(made.graph(*flat))


def fit_members(members: Sequence[Recorded]) -> Fit:
    assert len({one.skeleton.key for one in members}) == 1, "of one family"
    return fit(members[0].skeleton.places, [one.skeleton.numbers for one in members])


def check(one: Recorded, region: Region, call: Callable[..., Any], symbols: tuple[int, ...]) -> str:
    """Run the graph and the reference on the inputs of a member. Returns where they differ."""
    served = Served(FamilyLibrary(None, region, call), symbols)  # type: ignore[arg-type]
    native = NativeExecutable(one.program, one.signature, call, 1, served.carriers())
    checked = run_checked(native, ReferenceExecutable(one.program), list(one.inputs), one.scalars)
    return checked.failure or checked.mismatch
