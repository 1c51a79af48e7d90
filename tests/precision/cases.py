"""A table of functions that are run on the CPU and on the lazy device, and must give the same."""

from collections.abc import Callable
from typing import Any

Case = Callable[[str], Any]  # takes the device


class Cases(dict[str, Case]):
    """The functions by name. As a decorator it adds one."""

    def __call__(self, function: Case) -> Case:
        self[function.__name__] = function
        return function


class CapturedCases(dict[str, tuple[Callable[..., Any], int]]):
    """Functions by name, each with how many of its calls are replayed at least: `@case(6)` adds one."""

    def __call__(self, num_replayed: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            self[function.__name__] = function, num_replayed
            return function

        return register
