"""A scene: a step with its surroundings, made once on the CPU, plain, and once on the lazy device, captured.

Both play the same calls, with a change in between, and must agree bit for bit after each of them.
"""

from __future__ import annotations

import dataclasses
import operator
import random
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import lazystep

from .common import captured

NUM_BEFORE = 6
NUM_AFTER = 6


def nothing(*_: Any) -> None:
    return None


@dataclasses.dataclass
class Scene:
    """What one run needs. `kept` is read after each call: state that has to agree, too."""

    step: Callable[..., Any]
    change: Callable[[], object] = nothing
    kept: Callable[[], Any] = nothing
    arguments: Callable[[int], tuple[Any, ...]] = lambda number: (torch.linspace(-1, 1, 3) + number,)


Make = Callable[[str], Scene]


def space(**names: Any) -> Any:
    """An object with these attributes."""
    return types.SimpleNamespace(**names)


def put(container: Any, key: Any, value: Any) -> Callable[[], None]:
    """A change: another item."""
    return lambda: operator.setitem(container, key, value)


def assign(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """A change: another value of an attribute."""
    return lambda: setattr(owner, name, value)


def linear() -> torch.nn.Module:
    """The smallest model that most of the training needs."""
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


class Scenes:
    """Collects scenes, as a decorator, and hands them to a parametrized test."""

    def __init__(self) -> None:
        self.parameters: list[Any] = []

    def __call__(self, make: Make) -> Make:
        self.parameters.append(pytest.param(make, id=make.__name__))
        return make

    def rows(self, **makes: Make) -> None:
        self.parameters += [pytest.param(make, id=name) for name, make in makes.items()]


def bits(value: Any) -> Any:
    """A value as something that is equal only if all bits, types and places are equal."""
    leaves, spec = pytree.tree_flatten(value)
    return spec, [_bits_of(leaf) for leaf in leaves]


def _bits_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        host = leaf.detach().cpu().contiguous()
        return "tensor", host.dtype, tuple(host.shape), host.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, float):
        return type(leaf), leaf.hex()
    if isinstance(leaf, (np.ndarray, np.generic)):
        return type(leaf), leaf.dtype.str, leaf.tobytes()
    return type(leaf), leaf


def shown(value: Any) -> Any:
    """The same for a reader."""
    return pytree.tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, value)


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def play(scene: Scene, call: Callable[..., Any], num_after: int) -> Iterable[tuple[Any, Any]]:
    """The results and what is kept, call by call."""
    for number in range(NUM_BEFORE + num_after):
        if number == NUM_BEFORE:
            scene.change()
        result = call(*scene.arguments(number))
        kept = scene.kept()
        yield bits((result, kept)), shown((result, kept))


def check_right(make: Make, num_after: int = NUM_AFTER) -> tuple[Any, list[int]]:
    """Compare all calls with eager's. Returns the step, and its number of replays after each call."""
    seed()
    eager = make("cpu")
    wanted = list(play(eager, eager.step, num_after))
    seed()
    scene = make("lazy")
    step = captured(scene.step)
    replays = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lazystep.LazyStepWarning)
        for number, ((want, want_shown), (got, got_shown)) in enumerate(
            zip(wanted, play(scene, step, num_after), strict=True)
        ):
            replays.append(step.num_replayed)
            was = "replayed" if replays[-1] > ([0] + replays)[-2] else "recorded"
            assert got == want, (
                f"wrong: call {number} was {was}, gave {got_shown}, eager {want_shown}\n{step.explain()}"
            )
    return step, replays


def check_replays(make: Make, num_recorded: int = 4) -> None:
    """Right at every call, and replayed: before the change and after it, without a reason not to."""
    step, replays = check_right(make)
    text = step.explain()
    assert replays[NUM_BEFORE - 1] >= NUM_BEFORE - num_recorded, f"not replayed: {text}"
    assert replays[-1] - replays[NUM_BEFORE - 1] >= NUM_AFTER - num_recorded, f"not replayed again: {text}"
    assert "not replayed" not in text, text


def check_right_or_refused(make: Make) -> None:
    """Right at every call; a step that was never replayed says why."""
    step, replays = check_right(make)
    if not replays[-1]:
        assert len(step.explain().splitlines()) > 1, f"no reason: {step.explain()}"
