"""Which object is in a place, where its attributes are, and arithmetic that raises.

Each scene was replayed with the old numbers before the witness knew its kind.
"""

from __future__ import annotations

import importlib
import math
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from .common import captured
from .scenes import Scene, Scenes, check_replays

scene = Scenes()


@pytest.fixture(autouse=True)
def modules_as_before() -> Iterator[None]:
    yield
    sys.modules.pop("held_by_its_name", None)


@scene
def attributes_in_another_dict(device: str) -> Scene:
    holder: Any = type("Holder", (), {})()
    holder.number = 2.0
    return Scene(lambda x: x * holder.number, lambda: setattr(holder, "__dict__", {"number": 3.0}))


@scene
def vars_in_another_dict(device: str) -> Scene:
    holder: Any = type("Holder", (), {})()
    holder.number = 2.0
    return Scene(lambda x: x * vars(holder)["number"], lambda: setattr(holder, "__dict__", {"number": 3.0}))


@scene
def division_that_raises(device: str) -> Scene:
    box = types.SimpleNamespace(number=0.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            return x * (1 / box.number)
        except ZeroDivisionError:
            return x * 7

    return Scene(step, lambda: setattr(box, "number", 2.0))


@scene
def function_of_math_that_raises(device: str) -> Scene:
    box = types.SimpleNamespace(number=-1.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            return x * math.sqrt(box.number)
        except ValueError:
            return x * 7

    return Scene(step, lambda: setattr(box, "number", 2.0))


@scene
def power_that_is_complex(device: str) -> Scene:
    box = types.SimpleNamespace(number=-4.0)
    return Scene(lambda x: x * abs(box.number**0.5), lambda: setattr(box, "number", -9.0))


@scene
def module_by_its_name(device: str) -> Scene:
    def put(number: float) -> None:
        module = types.ModuleType("held_by_its_name")
        module.number = number  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module

    put(2.0)
    return Scene(lambda x: x * importlib.import_module("held_by_its_name").number, lambda: put(3.0))


@scene
def one_tuple_in_two_places(device: str) -> Scene:
    one: Any = (1, [2])
    box = types.SimpleNamespace(a=one, b=one)
    return Scene(lambda x: x * (2 if box.a is box.b else 3), lambda: setattr(box, "b", (1, [2])))


@scene
def id_of_a_tensor_as_a_key(device: str) -> Scene:
    box = types.SimpleNamespace(tensor=torch.ones(3, device=device))
    other = torch.ones(3, device=device)
    numbers = {id(box.tensor): 2.0, id(other): 3.0}
    return Scene(lambda x: x * numbers[id(box.tensor)], lambda: setattr(box, "tensor", other))


@scene
def last_element_that_is_written(device: str) -> Scene:
    tensors = [torch.ones(3, device=device), torch.ones(3, device=device)]

    def step(x: torch.Tensor) -> torch.Tensor:
        tensors[-1] = tensors[1] + x
        return tensors[1] * x

    return Scene(step, lambda: tensors.__setitem__(1, tensors[0] * 5), kept=lambda: list(tensors))


@pytest.mark.parametrize("make", scene.parameters)
def test_change_is_noticed_and_replayed(make: Any) -> None:
    check_replays(make)


@pytest.mark.filterwarnings("ignore::lazystep.LazyStepWarning")
def test_id_of_an_argument_is_refused() -> None:
    seen: dict[int, float] = {}
    run = captured(lambda x: x * seen.get(id(x), 2.0))
    x = torch.ones(3, device="lazy")
    for _ in range(4):
        assert run(x).tolist() == [2.0] * 3
    seen[id(x)] = 3.0
    assert run(x).tolist() == [3.0] * 3
    assert "it asks for the id of an argument" in run.explain()


@pytest.mark.filterwarnings("ignore::lazystep.LazyStepWarning")
def test_dict_of_attributes_that_the_step_replaces_is_refused() -> None:
    holder: Any = type("Holder", (), {})()
    holder.number = 2.0

    def step(x: torch.Tensor) -> torch.Tensor:
        holder.__dict__ = {"number": holder.number + 1}
        return x * holder.number

    run = captured(step)
    for number in range(4):
        assert run(torch.ones(3)).tolist() == [3.0 + number] * 3
        assert type(holder.number) is float
    assert run.num_replayed == 0
    assert "it replaces the __dict__" in run.explain()
