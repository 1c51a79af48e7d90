"""Which objects are *outside*: they were there before the call, which has found them and did not make them.

The extension in C knows them, too (`_witness.add`, `_witness.is_outside`), by their ids. An id is that of one
object only while the object is alive, so all but tensors are kept alive here until the call has ended.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from . import _witness
from .values import BUFFERS, generator_id


class Outside:
    """The objects that one call has found."""

    def __init__(self) -> None:
        self.arguments: set[int] = set()  # ids of tensors among the arguments
        self.given: set[int] = set()  # ids of lists and dicts among the arguments
        self.weak: set[int] = set()  # ids of objects that were found by a weak reference
        self._kept: list[Any] = []
        self._met_ids: set[int] = set()
        self._oldest: list[Any] = []

    def begin(self) -> None:
        """The call begins: see `is_made`."""
        self._oldest = []  # the first object of the call

    def keep(self, value: Any) -> None:
        """Count a part of Python code as outside: a function or a class."""
        _witness.add(value)
        self._kept.append(value)

    def add(self, value: Any) -> None:
        """Count an object as outside that code finds. A tensor is not kept: `PlaceFinder.tensors` has it."""
        _witness.add(value)
        if not isinstance(value, torch.Tensor):
            self._kept.append(value)
            self._met_ids.add(_identity(value))

    def is_met(self, value: Any) -> bool:
        """Whether the call has found this object, which is no tensor."""
        return _identity(value) in self._met_ids

    def is_made(self, value: Any) -> bool:
        """Whether the call itself has made an object.

        Python keeps new objects that may be part of a cycle in a list, youngest last, until a collection.
        """
        if not gc.is_tracked(value):
            return not isinstance(value, (dict, *BUFFERS))
        young = gc.get_objects(generation=0)
        for number in range(len(young) - 1, -1, -1):
            if young[number] is value:
                return True
            if young[number] is self._oldest:
                break
        return False

    def release(self) -> None:
        """Let go of all objects: others may hold them weakly."""
        self._kept.clear()
        self._met_ids.clear()


def _identity(value: Any) -> int:
    return generator_id(value) if isinstance(value, torch.Generator) else id(value)
