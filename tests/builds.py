"""Steps that are run until they are native, and the small one that most tests build."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import lazystep
from lazystep import config
from lazystep.compile.cache import LibraryCache


def cache() -> LibraryCache:
    return LibraryCache.open(Path(config.settings.cache_dir))


def steps_until_native(num_steps: int, wait_at: int = 3) -> Iterator[int]:
    """The numbers of some steps. A barrier follows each, and a wait for the build follows one of them."""
    for number in range(num_steps):
        yield number
        lazystep.mark_step()
        if number == wait_at:
            assert lazystep.wait_for_compile(300)


def repeat(function: Callable[[], torch.Tensor], times: int = 6) -> torch.Tensor:
    """Run a step until it is built, then once to be checked and once natively."""
    for _ in steps_until_native(times):
        result = function()  # held until the barrier: what nobody holds is not computed
    return result.cpu()


def square_sum(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum(1) + 1


X = torch.arange(12.0).reshape(3, 4)


def run_square_sum() -> None:
    """The step that most tests here build; right whatever happens."""
    lazy = X.to("lazy")
    assert repeat(lambda: square_sum(lazy)).tolist() == square_sum(X).tolist()
