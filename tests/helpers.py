"""What tests of several folders use: where things are, counters, and Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from lazystep import metrics

ROOT = Path(__file__).parents[1]
count = metrics.counter_value


def descend(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """The end of an ordinary step: gradients, an update, no gradients."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def failing(message: str) -> Callable[[], None]:
    """A closure that raises."""

    def closure() -> None:
        raise ArithmeticError(message)

    return closure


def nightly(values: Iterable[Any]) -> list[Any]:
    """Parameters of a test that only `make nightly` takes."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


def run_python(*command: Any, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments and variables; it finds the package where this process does."""
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
    )
