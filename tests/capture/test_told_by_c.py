"""State that C code tells or holds: settings of the process, caches, copies of tensors."""

from __future__ import annotations

import copy
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lazystep

from .common import Case, Cases, captured, check_change

case = Cases()


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    before = sys.getswitchinterval(), sys.getrecursionlimit(), gc.get_threshold(), torch.get_num_threads()
    yield
    sys.setswitchinterval(before[0])
    sys.setrecursionlimit(before[1])
    gc.set_threshold(*before[2])
    torch.set_num_threads(before[3])


case.rows(
    switch_interval=lambda: (lambda x: x * sys.getswitchinterval(), lambda: sys.setswitchinterval(0.25)),
    recursion_limit=lambda: (lambda x: x * sys.getrecursionlimit(), lambda: sys.setrecursionlimit(1500)),
    threshold=lambda: (lambda x: x * gc.get_threshold()[0], lambda: gc.set_threshold(800)),
    threads=lambda: (
        lambda x: x * torch.get_num_threads(),
        lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    ),
)


def _refilled(decorate: Callable[..., Any]) -> Case:
    """Other code clears the cache and fills it as often as before, so that its counts tell nothing."""
    scale = [2.0]

    @decorate
    def scaled(number: int) -> float:
        return scale[0] * number

    def change() -> None:
        before = scaled.cache_info()
        scaled.cache_clear()
        scale[0] = 5.0
        while scaled.cache_info().hits < before.hits or not scaled.cache_info().misses:
            scaled(3)

    return lambda x: x * scaled(3), change


case.rows(
    cache_with_a_limit=lambda: _refilled(functools.lru_cache),
    cache_without_a_limit=lambda: _refilled(functools.cache),
)


@case
def copy_of_a_tensor() -> Case:
    weight: Any = torch.zeros(2).to("lazy")
    weight.scale = 2.0
    return lambda x: x * copy.copy(weight).scale, lambda: setattr(weight, "scale", 3.0)


@case
def copy_of_a_tensor_gets_an_attribute() -> Case:
    weight: Any = torch.zeros(2).to("lazy")
    return lambda x: x * (3 if hasattr(copy.copy(weight), "scale") else 2), lambda: setattr(
        weight, "scale", 1.0
    )


@pytest.mark.parametrize("make", case.parameters)
def test_change_is_noticed(make: Callable[[], Case]) -> None:
    check_change(*make())


def test_a_cache_that_others_fill_further_is_still_good() -> None:
    @functools.lru_cache
    def double(number: int) -> int:
        return 2 * number

    step = captured(lambda x: x * double(3))
    for number in range(10, 20):
        assert step(torch.ones(1)).item() == 6
        double(number)
    assert step.num_replayed >= 7, step.explain()


def test_another_function_that_is_given_nothing_is_refused() -> None:
    step = captured(lambda x: x * len(sys._current_frames()), fullgraph=True)
    with pytest.raises(lazystep.CaptureError, match=r"sys\._current_frames at .*call it outside"):
        _call(step, torch.ones(2))


def test_the_address_of_an_argument_is_refused() -> None:
    step = captured(lambda x: x * (x.data_ptr() % 7), fullgraph=True)
    with pytest.raises(lazystep.CaptureError, match=r"address of a tensor at .*outside"):
        _call(step, torch.ones(2))


def test_collecting_garbage_is_no_obstacle() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        gc.collect(0)
        return x * 2

    step = captured(body)
    for _ in range(4):
        step(torch.ones(2))
    assert step.num_replayed == 2, step.explain()


def _call(step: Any, x: torch.Tensor) -> None:
    for _ in range(4):
        step(x)


def test_questions_about_accelerators_are_compared_and_not_refused() -> None:
    """Models of other packages ask them in each step, as whether CUDA captures a graph. Some raise."""

    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            is_ready = torch._C._accelerator_isAllocatorInitialized()
        except RuntimeError:  # there is none
            is_ready = None
        return x * (3 if is_ready is not None or torch._C._mps_is_available() else 2)

    scaled = lazystep.step(step)
    for _ in range(4):
        x = torch.ones(2).to("lazy")
        assert torch.equal(scaled(x).cpu(), step(x).cpu())
    assert scaled.num_replayed >= 1, scaled.explain()
