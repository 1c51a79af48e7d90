"""A native library as something to call: tensors in, tensors out, without the interpreter lock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..extensions import RUNNER

# Tensors in, tensors out: what a library is to Python.
Call = Callable[[list[torch.Tensor]], list[torch.Tensor]]

# Loaded at import, where a failure is an error. Later it would count as a library that can't be loaded, and
# training would go on without libraries.
_Library = RUNNER.load().Library


def load(path: Path) -> Call:
    """The entry of a library. Raises `RuntimeError` or `OSError` if it can't be loaded."""
    call: Call = _Library(str(path)).run
    return call


def library_of(call: Call) -> Any:
    """The extension's object behind an entry, for runs without Python; None for another function."""
    library = getattr(call, "__self__", None)
    return library if isinstance(library, _Library) else None
