"""What a scene changes for good is put back when its test, or its run on the CPU, is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

undo: list[Callable[[], object]] = []
_MISSING = object()


def restore() -> None:
    while undo:
        undo.pop()()


def patch(owner: Any, name: str, value: Any) -> None:
    """Set an attribute until `restore`."""
    old = owner.__dict__.get(name, _MISSING)
    undo.append(lambda: delattr(owner, name) if old is _MISSING else setattr(owner, name, old))
    setattr(owner, name, value)
