"""Calls of functions in C that must be known one by one, by the function and its arguments.

`c_calls` has the tables of functions. Here is what such a call means: which objects are looked at, which
answers are compared, and which calls can't be captured.
"""

from __future__ import annotations

import abc
import contextvars
import dis
import functools
import inspect
import operator
import string
import sys
import types
import weakref
from typing import Any

import torch

from ..record.source import user_line
from ..record.tensor import find_handle
from . import _witness, c_calls
from .code_owners import CodeKind, CodeOwners, asking_frame, is_called_by_the_user
from .objects import Objects
from .place_finder import PlaceFinder
from .places import Kind, Place
from .testimony import Testimony
from .traced import pinned

# Answers to `called`, for src/witness/sink.h.
_NOTHING, _KEEPS_RESULTS = 0, 1
_IN_SIGHT = 2  # call it by a Python function


class CallsOfC:
    """What the calls of functions in C mean for one call of a step."""

    def __init__(
        self, testimony: Testimony, finder: PlaceFinder, objects: Objects, owners: CodeOwners
    ) -> None:
        self._testimony = testimony
        self._finder = finder
        self._places = finder.places
        self._objects = objects
        self._owners = owners

    def called(self, function: Any, args: tuple[Any, ...], frame: types.FrameType) -> int:
        """A function in C is called that `c_calls` wants to know of. Answers whether it keeps results.

        `frame`: of the code that calls it.
        """
        is_outside = _witness.is_outside(function)
        if c_calls.is_decimal(function):
            self._objects.note_decimals(getattr(function, "__self__", None))
            pinned(list(args))
        elif c_calls.is_of_dates(function) and not c_calls.is_impure(function):
            self._objects.note_time_zone()
            pinned(list(args))
            return _KEEPS_RESULTS
        elif isinstance(function, functools.partial):
            if not self._objects.enter_partial(function, is_outside):
                return _IN_SIGHT
        elif c_calls.unbound(function) is dict.update:
            return self._update(function, args)
        elif isinstance(function, operator.methodcaller):
            for arg in args[:1]:
                if _witness.is_outside(arg):
                    self._objects.whole(arg)
        elif isinstance(function, functools._lru_cache_wrapper):
            if is_outside:
                self._enter_cache(function)
            return _KEEPS_RESULTS
        elif isinstance(owner := getattr(function, "__self__", None), contextvars.ContextVar):
            self._called(c_calls.unbound(function), (owner, *args), frame)
        else:
            self._called(function, args, frame)
        return _NOTHING

    def _called(self, function: Any, args: tuple[Any, ...], frame: types.FrameType) -> None:
        testimony = self._testimony
        if function is vars:
            if args and _witness.is_outside(args[0]):
                self._objects.read_attribute(args[0], "__dict__", frame)
        elif c_calls.asks_for_offset(function):
            tensor = args[0] if args else getattr(function, "__self__", None)
            handle = find_handle(tensor)
            if handle is not None:
                testimony.placed.add(handle.memory)
        elif c_calls.reads_generator(function):
            asking = asking_frame(frame)
            is_users = asking is not None and self._owners.kind_of_frame(asking) == CodeKind.USERS
            # A state of the same call may be set by other code: see `random_state`.
            if is_users or any(isinstance(arg, torch.Tensor) and _witness.is_outside(arg) for arg in args):
                testimony.refuse(
                    f"it uses the state of a torch.Generator at {user_line(2)} ({function.__name__}), and a "
                    "replay would not; do that outside"
                )
        elif function is sys._getframe and torch.is_anomaly_enabled():
            testimony.refuse(
                f"anomaly mode keeps the stack of each op, as at {user_line(2)}, and a replay would not; "
                "switch it off (torch.autograd.set_detect_anomaly)"
            )
        elif c_calls.is_impure(function):
            testimony.refuse(
                f"it calls {c_calls.name_of(function)} at {user_line(2)}, and a replay would not; call it "
                "outside and pass what it returns as an argument"
            )
        elif c_calls.tells_state(function):
            if is_called_by_the_user(frame, args) and (function, args) not in testimony.told:
                testimony.told[function, args] = c_calls.answer_of(function, args)
        elif function is next:
            if args and _witness.is_outside(args[0]):
                self._objects.taken(args[0])
        elif isinstance(function, types.MethodWrapperType):
            self._call_wrapper(function, args)
        elif c_calls.is_of_descriptor(function):
            self._use_descriptor(args[0], function.__name__, args[1:])
        elif isinstance(function, weakref.ref):
            self._call_reference(function)
        elif c_calls.asks_for_view(function):
            self._objects.note_view(frame)
        elif c_calls.asks_lock(function):
            has_conditions = len(args) > isinstance(function, types.MethodDescriptorType)  # besides the lock
            if (has_conditions or function.__name__ != "acquire") and is_called_by_the_user(frame, ()):
                testimony.refuse(
                    f"it asks whether a lock is free at {user_line(2)}, which is not compared; ask outside"
                )
        elif c_calls.asks_abstract_class(function):
            if not self._owners.is_foreign(args[0].__module__):  # others may be registered
                testimony.told[abc.get_cache_token, ()] = abc.get_cache_token()
        elif function in (operator.is_, operator.is_not):
            if len(args) == 2 and all(isinstance(arg, torch.Tensor) for arg in args):
                self._objects.compared(*args)
            for arg in args:
                if not isinstance(arg, torch.Tensor):
                    self._objects.identified(arg)
        elif function is id:
            if is_called_by_the_user(frame, ()):
                self._objects.asked_for_id(args[0])
        elif c_calls.is_scripted(function):  # a method that is kept without its module
            self._objects.refuse_scripted()
        elif c_calls.is_warning(function):
            testimony.told[c_calls.warning_filters, ()] = c_calls.warning_filters()
        elif c_calls.is_formatting(function):
            self._format(function, args)
        elif isinstance(function, operator.attrgetter):
            self._call_getter(function, args)
        elif args:
            self._use_context(function, args, frame)

    def _update(self, update: Any, args: tuple[Any, ...]) -> int:
        """A dict is updated. `args`: the dict, unless the method is bound, and all that is given."""
        given = args if update is dict.update else (update.__self__, *args)
        if given and type(given[0]) is dict:
            return _IN_SIGHT
        for container in filter(_witness.is_outside, given):
            self._objects.passed(container)
        return _NOTHING

    def called_with_nothing(self, function: Any, frame: types.FrameType) -> None:
        """A function in C is called without arguments: it may return a state that nothing else tells."""
        if getattr(function, "__name__", "") == "__subclasses__":
            self._testimony.told[function, ()] = function()
        if c_calls.may_tell_state(function) and is_called_by_the_user(frame, ()):
            self._testimony.refuse(
                f"it calls {c_calls.name_of(function)} at {user_line(1)}, a function in C that is given "
                "nothing: what it returns may change; call it outside and pass what it returns as an argument"
            )

    def _use_context(self, function: Any, args: tuple[Any, ...], frame: types.FrameType) -> None:
        """A method of a context variable, the first argument, is called."""
        place = self._places.at(args[0], None, Kind.CONTEXT, repr(args[0].name))
        if function.__name__ == "get" and self._owners.kind_of_frame(frame) == CodeKind.FOREIGN:
            self._objects.note_and_meet(place, place.get())  # what it does with the value is not seen
        self._testimony.note(place)
        if len(args) > 1 and function.__name__ == "set":
            self._testimony.writes[place] = None

    def _call_reference(self, reference: Any) -> None:
        if _witness.is_outside(reference):
            place = self._places.at(reference, None, Kind.WEAK, "a weak reference")
            self._testimony.note(place)
            if (value := weakref.ref.__call__(reference)) is not None:
                self._objects.meet(value, place)

    def _call_wrapper(self, wrapper: Any, args: tuple[Any, ...]) -> None:
        owner, name = wrapper.__self__, wrapper.__name__
        if isinstance(owner, weakref.ref) and name == "__call__":
            self._call_reference(owner)
            return
        if isinstance(owner, c_calls.DESCRIPTORS) and name in c_calls.USES_OF_DESCRIPTORS:
            self._use_descriptor(owner, name, args)
            return
        if name != "__setattr__":
            pinned(list(args))
        if args and isinstance(args[0], str) and name in ("__getattribute__", "__setattr__", "__delattr__"):
            if name == "__getattribute__":
                self._objects.read_attribute(owner, args[0])
            elif _witness.is_outside(owner):
                place = self._finder.attribute(owner, args[0], is_write=True)
                if place is not None:
                    self._testimony.writes[place] = None
        elif _witness.is_outside(owner):
            self._objects.whole(owner)

    def _use_descriptor(self, descriptor: Any, name: str, args: tuple[Any, ...]) -> None:
        """An attribute is read or written by the descriptor itself: `Base.slot.__get__(obj)`."""
        if not args or not _witness.is_outside(args[0]) or isinstance(args[0], torch.Tensor):
            return
        if isinstance(descriptor, types.GetSetDescriptorType) or name != "__get__":
            self._testimony.refuse(
                f"it calls {name} of a descriptor, {descriptor.__name__!r}, at {user_line(2)}, which is not "
                "followed; use the attribute"
            )
            return
        place = self._places.at(args[0], descriptor, Kind.SLOT, repr(descriptor.__name__))
        self._objects.note_and_meet(place, place.get())

    def _call_getter(self, getter: Any, args: tuple[Any, ...]) -> None:
        for path in getter.__reduce__()[1]:
            owner = args[0]
            for name in str(path).split("."):
                if not _witness.is_outside(owner):
                    break
                self._objects.read_whole_attribute(owner, name)
                owner = getattr(owner, name, None)  # as the getter will do at once

    def _format(self, function: Any, args: tuple[Any, ...]) -> None:
        """A text with places is filled: it may take attributes of attributes of what it is given."""
        text = function.__self__ if isinstance(getattr(function, "__self__", None), str) else args[0]
        fields = [field or "" for _, field, _, _ in string.Formatter().parse(text)]
        if any("." in field or "[" in field for field in fields):
            self._testimony.refuse(
                f"it formats a text that names attributes at {user_line(2)}; use an f-string"
            )
        for arg in args:
            if _witness.is_outside(arg):
                self._objects.whole(arg)

    # -- functions with a cache ----------------------------------------------------------------------------

    def _enter_cache(self, wrapper: Any) -> None:
        """What a cached function has read is known only if it runs: take all names of its code."""
        function = inspect.unwrap(wrapper)
        if not isinstance(function, types.FunctionType) or self._owners.is_foreign(function.__module__):
            return
        self._testimony.caches[id(wrapper)] = wrapper
        self._objects.enter_function(function)
        names = function.__code__.co_names
        for instruction in dis.get_instructions(function.__code__):
            if instruction.opname == "LOAD_GLOBAL" and instruction.argval in function.__globals__:
                self._read_whole(self._places.at(function.__globals__, instruction.argval, Kind.ITEM), names)
        for cell in function.__closure__ or ():
            self._read_whole(self._places.at(cell, None, Kind.CELL), names)

    def _read_whole(self, place: Place, names: tuple[str, ...]) -> None:
        value = place.get()
        self._testimony.note(place)
        if not self._objects.meet(value, place):
            return
        if isinstance(value, types.ModuleType):
            if not self._owners.is_foreign(value.__name__):
                for name in (name for name in names if name in value.__dict__):
                    self._objects.read_whole_attribute(value, name)
        elif not isinstance(value, torch.nn.Module):
            self._objects.whole(value)
