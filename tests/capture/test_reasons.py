"""What a step says: why it was recorded, which place has changed, from what, and to what."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import re
import threading
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lazystep
from tests.helpers import descend

from .common import captured

NUM_CALLS = 30
X = torch.ones(3)


@dataclasses.dataclass
class Never:
    """A step that is never replayed, what is passed at each call, and what its reason has to name."""

    step: Callable[..., Any]
    names: str
    arguments: Callable[[int], tuple[Any, ...]] = lambda number: (X,)


NEVER: dict[str, Callable[[], Never]] = {
    "read": lambda: Never(lambda x: x * x.sum().item(), r"waits for a value.*test_reasons\.py"),
    "branch": lambda: Never(lambda x: x * 2 if x.sum() > 0 else x, r"waits for a value.*test_reasons\.py"),
    "barrier": lambda: Never(lambda x: (lazystep.mark_step(), x * 2), r"ends a step at .*test_reasons\.py"),
    "anomaly mode": lambda: Never(
        looked_through(check_nan=True),
        r"anomaly mode looks for NaN\) at .*test_reasons\.py.*set_detect_anomaly",
    ),
    "anomaly mode without NaN": lambda: Never(
        looked_through(check_nan=False),
        r"anomaly mode keeps the stack .*test_reasons\.py.*set_detect_anomaly",
    ),
    "nothing": lambda: Never(lambda x: None, "records nothing"),
    "the argument": lambda: Never(lambda x: x, "records nothing"),
    "random": lambda: Never(lambda x: x * random.random(), "random numbers"),
    "numpy's random": lambda: Never(lambda x: x * float(np.random.rand()), "random numbers"),
    "torch's on the host": lambda: Never(lambda x: x * torch.rand(3).to("lazy"), "random numbers on the CPU"),
    "clock": lambda: Never(lambda x: x * time.time(), "number|time"),
    "count in python": lambda: counted(itertools.count(1)),
    "growing list": lambda: grown([]),
    "growing dict": lambda: keyed({}),
    "growing set": lambda: keyed_set(set()),
    "int argument": lambda: Never(lambda x, n: x * n, r"argument 1 \(int\)", lambda number: (X, number)),
    "text argument": lambda: Never(lambda x, s: x * len(s), r"argument 1 \(str\)", lambda n: (X, "a" * n)),
    "object argument": lambda: Never(lambda x, o: x * 2, "argument 1", lambda number: (X, Plain())),
    "shape": lambda: Never(lambda x: x * 2, "argument 0", lambda number: (torch.ones(number + 1),)),
    "structure": lambda: Never(
        lambda xs: sum(xs) * 2, "argument|structure", lambda number: ([X] * (number + 1),)
    ),
    "array argument": lambda: Never(
        lambda x, a: x * float(a[0]), "argument 1", lambda number: (X, np.full(1, number))
    ),
    "attribute": lambda: changing("scale", lambda number: float(number)),
    "int attribute": lambda: changing("scale", lambda number: number + 10),
    "text attribute": lambda: changing("scale", lambda number: "a" * number, len),
    "tuple attribute": lambda: changing("scale", lambda number: (1, number), sum),
    "object attribute": lambda: changing("scale", lambda number: Plain(), lambda value: value.scale),
    "function attribute": lambda: changing("scale", lambda number: lambda: 2.0, lambda value: value()),
    "list attribute": lambda: changing("scale", lambda number: [number], sum),
    "dict attribute": lambda: changing("scale", lambda number: {"n": number}, lambda value: value["n"]),
    "array attribute": lambda: changing("scale", lambda number: np.full(1, number), lambda a: float(a[0])),
    "host tensor": lambda: changing(
        "scale", lambda number: torch.full((3,), float(number)), lambda t: t.to("lazy")
    ),
    "length of a tensor": lambda: changing("scale", lambda number: torch.ones(number + 1).to("lazy"), len),
    "host tensor made inside": lambda: Never(
        lambda x: x * torch.full((3,), time.perf_counter()).to("lazy"), "another one in each call|time"
    ),
    "other ops": lambda: file_that_grows(),
    "graph": lambda: graph(nn.Linear(3, 3).to("lazy")),
    "new model": lambda: changing(
        "scale", lambda number: nn.Linear(3, 3).to("lazy"), lambda m: m.bias.detach()
    ),
    "new optimizer": lambda: fresh_optimizer(nn.Linear(3, 1).to("lazy")),
    "hook": lambda: hooked(nn.Identity()),
}


class Plain:
    scale = 2.0


def looked_through(check_nan: bool) -> Callable[..., Any]:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x.detach().requires_grad_()
        with torch.autograd.set_detect_anomaly(True, check_nan):
            y.square().sum().backward()
        assert y.grad is not None
        return y.grad

    return step


def counted(numbers: Any) -> Never:
    return Never(lambda x: x * next(numbers), "iterator|number|count")


def grown(history: list[Any]) -> Never:
    return Never(lambda x: history.append(x * 2), r"a list|'?history'?")


def keyed(seen: dict[int, int]) -> Never:
    def step(x: torch.Tensor) -> torch.Tensor:
        seen[len(seen)] = 1
        return x * 2

    return Never(step, r"a dict|'?seen'?")


def keyed_set(seen: set[int]) -> Never:
    def step(x: torch.Tensor) -> torch.Tensor:
        seen.add(len(seen))
        return x * 2

    return Never(step, r"a set|'?seen'?")


def changing(
    name: str, value: Callable[[int], Any], use: Callable[[Any], Any] = lambda value: value
) -> Never:
    """An attribute that is another one before each call."""
    box = types.SimpleNamespace()

    def arguments(number: int) -> tuple[torch.Tensor]:
        setattr(box, name, value(number))
        return (X,)

    return Never(lambda x: x * use(getattr(box, name)), re.escape(name), arguments)


def file_that_grows() -> Never:
    """As many ops as the file has bytes: no two calls do the same."""
    path = "bytes"  # in the test's own directory

    def arguments(number: int) -> tuple[torch.Tensor]:
        Path(path).write_bytes(b"x" * number)
        return (X,)

    return Never(lambda x: sum([x] * os.stat(path).st_size, x), "file|stat|other ops|aten", arguments)


@pytest.fixture
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def graph(model: nn.Module) -> Never:
    return Never(lambda x: model(x).tanh(), "carries a graph")


def fresh_optimizer(model: nn.Module) -> Never:
    def step(x: torch.Tensor) -> None:
        descend(model(x).sum(), torch.optim.Adam(model.parameters()))

    return Never(step, "optimizer|state")


def hooked(model: nn.Module) -> Never:
    def arguments(number: int) -> tuple[torch.Tensor]:
        model.register_forward_hook(lambda module, args, result: None)
        return (X,)

    return Never(lambda x: model(x) * 2, "hook", arguments)


def call_often(step: Any, never: Never) -> None:
    for number in range(NUM_CALLS):
        step(*never.arguments(number))


@pytest.mark.usefixtures("own_directory")
@pytest.mark.parametrize("kind", NEVER)
def test_step_that_is_never_replayed_says_why(kind: str) -> None:
    random.seed(0)
    never = NEVER[kind]()
    step = captured(never.step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call_often(step, never)
    if step.num_replayed:
        return  # it may be clever: then nothing has to be said
    reasons = "\n".join(step.explain().splitlines()[1:])
    assert re.search(never.names, reasons), f"no reason that names it: {step.explain()}"
    texts = [str(one.message) for one in caught if one.category is lazystep.LazyStepWarning]
    assert any(re.search(never.names, text) for text in texts), f"no warning that names it: {texts}"
    assert len(texts) <= 2, f"too many warnings: {texts}"


@pytest.mark.usefixtures("own_directory")
@pytest.mark.parametrize("kind", NEVER)
def test_step_that_is_never_replayed_raises_with_fullgraph(kind: str) -> None:
    random.seed(0)
    never = NEVER[kind]()
    step = captured(never.step, fullgraph=True)
    try:
        call_often(step, never)
    except lazystep.CaptureError:
        return
    assert step.num_replayed, f"{NUM_CALLS} calls without a replay and without an error: {step.explain()}"


# -- a step that is never replayed says so within some calls ------------------------------------------


def test_captures_that_are_never_used_are_an_error_in_the_end() -> None:
    counter = types.SimpleNamespace(n=0)

    @lazystep.step(fullgraph=True, audit_every=0)
    def step(x: torch.Tensor) -> torch.Tensor:
        counter.n += 1
        return x * (
            2 if counter.n in range(1000) else 3
        )  # `range` is asked by C code: the number is compared

    def run() -> None:
        for _ in range(60):
            step(torch.ones(1))

    with pytest.raises(lazystep.CaptureError, match="a number computed from 'n' changes between calls"):
        run()
    assert step.num_replayed == 0


def test_step_whose_ops_are_recorded_by_another_thread_warns_in_the_end() -> None:
    layer = torch.nn.Linear(2, 2).to("lazy")

    @lazystep.step(audit_every=0)
    def step(x: torch.Tensor) -> torch.Tensor:
        results: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: results.append(layer(x)))
        thread.start()
        thread.join()
        return results[0].detach() * 2

    def run() -> None:
        for _ in range(30):
            step(torch.ones(2))

    with pytest.warns(lazystep.LazyStepWarning, match="another thread recorded ops"):
        run()
    assert "another thread recorded ops" in step.explain()
