"""Numbers that reach Python, NumPy, a CPU tensor or another thread: always the true ones."""

from __future__ import annotations

import cmath
import copy
import ctypes
import decimal
import fractions
import functools
import importlib
import json
import math
import pickle
import statistics
import struct
import sys
import threading
import types
import warnings
from collections.abc import Callable
from math import exp, hypot, log, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lazystep
from tests.helpers import descend

from .common import captured
from .scenes import NUM_BEFORE, Scene, bits, check_replays, check_right_or_refused

# -- float arguments -------------------------------------------------------------------------------

X = torch.linspace(0.1, 1.3, 3, dtype=torch.float64)


def arguments(number: int) -> tuple[Any, ...]:
    """A number that repeats, until it is captured; that changes and repeats; and that varies."""
    return X, 0.3 if number < NUM_BEFORE else 0.7 if number < NUM_BEFORE + 3 else 0.05 * number + 0.2


def in_a_thread(function: Callable[[], Any]) -> Any:
    """What the function gives on a thread of its own."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def text_of(w: Any) -> float:
    return float(f"{w}")


NUMBERS: dict[str, Callable[[Any], Any]] = {
    "imported sqrt": lambda w: sqrt(w),
    "imported exp": lambda w: exp(w),
    "imported log": lambda w: log(w, 2),
    "imported hypot": lambda w: hypot(w, w),
    "math.log with a base": lambda w: math.log(w, 2),
    "math.log to a base": lambda w: math.log(3.0, w),
    "math.log2": lambda w: math.log2(w),
    "math.hypot": lambda w: math.hypot(w, 1.0, w),
    "math.fmod": lambda w: math.fmod(w, 0.2),
    "math.frexp": lambda w: math.frexp(w)[0],
    "math.ldexp": lambda w: math.ldexp(w, 3),
    "math.floor": lambda w: math.floor(w * 10),
    "math.prod": lambda w: math.prod([w, w, 3]),
    "math.dist": lambda w: math.dist([w], [1.0]),
    "math.atan2": lambda w: math.atan2(w, 1),
    "math.isfinite": lambda w: 2 if math.isfinite(w) else 3,
    "math.nextafter": lambda w: math.nextafter(w, 9.0) - w,
    "math.ulp": lambda w: math.ulp(w) * 1e16,
    "cmath": lambda w: cmath.sqrt(w).real,
    "partial of a function of math": lambda w: functools.partial(math.pow, w)(2),
    "mapped": lambda w: sum(map(math.sqrt, [w, w + 1])),
    "np.sqrt": lambda w: float(np.sqrt(w)),
    "np.exp": lambda w: np.exp(w),
    "np.clip": lambda w: float(np.clip(w, 0.2, 0.5)),
    "np.interp": lambda w: float(np.interp(w, [0.0, 1.0], [2.0, 5.0])),
    "np.linspace": lambda w: float(np.linspace(0, w, 4)[2]),
    "np.float32": lambda w: float(np.float32(w)),
    "np.asarray": lambda w: float(np.asarray(w) * 2),
    "int": lambda w: int(w * 10),
    "round": lambda w: round(w, 1),
    "truncated": lambda w: math.trunc(w * 10),
    "is_integer": lambda w: 2 if w.is_integer() else 3,
    "ratio": lambda w: w.as_integer_ratio()[0] / 2**60,
    "hash": lambda w: hash(w) % 1000,
    "repr": lambda w: float(repr(w)),
    "text": text_of,
    "format": lambda w: float(format(w, ".3e")),
    "percent": lambda w: float("%.2f" % w),  # noqa: UP031
    "json": lambda w: json.loads(json.dumps({"w": [w]}))["w"][0],
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "copy": lambda w: copy.deepcopy([w])[0],
    "struct": lambda w: struct.unpack("f", struct.pack("f", w))[0],
    "ctypes": lambda w: ctypes.c_float(w).value,
    "decimal": lambda w: float(decimal.Decimal(w) * 3),
    "fraction": lambda w: float(fractions.Fraction(w) / 3),
    "statistics": lambda w: statistics.mean([w, 1.0]),
    "type": lambda w: 2 if type(w) is float else 3,
    "type by name": lambda w: 2 if type(w).__name__ == "float" else 3,
    "isinstance": lambda w: 2 if isinstance(w, float) else 3,
    "isinstance of several": lambda w: 2 if isinstance(w, (int, float)) else 3,
    "not a tensor": lambda w: 2 if not isinstance(w, torch.Tensor) else 3,
    "dispatch": lambda w: kind_of(w),
    "compared": lambda w: 2 if w == 0.3 else 3,
    "in a list": lambda w: 2 if w in [0.3, 0.1] else 3,
    "minimum": lambda w: min(w, 0.5),
    "maximum of several": lambda w: max([0.2, w, 0.4]),
    "sorted": lambda w: sorted([0.5, w, 0.2])[1],
    "index": lambda w: [5.0, 6.0, 7.0, 8.0][round(w)],
    "range": lambda w: sum(range(round(w * 10))),
    "key of a dict": lambda w: {0.3: 5.0}.get(w, 6.0),
    "truth": lambda w: 2 if w else 3,
    "negative": lambda w: -w,
    "absolute": lambda w: abs(w - 0.5),
    "whole division": lambda w: w // 0.2,
    "complex": lambda w: complex(w, 1).real,
    "conjugate": lambda w: w.conjugate() + w.real + w.imag,
    "in another thread": lambda w: in_a_thread(lambda: w * 2),
    "json in another thread": lambda w: float(in_a_thread(lambda: json.dumps(w))),
    "root in another thread": lambda w: in_a_thread(lambda: math.sqrt(w)),
    "number in another thread": lambda w: 2 if in_a_thread(lambda: float.hex(w)) == float.hex(w) else 3,
}


@functools.singledispatch
def kind_of(value: object) -> float:
    return 3.0


@kind_of.register
def _(value: float) -> float:
    return 2.0


@pytest.mark.parametrize("kind", NUMBERS)
def test_number_in_python(kind: str) -> None:
    check_right_or_refused(lambda device: Scene(lambda x, w: x * NUMBERS[kind](w), arguments=arguments))


# Where a number meets a tensor on the host. What comes of it goes to the device.
HOST = torch.tensor([0.1, 0.7, 1.9], dtype=torch.float64)
MEETS: dict[str, Callable[[Any], torch.Tensor]] = {
    "multiplied": lambda w: HOST * w,
    "from the left": lambda w: 1 - w * HOST,
    "alpha": lambda w: torch.add(HOST, HOST, alpha=w),
    "power": lambda w: HOST**w,
    "power of": lambda w: w**HOST,
    "clamped": lambda w: HOST.clamp(max=w),
    "filled": lambda w: torch.full((3,), w, dtype=torch.float64),
    "filled in place": lambda w: torch.empty(3, dtype=torch.float64).fill_(w),
    "assigned": lambda w: assigned(w),
    "made": lambda w: torch.tensor([w, w, 1.0], dtype=torch.float64),
    "scalar": lambda w: HOST * torch.tensor(w, dtype=torch.float64),
    "asked": lambda w: HOST * torch.as_tensor(w, dtype=torch.float64),
    "spaced": lambda w: torch.linspace(0, w, 3, dtype=torch.float64),
    "range": lambda w: torch.arange(0, w * 3, w, dtype=torch.float64)[:3],
    "compared": lambda w: torch.gt(HOST, w).double(),
    "where": lambda w: torch.where(HOST > 0.5, HOST, w),
    "lerp": lambda w: torch.lerp(HOST, HOST * 2, w),
    "leaky": lambda w: nn.functional.leaky_relu(-HOST, w),
    "threshold": lambda w: nn.functional.threshold(HOST, w, 5.0),
    "normalized": lambda w: nn.functional.layer_norm(HOST, (3,), eps=w),
    "from numpy": lambda w: torch.from_numpy(HOST.numpy() * w),
    "item": lambda w: HOST * (HOST[0] * w).item(),
    "single precision": lambda w: (HOST.float() * w).double(),
    "foreach": lambda w: torch._foreach_mul([HOST], w)[0],
}


def assigned(w: float) -> torch.Tensor:
    made = torch.zeros(3, dtype=torch.float64)
    made[0] = w
    return made


@pytest.mark.parametrize("kind", MEETS)
def test_number_that_meets_a_tensor_on_the_host(kind: str) -> None:
    check_right_or_refused(
        lambda device: Scene(lambda x, w: x * MEETS[kind](w).to(device), arguments=arguments)
    )


# -- hyperparameters -------------------------------------------------------------------------------


class ByHand(torch.optim.Optimizer):
    """An optimizer with scalars on the CPU in its state, updated with the numbers of its group."""

    def __init__(self, parameters: Any, update: Callable[[Any, Any], Any], dtype: torch.dtype) -> None:
        super().__init__(parameters, {"lr": 0.05, "beta": 0.9, "eps": 1e-3, "steps": 0})
        self.update = update
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["c"] = torch.tensor(0.5, dtype=self.dtype)
                    state["step"] = torch.tensor(0.0)
                scale = self.update(state, group)
                if isinstance(scale, torch.Tensor):
                    scale = scale.item()
                p.add_(p.grad, alpha=-group["lr"] * scale)


def blend(state: Any, group: Any) -> Any:
    """As in timm's LaProp: the average of the rates, as a scalar tensor."""
    state["c"] = state["c"] * group["beta"] + (1 - group["beta"])
    return state["c"]


def blend_in_place(state: Any, group: Any) -> Any:
    return state["c"].mul_(group["beta"]).add_(1 - group["beta"])


def blend_rates(state: Any, group: Any) -> Any:
    state["c"] = state["c"] * group["beta"] + (1 - group["beta"]) * group["lr"]
    return state["c"] / group["lr"] if group["lr"] != 0.0 else 1.0


def lerp(state: Any, group: Any) -> Any:
    return state["c"].lerp_(torch.ones_like(state["c"]), 1 - group["beta"])


def add_with_alpha(state: Any, group: Any) -> Any:
    return state["c"].add_(torch.ones_like(state["c"]), alpha=group["lr"])


def correct(state: Any, group: Any) -> Any:
    state["step"] += 1
    return 1 - group["beta"] ** state["step"]


def correct_item(state: Any, group: Any) -> Any:
    state["step"] += 1
    return 1 - group["beta"] ** state["step"].item()


def decide(state: Any, group: Any) -> Any:
    state["c"] = torch.maximum(state["c"] * group["beta"], torch.tensor(group["eps"], dtype=state["c"].dtype))
    return state["c"]


def compare(state: Any, group: Any) -> Any:
    state["c"].mul_(group["beta"])
    return 1.0 if state["c"] > 0.3 else 0.5


def in_numpy(state: Any, group: Any) -> Any:
    return float(np.power(group["beta"], 3) + np.sqrt(group["lr"]))


def filled(state: Any, group: Any) -> Any:
    return state["c"].fill_(group["lr"]) * 2


UPDATES = [blend, blend_in_place, blend_rates, lerp, add_with_alpha] + [
    correct,
    correct_item,
    decide,
    compare,
    in_numpy,
    filled,
]


@pytest.mark.parametrize(
    ("update", "dtype"), [(update, torch.float32) for update in UPDATES] + [(blend, torch.float64)]
)
def test_hyperparameter_that_meets_a_scalar_on_the_host(
    update: Callable[[Any, Any], Any], dtype: torch.dtype
) -> None:
    def make(device: str) -> Scene:
        weight = nn.Parameter(torch.ones(3).to(device))
        optimizer = ByHand([weight], update, dtype)

        def step(x: torch.Tensor) -> torch.Tensor:
            descend((weight * x).square().sum(), optimizer)
            return weight.detach() + 0

        return Scene(
            step,
            lambda: optimizer.param_groups[0].update(lr=0.02, beta=0.8),
            kept=lambda: [dict(state) for state in optimizer.state.values()],
            arguments=lambda number: (torch.linspace(0.1, 1, 3),),
        )

    check_right_or_refused(make)


# -- zeros and other bits --------------------------------------------------------------------------

PAIRS = {
    "zeros": (0.0, -0.0),
    "zeros, the other way": (-0.0, 0.0),
    "not a number": (math.nan, 1.0),
    "infinite": (math.inf, -math.inf),
    "neighbours": (0.1, math.nextafter(0.1, 1.0)),
    "whole": (1.0, 1),
    "truth": (1, True),
    "tiny": (5e-324, 0.0),
    "numpy's": (2.0, np.float64(2.0)),
    "tuples of zeros": ((0.0, 1), (-0.0, 1)),
    "complex zeros": (complex(0.0, 0.0), complex(0.0, -0.0)),
}


def sign_of(value: Any) -> float:
    """A number that differs even for the zeros."""
    if isinstance(value, tuple):
        return sign_of(value[0])
    if isinstance(value, complex):
        return math.copysign(2.0, value.imag)
    kind = {int: 10.0, bool: 20.0, np.float64: 30.0}.get(type(value), 0.0)
    return math.copysign(2.0, value) + kind + (0 if not math.isfinite(value) else value * 1e3)


@pytest.mark.parametrize("where", ["attribute", "dict", "argument"])
@pytest.mark.parametrize("pair", PAIRS)
def test_numbers_are_compared_by_their_bits(pair: str, where: str) -> None:
    def make(device: str) -> Scene:
        now = PAIRS[pair][0]
        box, held = types.SimpleNamespace(w=now), {"w": now}

        def step(x: torch.Tensor, *given: Any) -> torch.Tensor:
            return x * sign_of(given[0] if given else box.w if where == "attribute" else held["w"])

        def change() -> None:
            nonlocal now
            now = box.w = held["w"] = PAIRS[pair][1]

        return Scene(step, change, arguments=lambda number: (X, *([now] if where == "argument" else [])))

    check_replays(make)


def test_zero_of_another_sign_as_a_hyperparameter() -> None:
    def make(device: str) -> Scene:
        weight = nn.Parameter(torch.zeros(3).to(device))
        optimizer = torch.optim.SGD([weight], lr=0.0)

        def step(x: torch.Tensor) -> torch.Tensor:
            descend((weight * x).sum(), optimizer)
            return math.copysign(1.0, optimizer.param_groups[0]["lr"]) * x

        return Scene(step, lambda: optimizer.param_groups[0].update(lr=-0.0), kept=lambda: weight + 0)

    check_right_or_refused(make)


# -- what is seen inside ---------------------------------------------------------------------------


def test_text_of_numbers_that_is_printed_inside(capsys: pytest.CaptureFixture[str]) -> None:
    weight = nn.Parameter(torch.ones(1).to("lazy"))
    optimizer = torch.optim.Adam([weight], lr=0.1, betas=(0.8, 0.9))

    @lazystep.step(audit_every=0)
    def step(x: torch.Tensor, w: float) -> torch.Tensor:
        group = optimizer.param_groups[0]
        descend((weight * x).sum() * w, optimizer)
        print(w, f"{w:.3f} {w!r}", "%s" % w, [w], {"lr": group["lr"]}, group["betas"], w * 2)  # noqa: UP031
        return x * w

    for _ in range(5):
        step(torch.ones(1), 0.3)
    lines = capsys.readouterr().out.splitlines()
    assert set(lines) == {"0.3 0.300 0.3 0.3 [0.3] {'lr': 0.1} (0.8, 0.9) 0.6"}


def test_numbers_of_an_optimizer_that_are_written_as_text() -> None:
    weight = nn.Parameter(torch.ones(1).to("lazy"))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    texts = set()

    @lazystep.step(audit_every=0)
    def step(x: torch.Tensor) -> None:
        descend((weight * x).sum(), optimizer)
        group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        texts.add(json.dumps(group))
        texts.add(json.dumps(pickle.loads(pickle.dumps(copy.deepcopy(group)))))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lazystep.LazyStepWarning)  # the set grows once
        for _ in range(5):
            step(torch.ones(1))
    (text,) = texts
    assert json.loads(text)["lr"] == 0.1
    assert json.loads(text)["betas"] == [0.9, 0.999]


# -- other threads ---------------------------------------------------------------------------------


def looked_at_from_another_thread(look: Callable[[], Any]) -> None:
    """What another thread sees in the middle of a recorded call is what it sees before it."""
    before = in_a_thread(look)
    seen = []

    @lazystep.step(audit_every=0)
    def step(x: torch.Tensor, w: float) -> torch.Tensor:
        y = x * math.sqrt(w)
        seen.append(in_a_thread(look))
        return y * w

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lazystep.LazyStepWarning)  # the list grows
        for _ in range(3):
            step(torch.ones(1), 0.3)
    assert [bits(one) for one in seen] == [bits(before)] * 3


ADAM = importlib.import_module("torch.optim.adam")
OPTIMIZER = torch.optim.Adam([torch.ones(2, requires_grad=True)], lr=0.1, betas=(0.8, 0.9))


def train_elsewhere() -> list[float]:
    weight = torch.full((3,), 0.7, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.NAdam([weight], lr=0.03)
    for _ in range(3):
        descend(weight.square().sum() * 0.3, optimizer)
    return weight.tolist()


@pytest.mark.parametrize(
    "look",
    [
        lambda: [math.sqrt(0.3), math.log(0.3, 2), math.pow(0.3, 2), sqrt(0.3)],
        lambda: [type(math.sqrt(0.3)).__name__, type(math.exp(1)).__name__],
        lambda: (OPTIMIZER.param_groups[0]["lr"], OPTIMIZER.param_groups[0]["betas"]),
        lambda: ADAM._get_value(torch.tensor(0.3)),
        lambda: ADAM._get_value(3),
        lambda: (torch.full((2,), 0.3, dtype=torch.float64) * 0.3).tolist(),
        lambda: (np.sqrt(0.3) * 0.3).item(),
        lambda: json.dumps([0.3, 0.3 * 3]),
        train_elsewhere,
    ],
    ids=[
        "math",
        "types",
        "groups",
        "_get_value",
        "_get_value of an int",
        "tensors",
        "numpy",
        "json",
        "training",
    ],
)
def test_another_thread_sees_nothing_of_the_recording(look: Callable[[], Any]) -> None:
    looked_at_from_another_thread(look)


def test_hyperparameters_that_another_thread_reads_during_the_call() -> None:
    """A thread that logs the rate, while a call of a step that trains with it is being recorded."""
    weight = nn.Parameter(torch.ones(3).to("lazy"))
    optimizer = torch.optim.Adam([weight], lr=0.1, betas=(0.8, 0.9))
    seen: set[str] = set()

    def look() -> str:
        group = optimizer.param_groups[0]
        return f"{group['lr']!r} {group['betas']!r} {type(group['lr']).__name__}"

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling():
                seen.add(in_a_thread(look))
            return x

    looks = Looks()

    @lazystep.step(audit_every=0)
    def step(x: torch.Tensor) -> None:
        descend((looks(weight) * x).sum(), optimizer)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lazystep.LazyStepWarning)  # the set grows once
        for _ in range(4):
            step(torch.ones(3))
    assert seen == {"0.1 (0.8, 0.9) float"}


def test_functions_of_math_are_the_same_after_a_call_that_fails() -> None:
    before = {name: getattr(math, name) for name in dir(math)}
    values = {name: module.__dict__["_get_value"] for name, module in optimizer_modules().items()}

    @captured
    def step(x: torch.Tensor, w: float) -> torch.Tensor:
        raise ValueError(math.sqrt(w))

    for _ in range(3):
        with pytest.raises(ValueError, match=r"0\.5$"):
            step(torch.ones(1), 0.25)
    assert {name: getattr(math, name) for name in dir(math)} == before
    assert {name: module.__dict__["_get_value"] for name, module in optimizer_modules().items()} == values


def optimizer_modules() -> dict[str, Any]:
    found = {name: module for name, module in sys.modules.items() if name.startswith("torch.optim.")}
    return {name: module for name, module in found.items() if "_get_value" in vars(module)}


def test_sign_of_a_nan() -> None:
    """A constant of a replay keeps all its bits."""

    def make(device: str) -> Scene:
        box = types.SimpleNamespace(scale=math.nan)
        return Scene(lambda x: x * box.scale, lambda: setattr(box, "scale", -math.nan))

    check_replays(make)


def test_number_in_a_function_that_the_step_keeps() -> None:
    """A parameter that an inner function reads gets into its cell without an instruction that writes it."""

    def make_getter(number: float) -> Callable[[], float]:
        return lambda: number

    def make(device: str) -> Scene:
        box = types.SimpleNamespace(get=make_getter(2.0))

        def step(x: torch.Tensor) -> torch.Tensor:
            number = box.get()
            box.get = make_getter(number)
            return x * number

        return Scene(step, kept=lambda: box.get())

    check_right_or_refused(make)
