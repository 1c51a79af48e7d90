"""Numbers in a captured step: each is the one that eager would have, at every call."""

from __future__ import annotations

import json
import math
import types
import warnings
from collections.abc import Callable
from math import copysign, isclose
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lazystep
from tests.helpers import descend

from .common import NUM_CALLS, captured


def test_number_argument_is_not_frozen() -> None:
    scaled = captured(lambda x, weight: (x * weight + (1 - weight) * 2).sum())
    for number in range(NUM_CALLS):
        weight = 0.1 * number
        want = (torch.ones(2) * weight + (1 - weight) * 2).sum()
        assert scaled(torch.ones(2), weight).item() == want.item()
    assert scaled.num_replayed >= NUM_CALLS - 2


def test_learning_rate_is_not_frozen() -> None:
    weight = nn.Parameter(torch.zeros(1).to("lazy"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    fit = captured(lambda: descend(weight.sum(), optimizer))
    want = 0.0
    for number in range(NUM_CALLS):
        optimizer.param_groups[0]["lr"] = 0.5**number
        want -= 0.5**number
        fit()
    assert weight.item() == want
    assert fit.num_replayed >= NUM_CALLS - 3


COMPUTING_INSIDE = {
    "dropout": lambda x, s: nn.functional.dropout(x, s),
    "exponent with a gradient": lambda x, s: (x + 1).pow(s),
    "label smoothing": lambda x, s: nn.functional.cross_entropy(
        x, torch.full_like(x.detach(), 0.25), label_smoothing=s
    ),
    "alpha with a gradient": lambda x, s: torch.sub(x, x * 2, alpha=s),
    "tensor on the host": lambda x, s: x * torch.full((4,), s).to(x.device),
    "tensor from a number": lambda x, s: x * torch.tensor(s).to(x.device),
    "numpy": lambda x, s: x * float(np.sqrt(s)),
    "lerp with a gradient": lambda x, s: torch.lerp(x, x * 2, s),
}


@pytest.mark.parametrize("kind", COMPUTING_INSIDE)
@pytest.mark.parametrize("values", ["vary", "repeat"])
def test_number_that_torch_computes_with_inside_is_never_a_tagged_one(kind: str, values: str) -> None:
    """Bit for bit: a number whose way into the ops can't be followed is the true one, and guarded."""
    function = COMPUTING_INSIDE[kind]

    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        weight = torch.linspace(0.1, 1.3, 12, dtype=torch.float64).view(3, 4).to(device).requires_grad_()
        inner = lazystep.step(audit_every=0)(call) if device == "lazy" else call
        results = []
        for number in range(12):
            s = 0.1 + 0.07 * (number if values == "vary" else number // 4)
            results += inner(weight, s)
        if device == "lazy" and values == "repeat":
            assert inner.num_replayed >= 1
        return [result.detach().cpu() for result in results]

    def call(weight: torch.Tensor, s: float) -> tuple[torch.Tensor, ...]:
        y = function(weight, s)
        return y, *torch.autograd.grad(y.sum(), weight)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lazystep.LazyStepWarning)
        lazy = run("lazy")
    for number, (want, got) in enumerate(zip(run("cpu"), lazy, strict=True)):
        assert torch.equal(want, got), f"{kind}, result {number}"


IN_PYTHON: dict[str, Callable[[float], float]] = {
    "float": lambda s: float(s) * 3,
    "remainder": lambda s: 7 % s,
    "divmod": lambda s: divmod(s, 0.3)[1],
    "floor division": lambda s: 2.0 // s,
    "round": lambda s: round(s, 2),
    "digits": lambda s: float.fromhex(s.hex()),
    "complex": lambda s: abs(complex(s) * 2j),
    "times complex": lambda s: (s * 2j).imag,
    "array": lambda s: float(np.array([s, 1.0]).sum()),
    "array scalar": lambda s: float(np.float64(s)) * 2,
    "math.pow": lambda s: math.pow(s, 3),
    "math.fsum": lambda s: math.fsum([s, s, 1]),
    "infinite": lambda s: min(s * math.inf, 1e30),
    "sum": lambda s: sum([s, s]),
}


@pytest.mark.parametrize("kind", IN_PYTHON)
def test_number_that_python_computes_with_is_never_a_tagged_one(kind: str) -> None:
    function = IN_PYTHON[kind]
    scaled = captured(lambda x, s: x * function(s))
    x = torch.ones(2, dtype=torch.float64)
    for s in (0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.5):
        assert torch.equal(scaled(x, s).cpu(), x * function(s)), s
    assert scaled.num_replayed >= 2


def test_number_that_ends_at_one_is_not_taken_for_every_one() -> None:
    """Adam's `1 - beta ** step` is 1.0 from some step on, as is the 1 that batch norm counts with.

    A capture that is made there must tell them apart: by type, and when the step count goes back.
    """

    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(1e-3, 1e-3))
        xs = [torch.randn(5, 3) for _ in range(30)]

        def train(x: torch.Tensor) -> torch.Tensor:
            loss = (model(x) * 1.0 + 1.0).square().mean()
            descend(loss, optimizer)
            return loss

        step = lazystep.step(audit_every=3)(train) if device == "lazy" else train
        losses = []
        for number, x in enumerate(xs):
            if number == 12:
                model.train(False)
                model.train(True)
                step = lazystep.step(audit_every=0)(train) if device == "lazy" else train
            if number == 20:
                for state in optimizer.state.values():
                    state["step"].zero_()
            losses.append(step(x.to(device)).detach().cpu())
        if device == "lazy":
            assert step.num_replayed >= 14
        return losses

    for number, (want, got) in enumerate(zip(run("cpu"), run("lazy"), strict=True)):
        assert torch.equal(want, got), f"step {number}"


def test_two_numbers_with_one_value_are_followed_apart() -> None:
    scaled = captured(lambda x, a, b: x * a + x * (b**1.0) * b)
    for a, b in [(0.5, 0.5)] * 3 + [(0.25, 0.5), (0.5, 0.75), (1.0, 1.0)]:
        assert scaled(torch.ones(1), a, b).item() == a + b * b
    assert scaled.num_replayed >= 4


TABLE = {1.0: 5.0, 2.0: 6.0}


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x * TABLE.get(w, 7.0),
        lambda x, w: x * 2 if w in {1.0, 2.0} else x * 3,
        lambda x, w: x * float(f"{w:.0f}"),
        lambda x, w: x * float(str(w)),
        lambda x, w: x * 2 if isclose(w, 1.0) else x * 3,
        lambda x, w: x * copysign(2.0, w),
        lambda x, w: x * math.sqrt(abs(w)),
    ],
    ids=["dict", "set", "format", "text", "imported", "sign", "followed"],
)
def test_number_that_leads_to_others(function: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
    step = captured(function)
    x = torch.ones(2, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lazystep.LazyStepWarning)  # some are recorded in each call in the end
        for w in (3.0, 3.0, 3.0, 1.0, -2.0, 1.0, 25.0):
            assert step(x, w).tolist() == function(x.to("lazy"), w).tolist()
    assert step.num_replayed > 0


def test_numbers_that_leave_the_step_are_true_ones() -> None:
    log: list[float] = []
    options = types.SimpleNamespace(last=0.0)

    @lazystep.step(audit_every=0)
    def scaled(x: torch.Tensor, w: float) -> Any:
        log.append(w)
        options.last = w * 2
        options.new = w
        return x * w, w * 0.5

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lazystep.LazyStepWarning)
        for _ in range(3):
            made = scaled(torch.ones(1), 0.3)
            assert json.dumps([made[1], log[-1], options.last, options.new]) == "[0.15, 0.3, 0.6, 0.3]"
    halved = captured(lambda x, w: (x * w, w * 0.5))
    for _ in range(5):
        assert json.dumps(halved(torch.ones(1), 0.3)[1]) == "0.15"
    assert halved.num_replayed == 3


def test_numbers_that_a_failed_call_leaves_are_true_ones() -> None:
    class Last:
        scale = 0.0

    log: list[Any] = []

    @lazystep.step(audit_every=0)
    def failing(x: torch.Tensor, w: float) -> torch.Tensor:
        log.append({"scale": (w, [w * 2])})
        Last.scale = w
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        failing(torch.ones(1), 0.3)
    assert json.dumps([log, Last.scale]) == '[[{"scale": [0.3, [0.6]]}], 0.3]'


def test_number_that_python_refuses_is_left_to_the_function() -> None:
    @lazystep.step(audit_every=0)
    def inverse(x: torch.Tensor, w: float) -> torch.Tensor:
        try:
            return x * (1 / w)
        except ZeroDivisionError:
            return x * 100.0

    for w in (2.0, 4.0, 2.0, 4.0):
        assert inverse(torch.ones(1), w).item() == 1 / w
    assert inverse.num_replayed > 0
    assert inverse(torch.ones(1), 0.0).item() == 100


def test_logarithm_to_a_base_is_the_true_one() -> None:
    @lazystep.step
    def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * math.log(factor, 2)

    x = torch.ones(1).to("lazy")
    for factor in (8.0, 8.0, 8.0, 4.0):
        assert scale(x, factor).item() == math.log(factor, 2)
