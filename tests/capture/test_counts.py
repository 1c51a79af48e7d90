"""Numbers and states that a step advances, wherever it keeps them: each replay advances them, too."""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from .scenes import Scene, check_replays, check_right_or_refused


class Slots:
    __slots__ = ("n",)


@dataclasses.dataclass
class Data:
    n: Any = 0


class Counts:
    """A counter that is a property."""

    def __init__(self) -> None:
        self._n: Any = 0

    @property
    def n(self) -> Any:
        return self._n

    @n.setter
    def n(self, value: Any) -> None:
        self._n = value


COUNT: Any = 0


def holder_of(kind: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Where a number is kept: how to read and how to write it."""
    if kind == "global":

        def write_global(n: Any) -> None:
            global COUNT
            COUNT = n

        return lambda: COUNT, write_global
    if kind == "variable":
        count: Any = 0

        def write_variable(n: Any) -> None:
            nonlocal count
            count = n

        return lambda: count, write_variable
    if kind in ("dict", "list", "default dict"):
        items: Any = {"dict": {0: 0}, "list": [0], "default dict": collections.defaultdict(int)}[kind]

        def write_item(n: Any) -> None:
            items[0] = n

        return lambda: items[0], write_item
    if kind in ("optimizer's group", "optimizer's state"):
        weight = torch.ones(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def values() -> Any:
            return optimizer.param_groups[0] if kind == "optimizer's group" else optimizer.state[weight]

        def write_option(n: Any) -> None:
            values()["n"] = n

        return lambda: values()["n"], write_option
    holders: dict[str, Callable[[], Any]] = {
        "attribute": types.SimpleNamespace,
        "slots": Slots,
        "data class": Data,
        "module": nn.Module,
        "property": Counts,
        "class": lambda: type("Own", (), {}),
        "python module": lambda: types.ModuleType("users_counts"),
        "function": lambda: lambda: None,
        "thread's own": threading.local,
    }
    holder = holders[kind]()

    def write_attribute(n: Any) -> None:
        holder.n = n

    return lambda: holder.n, write_attribute


HOLDERS = (
    ["attribute", "slots", "data class", "module", "property", "class", "python module", "function"]
    + ["global", "variable", "dict", "list", "default dict", "optimizer's group", "optimizer's state"]
    + ["thread's own"]
)
# How the number changes in each call, and how it is used.
CHANGES: dict[str, tuple[Any, Callable[[Any], Any], Callable[[torch.Tensor, Any], torch.Tensor]]] = {
    "counted, not used": (0, lambda n: n + 1, lambda x, n: x * 2),
    "counted by an operand": (0, lambda n: n + 1, lambda x, n: x + n),
    "counted as a float": (0.0, lambda n: n + 1.0, lambda x, n: x * n),
    "counted in threes": (5, lambda n: n + 3, lambda x, n: x * n),
    "counted down": (100, lambda n: n - 1, lambda x, n: x / n),
    "bias correction": (0, lambda n: n + 1, lambda x, n: x * (1 - 0.9**n)),
    "root of a count": (0, lambda n: n + 1, lambda x, n: x * math.sqrt(n)),
    "decays": (1.0, lambda n: n * 0.9, lambda x, n: x * n),
    "average": (1.0, lambda n: 0.9 * n + 0.1 * 3.0, lambda x, n: x + n),
}


def counting(kind: str, how: str, device: str) -> Scene:
    start, change, use = CHANGES[how]
    read, write = holder_of(kind)
    write(start)

    def step(x: torch.Tensor) -> torch.Tensor:
        write(change(read()))
        return use(x, read())

    return Scene(step, lambda: write(start), kept=read)  # it starts anew between two calls


@pytest.mark.parametrize("how", CHANGES)
def test_count_is_carried(how: str) -> None:
    check_replays(lambda device: counting("attribute", how, device))


@pytest.mark.parametrize("kind", HOLDERS[1:])
def test_count_is_carried_wherever_it_is_kept(kind: str) -> None:
    check_replays(lambda device: counting(kind, "counted by an operand", device))


@pytest.mark.parametrize(
    "change",
    [
        lambda n: (n + 1) % 3,
        lambda n: n * 2 % 7,
        lambda n: -n,
        lambda n: not n,
        lambda n: 1 if n == 2 else 2,
        lambda n: "b" if n == "a" else "a",
        lambda n: n + 1 if n < 3 else n,
        lambda n: None if n else 2,
        lambda n: (*n, 1) if isinstance(n, tuple) and len(n) < 3 else (),
        lambda n: n ^ 1,
        lambda n: float(n) if isinstance(n, int) else int(n),
    ],
    ids=["thirds", "powers", "sign", "flag", "pair", "text", "warm-up", "none", "tuple", "parity", "type"],
)
@pytest.mark.parametrize("kind", ["attribute", "dict", "variable", "class", "optimizer's group"])
def test_state_that_cycles(change: Callable[[Any], Any], kind: str) -> None:
    def make(device: str) -> Scene:
        read, write = holder_of(kind)
        write(1)
        factors = collections.defaultdict(
            lambda: 11.0, {1: 2.0, 2: 3.0, 0: 5.0, "a": 6.0, None: 7.0, (): 8.0}
        )

        def step(x: torch.Tensor) -> torch.Tensor:
            y = x * factors[read()]
            write(change(read()))
            return y

        return Scene(step, lambda: write(2), kept=read)

    check_right_or_refused(make)
