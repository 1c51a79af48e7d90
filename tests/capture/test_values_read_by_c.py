"""Values that C code reads, such as views, arrays, files and locks, and which of two objects a container is.

Each scene was replayed with the old numbers before the witness knew its kind.
"""

from __future__ import annotations

import ctypes
import decimal
import io
import math
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from .scenes import Scene, Scenes, assign, check_replays, check_right_or_refused, put, space

scene, refused = Scenes(), Scenes()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    context = decimal.getcontext().copy()
    yield
    decimal.setcontext(context)


# -- values ------------------------------------------------------------------------------------------


def third(x: Any) -> Any:
    return x * float(decimal.Decimal(1) / decimal.Decimal(3))


@scene
def precision_of_decimals(device: str) -> Scene:
    decimal.setcontext(decimal.Context(prec=28))
    return Scene(step=lambda x: third(x), change=assign(decimal.getcontext(), "prec", 2))


@scene
def precision_of_decimals_from_outside(device: str) -> Scene:
    decimal.setcontext(decimal.Context(prec=28))
    one, three = decimal.Decimal(1), decimal.Decimal(3)
    return Scene(step=lambda x: x * float(one / three), change=assign(decimal.getcontext(), "prec", 2))


@scene
def precision_of_a_context(device: str) -> Scene:
    context = decimal.Context(prec=28)
    return Scene(
        step=lambda x: x * float(context.divide(decimal.Decimal(1), decimal.Decimal(3))),
        change=assign(context, "prec", 2),
    )


def records() -> Any:
    made = np.zeros(2, dtype=[("scale", "f8")])
    made["scale"] = 2.0
    return made


@scene
def record_of_an_array(device: str) -> Scene:
    array = records()
    record = array[0]
    return Scene(step=lambda x: x * float(record["scale"]), change=put(array["scale"], 0, 3.0))


@scene
def number_of_an_array_without_dimensions(device: str) -> Scene:
    array = np.array(2.0)
    return Scene(step=lambda x: x * float(array), change=put(array, (), 3.0))


@scene
def index_that_an_object_tells(device: str) -> Scene:
    class At:
        place = 1

        def __index__(self) -> int:
            return self.place

    at = At()
    return Scene(step=lambda x: x[at] * 1, change=assign(at, "place", 2))


@scene
def order_of_a_set(device: str) -> Scene:
    other = {8}
    other.add(0)
    held = space(numbers={0, 8})
    assert list(other) != list(held.numbers), "this case needs two orders of one set"

    def step(x: Any) -> Any:
        for number in held.numbers:
            x = x * 2 + number
        return x

    return Scene(step=step, change=assign(held, "numbers", other))


def sign(held: Any) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        return x * sum(math.copysign(1, number) for number in held.numbers)

    return step


def other_numbers(before: Any, after: Any) -> Callable[[str], Scene]:
    def make(device: str) -> Scene:
        held = space(numbers=before)
        return Scene(step=sign(held), change=assign(held, "numbers", after))

    return make


scene.rows(
    zero_in_a_set=other_numbers({0.0}, {-0.0}),
    zero_in_a_frozen_set=other_numbers(frozenset({0.0}), frozenset({-0.0})),
    zero_of_numpy=other_numbers((np.float32(0.0),), (np.float32(-0.0),)),
    double_zero_of_numpy=other_numbers((np.float64(0.0),), (np.float64(-0.0),)),
)


@scene
def form_of_a_memoryview(device: str) -> Scene:
    memory = bytearray(8)
    held = space(view=memoryview(memory))
    return Scene(step=lambda x: x * len(held.view), change=assign(held, "view", memoryview(memory).cast("i")))


@refused
def large_memoryview(device: str) -> Scene:
    memory = bytearray(2 << 20)
    memory[0] = 2
    view = memoryview(memory)
    return Scene(step=lambda x: x * view[0], change=put(memory, 0, 3))


@refused
def text_that_names_attributes(device: str) -> Scene:
    held = space(inside=[space(number=1.0)])
    return Scene(
        step=lambda x: x * (2 if "{0.inside[0].number}".format(held) == "1.0" else 3),  # noqa: UP030, UP032
        change=assign(held.inside[0], "number", 1.5),
    )


# -- views, files, records, locks --------------------------------------------------------------------


def changed(
    make: Callable[[], Any], use: Callable[[Any, Any], Any], change: Callable[[Any], Any]
) -> Callable[[str], Scene]:
    """A step that uses one object, which then changes."""

    def made(device: str) -> Scene:
        held = make()
        return Scene(step=lambda x: use(x, held), change=lambda: change(held))

    return made


def dict_and(view: Callable[[dict[str, float]], Any]) -> Callable[[], tuple[Any, Any]]:
    def make() -> tuple[Any, Any]:
        numbers = {"a": 2.0}
        return numbers, view(numbers)

    return make


def more(held: Any) -> None:
    held[0].update(a=3.0, b=4.0)


class Fields(ctypes.Structure):
    _fields_ = (("scale", ctypes.c_float),)


scene.rows(
    values_of_a_dict=changed(dict_and(dict.values), lambda x, held: x * sum(held[1]), more),
    items_of_a_dict=changed(dict_and(dict.items), lambda x, held: x * next(v for _, v in held[1]), more),
    number_of_keys=changed(dict_and(dict.keys), lambda x, held: x * len(held[1]), more),
    key_in_a_view=changed(dict_and(dict.keys), lambda x, held: x * (2 if "b" in held[1] else 3), more),
    keys_of_a_dict_and_a_set=changed(dict_and(dict.keys), lambda x, held: x * len(held[1] & {"b"}), more),
    flat_array=changed(
        lambda: np.ones(2), lambda x, held: x * float(held.flat[0]), lambda held: held.fill(5)
    ),
    array_on_its_side=changed(
        lambda: np.ones((2, 2)), lambda x, held: x * float(held.T[0, 0]), lambda held: held.fill(5)
    ),
    memory_of_an_array=changed(
        lambda: np.ones(2), lambda x, held: x * float(held.data[0]), lambda held: held.fill(5)
    ),
    array_of_ctypes=changed(
        lambda: (ctypes.c_float * 2)(2.0, 1.0), lambda x, held: x * held[0], lambda held: put(held, 0, 3.0)()
    ),
    structure_of_ctypes=changed(
        lambda: Fields(2.0), lambda x, held: x * held.scale, lambda held: setattr(held, "scale", 3.0)
    ),
    code_of_a_function=changed(
        lambda: lambda: 2.0,
        lambda x, held: x * held.__code__.co_consts[-1],
        lambda held: setattr(held, "__code__", (lambda: 3.0).__code__),
    ),
    text_of_an_exception=changed(
        lambda: ValueError("2"),
        lambda x, held: x * float(str(held)),
        lambda held: setattr(held, "args", ("3",)),
    ),
    are_one=changed(
        lambda: space(a=[1], b=[1]),
        lambda x, held: x * (2 if operator.is_(held.a, held.b) else 3),
        lambda held: setattr(held, "b", held.a),
    ),
)
refused.rows(
    text_in_memory=changed(
        lambda: io.StringIO("2"),
        lambda x, held: x * float(held.getvalue()),
        lambda held: (held.seek(0), held.write("3")),
    ),
    text_in_memory_by_a_method_that_is_kept=changed(
        lambda: (lambda file: (file, file.getvalue))(io.StringIO("2")),
        lambda x, held: x * float(held[1]()),
        lambda held: (held[0].seek(0), held[0].write("3")),
    ),
    place_in_a_file=changed(
        lambda: io.StringIO("abc"), lambda x, held: x * held.tell(), lambda held: held.seek(2)
    ),
    lock=changed(
        threading.Lock, lambda x, held: x * (2 if held.locked() else 3), lambda held: held.acquire()
    ),
    lock_that_is_taken_if_it_is_free=changed(
        threading.Lock,
        lambda x, held: x * (2 if held.acquire(blocking=False) and not held.release() else 3),
        lambda held: held.acquire(),
    ),
    owner_of_a_lock=changed(
        threading.RLock, lambda x, held: x * (2 if held._is_owned() else 3), lambda held: held.acquire()
    ),
    state_of_the_generator=changed(
        lambda: torch.manual_seed(5),
        lambda x, held: x * float(torch.get_rng_state()[:8].sum()),
        lambda held: torch.manual_seed(77),
    ),
)


# -- which of two containers it is -------------------------------------------------------------------


@scene
def two_lists_become_one(device: str) -> Scene:
    held = space(a=[2.0], b=[2.0])
    return Scene(
        step=lambda x: x * 2 * held.a[0] if held.a is held.b else x * 3 * held.b[0],
        change=assign(held, "b", held.a),
    )


@scene
def another_tuple(device: str) -> Scene:
    known = (1, [2])
    held = space(a=known)
    return Scene(step=lambda x: x * 2 if held.a is known else x * 3, change=assign(held, "a", (1, [2])))


def written_twice(first: Any, second: Any, key: Any) -> Callable[[str], Scene]:
    def make(device: str) -> Scene:
        held = space(a=first.copy(), b=second.copy())

        def step(x: Any) -> Any:
            held.a[key] += 1
            return x * held.b[key]

        return Scene(
            step=step, change=lambda: setattr(held, "b", held.a), kept=lambda: (held.a[key], held.b[key])
        )

    return make


scene.rows(
    list_that_becomes_the_one_that_is_written=written_twice([2.0], [3.0], 0),
    dict_that_becomes_the_one_that_is_written=written_twice({"k": 2.0}, {"k": 3.0}, "k"),
)


@pytest.mark.parametrize("make", scene.parameters)
def test_read_is_noticed(make: Callable[[str], Scene]) -> None:
    check_replays(make)


@pytest.mark.parametrize("make", refused.parameters)
def test_read_that_is_not_compared_is_refused(make: Callable[[str], Scene]) -> None:
    check_right_or_refused(make)
