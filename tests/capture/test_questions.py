"""Questions whose answer lies in no place: about time, the system, classes, tensors, the collector."""

from __future__ import annotations

import abc
import builtins
import datetime
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lazystep

from .common import captured
from .scenes import Scene, Scenes, assign, check_replays, check_right, check_right_or_refused, space

scene, refused = Scenes(), Scenes()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    vars(builtins).pop("users_scale", None)


# -- time and the system -------------------------------------------------------------------------------


class Moment(datetime.datetime):
    """A user's own kind of time."""


class Day(datetime.date):
    """A user's own kind of date."""


@pytest.mark.parametrize(
    "ask",
    [
        Moment.now,
        Moment.utcnow,
        Moment.today,
        Day.today,
        lambda: os.fstat(0),
        lambda: os.isatty(0),
        lambda: os.statvfs("/"),
        lambda: os.sched_getaffinity(0),
    ],
    ids=["now", "utcnow", "today", "day", "open_file", "terminal", "room_on_a_disk", "processors"],
)
def test_question_about_time_or_the_system_is_refused(ask: Callable[[], object]) -> None:
    """By the class method of a user's subclass, too, and by each function of `os` that asks the system."""
    step = captured(lambda x: x * (2 if ask() else 3), fullgraph=True)
    with pytest.raises(lazystep.CaptureError, match=r"it calls .* at .*call it outside"):
        call_often(step)


def call_often(step: Any) -> None:
    for _ in range(4):
        step(torch.ones(2))


# -- names, classes, tensors ---------------------------------------------------------------------------


@scene
def name_among_the_builtins(device: str) -> Scene:
    builtins.users_scale = 2.0  # type: ignore[attr-defined]
    return Scene(
        step=lambda x: x * users_scale,  # type: ignore[name-defined]  # noqa: F821
        change=assign(builtins, "users_scale", 3.0),
    )


@scene
def class_is_registered(device: str) -> Scene:
    class Abstract(abc.ABC):  # noqa: B024
        pass

    class Other:
        pass

    other = Other()
    return Scene(
        step=lambda x: x * (2 if isinstance(other, Abstract) else 3), change=lambda: Abstract.register(Other)
    )


@scene
def classes_below(device: str) -> Scene:
    class Above:
        pass

    kept: list[type] = []
    return Scene(
        step=lambda x: x * len(Above.__subclasses__()) + 1,
        change=lambda: kept.append(type("Below", (Above,), {})),
    )


@scene
def names_of_a_class(device: str) -> Scene:
    class Registry:
        first = 1.0

    return Scene(step=lambda x: x * len(vars(Registry)), change=assign(Registry, "second", 2.0))


@scene
def version_of_a_tensor(device: str) -> Scene:
    weight = torch.ones(3, device=device)
    return Scene(
        step=lambda x: x * 2 if weight._version < 3 else x * 3,
        change=lambda: [weight.mul_(1) for _ in "12345"],
    )


def view_or_not(use: Callable[[Any], bool]) -> Callable[[str], Scene]:
    def make(device: str) -> Scene:
        whole = torch.ones(6, device=device)
        held = space(weight=torch.ones(3, device=device))
        return Scene(
            step=lambda x: x * 2 * held.weight if use(held.weight) else x * 3 * held.weight,
            change=assign(held, "weight", whole[:3]),
        )

    return make


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@refused
def scripted_module(device: str) -> Scene:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(Scaled()).to(device)
    return Scene(step=lambda x: model(x), change=assign(model, "scale", 3.0))


@refused
def method_of_a_scripted_module(device: str) -> Scene:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(Scaled()).to(device)
    forward = model.forward
    return Scene(step=lambda x: forward(x), change=assign(model, "scale", 3.0))


refused.rows(
    tensor_that_is_a_view=view_or_not(lambda weight: weight._is_view()),
    tensor_with_a_base=view_or_not(lambda weight: weight._base is not None),
)


@pytest.mark.parametrize("make", scene.parameters)
def test_read_is_noticed(make: Callable[[str], Scene]) -> None:
    check_replays(make)


@pytest.mark.parametrize("make", refused.parameters)
def test_read_that_is_not_compared_is_refused(make: Callable[[str], Scene]) -> None:
    check_right_or_refused(make)


# -- the collector of garbage ------------------------------------------------------------------------


def test_step_sees_the_settings_of_the_garbage_collector() -> None:
    gc.set_threshold(500, 10, 10)

    def step(x: Any) -> Any:
        return x * gc.get_threshold()[0] if gc.isenabled() else x * 3

    check_replays(lambda device: Scene(step=step))
    assert gc.get_threshold() == (500, 10, 10)


def test_step_may_switch_the_garbage_collector_off() -> None:
    gc.enable()

    def step(x: Any) -> Any:
        gc.disable()
        return x * 2

    try:
        check_right(lambda device: Scene(step=step))
        assert not gc.isenabled()
    finally:
        gc.enable()
