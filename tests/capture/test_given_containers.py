"""Lists and dicts among the arguments: the step is given the caller's own, and changes them as eager does."""

from __future__ import annotations

import collections
import decimal
import math
from typing import Any

import numpy as np
import pytest
import torch

import lazystep

from .common import captured
from .scenes import NUM_BEFORE, Scene, check_right

pytestmark = pytest.mark.filterwarnings("ignore::lazystep.LazyStepWarning")
KINDS = {
    "dict": lambda x: {"x": x, "scale": 2.0},
    "OrderedDict": lambda x: collections.OrderedDict(x=x, scale=2.0),
    "list": lambda x: [x, 2.0],
    "deque": lambda x: collections.deque([x, 2.0]),
    "nested": lambda x: [({"x": x}, 2.0), [x]],
}


def first(batch: Any) -> Any:
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return batch


def on_host(batch: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_unchanged_containers_are_replayed_and_hold_what_they_held(kind: str, device: str) -> None:
    run = captured(lambda batch: first(batch) * 2)
    for number in range(5):
        x = torch.full((3,), float(number)).to(device)
        batch = KINDS[kind](x)
        assert run(batch).tolist() == [2.0 * number] * 3
        assert first(batch) is x
        assert repr(on_host(batch)) == repr(on_host(KINDS[kind](x)))
    assert run.num_replayed == 3, run.explain()


def test_changed_dict_is_the_callers_dict_and_the_step_is_refused() -> None:
    def step(batch: dict[str, Any]) -> torch.Tensor:
        x = batch.pop("x")
        batch["y"], batch["count"], batch["again"] = x * 2, batch["count"] + 1.0, [x, batch["count"]]
        return batch["y"].sum()

    def make(device: str) -> Scene:
        given: list[dict[str, Any]] = []

        def arguments(number: int) -> tuple[Any, ...]:
            given.append({"x": torch.full((3,), float(number)), "count": 1.0 * number})
            return (given[-1],)

        return Scene(step, kept=lambda: given[-1], arguments=arguments)

    run, replays = check_right(make)
    assert replays[-1] == 0
    assert "it changes an argument, a dict" in run.explain()


def test_changed_list_inside_a_tuple() -> None:
    def step(batch: tuple[list[Any], float]) -> torch.Tensor:
        batch[0].append(batch[0][0] * batch[1])
        return batch[0][-1] + 1

    run = captured(step)
    for number in range(4):
        given: list[Any] = [torch.full((3,), 1.0 * number)]
        assert run((given, 2.0)).tolist() == [2.0 * number + 1] * 3
        assert [one.tolist() for one in given] == [[1.0 * number] * 3, [2.0 * number] * 3]


def test_dict_that_is_reached_by_another_name() -> None:
    """The argument was a copy, so that the step did not see what it had written itself."""

    def make(device: str) -> Scene:
        outer = {"a": 2.0}

        def step(x: torch.Tensor, held: dict[str, float]) -> torch.Tensor:
            outer["a"] = outer["a"] + 1
            return x * held["a"]

        return Scene(step, kept=lambda: dict(outer), arguments=lambda number: (torch.ones(3), outer))

    check_right(make)


def test_step_inside_a_step_changes_the_list_of_the_outer_one() -> None:
    @lazystep.step(audit_every=0)
    def inner(parts: list[torch.Tensor]) -> None:
        parts.append(parts[0] * 3)

    def outer(x: torch.Tensor) -> torch.Tensor:
        parts = [x]
        inner(parts)
        return parts[1]

    run = captured(outer)
    for number in range(4):
        assert run(torch.full((2,), float(number))).tolist() == [3.0 * number] * 2


def test_call_that_raises_gives_the_leaves_back() -> None:
    def step(batch: dict[str, Any]) -> torch.Tensor:
        batch["seen"] = batch["scale"] * 2
        raise KeyError

    run = captured(step)
    x = torch.ones(3)
    batch = {"x": x, "scale": 2.0}
    for _ in range(3):
        with pytest.raises(KeyError):
            run(batch)
        assert batch["x"] is x
        assert [type(batch["scale"]), type(batch["seen"]), batch["seen"]] == [float, float, 4.0]


# -- plain arguments: equal is not the same --------------------------------------------------------------


class Text(str):
    """A text that may have attributes."""

    scale: float


def text(scale: float) -> Text:
    made = Text("a")
    made.scale = scale
    return made


EQUAL: dict[str, tuple[Any, Any, Any]] = {
    "frozenset": (frozenset([1]), frozenset([True]), lambda v: 2 if True is next(iter(v)) else 3),
    "NumPy's zero": (np.float64(0.0), np.float64(-0.0), lambda v: math.copysign(2, v)),
    "range": (range(0, 3, 2), range(0, 4, 2), lambda v: v.stop),
    "decimal": (decimal.Decimal("2.0"), decimal.Decimal("2.00"), lambda v: len(str(v))),
    "text with attributes": (text(2.0), text(3.0), lambda v: v.scale),
    "order of an array": (
        np.ones((2, 2)),
        np.asfortranarray(np.ones((2, 2))),
        lambda v: 2 if v.flags.c_contiguous else 3,
    ),
    "size": (torch.Size([2, 3]), torch.Size([2, 4]), lambda v: v.numel()),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_arguments_that_differ(name: str) -> None:
    first_value, second_value, use = EQUAL[name]

    def make(device: str) -> Scene:
        return Scene(
            lambda x, value: x * use(value),
            arguments=lambda number: (torch.ones(3), first_value if number < NUM_BEFORE else second_value),
        )

    check_right(make)


@pytest.mark.parametrize("is_list", [True, False])
def test_whether_an_argument_is_a_certain_object(is_list: bool) -> None:
    def make(device: str) -> Scene:
        objects = [[1.0], [1.0]] if is_list else [torch.ones(3, device=device) for _ in range(2)]
        return Scene(
            lambda x, value: x * (2 if value is objects[0] else 3),
            arguments=lambda number: (torch.ones(3), objects[number < NUM_BEFORE]),
        )

    check_right(make)
