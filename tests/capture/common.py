"""A case: a function and a change, after which the captured function must do what the plain one does."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazystep

Function = Callable[[torch.Tensor], torch.Tensor]
Case = tuple[Function, Callable[[], object]]


class Cases:
    """Collects cases, as a decorator, and hands them to a parametrized test."""

    def __init__(self) -> None:
        self.parameters: list[Any] = []

    def __call__(self, make: Callable[[], Case]) -> Callable[[], Case]:
        self.parameters.append(pytest.param(make, id=make.__name__))
        return make


def check_change(function: Function, change: Callable[[], object]) -> None:
    """Capture and replay the function, make the change, and compare with the plain function throughout."""
    captured = lazystep.step(function, audit_every=0)  # type: ignore[call-overload]
    x = torch.linspace(-1, 1, 3)

    def compare() -> Any:
        torch.manual_seed(1)
        got = captured(x.clone())
        torch.manual_seed(1)
        want = function(x.clone().to("lazy"))
        assert got.dtype == want.dtype
        assert got.tolist() == want.tolist()
        return want.dtype, want.tolist()

    before = [compare() for _ in range(5)][-1]
    assert captured.num_replayed > 0, captured.explain()
    change()
    after = [compare() for _ in range(5)][-1]
    assert before != after, "the change changes nothing: this test would not see it ignored"


class Doubler:
    """Something with state that can be called."""

    def __init__(self) -> None:
        self.flag = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.flag else x * 3

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def class_with_a_scale() -> Any:
    """A class of its own for each case."""

    class Options:
        scale = 2.0

    return Options


def module_with(**values: Any) -> Any:
    """A module of the user's, with these names."""
    module = types.ModuleType("users_module")
    module.__dict__.update(values)
    return module
