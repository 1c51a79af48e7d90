"""Deleting what is not there raises, and so does writing behind the end of a list: that is compared, too."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from .scenes import Scene, check_replays, check_right

here: Any = None


def delete_item(box: Any) -> None:
    del vars(box)["value"]


def delete_attribute(box: Any) -> None:
    del box.value


def delattr_(box: Any) -> None:
    delattr(box, "value")


@pytest.mark.parametrize("delete", [delete_item, delete_attribute, delattr_])
def test_deletion_that_raises(delete: Callable[[Any], None]) -> None:
    def make(device: str) -> Scene:
        box = types.SimpleNamespace()

        def step(x: torch.Tensor) -> torch.Tensor:
            try:
                delete(box)
            except (KeyError, AttributeError):
                return x * 3
            return x * 2

        return Scene(step, lambda: setattr(box, "value", 1), kept=lambda: dict(vars(box)))

    check_right(make)


def test_deletion_of_a_variable_that_raises() -> None:
    def make(device: str) -> Scene:
        value = 1

        def put() -> None:
            nonlocal value
            value = 1

        def step(x: torch.Tensor) -> torch.Tensor:
            nonlocal value
            try:
                del value
            except NameError:
                return x * 3
            return x * 2

        return Scene(step, put)

    check_right(make)


def test_deletion_of_a_global_that_raises() -> None:
    def make(device: str) -> Scene:
        def put() -> None:
            global here
            here = 1

        def step(x: torch.Tensor) -> torch.Tensor:
            global here
            try:
                del here
            except NameError:
                return x * 3
            return x * 2

        put()
        return Scene(step, put)

    check_right(make)


def test_deletion_is_replayed_if_something_is_there_in_each_call() -> None:
    def make(device: str) -> Scene:
        box = types.SimpleNamespace(value=1)

        def step(x: torch.Tensor) -> torch.Tensor:
            del box.value
            return x * 2

        def arguments(number: int) -> tuple[Any, ...]:
            box.value = number
            return (torch.ones(3) * number,)

        return Scene(step, kept=lambda: dict(vars(box)), arguments=arguments)

    check_replays(make)


def test_write_behind_the_end_of_a_list() -> None:
    def make(device: str) -> Scene:
        numbers = [1.0]

        def step(x: torch.Tensor) -> torch.Tensor:
            try:
                numbers[1] = 2.0
            except IndexError:
                return x * 3
            return x * 2

        return Scene(step, lambda: numbers.append(1.0), kept=lambda: list(numbers))

    check_replays(make)
