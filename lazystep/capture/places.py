"""Places: where a step finds its state and puts it, such as a global, a cell, an attribute or an item.

A place in a list, dict or tuple is a path: its container is the place of that list, dict or tuple. So the
container may be replaced by an equal one. A place in any other object belongs to that very object.

Reading and writing a place runs none of the user's code: no property, no `__getattr__`, no `__setattr__`.
"""

from __future__ import annotations

import enum
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any


class _Missing(enum.Enum):
    MISSING = "nothing"

    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing.MISSING


class Kind(enum.Enum):
    """How the value of a place is read."""

    ITEM = "item"  # of a list, dict, tuple or deque; an attribute is an item of `__dict__`
    CELL = "cell"  # a variable that a function shares with the functions inside
    SLOT = "slot"  # an attribute of a class with `__slots__`; the key is its descriptor
    CLASS = "class"  # a name in the class itself, not in its bases
    ATTRIBUTE = "attribute"  # of an object in C
    GRAD = "grad"  # the gradient of a tensor
    OBJECT = "object"  # an object that has no place of its own: a default, an element of a set
    WEAK = "weak"  # the object behind a weak reference
    CONTEXT = "context"  # the value of a context variable
    TYPE = "type"  # the class of an object


class Place:
    """A place. Each is made once (see `Places`), so places are compared by identity."""

    __slots__ = ("container", "key", "kind", "name")

    def __init__(self, container: Any, key: Any, kind: Kind, name: str) -> None:
        self.container = container  # an object, or the place of a list, dict, tuple or tensor
        self.key = key
        self.kind = kind
        self.name = name  # in messages

    def __repr__(self) -> str:
        return self.name

    def get(self) -> Any:
        """The value that is there now, or `MISSING`."""
        base = self._base()
        if base is MISSING:
            return MISSING
        kind = self.kind
        if kind is Kind.ITEM:
            return _item(base, self.key)
        if kind is Kind.OBJECT:
            return base
        if kind is Kind.CLASS:
            return base.__dict__.get(self.key, MISSING)
        if kind is Kind.TYPE:
            return type(base)
        try:
            if kind is Kind.CELL:
                return base.cell_contents
            if kind is Kind.SLOT:
                return self.key.__get__(base, type(base))
            if kind is Kind.WEAK:
                return weakref.ref.__call__(base)  # a subclass may return something else
            if kind is Kind.CONTEXT:
                return base.get()
            if kind is Kind.GRAD and not base.is_leaf:
                return None  # torch would warn
            return getattr(base, self.key)
        except (AttributeError, ValueError, LookupError):
            return MISSING

    def set(self, value: Any) -> None:
        """Put a value there, or remove what is there if the value is `MISSING`."""
        base = self._base()
        if value is MISSING:
            self._remove(base)
        elif self.kind is Kind.ITEM:
            self._set_item(base, value)
        elif self.kind is Kind.CELL:
            base.cell_contents = value
        elif self.kind is Kind.SLOT:
            self.key.__set__(base, value)
        elif self.kind is Kind.CLASS:
            type.__setattr__(base, self.key, value)
        elif self.kind is Kind.CONTEXT:
            base.set(value)
        else:
            setattr(base, self.key, value)

    def _base(self) -> Any:
        return self.container.get() if type(self.container) is Place else self.container

    def _set_item(self, base: Any, value: Any) -> None:
        if isinstance(base, tuple):
            elements = [*base[: self.key], value, *base[self.key + 1 :]]
            self.container.set(type(base)(*elements) if hasattr(base, "_fields") else type(base)(elements))
        elif isinstance(base, OrderedDict):
            OrderedDict.__setitem__(base, self.key, value)
        elif isinstance(base, dict):
            dict.__setitem__(base, self.key, value)
        elif isinstance(base, list):
            list.__setitem__(base, self.key, value)
        else:
            base[self.key] = value

    def _remove(self, base: Any) -> None:
        if base is MISSING or self.get() is MISSING:
            return
        if self.kind is Kind.ITEM:
            del base[self.key]
        elif self.kind is Kind.CELL:
            del base.cell_contents
        elif self.kind is Kind.SLOT:
            self.key.__delete__(base)
        elif self.kind is Kind.CLASS:
            type.__delattr__(base, self.key)
        else:
            delattr(base, self.key)


def _item(base: Any, key: Any) -> Any:
    if isinstance(base, dict):
        return dict.get(base, key, MISSING)
    try:
        if isinstance(base, list):  # not by a method of a subclass
            return list.__getitem__(base, key)
        if isinstance(base, tuple):
            return tuple.__getitem__(base, key)
        return base[key]
    except (IndexError, KeyError, TypeError):
        return MISSING


class Places:
    """All places that the calls of a step have met, each once."""

    def __init__(self) -> None:
        self._places: dict[tuple[Any, ...], Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Place]:
        return iter(list(self._places.values()))

    def at(self, container: Any, key: Any, kind: Kind, name: str = "") -> Place:
        """The place with this container and key. The place keeps its container alive, so ids stay unique."""
        # The type of the key, because 1, 1.0 and True are equal.
        identity = (id(container), kind, type(key), key)
        try:
            return self._places[identity]
        except KeyError:
            made = Place(container, key, kind, name or _name(container, key))
        except TypeError:  # a key that can't be hashed can't be in a dict: an index object, say
            identity = (id(container), kind, type(key), id(key))
            made = self._places.get(identity) or Place(container, key, kind, name or _name(container, key))
        self._places[identity] = made
        return made


def _name(container: Any, key: Any) -> str:
    if type(container) is Place:
        return f"{container.name}[{key!r}]" if not hasattr(key, "device") else f"{container.name}[a tensor]"
    return repr(key) if isinstance(key, (str, int)) else "a variable"
