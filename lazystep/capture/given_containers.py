"""Lists and dicts among the arguments of a recorded call: the function is given these very objects.

A recorded call computes with leaves of its own: a lazy copy of a CPU tensor, a float that is followed. They
stand in the caller's lists and dicts while the call runs. When it ends, the caller's leaves come back. What
the function itself has put there stays. Code that reaches a list by another name sees the same list.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ._places import is_same
from .arguments import Structure, put_together
from .stored_numbers import untraced
from .traced import is_traced

_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_LISTS = (list, collections.deque)


class GivenContainers:
    """The lists and dicts among the arguments of one call."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._args = args
        self._kwargs = kwargs
        # Each list and dict, with what it holds while the call runs, and what the caller had there.
        self._found: dict[int, tuple[Any, dict[Any, Any], dict[Any, Any]]] = {}

    def fill(self, leaves: list[Any], structure: Structure) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments with these leaves, in the caller's own lists and dicts."""
        args, kwargs = put_together(leaves, structure)
        if isinstance(structure, int):
            return args, kwargs
        given = [self._merge(*pair) for pair in zip(self._args, args, strict=True)]
        return given, {key: self._merge(self._kwargs[key], value) for key, value in kwargs.items()}

    def _merge(self, mine: Any, made: Any) -> Any:
        """The caller's object with the leaves of an equal one that was made for the call."""
        kind = type(mine)
        if kind is torch.Size:  # of which pytree makes a tuple
            return mine
        if kind is not type(made) or mine is made:
            return made
        if kind in _DICTS or kind in _LISTS:
            if id(mine) not in self._found:
                before = dict(_items(mine))
                inside = {key: self._merge(before[key], value) for key, value in _items(made)}
                self._found[id(mine)] = mine, inside, before
                for key, value in inside.items():
                    if value is not before[key]:
                        mine[key] = value
            return mine
        if isinstance(mine, tuple):
            parts = [self._merge(*pair) for pair in zip(mine, made, strict=True)]
            if all(a is b for a, b in zip(mine, parts, strict=True)):
                return mine
            return kind(*parts) if hasattr(mine, "_fields") else kind(parts)
        return made

    @property
    def containers(self) -> list[Any]:
        """The lists and dicts that the function is given."""
        return [container for container, _, _ in self._found.values()]

    def take_back(self) -> str:
        """Put the caller's leaves back. Which type a changed list or dict has; empty if none is changed."""
        changed = ""
        mine = {
            id(inside[key]): (inside[key], value)
            for _, inside, before in self._found.values()
            for key, value in before.items()
        }
        for container, inside, _ in self._found.values():
            now = dict(_items(container))
            if not _are_same(now, inside):
                changed = changed or type(container).__name__
            for key, value in now.items():
                if id(value) in mine:
                    container[key] = mine[id(value)][1]
        return changed

    def put_plain(self) -> None:
        """Put plain numbers where the call has stored numbers that are followed."""
        for container, _, _ in self._found.values():
            for key, value in _items(container):
                if is_traced(value) or isinstance(value, (tuple, list, dict)):
                    container[key] = untraced(value)


def _are_same(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    pairs = zip(now.items(), before.items(), strict=False)
    return len(now) == len(before) and all(
        (key is old_key or is_same(key, old_key)) and value is old for (key, value), (old_key, old) in pairs
    )


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    return iter(list(container.items() if isinstance(container, dict) else enumerate(container)))
