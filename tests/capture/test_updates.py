"""Numbers that the step puts somewhere before it reads them there, also by `dict.update`: followed."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.helpers import descend

from .common import captured
from .scenes import Scene, check_replays, check_right, check_right_or_refused


class Box(types.SimpleNamespace):
    """Holds `n`, a counter, and `stats`, a dict with the same number."""


def scene_of(change: Callable[[Box], Any], stats: Callable[..., Any] = dict) -> Callable[[str], Scene]:
    """A step that changes `box.stats`, and computes with the numbers in it."""

    def make(device: str) -> Scene:
        box = Box(n=1, given={"lr": 0.5}, other={"n": 5, "c": 0.5}, stats=stats({"n": 1, "lr": 0.5}))
        box.alias = box.stats

        def step(x: torch.Tensor) -> torch.Tensor:
            box.n += 1
            change(box)
            return x.to(device) * box.stats["n"] * box.stats["lr"]

        def between() -> None:
            box.n, box.other["c"], box.stats["lr"] = 40, 0.25, 0.125

        return Scene(step, between, lambda: (box.n, [*box.stats.items()], [*box.other.items()]))

    return make


UPDATES: dict[str, Callable[[Box], Any]] = {
    "dict": lambda box: box.stats.update({"n": box.n}),
    "keyword": lambda box: box.stats.update(n=box.n),
    "both": lambda box: box.stats.update({"n": box.n}, lr=0.5 / box.n),
    "of itself": lambda box: box.stats.update(n=box.stats["n"] + 1, lr=box.stats["lr"] * 0.5),
    "unbound": lambda box: dict.update(box.stats, {"n": box.n}),
    "bound earlier": lambda box: (lambda update: update({"n": box.n}))(box.stats.update),
    "unpacked": lambda box: box.stats.update(*[{"n": box.n}], **box.given),
    "from another dict": lambda box: box.stats.update(box.other),
    "from another dict of its own": lambda box: box.stats.update({**box.other, "n": box.n}),
    "alias": lambda box: box.alias.update(n=box.n),
    "nothing": lambda box: box.stats.update(),
    "own dict": lambda box: (lambda made: made.update(box.other))({}),
    "attributes": lambda box: vars(box).update(n=box.n + 1),
}


@pytest.mark.parametrize("kind", UPDATES)
def test_update_of_a_dict_is_replayed(kind: str) -> None:
    check_replays(scene_of(UPDATES[kind]))


# Right: whether they are replayed is another matter.
OTHERS: dict[str, Callable[[Box], Any]] = {
    "pairs": lambda box: box.stats.update([("n", box.n)]),
    "zip": lambda box: box.stats.update(zip(["n"], [box.n], strict=True)),
    "item": lambda box: box.stats.__setitem__("n", box.n),
    "with itself": lambda box: box.stats.update(box.stats),
    "by operator": lambda box: box.stats.__ior__({"n": box.n}),
    "new key and back": lambda box: (box.stats.update(z=box.n), box.stats.pop("z")),
    "keys in another order": lambda box: (box.stats.pop("n"), box.stats.update(n=box.n)),
}


@pytest.mark.parametrize("kind", OTHERS | UPDATES)
@pytest.mark.parametrize(
    "stats", [dict, collections.OrderedDict, collections.Counter, type("D", (dict,), {})]
)
def test_update_is_right(kind: str, stats: Callable[..., Any]) -> None:
    check_right_or_refused(scene_of((OTHERS | UPDATES)[kind], stats))


def test_update_raises_as_it_does() -> None:
    stats = {"n": 1}

    @captured
    def step(x: torch.Tensor) -> torch.Tensor:
        stats.update({"n": 2}, {"n": 3})
        return x

    with pytest.raises(TypeError):
        step(torch.ones(3))
    assert stats == {"n": 1}


# -- a number is put there, and read after that ------------------------------------------------------------


def put_item(box: Box) -> None:
    box.stats["n"] = box.n * 2


def put_attribute(box: Box) -> None:
    box.half = box.n / 2
    box.stats["n"] = box.half


def put_if(box: Box) -> None:
    if box.other["c"] > 0.3:
        box.stats["n"] = box.n * 2


def put_after_a_read(box: Box) -> None:
    box.stats["n"], box.stats["lr"] = box.n, box.stats["n"] * 0.25


def put_by_two_names(box: Box) -> None:
    box.alias["n"] = box.n * 2
    box.stats["lr"] = box.alias["n"] / 4


def put_a_number_and_a_constant(box: Box) -> None:
    box.stats["n"] = box.n
    box.stats["n"] = 3


def put_and_deleted(box: Box) -> None:
    box.stats["n"] = box.n
    del box.stats["n"]
    box.stats["n"] = 7


@pytest.mark.parametrize(
    "put",
    [
        put_item,
        put_attribute,
        put_if,
        put_after_a_read,
        put_by_two_names,
        put_a_number_and_a_constant,
        put_and_deleted,
    ],
)
def test_number_that_is_put_before_it_is_read(put: Callable[[Box], Any]) -> None:
    check_right(scene_of(put))


@pytest.mark.parametrize("put", [put_item, put_attribute, put_after_a_read, put_by_two_names])
def test_number_that_is_put_before_it_is_read_is_followed(put: Callable[[Box], Any]) -> None:
    check_replays(scene_of(put))


def test_write_that_is_ignored_is_no_write() -> None:
    """What was there is read after it, and compared."""

    class Ignoring:
        def __init__(self) -> None:
            object.__setattr__(self, "n", 2.0)

        def __setattr__(self, name: str, value: Any) -> None:
            return None

    def make(device: str) -> Scene:
        box, count = Ignoring(), types.SimpleNamespace(n=1)

        def step(x: torch.Tensor) -> torch.Tensor:
            box.n = count.n * 2
            return x.to(device) * box.n * (2 if box.n > 2 else 1)

        return Scene(step, lambda: object.__setattr__(box, "n", 3.0))

    check_right_or_refused(make)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_hook_before_an_optimizers_step_may_set_its_rate(kind: str) -> None:
    def make(device: str) -> Scene:
        weight = nn.Parameter(torch.ones(3, device=device))
        optimizer = getattr(torch.optim, kind)([weight], lr=0.1)
        state = types.SimpleNamespace(n=0, base=0.5)

        def set_rate(optimizer: Any, args: Any, kwargs: Any) -> None:
            state.n += 1
            for group in optimizer.param_groups:
                group["lr"] = state.base / state.n

        optimizer.register_step_pre_hook(set_rate)

        def step(x: torch.Tensor) -> torch.Tensor:
            descend((weight * x.to(device)).sum(), optimizer)
            return weight.detach() * 1

        def kept() -> Any:
            return weight, optimizer.param_groups[0]["lr"], state.n

        return Scene(step, lambda: setattr(state, "base", 0.25), kept)

    check_replays(make)


def test_cache_of_parametrizations_is_refused_by_its_name() -> None:
    class Symmetric(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight.triu() + weight.triu(1).T

    def make(device: str) -> Scene:
        layer = nn.Linear(3, 3).to(device)
        parametrize.register_parametrization(layer, "weight", Symmetric())
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            with parametrize.cached():
                loss = layer(layer(x.to(device))).square().sum()
            descend(loss, optimizer)
            return loss.detach()

        return Scene(step, kept=lambda: list(layer.parameters()))

    step, replays = check_right(make)
    assert replays[-1] == 0
    assert f"parametrize.cached at {__file__}:" in step.explain()
