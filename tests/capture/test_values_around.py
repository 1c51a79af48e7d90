"""What values consist of: containers, objects, arrays, tensors and generators around a step."""

from __future__ import annotations

import array
import collections
import contextvars
import dataclasses
import functools
import random
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lazystep

from .common import Case, Cases, Doubler, Function, captured, check_change, scale_of

case = Cases()


def first_of(numbers: Any) -> Case:
    return lambda x: x * numbers[0], lambda: numbers.__setitem__(0, numbers[0] + 1)


case.rows(
    element_of_a_deque=lambda: first_of(collections.deque([2.0])),
    array_of_bytes=lambda: first_of(bytearray([2])),
    array_of_numbers=lambda: first_of(array.array("d", [2.0])),
)


@case
def element_of_a_list() -> Case:
    functions: list[Any] = [torch.sin]
    return lambda x: functions[0](x), lambda: functions.__setitem__(0, torch.cos)


@case
def value_of_a_dict() -> Case:
    functions: dict[str, Any] = {"activation": torch.sin}
    return lambda x: functions["activation"](x), lambda: functions.update(activation=torch.cos)


@case
def key_of_a_dict_is_replaced() -> Case:
    options: dict[str, float] = {"twice": 2.0}

    def change() -> None:
        del options["twice"]
        options["thrice"] = 3.0

    return lambda x: x * (3 if "thrice" in options else 2), change


@case
def order_of_a_dict() -> Case:
    functions = collections.OrderedDict(a=lambda x: x + 1, b=lambda x: x * 2)

    def function(x: torch.Tensor) -> torch.Tensor:
        for one in functions.values():
            x = one(x)
        return x

    return function, lambda: functions.move_to_end("a")


@case
def value_behind_a_proxy() -> Case:
    values = {"scale": 2.0}
    proxy = types.MappingProxyType(values)
    return lambda x: x * proxy["scale"], lambda: values.update(scale=3.0)


@case
def element_of_a_set_is_replaced() -> Case:
    options = {"twice"}

    def change() -> None:
        options.remove("twice")
        options.add("thrice")

    return lambda x: x * (3 if "thrice" in options else 2), change


@case
def type_in_a_tuple() -> Case:
    options = types.SimpleNamespace(scale=(2,))
    return lambda x: (x > 5).to(torch.int64) * options.scale[0], lambda: setattr(options, "scale", (2.0,))


# -- objects ---------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Slots:
    scale: float = 2.0


class KindOfDict(dict[str, Any]):
    scale = 2.0


case.rows(
    attribute_in_slots=lambda: scale_of(Slots()),
    attribute_of_a_kind_of_dict=lambda: scale_of(KindOfDict()),
)


@case
def attribute_of_a_thread() -> Case:
    local = threading.local()
    local.scale = 2.0
    return scale_of(local)


@case
def attribute_of_a_decorator() -> Case:
    class Scaled:
        def __init__(self, function: Function) -> None:
            functools.update_wrapper(self, function)
            self.function = function
            self.scale = 2.0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.function(x) * self.scale

    scaled = Scaled(lambda x: x + 1)
    return lambda x: scaled(x), lambda: setattr(scaled, "scale", 3.0)


@case
def attribute_that_is_looked_up_by_code() -> Case:
    class Options:
        def __init__(self) -> None:
            self.__dict__["_values"] = {"scale": 2.0}

        def __getattr__(self, name: str) -> Any:
            return self._values[name]

    options = Options()
    return lambda x: x * options.scale, lambda: options._values.update(scale=3.0)


@case
def variable_of_a_context() -> Case:
    variable = contextvars.ContextVar("variable", default=2.0)
    variable.set(2.0)
    return lambda x: x * variable.get(), lambda: variable.set(3.0)


@case
def attribute_of_a_function() -> Case:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scaled.scale  # type: ignore[attr-defined]

    scaled.scale = 2.0  # type: ignore[attr-defined]
    return lambda x: scaled(x), lambda: setattr(scaled, "scale", 3.0)


@case
def attribute_of_a_parameter() -> Case:
    parameter: Any = nn.Parameter(torch.ones(3).to("lazy"))
    parameter.scale = 2.0
    return lambda x: x * parameter.detach() * parameter.scale, lambda: setattr(parameter, "scale", 3.0)


@case
def private_attribute_of_a_layer() -> Case:
    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self._scale = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self._scale

    layer = Layer().to("lazy")
    return lambda x: layer(x).detach(), lambda: setattr(layer, "_scale", 3.0)


@case
def object_behind_a_weak_reference() -> Case:
    doubler = Doubler()
    reference = weakref.ref(doubler)

    def function(x: torch.Tensor) -> torch.Tensor:
        there = reference()
        assert there is not None
        return there(x)

    return function, lambda: setattr(doubler, "flag", False)


@case
def child_of_an_empty_module() -> Case:
    model = nn.Sequential().to("lazy")
    return lambda x: model(x) + 0, lambda: model.append(nn.Softmax(0))


@case
def buffer_that_is_added() -> Case:
    model = nn.Identity().to("lazy")
    buffer = torch.ones(1, device="lazy")
    return (
        lambda x: x * (3 if dict(model.named_buffers()) else 2),
        lambda: model.register_buffer("scale", buffer),
    )


# -- numbers and tensors ---------------------------------------------------------------------------


@case
def numpy_array() -> Case:
    array = np.full(3, 2.0, dtype=np.float32)
    return lambda x: x * torch.from_numpy(array).to("lazy"), lambda: array.fill(3.0)


@case
def numpy_number() -> Case:
    numbers = types.SimpleNamespace(scale=np.float64(2.0))
    return lambda x: x * float(numbers.scale), lambda: setattr(numbers, "scale", np.float64(3.0))


@case
def complex_number() -> Case:
    numbers = types.SimpleNamespace(scale=2 + 1j)
    return lambda x: x * numbers.scale.real, lambda: setattr(numbers, "scale", 3 + 1j)


@case
def tensor_that_numpy_writes() -> Case:
    array = np.full(3, 2.0, dtype=np.float32)
    tensor = torch.from_numpy(array)
    return lambda x: x * tensor.to("lazy"), lambda: array.fill(3.0)


@case
def one_tensor_in_two_places() -> Case:
    first = torch.ones(3, device="lazy")
    state = {"a": first, "b": first}
    return lambda x: x * state["a"] + 10 * state["b"], lambda: state.update(b=first * 7)


@pytest.mark.parametrize("make", case.parameters)
def test_change_is_noticed(make: Callable[[], Case]) -> None:
    check_change(*make())


def test_array_that_is_too_large_to_be_compared_is_refused() -> None:
    array = np.ones(1 << 20, dtype=np.float32)
    total = lazystep.step(lambda x: x + torch.from_numpy(array).to("lazy").sum())
    with pytest.warns(lazystep.LazyStepWarning, match="NumPy array .*pass it as an argument"):
        for number in range(4):
            array[0] = number
            assert total(torch.zeros(1)).item() == array.sum()
    assert total.num_replayed == 0


def test_iterator_is_not_frozen() -> None:
    factors = iter([2.0, 2.0, 2.0, 3.0, 4.0])
    scaled = captured(lambda x: x * next(factors))
    with pytest.warns(lazystep.LazyStepWarning, match="an iterator, .*pass what you get"):
        assert [scaled(torch.ones(1)).item() for _ in range(5)] == [2, 2, 2, 3, 4]


generator = torch.Generator()
DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy": lambda: np.random.rand(),
    "generator of its own": lambda: torch.rand((), generator=generator).item(),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_drawn_numbers_are_not_frozen(kind: str) -> None:
    random.seed(0)
    np.random.seed(0)
    generator.manual_seed(1)
    draw = DRAWS[kind]
    sometimes = captured(lambda x: x * 2 if draw() < 0.9 else x * 3)
    with pytest.warns(lazystep.LazyStepWarning, match="draws random numbers|torch.Generator"):
        drawn = [sometimes(torch.ones(1)).item() for _ in range(100)]
    assert 3.0 in drawn
    assert sometimes.num_replayed == 0


@pytest.mark.parametrize("what", ["argument and global", "two arguments"])
def test_arguments_that_were_one_value_when_captured(what: str) -> None:
    anchor = torch.ones(2, device="lazy")
    both = captured(lambda x, y: x + 10 * (anchor if what == "argument and global" else y))
    for _ in range(5):
        assert both(anchor, anchor.detach()).tolist() == [11, 11]
    assert both.num_replayed > 0
    other = torch.full((2,), 5.0, device="lazy")
    assert both(other, anchor * 2).tolist() == ([15, 15] if what == "argument and global" else [25, 25])


def test_more_objects_than_can_be_followed_are_refused() -> None:
    data = [[number] for number in range(51_000)]
    scaled = lazystep.step(lambda x: x * sum(len(row) for row in data))
    with pytest.warns(lazystep.LazyStepWarning, match="more than 50000 objects"):
        for _ in range(3):
            assert scaled(torch.ones(1)).item() == 51_000


@pytest.mark.parametrize("kind", ["inference", "sparse", "conjugate", "random"])
def test_things_in_reach_that_have_no_version(kind: str) -> None:
    with torch.inference_mode():
        inference = torch.ones(3)
    things: dict[str, Any] = {
        "inference": inference,
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": torch.tensor([1 + 1j]).conj(),
        "random": random.SystemRandom(),
    }
    thing = things[kind]
    scaled = captured(lambda x: x * (2 if thing is not None else 3))
    for _ in range(4):
        assert scaled(torch.ones(1)).item() == 2
    assert scaled.num_replayed > 0
