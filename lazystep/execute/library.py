"""A native library as something to call: tensors in, tensors out, without the interpreter lock."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..extensions import RUNNER, ExtensionError

# Tensors in, tensors out: what a library is to Python.
Call = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def load(path: Path) -> Call:
    """The entry of a library. Raises `RuntimeError` or `OSError` if it can't be loaded."""
    call: Call = _runner()(str(path)).run
    return call


@functools.cache
def _runner() -> Callable[[str], Any]:
    try:
        runner: Callable[[str], Any] = RUNNER.load().Library
    except ExtensionError:
        # torch's own binding of the same: right, but nothing else in Python runs beside a step.
        return lambda path: torch._C._aoti.AOTIModelContainerRunnerCpu(path, 1)
    return runner
