"""Which place it is: an attribute may be found in the object, in its class or in a base.

Finding a place runs none of the user's code.
"""

from __future__ import annotations

import _thread
import enum
import types
from typing import Any

import torch

from .places import MISSING, Kind, Place, Places

STEPS_KEY = "_lazystep_steps"  # in `__dict__` of an object with step methods


class Access(enum.IntEnum):
    """How code reaches a value. Told by src/witness/."""

    ATTRIBUTE = 0
    ITEM = 1
    GLOBAL = 2
    CELL = 3
    RESULT = -1  # of C code: it has no place


class PlaceFinder:
    """Finds places, by the places where lists, dicts, tuples and tensors were found."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.tensors: dict[int, tuple[torch.Tensor, Place]] = {}  # that were met, by id
        self._origins: dict[int, Place] = {}  # of lists, dicts and tuples, by id

    def add_origin(self, value: Any, place: Place) -> None:
        """A container was found in a place. Only the first one counts."""
        self._origins.setdefault(id(value), place)

    def origin_of(self, value: Any) -> Place | None:
        """The place in which a container was found first; None if it was found otherwise."""
        return self._origins.get(id(value))

    def release(self) -> None:
        """Forget where containers were found: their ids may become those of others."""
        self._origins.clear()

    def find(self, access: int, owner: Any, key: Any, is_write: bool = False) -> Place | None:
        """The place that code reads or writes; None if code decides."""
        if access == Access.GLOBAL:
            return self.places.at(owner, key, Kind.ITEM)
        if access == Access.CELL:
            return self.places.at(owner, None, Kind.CELL)
        if access == Access.ITEM:
            return self.item(owner, key)
        return self.attribute(owner, key, is_write)

    def item(self, owner: Any, key: Any) -> Place:
        """The place of an item of a container."""
        origin = self._origins.get(id(owner))
        return self.places.at(owner if origin is None else origin, key, Kind.ITEM)

    def container(self, value: Any) -> Place:
        """The place of a container, or of a set or an array."""
        origin = self._origins.get(id(value))
        return origin or self.places.at(value, None, Kind.OBJECT, f"a {type(value).__name__}")

    def of_tensor(self, tensor: torch.Tensor, name: str) -> Place:
        """The place of an attribute of a tensor, which is reached by the place of the tensor."""
        known = self.tensors.get(id(tensor))
        owner = tensor if known is None else known[1]
        if name == "grad":
            return self.places.at(owner, "grad", Kind.GRAD, "a gradient")
        return self.places.at(owner, name, Kind.ATTRIBUTE)

    def attribute(self, owner: Any, name: str, is_write: bool = False) -> Place | None:
        """The place in which an attribute is found, or will be; None if code decides."""
        if name == "__dict__":
            return None
        if is_of_module(owner, name):
            return self.places.at(owner.__dict__, name, Kind.ITEM)
        if isinstance(owner, type):
            for base in (owner,) if is_write else owner.__mro__:
                if is_write or name in base.__dict__:
                    return self.places.at(base, name, Kind.CLASS)
            if isinstance(look_up(type, name), (types.GetSetDescriptorType, types.MemberDescriptorType)):
                return self.places.at(owner, name, Kind.ATTRIBUTE)  # such as `__name__`
            return self._in_class(type(owner), name)
        if isinstance(owner, torch.Tensor):
            return self.of_tensor(owner, name)
        descriptor = look_up(type(owner), name)
        if isinstance(descriptor, types.MemberDescriptorType) and is_of_python(descriptor.__objclass__):
            return self.places.at(owner, descriptor, Kind.SLOT, repr(name))
        if isinstance(owner, tuple) and type(descriptor).__name__ == "_tuplegetter":  # of a named tuple
            return self.item(owner, getattr(type(owner), "_fields").index(name))  # noqa: B009
        if isinstance(descriptor, (types.GetSetDescriptorType, types.MemberDescriptorType)):
            return self.places.at(owner, name, Kind.ATTRIBUTE)
        if hasattr(type(descriptor), "__set__"):
            return None  # a property: its code is followed
        names = dict_of(owner)
        if names is not None and (is_write or name in names or descriptor is MISSING):
            return self.places.at(names, name, Kind.ITEM)
        return self._in_class(type(owner), name)

    def _in_class(self, kind: type, name: str) -> Place | None:
        for base in kind.__mro__:
            if name in base.__dict__:
                return self.places.at(base, name, Kind.CLASS)
        return None


# The modules of classes in C whose objects have all their state in attributes, or never change.
_WITHOUT_HIDDEN_STATE = ("builtins", "types", "_struct", "_thread", "ast", "torch._C")


def is_of_python(kind: type) -> bool:
    """Whether a class was made by a `class` statement."""
    return bool(kind.__flags__ & (1 << 9))


def has_hidden_state(kind: type) -> bool:
    """Whether objects of a class may keep state that is in no attribute: one of its bases is made in C."""
    return any(base.__module__ not in _WITHOUT_HIDDEN_STATE and _is_of_c(base) for base in kind.__mro__)


def _is_of_c(kind: type) -> bool:
    """Whether a class was made in C. A `class` statement makes no methods in C."""
    if kind.__name__.startswith(
        "pybind11_detail_function_record"
    ):  # to which a function of pybind11's is bound
        return False
    methods = (types.MethodDescriptorType, types.WrapperDescriptorType)
    return any(isinstance(one, methods) and one.__objclass__ is kind for one in vars(kind).values())


def is_of_module(owner: Any, name: str) -> bool:
    """Whether an attribute is, or would be, a name of a module, and not of the module's class."""
    return isinstance(owner, types.ModuleType) and (name in owner.__dict__ or type(owner) is types.ModuleType)


def look_up(kind: type, name: str) -> Any:
    """What a class or its bases have under a name, without running any code; else `MISSING`."""
    for base in kind.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return MISSING


def dict_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object; None if it has no `__dict__`. Runs no code of the user's."""
    try:
        # A thread's own attributes are not where other objects have theirs.
        is_local = isinstance(value, _thread._local)
        found = value.__dict__ if is_local else object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def names_of(value: Any) -> list[str]:
    """The attributes that an object has itself, in `__dict__` and in slots."""
    names = [name for name in dict_of(value) or () if name != STEPS_KEY]
    for base in type(value).__mro__:
        names += [n for n, s in base.__dict__.items() if isinstance(s, types.MemberDescriptorType)]
    return names


def names_in_c(kind: type) -> list[str]:
    """The attributes that a class made in C gives its objects: `errno` and `strerror` of an `OSError`."""
    bases = [base for base in kind.__mro__ if not is_of_python(base)]
    return [n for base in bases for n, s in vars(base).items() if isinstance(s, types.MemberDescriptorType)]
