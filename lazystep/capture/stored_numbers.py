"""Traced numbers that a call has stored: plain ones take their place when it has ended.

Others may ask for the type of a number. Which expression was in a list or dict is kept for the replay.
"""

from __future__ import annotations

import inspect
from types import FunctionType, MemberDescriptorType
from typing import Any

import torch

from .place_finder import Access
from .places import Kind, Place
from .testimony import Testimony
from .traced import is_traced, plain


class StoredNumbers:
    """The lists and dicts of one call in which traced numbers were."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}  # by id, each with a copy of what it was

    def put_plain(self, testimony: Testimony) -> None:
        """Replace all traced numbers that the call has stored."""
        for access, owner, key in testimony.numbers_stored:
            _put_plain(access, owner, key)
        for place in {**testimony.writes, **testimony.structures}:
            value = place.get()
            made = untraced(value, self._copies)
            # An object in no place of its own, such as a tuple of arguments, was made for this call.
            if made is not value and place.kind is not Kind.OBJECT:
                place.set(made)

    def as_left(self, container: Any) -> Any:
        """A list or dict as the call has left it: with its traced numbers."""
        return self._copies.get(id(container), (None, container))[1]


def _put_plain(access: int, owner: Any, key: Any) -> None:
    """Put the plain number where a traced one was stored, if it is still there."""
    if access == Access.CELL:
        place = Place(owner, None, Kind.CELL, "")
    elif access == Access.ATTRIBUTE:
        if isinstance(owner, type):
            place = Place(owner, key, Kind.CLASS, "")
        else:
            slot = inspect.getattr_static(type(owner), key, None)
            names = getattr(owner, "__dict__", {})
            is_slot = isinstance(slot, MemberDescriptorType)
            place = Place(owner, slot, Kind.SLOT, "") if is_slot else Place(names, key, Kind.ITEM, "")
    else:
        place = Place(owner, key, Kind.ITEM, "")
    value = place.get()
    if is_traced(value):
        place.set(plain(value))


def untraced(value: Any, seen: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """`value` with plain numbers in place of traced ones. Lists and dicts are changed in place, each once.

    `seen` gets each of them by its id, and a copy of what it was.
    """
    seen = {} if seen is None else seen
    if is_traced(value):
        return plain(value)
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        elements = [untraced(element, seen) for element in value]
        if all(a is b for a, b in zip(elements, value, strict=True)):
            return value
        return type(value)(*elements) if hasattr(value, "_fields") else type(value)(elements)
    if isinstance(value, FunctionType) and id(value) not in seen:  # that the call has made, and kept
        seen[id(value)] = value, value
        for cell in value.__closure__ or ():
            place = Place(cell, None, Kind.CELL, "")
            held = place.get()
            if (made := untraced(held, seen)) is not held:
                place.set(made)
    if isinstance(value, (dict, list)) and id(value) not in seen:
        seen[id(value)] = value, value.copy()
        for key, element in list(value.items() if isinstance(value, dict) else enumerate(value)):
            made = untraced(element, seen)
            if made is not element:
                value[key] = made
        if isinstance(value, dict) and any(isinstance(key, tuple) for key in value):
            _put_plain_keys(value)
    return value


def _put_plain_keys(items: dict[Any, Any]) -> None:
    """Replace keys with traced numbers inside, which C code has put there. Their order stays."""
    plain_keys = [untraced(key) for key in items]
    if any(old is not new for old, new in zip(items, plain_keys, strict=True)):
        values = list(items.values())
        items.clear()
        for key, value in zip(plain_keys, values, strict=True):
            dict.__setitem__(items, key, value)
