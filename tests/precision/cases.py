"""A table of functions that are run on the CPU and on the lazy device, and must give the same."""

from collections.abc import Callable
from typing import Any

Case = Callable[[str], Any]  # takes the device


class Cases(dict[str, Case]):
    """The functions by name. As a decorator it adds one."""

    def __call__(self, function: Case) -> Case:
        self[function.__name__] = function
        return function
