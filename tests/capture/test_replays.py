"""Ordinary steps: each is replayed, equals eager, and is replayed again after an ordinary change."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import io
import itertools
import logging
import os
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lazystep
from tests.helpers import descend

from .common import captured
from .scenes import Scene, Scenes, check_replays, check_right_or_refused, linear

scene = Scenes()


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USERS_SCALE", "2.0")
    monkeypatch.delenv("USERS_OTHER", raising=False)


# -- what is named and not touched -----------------------------------------------------------------

history: list[Any] = []
UNTOUCHED: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "list": (list, lambda items: items.append(len(items))),
    "list of tensors": (lambda: [torch.ones(1)], lambda items: items.append(torch.ones(1))),
    "dict": (dict, lambda items: items.update({len(items): 1})),
    "set": (set, lambda items: items.add(len(items))),
    "deque": (lambda: collections.deque(maxlen=3), lambda items: items.append(1)),
    "many objects": (lambda: [[] for _ in range(51_000)], lambda items: items.append([1])),
    "iterator": (lambda: iter(range(99)), next),
    "generator": (lambda: (number for number in range(99)), next),
    "open file": (io.StringIO, lambda file: file.write("line")),
    "lock": (threading.Lock, lambda lock: None),
    "event": (threading.Event, lambda event: event.set()),
    "generator of numbers": (torch.Generator, lambda generator: torch.rand(1, generator=generator)),
    "object": (types.SimpleNamespace, lambda box: setattr(box, "last", object())),
    "array": (lambda: bytearray(4096), lambda array: array.__setitem__(0, (array[0] + 1) % 256)),
}


@pytest.mark.parametrize("kind", UNTOUCHED)
def test_what_is_named_and_never_touched_may_change(kind: str) -> None:
    make, change = UNTOUCHED[kind]

    def scene_of(device: str) -> Scene:
        named = make()
        options = types.SimpleNamespace(is_logging=False)

        def step(x: torch.Tensor) -> torch.Tensor:
            if options.is_logging:
                print(named)
            return x * 2

        def arguments(number: int) -> tuple[torch.Tensor]:
            change(named)
            return (torch.ones(3) * number,)

        return Scene(step, arguments=arguments)

    check_replays(scene_of)


def test_list_of_losses_that_the_function_names() -> None:
    history.clear()

    @lazystep.step(audit_every=0, fullgraph=True)
    def step(x: torch.Tensor, is_last: bool = False) -> torch.Tensor:
        return torch.stack(history).sum() if is_last else x * 2

    for number in range(6):
        history.append(step(torch.ones(1) * number))
    assert step.num_replayed == 4
    assert step(torch.ones(1), is_last=True).item() == 30


class LitModel(nn.Module):
    """As a LightningModule: attributes and methods around a `training_step` that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.trainer = types.SimpleNamespace(global_step=0, current_epoch=0, logged={}, callbacks=[])
        self.completed = 0
        self.last_batch: Any = None
        self.validation_outputs: list[Any] = []
        self.prefix = "train"

    def log(self, name: str, value: torch.Tensor) -> None:
        self.trainer.logged[f"{self.prefix}/{name}"] = value.detach()

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.layer(x).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, x: torch.Tensor) -> None:
        self.validation_outputs.append(self.layer(x))
        self.completed += 1

    def on_epoch_end(self) -> None:
        self.trainer.current_epoch += 1
        self.validation_outputs.clear()


@scene
def training_step_of_a_module_with_much_around(device: str) -> Scene:
    model = LitModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model.training_step(x)
        descend(loss, optimizer)
        return loss.detach()

    def arguments(number: int) -> tuple[torch.Tensor]:
        model.trainer.global_step = number
        model.completed += 1
        model.last_batch = {"number": number}
        model.validation_outputs.append(number)
        model.trainer.callbacks.append(lambda: number)
        return (torch.linspace(0, 1, 6).view(2, 3) + number,)

    return Scene(step, model.on_epoch_end, lambda: dict(model.trainer.logged), arguments)


@scene
def steps_completed_are_counted_inside(device: str) -> Scene:
    model = LitModel().to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        model.completed += 1
        model.trainer.global_step += 1
        return model.layer(x).detach()

    return Scene(step, kept=lambda: (model.completed, model.trainer.global_step))


@pytest.mark.parametrize("make", scene.parameters)
def test_is_replayed(make: Callable[[str], Scene]) -> None:
    check_replays(make)


# -- slices of data on the device ------------------------------------------------------------------

SLICES: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "rows": lambda data, n: data[2 * n : 2 * n + 2],
    "row": lambda data, n: data[n],
    "columns": lambda data, n: data[:, n : n + 2],
    "narrow": lambda data, n: data.narrow(0, n, 2),
    "select": lambda data, n: data.select(1, n),
    "every other": lambda data, n: data[n::2][:3],
    "chunk": lambda data, n: data.chunk(12)[n],
    "split": lambda data, n: data.split(2)[n],
    "unbind": lambda data, n: data.unbind(0)[n],
    "element": lambda data, n: data[n, n],
    "transposed": lambda data, n: data.t()[n],
    "diagonal": lambda data, n: data.diagonal(n)[:4],
    "strided": lambda data, n: data.as_strided((2, 2), (1, 3), n),
    "unfold": lambda data, n: data.view(-1).unfold(0, 4, 4)[n],
}


@pytest.mark.parametrize("kind", SLICES)
def test_slices_of_data_on_the_device_are_right(kind: str) -> None:
    data = torch.randn(24, 24)
    on_device = data.to("lazy")
    step = captured(lambda x, y: ((x * 2 + y).sum(), x + 1))
    for n in [*range(4)] * 3:
        want = SLICES[kind](data, n)
        total, more = step(SLICES[kind](on_device, n), SLICES[kind](on_device * 2, n))
        assert torch.equal(total.cpu(), (want * 2 + want * 2).sum())
        assert torch.equal(more.cpu(), want + 1)
    assert step.num_replayed >= 4, step.explain()  # each offset is a kind of its own


def test_epochs_over_data_on_the_device() -> None:
    data, targets = torch.randn(10, 4), torch.randn(10, 1)

    def run(device: str) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        model = linear().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, y = data.to(device), targets.to(device)

        def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            loss = (model(a) - b).square().mean()
            descend(loss, optimizer)
            return loss.detach()

        call = captured(step, fullgraph=True) if device == "lazy" else step
        losses = [call(x[i : i + 4], y[i : i + 4]) for _ in range(5) for i in range(0, 10, 4)]
        return [loss.item() for loss in losses], call

    losses, step = run("lazy")
    assert losses == run("cpu")[0]
    assert step.num_replayed >= 6, step.explain()


@pytest.mark.parametrize("kind", ["rows", "columns", "element"])
def test_slice_that_is_written_inside_is_written_where_it_is(kind: str) -> None:
    data = torch.arange(576.0).view(24, 24)
    on_device = data.to("lazy")

    @lazystep.step(audit_every=0)
    def step(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.sum()

    for n in [0, 1] * 4:
        want = SLICES[kind](data, n).mul_(2).sum()
        assert step(SLICES[kind](on_device, n)).item() == want.item()
        assert torch.equal(on_device.cpu(), data)
    assert step.num_replayed >= 4, step.explain()


def test_slice_that_the_step_takes_by_a_number_around_it() -> None:
    def make(device: str) -> Scene:
        data = torch.arange(24.0).view(8, 3).to(device)
        box = types.SimpleNamespace(position=0)
        return Scene(lambda x: x * data[box.position], lambda: setattr(box, "position", 5))

    check_replays(make)


# -- options ---------------------------------------------------------------------------------------


class Kind(enum.Enum):
    TWICE = 2
    THRICE = 3


@dataclasses.dataclass(frozen=True)
class Options:
    kind: Kind = Kind.TWICE
    shift: float = 0.5
    names: tuple[str, ...] = ("a", "b")


option = Scenes()


@option
def frozen_options(device: str) -> Scene:
    box = types.SimpleNamespace(options=Options())

    def step(x: torch.Tensor) -> torch.Tensor:
        options = box.options
        return x * options.kind.value + (options.shift if "a" in options.names else 0.0)

    return Scene(step, lambda: setattr(box, "options", Options(Kind.THRICE)))


@option
def variable_of_the_environment(device: str) -> Scene:
    os.environ["USERS_SCALE"] = "2.0"
    return Scene(
        lambda x: x * float(os.environ["USERS_SCALE"]), lambda: os.environ.update({"USERS_SCALE": "3.0"})
    )


@option
def variable_of_the_environment_by_getenv(device: str) -> Scene:
    os.environ.pop("USERS_OTHER", None)
    return Scene(
        lambda x: x * float(os.getenv("USERS_OTHER", "2.0")),
        lambda: os.environ.update({"USERS_OTHER": "3.0"}),
    )


@option
def logger(device: str) -> Scene:
    log = logging.getLogger("users")
    box = types.SimpleNamespace(scale=2.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        log.debug("scale %s", box.scale)
        if log.isEnabledFor(logging.DEBUG):
            x = x + 1
        return x * box.scale

    return Scene(step, lambda: setattr(box, "scale", 3.0))


@option
def iterators_inside(device: str) -> Scene:
    layers = [nn.Softmax(0), nn.Sigmoid(), nn.Tanh()]

    def step(x: torch.Tensor) -> torch.Tensor:
        for number, (layer, scale) in enumerate(zip(layers, itertools.count(1), strict=False)):
            x = layer(x) * scale + number
        return sum(map(lambda scale: x * scale, range(3)), x)  # noqa: C417

    return Scene(step, lambda: layers.reverse())


@option
def questions_of_torch(device: str) -> Scene:
    box = types.SimpleNamespace(scale=2.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or torch.jit.is_scripting() or torch.jit.is_tracing():
            return x
        if torch.is_autocast_enabled("cpu") or not torch.is_grad_enabled():
            return x * 7
        return x * box.scale

    return Scene(step, lambda: setattr(box, "scale", 3.0))


@option
def profiled(device: str) -> Scene:
    box = types.SimpleNamespace(scale=2.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("forward"), torch.enable_grad():
            return x * box.scale

    return Scene(step, lambda: setattr(box, "scale", 3.0))


@pytest.mark.parametrize("make", option.parameters)
def test_options_are_compared_and_the_step_is_replayed(make: Callable[[str], Scene]) -> None:
    check_replays(make)


def equal_options_made_anew(device: str) -> Scene:
    box = types.SimpleNamespace(options=Options())

    def arguments(number: int) -> tuple[torch.Tensor]:
        box.options = copy.deepcopy(box.options)
        return (torch.ones(3) * number,)

    return Scene(
        lambda x: x * box.options.kind.value,
        lambda: setattr(box, "options", Options(Kind.THRICE)),
        arguments=arguments,
    )


def test_equal_options_made_anew_are_right_or_refused() -> None:
    check_right_or_refused(equal_options_made_anew)
