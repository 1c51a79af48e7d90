"""C code that looks at a tuple, list or dict of the call's own, or at a key: what is inside may be outside.

Each of these was replayed with the old numbers before the witness looked there.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from .scenes import Scene, check_replays, check_right

Use = Callable[[Any], Any]

# The step multiplies by what each of them makes of `box.inside`, which is [1, 2] and then [1, 2, 3].
OF_LIST: dict[str, Use] = {
    "equal": lambda box: 2 if {"k": box.inside} == {"k": [1, 2]} else 3,
    "contains": lambda box: 2 if [1, 2] in [box.inside] else 3,
    "index": lambda box: 1 + [[0], box.inside, [1, 2]].index([1, 2]),
    "str": lambda box: len(str([box.inside])),
    "f-string": lambda box: len(f"{(box.inside,)}"),
    "json": lambda box: len(json.dumps({"a": box.inside})),
    "sorted": lambda box: sorted([box.inside, [1, 2, 2]])[0][-1] + len(sorted([box.inside, [1, 2, 2]])[0]),
    "max": lambda box: len(max([box.inside, [1, 2, 2]])) + max([box.inside, [1, 2, 2]])[-1],
    "tensor": lambda box: int(torch.tensor([box.inside, box.inside]).sum()),
    "NumPy": lambda box: int(np.array([box.inside, box.inside]).sum()),
    "sorted zip": lambda box: len(sorted(zip([box.inside, [1, 2, 2]], "ab", strict=True))[0][0]) * 2,
    "chain": lambda box: sum(itertools.chain.from_iterable([box.inside, box.inside])),
    "deep": lambda box: len(str([({"a": [box.inside]},)])),
}
# The same for (len, 1) and then (len, 2): not plain, because of the function.
OF_TUPLE: dict[str, Use] = {
    "hash": lambda box: 1 + hash(box.inside) % 1009,
    "hash of an own tuple": lambda box: 1 + hash((box.inside, 1)) % 1009,
    "key": lambda box: box.table[box.inside],
    "key of get": lambda box: box.table.get(box.inside, 4),
    "key of an own dict": lambda box: {(len, 1): 2}.get(box.inside, 3),
    "key that is built": lambda box: {box.inside: 2}.get((len, 1), 3),
    "key of a comprehension": lambda box: {key: n for n, key in enumerate([box.inside])}.get((len, 1), 3) + 1,
    "own key": lambda box: {((len, 1), 1): 2}.get((box.inside, 1), 3),
    "element of a set": lambda box: 2 if (len, 1) in {box.inside} else 3,
    "set comprehension": lambda box: len({key for key in [box.inside, (len, 1)] if key}) + 1,
    "fromkeys": lambda box: len(dict.fromkeys([box.inside, (len, 1)])) + 1,
    "dict of a zip": lambda box: dict(zip([box.inside, (len, 1)], (2, 3), strict=True)).get((len, 2), 4),
    "equal": lambda box: 2 if [box.inside] == [(len, 1)] else 3,
}


@pytest.mark.parametrize("name", OF_LIST)
def test_list_in_a_container_of_the_step(name: str) -> None:
    def make(device: str) -> Scene:
        box = types.SimpleNamespace(inside=[1, 2])
        return Scene(lambda x: x * OF_LIST[name](box), lambda: box.inside.append(3))

    check_replays(make)


@pytest.mark.parametrize("name", OF_TUPLE)
def test_tuple_that_is_hashed_or_compared(name: str) -> None:
    def make(device: str) -> Scene:
        box = types.SimpleNamespace(inside=(len, 1), table={(len, 1): 2, (len, 2): 3})
        return Scene(lambda x: x * OF_TUPLE[name](box), lambda: setattr(box, "inside", (len, 2)))

    check_replays(make)


# -- tuples of classes ---------------------------------------------------------------------------------


def caught(kinds: Any) -> int:
    try:
        try:
            raise IndexError
        except kinds:
            return 2
    except IndexError:
        return 3


OF_CLASSES: dict[str, Use] = {
    "isinstance": lambda kinds: 2 if isinstance(IndexError(), kinds) else 3,
    "issubclass": lambda kinds: 2 if issubclass(IndexError, kinds) else 3,
    "own tuple": lambda kinds: 2 if isinstance(IndexError(), (KeyError, kinds)) else 3,
    "except": caught,
}


@pytest.mark.parametrize("name", OF_CLASSES)
@pytest.mark.parametrize(
    "kinds", [(KeyError, IndexError), (KeyError, (ValueError, IndexError))], ids=["flat", "nested"]
)
def test_tuple_of_classes(name: str, kinds: Any) -> None:
    if name == "except" and isinstance(kinds[1], tuple):
        kinds = (KeyError, IndexError, ValueError)  # Python takes no nested ones there

    def make(device: str) -> Scene:
        box = types.SimpleNamespace(kinds=(KeyError, ValueError))
        return Scene(lambda x: x * OF_CLASSES[name](box.kinds), lambda: setattr(box, "kinds", kinds))

    check_replays(make)


def test_key_of_an_item_that_is_written() -> None:
    """The key decides where a replay writes."""

    def make(device: str) -> Scene:
        box = types.SimpleNamespace(key=(len, 1))
        table = {(len, 1): torch.zeros(3, device=device), (len, 2): torch.zeros(3, device=device)}

        def step(x: torch.Tensor) -> torch.Tensor:
            table[box.key] = x * 2
            return x

        return Scene(step, lambda: setattr(box, "key", (len, 2)), kept=lambda: list(table.values()))

    check_right(make)


# -- what the call itself has put somewhere ------------------------------------------------------------


def test_list_that_c_code_puts_into_a_place_is_the_calls_own() -> None:
    """It was kept as an object from before the call, and so the same list in each replay."""

    def make(device: str) -> Scene:
        state = {"hidden": [torch.ones(3, device=device)]}

        def step(x: torch.Tensor) -> torch.Tensor:
            state.update(hidden=[x * 2])
            return x * state["hidden"][0]

        def change() -> None:
            state["hidden"][0] = torch.zeros(3, device=device)

        return Scene(step, change, kept=lambda: state["hidden"][0])

    check_right(make)


@dataclasses.dataclass
class Locked:
    """Ignores what is written."""

    value: Any

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in vars(self):
            object.__setattr__(self, name, value)


def test_object_in_a_place_whose_write_was_ignored() -> None:
    def make(device: str) -> Scene:
        inside = types.SimpleNamespace(scale=2.0)
        locked = Locked(inside)

        def step(x: torch.Tensor) -> torch.Tensor:
            locked.value = None
            return x * locked.value.scale

        return Scene(step, lambda: setattr(inside, "scale", 3.0))

    check_replays(make)


@pytest.mark.parametrize("kind", [tuple, list])
def test_containers_that_a_step_exchanges(kind: type) -> None:
    """A replay puts the containers there that are in the places now, not those of the captured call."""

    def make(device: str) -> Scene:
        def tensors(number: float) -> Any:
            return kind([torch.full((3,), number, device=device)])

        box = types.SimpleNamespace(a=tensors(2.0), b=tensors(5.0))

        def step(x: torch.Tensor) -> torch.Tensor:
            y = x * box.a[0] + 10 * box.b[0]
            box.a, box.b = box.b, box.a
            return y

        return Scene(step, lambda: setattr(box, "a", tensors(7.0)), kept=lambda: (list(box.a), list(box.b)))

    check_right(make)


def test_number_that_setdefault_stores_is_plain() -> None:
    def make(device: str) -> Scene:
        table = {"a": 1.5}

        def step(x: torch.Tensor) -> torch.Tensor:
            return x * table.setdefault("b", table["a"] * 2)

        return Scene(step, lambda: table.pop("b"), kept=lambda: dict(table))

    check_right(make)
