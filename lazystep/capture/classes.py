"""Classes that decide what is done with the objects of a step: their bases, names and methods are compared.

Python asks a class for operators and bases without a read that the witness sees. So a class of the user's is
compared as soon as the class or one of its objects is met. Of other packages' classes, the names that are
looked up are compared by identity.
"""

from __future__ import annotations

from typing import Any

import torch

from ._places import dict_of_class
from .code_owners import CodeOwners
from .outside import Outside
from .place_finder import is_of_python
from .places import Kind, Place
from .testimony import FOLLOW, OUTSIDE, Testimony
from .values import CONTAINERS

# Names of a class that say nothing of its objects, or can't be read without making them.
_ABOUT_CLASS = ("__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__orig_bases__")
_TENSOR_OPERATORS = tuple(
    name
    for name, value in {**vars(torch._C.TensorBase), **vars(torch.Tensor)}.items()
    if name.startswith("__") and callable(value)
)


class Classes:
    """The classes that one call depends on."""

    def __init__(self, testimony: Testimony, owners: CodeOwners, outside: Outside) -> None:
        self._testimony = testimony
        self._places = testimony.places
        self._owners = owners
        self._outside = outside
        self._known: set[type] = set()

    def meet(self, value: Any, place: Place | None) -> None:
        """An object is met: whatever is done with it, its class decides what that does."""
        if isinstance(value, type):
            if self._owners.is_foreign(value.__module__):
                self.note(value)
            if value not in self._known and (place is not None or not self._outside.is_made(value)):
                self.note_class_of(value)
                self.note(value)
        elif is_of_python(type(value)):
            if place is None or place.kind is Kind.WEAK or isinstance(value, (*CONTAINERS, torch.Tensor)):
                self.note(type(value))  # a place of its own would keep it alive
            else:
                self.note_class_of(value)

    def note_class_of(self, value: Any) -> None:
        """Compare which class an object has, and that class."""
        if id(value) not in self._outside.weak:  # a place would keep it alive; the reference's compares it
            name = f"the class of a {type(value).__name__}"
            self._testimony.note(self._places.at(value, None, Kind.TYPE, name))
        self.note(type(value))

    def note(self, kind: type) -> None:
        """Compare how objects of a class of the user's behave.

        So its bases, its names and its methods are compared. Other values that a class has may change. Of
        a class of another package, its bases are.
        """
        if kind in self._known:
            return
        self._known.add(kind)
        if is_of_python(kind):
            # By identity: other bases make another tuple.
            self._testimony.note_shallow(
                self._places.at(kind, "__mro__", Kind.ATTRIBUTE, f"the bases of {kind.__name__}")
            )
        if self._owners.is_foreign(kind.__module__):
            return
        for base in kind.__mro__:
            if not self._owners.is_foreign(base.__module__):
                self._outside.keep(base)  # C code gives it to its class methods
                self._testimony.note_structure(
                    self._places.at(dict_of_class(base), None, Kind.OBJECT, f"the names of {base.__name__}")
                )
                for name, value in list(base.__dict__.items()):
                    is_special = name.startswith("__") and name.endswith("__") and name not in _ABOUT_CLASS
                    if is_special or hasattr(type(value), "__get__"):
                        self._testimony.note(self._places.at(base, name, Kind.CLASS))

    def note_call(self, value: Any) -> None:
        """An object is called or entered: its class says what that does."""
        self.note_class_of(value)
        for base in type(value).__mro__:
            # A class of the user's is compared as a whole.
            if self._owners.is_foreign(base.__module__) and is_of_python(base):
                self._testimony.note_shallow(self._places.at(base, "__call__", Kind.CLASS))
            if "__call__" in base.__dict__:
                break

    def note_hiding(self, kind: type, name: str, found: Place | None) -> None:
        """Nothing is under a name in the classes before that of `found`: a name there would hide it."""
        for base in kind.__mro__:
            if found is not None and base is found.container:
                break
            if not self._owners.is_foreign(base.__module__):
                self._testimony.note(self._places.at(base, name, Kind.CLASS))

    def find_super(self, this: type, owner: Any, name: str) -> type | None:
        """The class in which `super(this, owner).name` is found."""
        kind = owner if isinstance(owner, type) and issubclass(owner, this) else type(owner)
        order = kind.__mro__
        for base in order[order.index(this) + 1 :] if this in order else ():
            if name in base.__dict__:
                return base
            if not self._owners.is_foreign(base.__module__):
                self._testimony.note(self._places.at(base, name, Kind.CLASS))
        return None

    # -- tensors -------------------------------------------------------------------------------------------

    def note_tensor_operators(self) -> None:
        """Compare the operators of tensors: somebody may put functions of his own there."""
        for name in _TENSOR_OPERATORS:
            self.read_tensor_class(torch.Tensor, name)

    def read_tensor_class(self, kind: type, name: str) -> int:
        """A name is looked up in a class of tensors, torch's or the user's. Answers as `read` does."""
        if name == "__dict__":
            return OUTSIDE
        for base in kind.__mro__:
            place = self._places.at(base, name, Kind.CLASS)
            if not self._owners.is_foreign(base.__module__):
                self._testimony.note(place)
                if name in base.__dict__:
                    return OUTSIDE if hasattr(place.get(), "__get__") else FOLLOW | OUTSIDE
            elif is_of_python(base):  # somebody may put a function of his own there
                self._testimony.note_shallow(place)
            if name in base.__dict__:
                break
        return 0
