"""Objects that a call meets: which of their attributes and contents are compared.

Reading an attribute meets the object that is found there, and looking at an object as a whole reads all of
its attributes, so both are here. Where an attribute is, `place_finder` tells; what a class is, `classes`.
"""

from __future__ import annotations

import decimal
import functools
import gc
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..record.source import user_line
from . import _witness, c_calls
from ._places import dict_of_class
from .classes import Classes
from .code_owners import CodeKind, CodeOwners, is_torchs
from .outside import Outside
from .place_finder import (
    PlaceFinder,
    dict_of,
    has_hidden_state,
    is_of_module,
    is_of_python,
    look_up,
    names_in_c,
    names_of,
)
from .places import MISSING, Kind, Place
from .surroundings import Surroundings
from .testimony import FOLLOW, OUTSIDE, Testimony
from .values import BUFFERS, CONTAINERS, GENERATORS, MAX_COMPARED, is_simple, keys_of

_MAX_ELEMENTS = 50_000
_MOVED: tuple[type, ...] = (*CONTAINERS, *BUFFERS, frozenset, types.MappingProxyType, Iterator)
_DICTS: tuple[dict[str, Any], ...] = ({}, OrderedDict())
_VIEWS = tuple(type(view) for one in _DICTS for view in (one.keys(), one.values(), one.items()))
_MOVED += (types.SimpleNamespace, decimal.Decimal, *_VIEWS)
_NONE = object()
_FACTS = ("_version", "retains_grad", "output_nr")  # of tensors, that are not compared for every tensor


class Objects:
    """The objects that one call has met, and what it has looked at."""

    def __init__(
        self,
        testimony: Testimony,
        before: Surroundings,
        finder: PlaceFinder,
        classes: Classes,
        owners: CodeOwners,
        outside: Outside,
    ) -> None:
        self._testimony = testimony
        self._before = before
        self._finder = finder
        self._places = finder.places
        self._classes = classes
        self._owners = owners
        self._outside = outside
        self._shallow_done: set[Place] = set()  # containers whose elements were passed on
        self._deep: set[Place] = set()  # containers that were looked at with all that is in them
        self._num_elements = 0

    # -- meeting -------------------------------------------------------------------------------------------

    def meet(self, value: Any, place: Place | None) -> bool:
        """Count an object as outside, unless it is the call's own; whether it is outside.

        `place`: where it was found.
        """
        if place is not None and self._is_put(value, place):
            return False
        if isinstance(value, types.MethodType):
            self.meet(value.__func__, None)
            self.meet(value.__self__, None)
            return True
        is_bound = isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType))
        if is_bound and not isinstance(value.__self__, types.ModuleType):
            self.meet(value.__self__, None)
        self._outside.add(value)
        if place is not None and place.kind is Kind.WEAK:
            self._outside.weak.add(id(value))
        if type(value) in weakref.ProxyTypes:
            self.meet(_witness.behind(value), None)
        if isinstance(value, (*CONTAINERS, *BUFFERS, frozenset)):
            self._meet_container(value, place)
        elif isinstance(value, torch.Tensor):
            if id(value) not in self._finder.tensors:
                where = place or self._places.at(value, None, Kind.OBJECT, "a tensor")
                self._testimony.note(where)
                self._finder.tensors[id(value)] = value, where
        elif isinstance(value, functools.partial):
            self.enter_partial(value, is_outside=True)
        elif isinstance(value, (np.ndarray, np.generic)):
            self.note_numpy()
        elif c_calls.is_scripted(value):  # kept without its module; its `__call__` may be Python's
            self.refuse_scripted()
        self._classes.meet(value, place)
        return True

    def _meet_container(self, value: Any, place: Place | None) -> None:
        """Remember where a container was found, or that something else holds it."""
        if place is not None:
            self._finder.add_origin(value, place)
        elif id(value) not in self._outside.given:
            self._testimony.held[id(value)] = value

    def _is_put(self, value: Any, place: Place) -> bool:
        """Whether the call itself has put an object into a place.

        C code may have done so, unseen. And a write may have been ignored, by a `__setattr__` of the user's.
        """
        is_written = place in self._testimony.writes
        if place not in self._before:
            return is_written  # not known: a later call looks closer
        if place.kind in (Kind.ATTRIBUTE, Kind.WEAK, Kind.TYPE):  # which may make an object at each read
            return is_written and self._before[place].value is not value
        return self._before[place].value is not value

    def note_and_meet(self, place: Place, value: Any, is_deep: bool = True) -> None:
        """C code looks at what is in a place."""
        self._testimony.note(place)
        if self.meet(value, place):
            self._testimony.pinned.add(place)
            if is_deep and isinstance(value, (*CONTAINERS, *BUFFERS, frozenset)):
                self.whole(value)

    def enter_function(self, function: types.FunctionType) -> None:
        """A function of the user's runs that the call did not make."""
        self._outside.keep(function)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            _witness.add(cell)
            self._places.at(cell, None, Kind.CELL, repr(name))
        self._testimony.note(self._places.at(function, "__code__", Kind.ATTRIBUTE))
        for name in ("__defaults__", "__kwdefaults__"):
            defaults = getattr(function, name)
            place = self._places.at(function, name, Kind.ATTRIBUTE)
            self._testimony.note(place)
            if defaults and self.meet(defaults, place):
                self.whole(defaults)

    def enter_partial(self, partial: Any, is_outside: bool) -> bool:
        """Look at the parts of a partial, which may be outside if it is not. Whether it runs Python."""
        parts = (partial.func, *partial.args, *partial.keywords.values())
        if is_outside:
            for name in ("func", "args", "keywords"):
                place = self._places.at(partial, name, Kind.ATTRIBUTE, f"{name} of a partial")
                self._testimony.note(place)
            for part in parts:
                self.meet(part, None)
            self.whole(partial.keywords)
        is_python = isinstance(partial.func, (types.FunctionType, types.MethodType))
        for part in parts[1:]:
            if _witness.is_outside(part):
                self.moved(part) if is_python else self.whole(part)
        return is_python

    # -- attributes ----------------------------------------------------------------------------------------

    def read_attribute(self, owner: Any, name: str, frame: types.FrameType | None = None) -> int:
        """An attribute is read. Answers how to treat the value.

        `frame`: of the code that reads it; None if C code looks at the object.
        """
        if isinstance(owner, torch.Tensor) and name != "grad" and look_up(type(owner), name) is not MISSING:
            if name == "_base" and frame is not None:
                self.note_view(frame)
            # torch's own code keeps versions as they are: `_unsafe_preserve_version_counter`.
            if name in _FACTS and not (frame is not None and is_torchs(frame.f_code)):
                self._testimony.note(self._finder.of_tensor(owner, name))
            # Else a fact that is compared for every tensor, or something that the call makes.
            return self._classes.read_tensor_class(type(owner), name)
        if id(owner) in self._outside.arguments and name != "grad":
            if name in owner.__dict__:  # else its kind says that there is nothing
                self._testimony.refuse(
                    f"it reads {name!r} of an argument, a tensor, at {user_line(2)}; pass that as an "
                    "argument of its own"
                )
            return 0
        if isinstance(owner, torch.jit.ScriptModule):
            self.refuse_scripted()
        if isinstance(owner, c_calls.POINTERS):
            self._refuse_pointer()
        if isinstance(owner, types.FrameType):
            self.read_frame(name)
        if is_of_module(owner, name):
            return self._read_module(owner, name)
        found = self._finder.attribute(owner, name)
        self._note_around(owner, name, found)
        if found is None:
            self._meet_descriptor(owner, name)
            if isinstance(owner, BUFFERS):  # a field of a record
                self.whole(owner)
            return OUTSIDE
        value = found.get()
        if found.kind is Kind.ATTRIBUTE and not isinstance(owner, torch.Tensor) and not is_simple(value):
            if isinstance(owner, BUFFERS):  # another view of the same memory
                self.whole(owner)
            if isinstance(owner, types.FunctionType) or found.get() is value:
                self._testimony.note(found)
            return OUTSIDE  # else an object in C makes it anew each time
        self._testimony.note(found)
        if found.kind is Kind.ITEM and not isinstance(owner, type):
            self._meet_descriptor(owner, name)  # which may begin to come first
        if found.kind is Kind.CLASS and self._owners.is_foreign(found.container.__module__):
            self._testimony.shallow.add(found)
            return OUTSIDE
        if found.kind is Kind.CLASS and hasattr(value, "__get__"):
            self._meet_descriptor(owner, name)
            return OUTSIDE
        return FOLLOW | OUTSIDE

    def _note_around(self, owner: Any, name: str, found: Place | None) -> None:
        """Compare what decides where an attribute is found: the classes, and where there is nothing."""
        if isinstance(owner, type):
            self._classes.note(owner)
            if name == "__dict__":
                self.whole_class(owner)
        elif not isinstance(owner, torch.Tensor):
            origin = self._finder.origin_of(owner)
            if origin is not None:  # another container may take its place
                self._classes.note(type(owner))
                if found is not None and found.kind is not Kind.CLASS and found.container is not origin:
                    self.identified(owner)  # not one with other attributes
            else:
                self._classes.note_class_of(owner)
            names = dict_of(owner)
            if names is not None and name not in names:  # an attribute would hide the class's
                self._testimony.note(self._places.at(names, name, Kind.ITEM))
        if found is None or found.kind is Kind.CLASS:
            self._classes.note_hiding(owner if isinstance(owner, type) else type(owner), name, found)

    def read_frame(self, name: str) -> None:
        """An attribute of a frame is read: of a generator that is kept, of a traceback."""
        if name in ("f_locals", "f_back"):
            self._testimony.refuse(
                f"it reads {name} of a frame at {user_line(2)}, and a frame's variables are not compared; "
                "read them outside and pass what you need as an argument"
            )

    def read_whole_attribute(self, owner: Any, name: str) -> None:
        """C code reads an attribute and looks at its value."""
        self.read_attribute(owner, name)
        found = self._finder.attribute(owner, name)
        if found is not None and found in self._testimony.reads:
            self.note_and_meet(found, found.get())

    def _read_module(self, module: types.ModuleType, name: str) -> int:
        place = self._places.at(module.__dict__, name, Kind.ITEM)
        self._testimony.note(place)
        self._classes.note_class_of(module)
        if self._owners.is_foreign(module.__name__):
            self._testimony.shallow.add(place)
            return OUTSIDE
        if name not in module.__dict__:
            place = self._places.at(module.__dict__, "__getattr__", Kind.ITEM)
            self.note_and_meet(place, place.get())
        return FOLLOW | OUTSIDE

    def _meet_descriptor(self, owner: Any, name: str) -> None:
        """A descriptor may have state of its own: one of the user's, or `functools.partialmethod`."""
        descriptor = look_up(owner if isinstance(owner, type) else type(owner), name)
        if descriptor is not MISSING and is_of_python(type(descriptor)):
            self._classes.note_class_of(descriptor)
            self.meet(descriptor, None)

    # -- looking at objects as a whole ---------------------------------------------------------------------

    def whole(self, value: Any) -> None:
        """C code looks at an object as a whole."""
        if isinstance(value, torch.Tensor) or (is_simple(value) and not isinstance(value, CONTAINERS)):
            return
        if isinstance(value, types.FunctionType):
            for name in value.__dict__:
                self.read_whole_attribute(value, name)
            return
        if isinstance(value, types.ModuleType) and not self._owners.is_foreign(value.__name__):
            listed = self._places.at(value.__dict__, None, Kind.OBJECT, "the names of a module")
            self._testimony.note_structure(listed)
        if isinstance(value, (*_VIEWS, types.MappingProxyType)):
            (value,) = gc.get_referents(value)  # the dict
            self.meet(value, None)
        if isinstance(value, c_calls.POINTERS):
            self._refuse_pointer()
        if isinstance(value, BaseException):  # its text is made of its arguments, and of what its class keeps
            for name in ("args", *names_in_c(type(value))):
                self.read_whole_attribute(value, name)
        if isinstance(value, c_calls.DATES):
            self.note_time_zone()
        if isinstance(value, (decimal.Decimal, decimal.Context)):
            self.note_decimals(value)
            return
        if c_calls.is_harmless(value) and not isinstance(value, (*BUFFERS, *GENERATORS)):
            return
        place = self._finder.container(value)
        if isinstance(value, CONTAINERS):
            self._whole_container(value, place)
        elif isinstance(value, (*BUFFERS, frozenset)):
            self._whole_buffer(value, place)
        elif isinstance(value, torch.Generator):
            self._testimony.refuse(
                f"it copies or inspects a torch.Generator at {user_line(2)}; do that outside"
            )
        elif isinstance(value, GENERATORS):
            return  # of random numbers: a call that draws from it is refused
        elif isinstance(value, Iterator):
            self.taken(value)
        else:
            self._whole_attributes(value)

    def _whole_attributes(self, value: Any) -> None:
        names = names_of(value)
        is_plain = names or is_of_python(type(value))
        if not is_plain or has_hidden_state(type(value)):
            self._testimony.refuse(
                f"C code looks at a {type(value).__name__} at {user_line(2)}, which can't be compared; "
                "use it outside of the step"
            )
        own = dict_of(value)
        if own is not None:
            listed = self._places.at(own, None, Kind.OBJECT, "the attributes of an object")
            self._testimony.note_structure(listed)
        for name in names:
            self.read_whole_attribute(value, name)

    def whole_class(self, kind: type) -> None:
        """All names of a class are looked at."""
        if not self._owners.is_foreign(kind.__module__):
            names = self._places.at(dict_of_class(kind), None, Kind.OBJECT, "the names of a class")
            self._testimony.note_structure(names)
            for name, value in list(kind.__dict__.items()):
                if name not in ("__dict__", "__weakref__"):
                    self.note_and_meet(self._places.at(kind, name, Kind.CLASS), value)

    def _whole_container(self, value: Any, place: Place, is_deep: bool = True) -> None:
        if place in self._deep or (not is_deep and place in self._shallow_done):
            return
        (self._deep if is_deep else self._shallow_done).add(place)
        self._testimony.note_structure(place)
        self._num_elements += len(value)
        if self._num_elements > _MAX_ELEMENTS:
            self._testimony.refuse(
                f"it looks at more than {_MAX_ELEMENTS} objects, {len(value)} of them in {place.name}; pass "
                "what it needs as arguments"
            )
            return
        keys = keys_of(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            if isinstance(value, dict):
                self.meet(key, None)
            place_of_key = self._finder.item(value, key)
            self.note_and_meet(place_of_key, place_of_key.get(), is_deep)

    def _whole_buffer(self, value: Any, place: Place) -> None:
        if getattr(value, "nbytes", 0) > MAX_COMPARED:
            what = "a NumPy array" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
            self._testimony.refuse(
                f"it uses {place.name}, {what} that is too large to be compared in each call; pass "
                "it as an argument"
            )
            return
        self._testimony.note(place)
        self._testimony.contents[place] = None
        has_objects = isinstance(value, np.ndarray) and value.dtype.hasobject
        if isinstance(value, (set, frozenset)) or has_objects:
            for element in value.ravel() if has_objects else value:
                self.meet(element, None)

    def copied(self, tensor: torch.Tensor) -> None:
        """All attributes that the user has set on a tensor are read."""
        if not _witness.is_outside(tensor):
            return
        self._testimony.note_structure(self._finder.of_tensor(tensor, "__dict__"))
        for name in tensor.__dict__:
            self.read_whole_attribute(tensor, name)

    # -- looking at parts of objects -----------------------------------------------------------------------

    def moved(self, value: Any) -> None:
        """C code looks at an object or passes it on: what is in it matters if it is a container or array."""
        if isinstance(value, (*_MOVED, *c_calls.DATES, BaseException)):
            self.whole(value)

    def passed(self, value: Any) -> None:
        """The elements of a container are passed on, as objects."""
        if isinstance(value, CONTAINERS):
            self._whole_container(value, self._finder.container(value), is_deep=False)
        else:
            self.moved(value)

    def sized(self, value: Any) -> None:
        """The length or the keys of a container matter."""
        if isinstance(value, CONTAINERS):
            self._testimony.note_structure(self._finder.container(value))
            for key in keys_of(value) if isinstance(value, dict) else ():
                self.meet(key, None)
        else:
            self.moved(value)

    def identified(self, value: Any) -> None:
        """Whether a container or a tensor is a certain object is asked: an equal one is not as good."""
        _, place = self._finder.tensors.get(id(value), (None, self._finder.origin_of(value)))
        if place is not None and place.kind is not Kind.WEAK:
            self._testimony.identified_places.add(place)
        if id(value) in self._outside.given:
            self._testimony.refuse(
                f"it asks which {type(value).__name__} an argument is at {user_line(2)}; ask outside"
            )

    def asked_for_id(self, value: Any) -> None:
        """Code asks for the id of an object, or has it as a key."""
        self.identified(value)
        if id(value) in self._outside.arguments:
            self._testimony.refuse(
                f"it asks for the id of an argument, a tensor, or uses it as a key, at {user_line(2)}; ask "
                "outside, or keep the tensor in an attribute"
            )

    def compared(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Whether two tensors are one is asked."""
        self._testimony.compares_tensors = True
        is_given = [id(tensor) in self._outside.arguments for tensor in (left, right)]
        is_met = [id(tensor) in self._finder.tensors for tensor in (left, right)]
        if any(is_given) and any(is_met):  # of two arguments, their kind tells
            self._testimony.refuse(
                f"it asks whether an argument is a certain tensor at {user_line(2)}; ask outside"
            )

    def taken(self, iterator: Any) -> None:
        """Something is taken from an iterator that the call did not make."""
        if isinstance(iterator, types.GeneratorType) or not isinstance(iterator, CONTAINERS):
            self._testimony.refuse(
                f"it takes from {self._name_of(iterator)}, an iterator, at {user_line(2)}, which a replay "
                "would not; take from it outside and pass what you get as an argument"
            )

    def _name_of(self, value: Any) -> str:
        for place in self._testimony.reads:
            if place.get() is value:
                return place.name
        return f"a {type(value).__name__}"

    # -- what can't be compared, or is compared by its settings --------------------------------------------

    def note_decimals(self, value: Any) -> None:
        """What decimal numbers become depends on a context: that of the thread, or the one that is used."""
        told = self._testimony.told
        context = value if isinstance(value, decimal.Context) else None
        if not any(getattr(function, "context", _NONE) is context for function, _ in told):
            settings = c_calls.DecimalSettings(context)
            told[settings, ()] = settings()

    def note_time_zone(self) -> None:
        """What a date without a time zone becomes depends on that of the process."""
        self._testimony.told.setdefault((c_calls.time_zone, ()), c_calls.time_zone())

    def note_numpy(self) -> None:
        """What NumPy does with arrays depends on its settings."""
        self._testimony.told.setdefault((c_calls.numpy_errors, ()), c_calls.numpy_errors())

    def note_view(self, frame: types.FrameType) -> None:
        """Code asks whether a tensor is a view. `frame`: of that code."""
        if self._owners.kind_of_frame(frame) == CodeKind.USERS:
            self._testimony.refuse(
                f"it asks whether a tensor is a view at {user_line(3)}, which is not compared; ask outside"
            )

    def refuse_scripted(self) -> None:
        """A scripted module is used."""
        self._testimony.refuse(
            f"it calls a scripted module at {user_line(2)}, whose attributes can't be compared; use "
            "the module itself"
        )

    def _refuse_pointer(self) -> None:
        self._testimony.refuse(
            f"it uses a pointer of ctypes at {user_line(2)}, and what is there is not compared; read it "
            "outside and pass the value as an argument"
        )
