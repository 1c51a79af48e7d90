"""Which object is in a place, where its attributes are, and arithmetic that raises.

Each scene was replayed with the old numbers before the witness knew its kind.
"""

from __future__ import annotations

import functools
import importlib
import math
import operator
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from .common import captured
from .scenes import Scene, Scenes, check_replays, check_right

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
def table_behind_a_bound_method(device: str) -> Scene:
    box = types.SimpleNamespace(table={"number": 2.0})
    table, get = box.table, box.table.__getitem__

    def change() -> None:
        box.table = dict(table)
        table["number"] = 3.0

    return Scene(lambda x: x * box.table["number"] * get("number"), change)


@scene
def table_that_is_written_behind_a_bound_method(device: str) -> Scene:
    box = types.SimpleNamespace(tables=[{"is_on": True}])
    get = box.tables[0].__getitem__

    def step(x: torch.Tensor) -> torch.Tensor:
        found = x * get("is_on")
        box.tables[0]["is_on"] = False
        return found

    def change() -> None:
        box.tables[0] = {"is_on": True}

    return Scene(step, change, kept=lambda: [dict(table) for table in box.tables])


@scene
def list_in_a_partial(device: str) -> Scene:
    box = types.SimpleNamespace(numbers=[2.0])
    numbers = box.numbers
    first = functools.partial(operator.getitem, numbers)

    def change() -> None:
        box.numbers = [2.0]
        numbers[0] = 3.0

    return Scene(lambda x: x * box.numbers[0] * first(0), change)


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


# -- tensors as keys -----------------------------------------------------------------------------------

AS_KEYS: dict[str, Any] = {
    "item": lambda tensor, table: table[tensor],
    "get": lambda tensor, table: table.get(tensor, 5.0),
    "in a dict": lambda tensor, table: 5.0 if tensor in {**table} else 7.0,
    "in": lambda tensor, table: 5.0 if tensor in table["keys"] else 7.0,
    "hash": lambda tensor, table: float(hash(tensor) == table["hash"]) + 1,
}


@pytest.mark.parametrize("name", AS_KEYS)
def test_another_tensor_is_another_key(name: str) -> None:
    def make(device: str) -> Scene:
        tensors = [torch.ones(3, device=device), torch.ones(3, device=device)]
        box = types.SimpleNamespace(tensor=tensors[0])
        table: dict[Any, Any] = {tensors[0]: 2.0, "keys": {tensors[0]}, "hash": hash(tensors[0])}
        if name in ("item", "get"):
            table[tensors[1]] = 3.0
        return Scene(
            lambda x: x * box.tensor * AS_KEYS[name](box.tensor, table),
            lambda: setattr(box, "tensor", tensors[1]),
        )

    check_right(make)


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_parameter_that_another_one_replaces_has_another_state(kind: str) -> None:
    """The update went on with the state of the old parameter."""

    def make(device: str) -> Scene:
        box = types.SimpleNamespace(weight=torch.ones(3, device=device, requires_grad=True))
        options = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)([box.weight], lr=0.1, **options)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = (box.weight * x).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        def change() -> None:
            box.weight = torch.ones(3, device=device, requires_grad=True)
            optimizer.param_groups[0]["params"][0] = box.weight

        return Scene(step, change, kept=lambda: box.weight.detach())

    check_replays(make, num_recorded=5)
