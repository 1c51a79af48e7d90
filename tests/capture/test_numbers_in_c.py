"""Numbers that C code takes out of a container, or that say which element it takes: compared.

Without the look inside, a replay went on with the numbers of the captured call.
"""

from __future__ import annotations

import array
import collections
import functools
import heapq
import itertools
import json
import math
import operator
import statistics
import struct
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from .scenes import Scene, check_right, check_right_or_refused

Use = Callable[[Any], Any]


def scene_of(use: Use) -> Callable[[str], Scene]:
    """The step multiplies by what is made of `box.n` and `box.f`, which then change."""

    def make(device: str) -> Scene:
        box = types.SimpleNamespace(n=2, f=1.5)

        def step(x: torch.Tensor) -> torch.Tensor:
            return x.to(device) * use(box)

        def change() -> None:
            box.n, box.f = 4, 40.25

        return Scene(step, change)

    return make


def after(container: Any, change: Callable[[Any], Any]) -> Any:
    """The container, changed."""
    change(container)
    return container


def row_written(row: int) -> float:
    rows = np.zeros((9, 2))
    rows[row, 0] = 3.0
    return float(rows[4].sum()) + 1


def ints_written(*numbers: int) -> float:
    ints = np.zeros(len(numbers), int)
    ints[:] = numbers
    return float(ints.sum())


NUMBERS = list(range(1, 10))
USES: dict[str, Use] = {
    "list.pop": lambda box: NUMBERS[:].pop(box.n),
    "list.insert": lambda box: after(NUMBERS[:], lambda items: items.insert(box.n, 99))[2],
    "list.index from": lambda box: [1, 2, 3, 1, 2, 3].index(1, box.n - 2) + 1,
    "list.__getitem__": lambda box: [1, 2, 3, 4, 5].__getitem__(box.n),
    "list.__mul__": lambda box: len([1].__mul__(box.n)),
    "tuple.__getitem__": lambda box: tuple.__getitem__((1, 2, 3, 4, 5), box.n),
    "deque.rotate": lambda box: after(collections.deque([1, 2, 3]), lambda items: items.rotate(box.n))[0],
    "deque.insert": lambda box: after(collections.deque(NUMBERS), lambda items: items.insert(box.n, 99))[2],
    "enumerate from": lambda box: next(iter(enumerate("a", box.n)))[0],
    "text with a tuple": lambda box: float("%.3f%d" % (box.f, box.n)),  # noqa: UP031
    "text with a dict": lambda box: float("%(a)d" % {"a": box.n}),  # noqa: UP031
    "bytes of a generator": lambda box: sum(bytes(n for n in [box.n, 1])),
    "bytes of an iterator": lambda box: sum(bytes(iter([box.n]))),
    "array of a generator": lambda box: array.array("i", (n for n in [box.n]))[0],
    "array of a reversed list": lambda box: array.array("i", reversed([box.n, 1]))[1],
    "generator with int": lambda box: sum(bytearray(int(n) for n in [box.f])),
    "index of an array": lambda box: float(np.arange(99.0).reshape(9, 11)[box.n, 0]),
    "row of an array": lambda box: row_written(box.n),
    "ints in an array": lambda box: ints_written(box.n, box.n),
    "array and a list": lambda box: int((np.ones(1, int) + [box.n]).sum()),
    "list and an array": lambda box: int(([box.n] * np.ones(1, int)).sum()),
    "deep": lambda box: len(json.dumps({"a": {"b": {"c": {"d": [[[[[[box.f * 1.37]]]]]]}}}})),
    "sum of sums": lambda box: math.fsum(itertools.accumulate([box.f, box.n])),
    "sum of a zip": lambda box: math.fsum(
        itertools.chain.from_iterable(zip([box.f] * 2, (1, 2), strict=True))
    ),
    "same object": lambda box: 2.0 if box.f is box.f else 3.0,
}


@pytest.mark.parametrize("kind", USES)
def test_number_that_c_code_takes(kind: str) -> None:
    check_right_or_refused(scene_of(USES[kind]))


class List(list[Any]):
    """One of the user's."""


Point = collections.namedtuple("Point", "a b")
CONTAINERS: dict[str, Use] = {
    "list": lambda box: [box.f, box.n],
    "tuple": lambda box: (box.f, box.n),
    "named tuple": lambda box: Point(box.f, box.n),
    "list of a class": lambda box: List([box.f, box.n]),
    "deque": lambda box: collections.deque([box.f, box.n]),
    "set": lambda box: {box.f, box.n},
    "values": lambda box: {"a": box.f, "b": box.n}.values(),
    "ordered values": lambda box: collections.OrderedDict(a=box.f, b=box.n).values(),
    "iterator": lambda box: iter([box.f, box.n]),
    "iterator of values": lambda box: iter({"a": box.f, "b": box.n}.values()),
    "reversed": lambda box: reversed([box.f, box.n]),
    "chain": lambda box: itertools.chain([box.f], (box.n,)),
    "slice": lambda box: itertools.islice([box.f, box.n], 2),
    "map": lambda box: map(operator.pos, [box.f, box.n]),
    "filter": lambda box: filter(None, [box.f, box.n]),
    "generator": lambda box: (number for number in [box.f, box.n]),
    "accumulate": lambda box: itertools.accumulate([box.f, box.n]),
    "takewhile": lambda box: itertools.takewhile(lambda number: True, [box.f, box.n]),
    "tee": lambda box: itertools.tee([box.f, box.n])[0],
    "product": lambda box: [box.f] * 2,
    "comprehension": lambda box: [number for number, _ in zip([box.f, box.n], "ab", strict=True)],
}
TAKERS: dict[str, Use] = {
    "fsum": math.fsum,
    "fmean": statistics.fmean,
    "array": lambda items: sum(array.array("d", items)),
    "NumPy": lambda items: float(np.array(list(items)).sum()),
    "fromiter": lambda items: float(np.fromiter(items, float).sum()),
    "struct": lambda items: struct.unpack("d", struct.pack("d", next(iter(items))))[0],
    "tensor": lambda items: torch.tensor(list(items)).sum().item(),
    "json": lambda items: len(json.dumps([[[[list(items)]]]])),
    "text": lambda items: len("%r" % (list(items),)),  # noqa: UP031
    "bytes": lambda items: sum(bytes(int(item) for item in items)),
    "bytearray": lambda items: sum(bytearray(map(int, items))),
    "heap": lambda items: after(list(items), heapq.heapify)[0],
    "partial": lambda items: functools.partial(math.fsum, list(items))(),
    "pairs": lambda items: float(np.array(list(zip(items, (1.0, 2.0), strict=False))).sum()),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_number_in_a_container_that_c_code_takes(container: str) -> None:
    for take in TAKERS.values():
        check_right(scene_of(lambda box, take=take: take(CONTAINERS[container](box))), num_after=2)


@pytest.mark.parametrize(
    "use",
    [
        lambda box: ([box.f] * 2)[1],
        lambda box: ((box.f,) + (box.n,))[0],
        lambda box: sum(number for number in (box.f, box.n)),
    ],
)
def test_number_that_is_passed_on_is_followed(use: Use) -> None:
    _, replays = check_right(scene_of(use), num_after=6)
    assert replays[-1] - replays[-7] == 6
