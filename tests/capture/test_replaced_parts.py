"""Parts of torch, of Python and of classes that somebody replaces while a step is captured."""

from __future__ import annotations

import builtins
import configparser
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .scenes import Scene, Scenes, check_replays

scene = Scenes()
NUMBERS = [1.0, 2.0]


class Trebled:
    """Takes the place of a function, and has a state of its own."""

    factor = 3.0

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs) * self.factor


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    kept = [(owner, name, getattr(owner, name)) for owner, name in _REPLACED]
    bases = [(kind, kind.__bases__) for kind in (nn.Identity, configparser.NoSectionError)]
    yield
    for owner, name, value in kept:
        setattr(owner, name, value)
    for kind, old in bases:
        kind.__bases__ = old
    vars(statistics).pop("sorted", None)


_REPLACED: list[tuple[Any, str]] = [
    (F, "linear"),
    (F, "relu"),
    (torch, "relu"),
    (torch, "layer_norm"),
    (builtins, "len"),
    (builtins, "sum"),
]


def through(module: Callable[[], nn.Module]) -> Callable[[str], Any]:
    def make(device: str) -> Any:
        held = module().to(device)
        return lambda x: held(x).detach()

    return make


def is_replaced(owner: Any, name: str, step: Callable[[str], Any], by: Any = Trebled) -> Any:
    """`owner.name` gives three times as much after the change."""
    original = getattr(owner, name)

    def make(device: str) -> Scene:
        setattr(owner, name, original)
        return Scene(step=step(device), change=lambda: setattr(owner, name, by(original)))

    return make


def by_function(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: original(*args, **kwargs) * 3


def for_these_numbers(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, *more: 7 if value is NUMBERS else original(value, *more)


scene.rows(
    linear_by_an_object=is_replaced(F, "linear", through(lambda: nn.Linear(3, 3))),
    linear_by_a_function=is_replaced(F, "linear", through(lambda: nn.Linear(3, 3)), by_function),
    relu=is_replaced(F, "relu", through(nn.ReLU), by_function),
    relu_of_torch=is_replaced(torch, "relu", through(nn.ReLU), by_function),
    layer_norm=is_replaced(torch, "layer_norm", through(lambda: nn.LayerNorm(3)), by_function),
    len=is_replaced(builtins, "len", lambda device: lambda x: x * len(NUMBERS), for_these_numbers),
    sum=is_replaced(builtins, "sum", lambda device: lambda x: x * sum(NUMBERS), for_these_numbers),
)


@scene
def state_of_what_was_replaced(device: str) -> Scene:
    other = F.linear = Trebled(F.linear if not isinstance(F.linear, Trebled) else F.linear.function)
    return Scene(step=through(lambda: nn.Linear(3, 3))(device), change=lambda: setattr(other, "factor", 5.0))


@scene
def name_in_a_module_of_python(device: str) -> Scene:
    class Only:
        number = 2.0

        def __call__(self, values: Any) -> list[float]:
            return [self.number]

    vars(statistics)["sorted"] = only = Only()
    return Scene(step=lambda x: x * statistics.median([5.0]), change=lambda: setattr(only, "number", 3.0))


class Marked(nn.Module):
    """Becomes a base of a class of torch's."""


def identity_has_another_base() -> None:
    nn.Identity.__bases__ = (Marked,)


def held_identity(use: Callable[[Any], bool]) -> Callable[[str], Scene]:
    def make(device: str) -> Scene:
        nn.Identity.__bases__ = (nn.Module,)
        held = {"module": nn.Identity()}
        return Scene(step=lambda x: x * 2 if use(held["module"]) else x * 3, change=identity_has_another_base)

    return make


scene.rows(
    bases_by_an_object=held_identity(lambda module: isinstance(module, Marked)),
    bases_by_the_class=held_identity(lambda module: issubclass(nn.Identity, Marked)),
    bases_by_its_type=held_identity(lambda module: issubclass(type(module), Marked)),
)


@scene
def class_of_a_module(device: str) -> Scene:
    held = {"module": nn.Identity()}
    return Scene(
        step=lambda x: x * 2 if isinstance(held["module"], nn.Tanh) else x * 3,
        change=lambda: setattr(held["module"], "__class__", nn.Tanh),
    )


class MarkingError(Exception):
    """Becomes a base of an exception of Python's."""


class MarkedError(configparser.Error, MarkingError):
    pass


@scene
def bases_of_an_exception(device: str) -> Scene:
    configparser.NoSectionError.__bases__ = (configparser.Error,)
    error = configparser.NoSectionError("a")

    def step(x: Any) -> Any:
        try:
            raise error
        except MarkingError:
            return x * 2
        except configparser.Error:
            return x * 3

    return Scene(step=step, change=lambda: setattr(configparser.NoSectionError, "__bases__", (MarkedError,)))


@scene
def settings_of_the_text_of_a_tensor(device: str) -> Scene:
    torch.set_printoptions(profile="default")
    third = torch.tensor([1 / 3])
    return Scene(step=lambda x: x * len(repr(third)), change=lambda: torch.set_printoptions(precision=6))


@pytest.mark.parametrize("make", scene.parameters)
def test_part_that_is_replaced_is_noticed(make: Callable[[str], Scene]) -> None:
    try:
        check_replays(make)
    finally:
        torch.set_printoptions(profile="default")
