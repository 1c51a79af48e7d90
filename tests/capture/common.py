"""A case: a function and a change, after which the captured function must do what the plain one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazystep

NUM_CALLS = 7

Function = Callable[[torch.Tensor], torch.Tensor]
Case = tuple[Function, Callable[[], object]]


class Cases:
    """Collects cases, as a decorator, and hands them to a parametrized test."""

    def __init__(self) -> None:
        self.parameters: list[Any] = []

    def __call__(self, make: Callable[[], Case]) -> Callable[[], Case]:
        self.parameters.append(pytest.param(make, id=make.__name__))
        return make

    def rows(self, **makes: Callable[[], Case]) -> None:
        """Cases that are one expression each, by their names."""
        self.parameters += [pytest.param(make, id=name) for name, make in makes.items()]


def captured(function: Callable[..., Any], **options: Any) -> Any:
    """The function as a step that is never audited: a replay that ignores a change is not corrected."""
    return lazystep.step(audit_every=0, **options)(function)


def check_change(function: Function, change: Callable[[], object]) -> None:
    """Capture and replay the function, make the change, and compare with the plain function throughout."""
    step = captured(function)
    x = torch.linspace(-1, 1, 3)

    def compare() -> Any:
        torch.manual_seed(1)
        got = step(x.clone())
        torch.manual_seed(1)
        want = function(x.clone().to("lazy"))
        assert got.dtype == want.dtype
        assert got.tolist() == want.tolist()
        return want.dtype, want.tolist()

    before = [compare() for _ in range(5)][-1]
    assert step.num_replayed > 0, step.explain()
    num_replayed = step.num_replayed
    change()
    after = [compare() for _ in range(5)][-1]
    assert before != after, "the change changes nothing: this test would not see it ignored"
    assert step.num_replayed > num_replayed, step.explain()


class Doubler:
    """Something with state that can be called."""

    def __init__(self) -> None:
        self.flag = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.flag else x * 3

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def scale_of(holder: Any, set_on: Callable[[Any], Any] = lambda holder: holder) -> Case:
    """The function uses `scale`, which then changes: on its holder, or where the holder has it from."""
    return lambda x: x * holder.scale, lambda: setattr(set_on(holder), "scale", 3.0)
