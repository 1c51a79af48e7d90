"""What a step says: why it was recorded, which place has changed, from what, and to what."""

from __future__ import annotations

import collections
import dataclasses
import gc
import itertools
import os
import random
import re
import threading
import time
import types
import warnings
import weakref
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


# -- captured anew ---------------------------------------------------------------------------------

SCALE: Any = "a"


@dataclasses.dataclass
class Anew:
    """A step, a change, and the words that `explain` has to have for it: the place, from what, to what."""

    step: Callable[..., Any]
    change: Callable[[], object]
    words: tuple[str, ...]


def attribute(before: Any, after: Any, *words: str, use: Callable[[Any], Any] = lambda value: value) -> Anew:
    box = types.SimpleNamespace(scale=before)
    return Anew(lambda x: x * use(box.scale), lambda: setattr(box, "scale", after), ("scale", *words))


class WithSlots:
    __slots__ = ("scale",)


class OfAClass:
    scale: Any = "a"


def slots() -> Anew:
    box = WithSlots()
    box.scale = "a"
    return Anew(lambda x: x * len(box.scale), lambda: setattr(box, "scale", "bb"), ("scale", "'a'", "'bb'"))


def of_a_class() -> Anew:
    own = type("Own", (OfAClass,), {"scale": "a"})
    return Anew(lambda x: x * len(own.scale), lambda: setattr(own, "scale", "bb"), ("scale", "'a'", "'bb'"))


def of_a_global() -> Anew:
    globals()["SCALE"] = "a"
    return Anew(lambda x: x * len(SCALE), lambda: globals().update(SCALE="bb"), ("SCALE", "'a'", "'bb'"))


def of_a_variable() -> Anew:
    scale = "a"

    def change() -> None:
        nonlocal scale
        scale = "bb"

    return Anew(lambda x: x * len(scale), change, ("scale", "'a'", "'bb'"))


def item(container: Any, key: Any) -> Anew:
    return Anew(
        lambda x: x * len(container[key]),
        lambda: container.__setitem__(key, "bb"),
        (repr(key), "'a'", "'bb'"),
    )


def model_with(change: Callable[[Any], object], *words: str) -> Anew:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).to("lazy")
    return Anew(lambda x: model(x).sum().backward(), lambda: change(model), words)


def optimizer_with(change: Callable[[Any], object], *words: str) -> Anew:
    weight = nn.Parameter(torch.ones(3).to("lazy"))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.5)
    return Anew(
        lambda x: descend((weight * x).sum(), optimizer), lambda: change(optimizer.param_groups[0]), words
    )


def add_hook(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, args, result: None)


def add_gradient_hook(model: nn.Module) -> None:
    model[0].weight.register_hook(lambda gradient: None)  # type: ignore[index,operator]


def repr_length(value: float) -> int:
    return len(repr(value))


ANEW: dict[str, Callable[[], Anew]] = {
    # Numbers that only go through arithmetic into ops are followed, and vary freely. These are looked at.
    "float": lambda: attribute(2.0, 3.5, "2.0", "3.5", use=lambda value: float(repr(value))),
    "int": lambda: attribute(2, 3, "2", "3", use=lambda value: len(range(value))),
    "flag": lambda: attribute(True, False, "True", "False"),
    "text": lambda: attribute("mean", "total", "mean", "total", use=len),
    "tuple": lambda: attribute((1, 2), (1, 3), "2", "3", use=max),
    "type": lambda: attribute(2, 2.0, "2", "2.0"),
    "none to a number": lambda: attribute(None, 3.0, "None", "3.0", use=lambda value: value or 2.0),
    "zeros": lambda: attribute(0.0, -0.0, "0.0", "-0.0", use=repr_length),
    "none to a tensor": lambda: attribute(
        None, torch.ones(3).to("lazy"), "None", "ensor", use=lambda value: 2 if value is None else 3
    ),
    "shape of a tensor": lambda: attribute(
        torch.ones(4, 2).to("lazy"), torch.ones(5, 2).to("lazy"), "4", "5", use=len
    ),
    "dtype of a tensor": lambda: attribute(
        torch.ones(3).to("lazy"), torch.ones(3).double().to("lazy"), "f32", "f64"
    ),
    "function": lambda: attribute(
        torch.sin, torch.cos, "sin", "cos", use=lambda function: function(torch.ones(3).to("lazy"))
    ),
    "length of a list": lambda: attribute([1.0], [1.0, 1.0], "1", "2", use=len),
    "class": lambda: attribute(
        nn.Tanh(), nn.Sigmoid(), "Tanh", "Sigmoid", use=lambda m: m(torch.ones(3).to("lazy"))
    ),
    "slots": slots,
    "variable of a class": of_a_class,
    "global": of_a_global,
    "variable": of_a_variable,
    "item of a dict": lambda: item({"width": "a"}, "width"),
    "item of a list": lambda: item(["c", "a"], 1),
    "item of a deque": lambda: item(collections.deque(["c", "a"]), 1),
    "training": lambda: model_with(lambda model: model.eval(), "training", "True", "False"),
    "probability": lambda: model_with(lambda model: setattr(model[1], "p", 0.25), "'?p'?", "0.5", "0.25"),
    "requires_grad": lambda: model_with(
        lambda model: model[0].bias.requires_grad_(False), "bias", "requires_grad", "True", "False"
    ),
    "hook": lambda: model_with(add_hook, "hook"),
    "hook of a gradient": lambda: model_with(add_gradient_hook, "hook", "weight"),
    "child": lambda: model_with(lambda model: model.append(nn.Tanh()), "modules|length", "2", "3"),
    "option": lambda: optimizer_with(lambda group: group.update(nesterov=True), "nesterov", "False", "True"),
    "option that is compared": lambda: optimizer_with(
        lambda group: group.update(weight_decay=0.5), "weight_decay", r"0(\.0)?", "0.5"
    ),
}


@pytest.mark.parametrize("kind", ANEW)
def test_place_that_has_changed_is_named_with_both_values(kind: str) -> None:
    anew = ANEW[kind]()
    step = captured(anew.step)
    for _ in range(6):
        step(X)
    assert step.num_replayed > 0, step.explain()
    known = set(step.explain().splitlines()[1:])
    anew.change()
    for _ in range(6):
        step(X)
    new = [line for line in step.explain().splitlines()[1:] if line not in known]
    for word in anew.words:
        assert any(re.search(word, line) for line in new), f"{word!r} is not in {new}"
    if len(anew.words) > 2:  # on one line: the place, the old and the new value
        in_order = ".*".join((anew.words[0], *anew.words[-2:]))
        assert any(re.search(in_order, line) for line in new), f"not from the old to the new value: {new}"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((2, 3), ("argument 1", "2", "3")),
        (("mean", "total"), ("argument 1", "mean", "total")),
        ((None, torch.ones(1)), ("argument 1", "None", "ensor")),
        ((torch.ones(2), torch.ones(5)), ("argument 1", "2", "5")),
        ((torch.ones(2), torch.ones(2).double()), ("argument 1", "float32", "float64")),
        (({"a": 1}, {"b": 1}), ("argument", "a", "b")),
    ],
    ids=["int", "text", "none", "shape", "dtype", "structure"],
)
def test_argument_that_is_another_one_is_named_with_both_values(
    values: tuple[Any, Any], words: tuple[str, ...]
) -> None:
    step = captured(lambda x, w: x * 2)
    for value in values:
        for _ in range(5):
            step(X, value)
    assert step.num_replayed >= 6
    last = step.explain().splitlines()[-1]
    assert all(word in last for word in words), step.explain()


def test_every_capture_has_a_line_of_its_own() -> None:
    box = types.SimpleNamespace(scale="a", shift="a")
    step = captured(lambda x: x * len(box.scale) + len(box.shift))
    for name in ("scale", "shift"):
        for _ in range(4):
            step(X)
        setattr(box, name, "bbbbb")
    for _ in range(4):
        step(X)
    text = step.explain()
    assert "3 captures" in text
    assert re.search(r"scale.*'a'.*'bbbbb'", text), text
    assert re.search(r"shift.*'a'.*'bbbbb'", text), text


def test_number_that_is_followed_needs_no_other_capture() -> None:
    box = types.SimpleNamespace(scale=1.0, shift=1)
    step = captured(lambda x: x * box.scale + box.shift)
    for number in range(12):
        box.scale, box.shift = 0.5 * number, number
        assert step(X).tolist() == [1.5 * number] * 3
    assert "1 capture\n" in step.explain(), step.explain()
    assert step.num_replayed >= 9, step.explain()


def test_refusal_names_the_place_both_values_and_the_line_or_remedy() -> None:
    box = types.SimpleNamespace(mode="")

    @lazystep.step(audit_every=0)
    def step(x: torch.Tensor) -> torch.Tensor:
        box.mode = box.mode + "a"
        return x * 2

    with pytest.warns(lazystep.LazyStepWarning, match=r"mode' from '(a*)' to '\1a+'.*(outside|argument)"):
        for number in range(NUM_CALLS):
            assert step(X).tolist() == [2.0] * 3
            assert box.mode == "a" * (number + 1)
    assert step.num_replayed == 0


def test_state_that_cycles_is_replayed_or_refused() -> None:
    box = types.SimpleNamespace(mode="warm")

    @lazystep.step(audit_every=0)
    def step(x: torch.Tensor) -> torch.Tensor:
        box.mode = "ice cold" if box.mode == "warm" else "warm"
        return x * len(box.mode)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(NUM_CALLS):
            assert step(X).tolist() == [4.0 if number % 2 else 8.0] * 3
            assert box.mode == ("warm" if number % 2 else "ice cold")
    if not step.num_replayed:
        want = r"mode' from '(warm|ice cold)' to '(warm|ice cold)'"
        assert any(re.search(want, str(one.message)) for one in caught), step.explain()


# -- what a step keeps alive -----------------------------------------------------------------------


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(3, 1).to("lazy")
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    @lazystep.step(audit_every=0)
    def train(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        descend(loss, self.optimizer)
        return loss.detach()


@pytest.mark.parametrize("num_calls", [1, 2, 6])
def test_step_that_is_a_method_does_not_keep_its_owner(num_calls: int) -> None:
    trainer = Trainer()
    for _ in range(num_calls):
        trainer.train(X)
    parts = [weakref.ref(part) for part in (trainer, trainer.model, trainer.optimizer)]
    del trainer
    gc.collect()
    assert [part() for part in parts] == [None] * 3


def test_owners_have_captures_of_their_own_after_others_have_gone() -> None:
    """A new object may get the address of a dead one: it must not get its captures."""
    for _ in range(5):
        trainer = Trainer()
        plain = Trainer()
        plain.model.load_state_dict(trainer.model.state_dict())
        for _ in range(5):
            want = Trainer.train.__wrapped__(plain, X.to("lazy"))  # type: ignore[attr-defined]
            assert trainer.train(X).item() == want.item()
        assert trainer.train.num_recorded <= 3, trainer.train.explain()
        del trainer, plain
        gc.collect()


def test_method_of_an_object_is_one_step() -> None:
    trainer = Trainer()
    assert trainer.train is trainer.train
    one = weakref.ref(trainer.train)
    gc.collect()
    trainer.train(X)
    assert one() is trainer.train


class SlotsTrainer:
    __slots__ = ("scale",)

    @lazystep.step(audit_every=0)
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale  # type: ignore[attr-defined]


def test_method_of_an_object_without_weak_references() -> None:
    one, other = SlotsTrainer(), SlotsTrainer()
    one.scale, other.scale = 2.0, 3.0
    for _ in range(4):
        assert one.double(X).tolist() == [2.0] * 3
        assert other.double(X).tolist() == [3.0] * 3
    assert one.double.num_replayed > 0


@dataclasses.dataclass
class ComparedTrainer:
    """Equal objects, which can't be keys of a dict."""

    scale: float = 2.0

    @lazystep.step(audit_every=0)
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_methods_of_equal_objects_are_steps_of_their_own() -> None:
    one, other = ComparedTrainer(), ComparedTrainer()
    for _ in range(4):
        one.double(X)
        other.double(X)
    assert one.double is not other.double
    other.scale = 3.0
    assert one.double(X).tolist() == [2.0] * 3
    assert other.double(X).tolist() == [3.0] * 3


def test_step_that_is_gone_keeps_nothing() -> None:
    def use() -> list[weakref.ref[Any]]:
        model = nn.Linear(3, 1).to("lazy")
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.ones(3).to("lazy")

        @lazystep.step(audit_every=0)
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            descend(loss, optimizer)
            return loss.detach()

        results = [step(batch) for _ in range(6)]
        assert step.num_replayed > 0
        return [weakref.ref(part) for part in (step, model, optimizer, batch, results[0])]

    parts = use()
    lazystep.wait_device_ops()
    gc.collect()
    assert [part() for part in parts] == [None] * 5


def test_capture_does_not_keep_arguments_and_results() -> None:
    step = captured(lambda x: x * 2)
    parts = []
    for _ in range(6):
        x = torch.ones(3).to("lazy")
        y = step(x)
        parts += [weakref.ref(x), weakref.ref(y)]
    del x, y
    lazystep.wait_device_ops()
    gc.collect()
    assert [part() for part in parts] == [None] * len(parts)


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
