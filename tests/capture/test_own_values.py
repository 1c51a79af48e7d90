"""Values that the call itself makes or is given, where something else looks at them in mid-call."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from .common import captured

pytestmark = pytest.mark.filterwarnings("ignore::lazystep.LazyStepWarning")  # refused, which is right, too
ONES = torch.ones(3)
held: list[torch.Tensor] = []


def test_cached_function_that_names_what_the_step_writes() -> None:
    """The names of a cached function are looked at; a list that the call has just put there is its own."""
    global held
    held = [ONES.to("lazy")]

    @functools.lru_cache(None)
    def fetch() -> list[torch.Tensor]:
        return held

    def step(x: torch.Tensor) -> torch.Tensor:
        global held
        held = [torch.full((3,), 3.0).to("lazy")]
        return x * fetch()[0]

    run = captured(step)
    for number in range(8):
        if number == 5:
            held[0] = held[0] * 0.5
        run(ONES)
        assert held[0].tolist() == [3.0] * 3, run.explain()


def test_copy_of_a_tuple_of_numbers_that_is_an_argument() -> None:
    run = captured(lambda x, numbers: x * sum(copy.copy(numbers)))
    for number in range(5):
        assert run(ONES, (1.0 * number, 2.0)).tolist() == [number + 2.0] * 3


def test_key_of_a_dict_that_is_another_tensor_in_each_call() -> None:
    table = {ONES.to("lazy"): 1}

    def step(x: torch.Tensor) -> torch.Tensor:
        (key,) = table
        table.clear()
        table[torch.full((3,), 3.0).to("lazy")] = 1
        return x * key

    run = captured(step)
    assert [run(ONES).tolist()[0] for _ in range(6)] == [1.0] + [3.0] * 5


def test_defaults_of_a_function_that_the_step_replaces() -> None:
    def given(*, value: torch.Tensor = ONES) -> torch.Tensor:
        return value

    def step(x: torch.Tensor) -> torch.Tensor:
        given.__kwdefaults__ = {"value": torch.full((3,), 3.0).to("lazy")}
        return x * given()

    run = captured(step)
    for number in range(8):
        if number == 5:
            given.__kwdefaults__["value"] = ONES.to("lazy") * 7
        assert run(ONES).tolist() == given().tolist() == [3.0] * 3, run.explain()
