"""What is in all known places at one moment: before a recorded call, and after it.

Places are found while a call runs, but values read in mid-call are not those that the next call will find. So
a call's places are found first, and their values are taken just before and just after a later call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..record.handle import Handle
from ..record.tensor import HAS_GRADIENT, find_handle, gradient_flags
from ._places import is_same
from .places import MISSING, Kind, Place
from .values import BUFFERS, CONTAINERS, MAX_COMPARED, Version, contents_of, is_simple, keys_of


class TensorFacts(NamedTuple):
    """What is known of a tensor that a step has met."""

    handle: Handle | None  # of a lazy tensor
    flags: int  # gradient wanted, hooks: see `gradient_flags`
    version: Version | None  # of a CPU tensor


class Found(NamedTuple):
    """What was in a place."""

    value: Any
    detail: Any  # facts of a tensor; type and length or keys of a container; contents of a set or an array


class Surroundings:
    """What is in many places now."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._found: dict[Place, Found] = {}
        self.add(places)

    def __contains__(self, place: Place) -> bool:
        return place in self._found

    def __getitem__(self, place: Place) -> Found:
        return self._found[place]

    def add(self, places: Iterable[Place]) -> None:
        """Look at more places."""
        for place in places:
            if place not in self._found:
                value = place.get()
                detail = detail_of(value)
                if place.kind is Kind.WEAK:
                    value = type(value)  # this must not keep the object alive
                self._found[place] = Found(value, detail)


def detail_of(value: Any) -> Any:
    """What can change about a value while it stays the same object."""
    if isinstance(value, torch.Tensor):
        handle = find_handle(value)
        flags = gradient_flags([value])[0] & ~HAS_GRADIENT  # the place of the gradient tells this
        return TensorFacts(handle, flags, Version(value) if value.device.type == "cpu" else None)
    if isinstance(value, dict):
        return type(value), keys_of(value)
    if isinstance(value, CONTAINERS):
        return type(value), len(value)
    if isinstance(value, (*BUFFERS, frozenset)) and getattr(value, "nbytes", 0) <= MAX_COMPARED:
        return contents_of(value)
    return None


def are_same(before: Found, after: Found) -> bool:
    """Whether nothing has changed in a place, as far as any code can tell."""
    if before.value is not after.value:
        if not (is_simple(before.value) and is_simple(after.value)) or MISSING in (before.value, after.value):
            return False
        return is_same(before.value, after.value)
    if isinstance(before.value, CONTAINERS) and not isinstance(before.value, tuple):
        return have_same_structure(before.detail, after.detail)
    return bool(before.detail == after.detail)


def have_same_structure(old: tuple[Any, Any], new: tuple[Any, Any]) -> bool:
    """Whether two containers are of one type and have the same length or keys. A key may be a tensor."""
    if old[0] is not new[0] or type(old[1]) is not type(new[1]):
        return False
    return bool(old[1] == new[1]) if type(old[1]) is int else _same_keys(old[1], new[1])


def _same_keys(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    return len(old) == len(new) and all(a is b or is_same(a, b) for a, b in zip(old, new, strict=True))
