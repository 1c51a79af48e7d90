"""A small step that most of these tests build, and looks at what became of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import lazystep
from lazystep import config
from lazystep.compile.cache import LibraryCache


def cache() -> LibraryCache:
    return LibraryCache.open(Path(config.settings.cache_dir))


def repeat(function: Callable[[], torch.Tensor], times: int = 5) -> torch.Tensor:
    for number in range(times):
        result = function()
        lazystep.mark_step()
        if number == 2:
            lazystep.wait_for_compile(300)
    return result.cpu()


def square_sum(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum(1) + 1


X = torch.arange(12.0).reshape(3, 4)


def run_square_sum() -> None:
    """The step that most tests here build; right whatever happens."""
    lazy = X.to("lazy")
    assert repeat(lambda: square_sum(lazy)).tolist() == square_sum(X).tolist()
