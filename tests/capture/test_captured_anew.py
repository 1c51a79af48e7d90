"""A step that is captured anew says which place or argument has changed, with both values."""

from __future__ import annotations

import collections
import dataclasses
import re
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lazystep
from tests.helpers import descend

from .common import captured

NUM_CALLS = 30
X = torch.ones(3)


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
