"""What a call reads and writes: the witness tells, this module turns it into places.

`src/witness.c` looks on while the call runs. It tells a `Witness` of each distinct read from an object that
was there before the call, each write, and each object that C code looks at as a whole. The witness resolves
them to places: an attribute may be found in the object, in its class or in a base.

Code of the user's is followed closely. Of torch, Python and other installed packages, globals are compared by
identity only; what such code reads from the user's objects is compared like everything else.
"""

from __future__ import annotations

import _thread
import abc
import builtins
import decimal
import dis
import functools
import gc
import inspect
import operator
import os
import string
import sys
import sysconfig
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..record.handle import Memory
from ..record.source import is_ours, user_line
from ..record.tensor import find_handle
from . import _witness, c_calls, visible
from ._places import dict_of_class, is_same
from .places import MISSING, Kind, Place, Places
from .surroundings import Surroundings
from .traced import Trace, TracedFloat, TracedInt, following, pinned, plain
from .values import BUFFERS, CONTAINERS, GENERATORS, MAX_COMPARED, is_simple

# Kinds of reads and writes that src/witness.c tells.
_ATTRIBUTE, _ITEM, _GLOBAL, _CELL, _RESULT = 0, 1, 2, 3, -1
# Answers to `read`: follow numbers there; objects there are outside.
_FOLLOW, _OUTSIDE = 1, 2
# An answer to `called`: call it by a Python function.
_IN_SIGHT = 2
_HIDDEN, _USERS, _FOREIGN, _COVER, _OPS = 0, 1, 2, 3, 4

_MAX_ELEMENTS = 50_000
_MOVED: tuple[type, ...] = (*CONTAINERS, *BUFFERS, frozenset, types.MappingProxyType, Iterator)
_DICTS: tuple[dict[str, Any], ...] = ({}, OrderedDict())
_VIEWS = tuple(type(view) for one in _DICTS for view in (one.keys(), one.values(), one.items()))
_MOVED += (types.SimpleNamespace, decimal.Decimal, *_VIEWS)
_NONE = object()
_FACTS = ("_version", "retains_grad", "output_nr")  # that are not compared for every tensor
_BUILTINS = frozenset(vars(builtins))
_STDLIB = os.path.join(sysconfig.get_paths()["stdlib"], "")
_TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")
_KNOWN_PACKAGES = frozenset(("torch", "lazystep", "numpy", "builtins"))
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Our code that calls the step's own code, or torch's for it.
_PASSING = {
    os.path.join(_ROOT, *path.split("/"))
    for path in (
        "capture/step.py",
        "device/grad_scaler.py",
        "device/patches.py",
        "device/tensor_methods.py",
    )
}
_MODE = os.path.join(_ROOT, "capture", "op_numbers.py")
STEPS_KEY = "_lazystep_steps"  # in `__dict__` of an object with step methods

# Ids of `sys.monitoring`: of tools that must see calls run, and those that src/events_monitoring.h may take.
_WATCHING_TOOLS, _FREE_TOOLS = (0, 1), (2, 3, 4, 5)


def obstacle() -> str:
    """Why no call can be witnessed now; empty if it can."""
    if not _witness.supported:
        major, minor = sys.version_info[:2]
        return f"captures need CPython {_witness.versions}, this is {major}.{minor}"
    if sys.gettrace() is not None:
        return "a debugger or a coverage tool traces this thread (sys.settrace)"
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    if monitoring is not None:
        for tool in _WATCHING_TOOLS:
            if monitoring.get_tool(tool) is not None:
                return (
                    f"a debugger or a coverage tool, {monitoring.get_tool(tool)}, is at work (sys.monitoring)"
                )
        if all(monitoring.get_tool(tool) is not None for tool in _FREE_TOOLS):
            return "other tools use all ids of sys.monitoring, of which the witness needs one"
    return ""


class Witness:
    """Everything that one call has read, written and looked at."""

    def __init__(self, places: Places, before: Surroundings, trace: Trace, package: str) -> None:
        """`before`: what is in these places now. `package`: the user's own, even if it is installed."""
        self._before = before
        self.places = places
        self.reads: dict[Place, None] = {}
        self.writes: dict[Place, None] = {}
        self.structures: dict[Place, None] = {}  # lists, dicts and tuples that were looked at as a whole
        self.contents: dict[Place, None] = {}  # sets and arrays that were looked at
        self.present: set[Place] = set()  # of which only is compared that something is there
        self.compares_tensors = False  # whether two tensors are one
        self.identified_places: set[Place] = set()  # containers of which it matters which one they are
        self.pinned: set[Place] = set()  # of values that C code has looked at
        self.numbers: set[Place] = set()  # places of numbers that were followed
        self.shallow: set[Place] = set()  # of other packages: compared by identity
        self.tensors: dict[int, tuple[torch.Tensor, Place]] = {}  # that were met, by id
        self.generators: dict[int, Any] = {}
        self.placed: set[Memory] = set()  # of lazy tensors whose `storage_offset` was asked for
        # Functions in C that tell a state, with their arguments, and what they have told.
        self.told: dict[tuple[Any, tuple[Any, ...]], Any] = {}
        self.caches: dict[int, Any] = {}  # functions with `functools.lru_cache`
        self.numbers_stored: list[tuple[int, Any, Any]] = []  # where traced numbers were put
        self.reason = ""  # why the call can't be captured
        self._trace = trace
        self._package = package
        self._origins: dict[int, Place] = {}  # of lists, dicts and tuples, by id
        self._kept: list[Any] = []  # keeps their ids unique
        self._met_ids: set[int] = set()
        self._shallow_done: set[Place] = set()  # containers whose elements were passed on
        self._deep: set[Place] = set()  # containers that were looked at with all that is in them
        self._classes: set[type] = set()
        self._num_elements = 0
        self._threshold: tuple[int, int, int] = (0, 0, 0)
        self._oldest: list[Any] = []

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], roots: list[Any]) -> Any:
        """Call the function and look on. `roots`: objects of its arguments."""
        # A collection in mid-call would run finalizers and callbacks that are none of the step's code. Not by
        # `gc.disable`, because the step may ask for that, and do it.
        self._threshold = gc.get_threshold()
        gc.set_threshold(0)
        # The step may collect garbage itself.
        callbacks = gc.callbacks[:]
        gc.callbacks.clear()
        self._oldest = []  # the first object of the call: see `_is_made`
        _witness.begin(self, TracedFloat, TracedInt, torch.Tensor)
        try:
            for root in (function, os.environ, *roots):
                if isinstance(root, torch.Tensor):
                    _witness.add(root)  # an argument: its place is its position
                else:
                    self._meet(root, None)
            return _witness.call(function, args, kwargs)
        finally:
            failure = _witness.end()
            gc.callbacks[:0] = callbacks
            if gc.get_threshold()[0] == 0:  # else the step has set another one
                gc.set_threshold(*self._threshold)
            if failure is not None:
                self.refuse(f"looking on failed, which is a bug of lazystep: {failure!r}")
                self.failure = failure

    def release_tensors(self) -> None:
        """Let go of the tensors that the call has met: a value that only we hold must not be an output."""
        self.tensors.clear()

    def release(self) -> None:
        """Let go of every object that the call has met: others may hold them weakly."""
        self._kept.clear()
        self._met_ids.clear()
        self._origins.clear()
        self.generators.clear()

    def refuse(self, reason: str) -> None:
        """Don't capture this call."""
        self.reason = self.reason or reason

    def is_outside(self, value: Any) -> bool:
        """Whether the call found this object, and did not make it."""
        return id(value) in self._met_ids or id(value) in self.tensors

    # -- what src/witness.c asks ---------------------------------------------------------------------------

    def code_kind(self, code: types.CodeType, names: dict[str, Any]) -> int:
        """Whether code is the user's, another package's, or not to be looked at."""
        file = code.co_filename
        if file.startswith("<frozen importlib") or str(names.get("__name__")).startswith("namedtuple_"):
            return _HIDDEN
        if file == visible.FILE:
            return _USERS
        if is_ours(code):
            # What torch's code does for us, such as deciding an op, says nothing of the step.
            if file == _MODE:
                return _OPS
            return _HIDDEN if file in _PASSING else _COVER
        if file.startswith("<"):
            return _FOREIGN if self._is_foreign(names.get("__name__")) else _USERS
        if file.startswith(_TORCH):
            return _FOREIGN
        if "site-packages" in file or "dist-packages" in file:
            return _FOREIGN if self._is_foreign(names.get("__name__")) else _USERS
        return _FOREIGN if file.startswith(_STDLIB) else _USERS

    def entered(self, function: types.FunctionType) -> None:
        """A function of the user's runs that the call did not make."""
        _witness.add(function)
        self._kept.append(function)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            _witness.add(cell)
            self.places.at(cell, None, Kind.CELL, repr(name))
        self._note(self.places.at(function, "__code__", Kind.ATTRIBUTE))
        for name in ("__defaults__", "__kwdefaults__"):
            defaults = getattr(function, name)
            place = self.places.at(function, name, Kind.ATTRIBUTE)
            self._note(place)
            if defaults:
                self._meet(defaults, place)
                self.whole(defaults)

    def entered_elsewhere(self, function: types.FunctionType) -> None:
        """A function of another package runs that shares variables with the functions around it."""
        if not function.__code__.co_filename.startswith(_TORCH):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                place = self.places.at(cell, None, Kind.CELL, repr(name))
                if not callable(place.get()):  # the function that a decorator has got stays the same
                    _witness.add(cell)

    def returned(self, value: Any) -> None:
        """Code of another package has returned an object that others hold, too."""
        if not self._is_made(value):
            self._meet(value, None)

    def _is_made(self, value: Any) -> bool:
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

    def super_base(self, this: type, owner: Any, name: str) -> type | None:
        """The class in which `super(this, owner).name` is found."""
        kind = owner if isinstance(owner, type) and issubclass(owner, this) else type(owner)
        order = kind.__mro__
        for base in order[order.index(this) + 1 :] if this in order else ():
            if name in base.__dict__:
                return base
            if not self._is_foreign(base.__module__):
                self._note(self.places.at(base, name, Kind.CLASS))
        return None

    def read(self, kind: int, owner: Any, key: Any) -> int:
        """A place is read. Answers how to treat the value."""
        if kind == _GLOBAL:
            place = self.places.at(owner, key, Kind.ITEM)
            self._note(place)
            if self._is_foreign(owner.get("__name__")):
                self.shallow.add(place)
                return 0
            if key not in owner and key not in _BUILTINS:  # a name that somebody has put there
                self._note(self.places.at(vars(builtins), key, Kind.ITEM))
                return _OUTSIDE
            return _FOLLOW | _OUTSIDE
        if kind == _CELL:
            self._note(self.places.at(owner, None, Kind.CELL))
            return _FOLLOW | _OUTSIDE
        if kind == _ITEM:
            self._note(self._item(owner, key))
            return _FOLLOW | _OUTSIDE
        return self._read_attribute(owner, key)

    def number(self, kind: int, owner: Any, key: Any, value: Any) -> Any:
        """A number was read: the traced number that takes its place, or None to leave it."""
        place = self._place(kind, owner, key)
        if place is None or place in self.writes or place in self.shallow or place.get() is not value:
            return None
        if place in self._before and self._before[place].value is not value:
            if not is_same(self._before[place].value, value):
                self.refuse(f"C code changes {place.name}, which is then read; change it outside")
            return None
        self._note(place)  # by now it may be known by the place of its container
        self.numbers.add(place)
        return self._trace.number(value, ("place", place))

    def met(self, value: Any, kind: int, owner: Any, key: Any) -> None:
        """An object was found in a place, or C code returned it."""
        if kind == _RESULT:  # of a weak reference or a context variable, say
            known = (p for p in self.reads if p.kind in (Kind.WEAK, Kind.CONTEXT) and p.get() is value)
            self._meet(value, next(known, None))
            return
        place = self._place(kind, owner, key)
        if place is None or place not in self.writes:  # else it is the call's own
            is_there = place is not None and place.get() is value  # and not what a descriptor has made of it
            self._meet(value, place if is_there else None)

    def whole(self, value: Any) -> None:
        """C code looks at an object as a whole."""
        if isinstance(value, torch.Tensor) or (is_simple(value) and not isinstance(value, CONTAINERS)):
            return
        if isinstance(value, types.FunctionType):
            for name in value.__dict__:
                self._read_whole_attribute(value, name)
            return
        if isinstance(value, _VIEWS):
            (value,) = gc.get_referents(value)  # the dict
            self._meet(value, None)
        if isinstance(value, (decimal.Decimal, decimal.Context)):
            self._note_decimals(value)
            return
        if c_calls.is_harmless(value) and not isinstance(
            value, (*BUFFERS, *GENERATORS, types.MappingProxyType)
        ):
            return
        place = self._origins.get(id(value)) or self._object(value)
        if isinstance(value, CONTAINERS):
            self._whole_container(value, place)
        elif isinstance(value, (*BUFFERS, frozenset)):
            self._whole_buffer(value, place)
        elif isinstance(value, types.MappingProxyType):
            self.structures[place] = None
            for key in value:
                self._note_and_meet(self.places.at(place, key, Kind.ITEM), value[key])
        elif isinstance(value, torch.Generator):
            self.refuse(f"it copies or inspects a torch.Generator at {user_line(2)}; do that outside")
        elif isinstance(value, GENERATORS):
            self.generators[id(value)] = value
        elif isinstance(value, Iterator):
            self.taken(value)
        else:
            names = _names_of(value)
            if not names and not _is_of_python(type(value)):
                self.refuse(
                    f"C code looks at a {type(value).__name__} at {user_line(2)}, which can't be compared; "
                    "use it outside of the step"
                )
            own = _dict_of(value)
            if own is not None:
                self.structures[
                    place := self.places.at(own, None, Kind.OBJECT, "the attributes of an object")
                ] = None
                self._note(place)
            for name in names:
                self._read_whole_attribute(value, name)

    def copied(self, tensor: torch.Tensor) -> None:
        """All attributes that the user has set on a tensor are read."""
        if not _witness.is_outside(tensor):
            return
        known = self.tensors.get(id(tensor))
        place = self.places.at(tensor if known is None else known[1], "__dict__", Kind.ATTRIBUTE)
        self._note(place)
        self.structures[place] = None
        for name in tensor.__dict__:
            self._read_whole_attribute(tensor, name)

    def moved(self, value: Any) -> None:
        """C code looks at an object or passes it on: what is in it matters if it is a container or array."""
        if isinstance(value, _MOVED):
            self.whole(value)

    def _note_decimals(self, value: Any) -> None:
        """What decimal numbers become depends on a context: that of the thread, or the one that is used."""
        context = value if isinstance(value, decimal.Context) else None
        if not any(getattr(function, "context", _NONE) is context for function, _ in self.told):
            settings = c_calls.DecimalSettings(context)
            self.told[settings, ()] = settings()

    def passed(self, value: Any) -> None:
        """The elements of a container are passed on, as objects."""
        if isinstance(value, CONTAINERS):
            place = self._origins.get(id(value)) or self._object(value)
            self._whole_container(value, place, is_deep=False)
        else:
            self.moved(value)

    def sized(self, value: Any) -> None:
        """The length or the keys of a container matter."""
        if isinstance(value, CONTAINERS):
            place = self._origins.get(id(value)) or self._object(value)
            self._note(place)
            self.structures[place] = None
            for key in value if isinstance(value, dict) else ():
                self._meet(key, None)
        else:
            self.moved(value)

    def _object(self, value: Any) -> Place:
        return self.places.at(value, None, Kind.OBJECT, f"a {type(value).__name__}")

    def write(self, kind: int, owner: Any, key: Any) -> None:
        """A place is about to be written or deleted."""
        place = self._place(kind, owner, key, is_write=True)
        if place is not None:
            self.writes[place] = None

    def stored(self, kind: int, owner: Any, key: Any) -> None:
        """A traced number is about to be put somewhere."""
        self.numbers_stored.append((kind, owner, key))

    def classify(self, function: Any) -> int:
        """How to treat the arguments of a function in C."""
        return int(c_calls.classify(function))

    def called(self, function: Any, args: tuple[Any, ...]) -> int:
        """A function in C is called that `c_calls` wants to know of. Answers whether it keeps results."""
        is_outside = _witness.is_outside(function)
        if c_calls.is_decimal(function):
            self._note_decimals(getattr(function, "__self__", None))
            pinned(list(args))
        elif isinstance(function, functools.partial):
            if not self._enter_partial(function, is_outside):
                return _IN_SIGHT
        elif isinstance(function, operator.methodcaller):
            for arg in args[:1]:
                if _witness.is_outside(arg):
                    self.whole(arg)
        elif isinstance(function, functools._lru_cache_wrapper):
            if is_outside:
                self._enter_cache(function)
            return 1
        else:
            self._called(function, args)
        return 0

    def _called(self, function: Any, args: tuple[Any, ...]) -> None:
        if function is vars:
            if args and isinstance(args[0], type) and _witness.is_outside(args[0]):
                self._whole_class(args[0])
        elif c_calls.asks_for_offset(function):
            tensor = args[0] if args else getattr(function, "__self__", None)
            handle = find_handle(tensor)
            if handle is not None:
                self.placed.add(handle.memory)
        elif c_calls.reads_generator(function):
            frame = _asking(sys._getframe(2))
            if frame is not None and self.code_kind(frame.f_code, frame.f_globals) == _USERS:
                self.refuse(
                    f"it uses the state of a torch.Generator at {user_line(2)} ({function.__name__}), and a "
                    "replay would not; do that outside"
                )
        elif c_calls.is_impure(function):
            self.refuse(
                f"it calls {c_calls.name_of(function)} at {user_line(2)}, and a replay would not; call it "
                "outside and pass what it returns as an argument"
            )
        elif c_calls.tells_state(function):
            if self._is_called_by_the_user(sys._getframe(2), args) and (function, args) not in self.told:
                self.told[function, args] = function(*args)
        elif function is next:
            if args and _witness.is_outside(args[0]):
                self.taken(args[0])
        elif isinstance(function, types.MethodWrapperType):
            self._call_wrapper(function, args)
        elif isinstance(function, weakref.ref):
            self._call_reference(function)
        elif c_calls.asks_for_view(function):
            self._asked_for_view(sys._getframe(2))
        elif c_calls.asks_abstract_class(function):
            if not self._is_foreign(args[0].__module__):  # others may be registered
                self.told[abc.get_cache_token, ()] = abc.get_cache_token()
        elif function in (operator.is_, operator.is_not):
            for arg in args:
                if _witness.is_outside(arg):
                    self.identified(arg)
        elif c_calls.is_scripted(function):
            self._refuse_scripted()
        elif c_calls.is_warning(function):
            self.told[c_calls.warning_filters, ()] = c_calls.warning_filters()
        elif c_calls.is_formatting(function):
            self._format(function, args)
        elif isinstance(function, operator.attrgetter):
            self._call_getter(function, args)
        elif args:  # of a context variable
            self._note(self.places.at(args[0], None, Kind.CONTEXT, repr(args[0].name)))
            if len(args) > 1 and function.__name__ == "set":
                self.writes[self.places.at(args[0], None, Kind.CONTEXT)] = None

    def called_with_nothing(self, function: Any) -> None:
        """A function in C is called without arguments: it may return a state that nothing else tells."""
        frame = sys._getframe(1)
        if getattr(function, "__name__", "") == "__subclasses__":
            self.told[function, ()] = function()
        if c_calls.may_tell_state(function) and self._is_called_by_the_user(frame, ()):
            self.refuse(
                f"it calls {c_calls.name_of(function)} at {user_line(1)}, a function in C that is given "
                "nothing: what it returns may change; call it outside and pass what it returns as an argument"
            )

    def _is_called_by_the_user(self, frame: types.FrameType, args: tuple[Any, ...]) -> bool:
        """Whether code that is neither torch's nor ours calls a function, with plain values.

        It may do so by a function of torch's that asks for it: `torch.backends.cuda.flash_sdp_enabled`.
        """
        asking = _asking(frame)
        if asking is None or asking.f_code.co_filename.startswith(_TORCH) or is_ours(asking.f_code):
            return False
        return all(map(is_simple, args))

    def pin(self, number: Any) -> Any:
        """C code takes a traced number: the plain one."""
        return number.pin()

    def plain(self, number: Any) -> Any:
        """The type of a traced number is asked for: the plain one."""
        return plain(number)

    def constant(self, value: float) -> Any:
        """A number that meets a traced one."""
        return self._trace.number(value, value)

    def follow(self, function: Any) -> Any:
        """The version of a function that follows numbers, or that knows what the witness has changed."""
        return self._get_threshold if function is gc.get_threshold else following(function)

    def _get_threshold(self) -> tuple[int, int, int]:
        self.told[gc.get_threshold, ()] = self._threshold
        return self._threshold

    def visible(self, function: Any) -> Any:
        """A function that does the same as one in C, and whose doing is seen."""
        return visible.caller(function)

    def call_of(self, value: Any) -> None:
        """An object is called or entered: its class says what that does."""
        self._note_class(value)

    def contains(self, container: dict[Any, Any], key: Any) -> None:
        """Whether a dict has a key is asked."""
        place = self._item(container, key)
        if place not in self.reads:
            self._note(place)
            if place.get() is not MISSING:
                self.present.add(place)

    def unpacked(self, container: Any) -> None:
        """A list or tuple is unpacked into variables: its length matters, and each element is read."""
        origin = self._origins.get(id(container))
        place = origin or self.places.at(container, None, Kind.OBJECT, f"a {type(container).__name__}")
        self._note(place)
        self.structures[place] = None
        for number in range(len(container)):
            self.read(_ITEM, container, number)

    def identity(self) -> None:
        """Whether two tensors are one is asked."""
        self.compares_tensors = True

    def identified(self, container: Any) -> None:
        """Whether a container is a certain object is asked: an equal one is not as good."""
        place = self._origins.get(id(container))
        if place is not None:
            self.identified_places.add(place)

    def matched(self, subject: Any, names: tuple[str, ...], num_positional: int) -> None:
        """A `match` statement takes attributes of an object."""
        for name in names:
            self._read_whole_attribute(subject, name)
        if num_positional:
            self.whole(subject)

    def taken(self, iterator: Any) -> None:
        """Something is taken from an iterator that the call did not make."""
        if isinstance(iterator, types.GeneratorType) or not isinstance(iterator, CONTAINERS):
            self.refuse(
                f"it takes from {self._name_of(iterator)}, an iterator, at {user_line(2)}, which a replay "
                "would not; take from it outside and pass what you get as an argument"
            )

    def imported(self, name: str, names: dict[str, Any], level: int) -> None:
        """A module is imported inside the call. It is met as the value that the import returns."""
        if level:
            above = (names.get("__package__") or "").rsplit(".", level - 1)[0]
            name = f"{above}.{name}" if name else above
        parts = name.split(".")
        for number in range(1, len(parts) + 1):
            place = self.places.at(sys.modules, ".".join(parts[:number]), Kind.ITEM)
            self._note(place)
            self.shallow.add(place)

    # -- places --------------------------------------------------------------------------------------------

    def _note(self, place: Place) -> None:
        self.present.discard(place)
        if place not in self.reads:
            if type(place.container) is Place:
                self._note(place.container)  # before what is in it
            self.reads[place] = None

    def _item(self, owner: Any, key: Any) -> Place:
        origin = self._origins.get(id(owner))
        return self.places.at(owner if origin is None else origin, key, Kind.ITEM)

    def _place(self, kind: int, owner: Any, key: Any, is_write: bool = False) -> Place | None:
        if kind == _GLOBAL:
            return self.places.at(owner, key, Kind.ITEM)
        if kind == _CELL:
            return self.places.at(owner, None, Kind.CELL)
        if kind == _ITEM:
            return self._item(owner, key)
        return self._resolve(owner, key, is_write)

    def _resolve(self, owner: Any, name: str, is_write: bool = False) -> Place | None:
        """The place in which an attribute is found, or will be; None if code decides."""
        if name == "__dict__":
            return None
        if isinstance(owner, types.ModuleType):
            return self.places.at(owner.__dict__, name, Kind.ITEM)
        if isinstance(owner, type):
            for base in (owner,) if is_write else owner.__mro__:
                if is_write or name in base.__dict__:
                    return self.places.at(base, name, Kind.CLASS)
            metaclass: type = type(owner)
            for base in metaclass.__mro__:
                if name in base.__dict__:
                    return self.places.at(base, name, Kind.CLASS)
            return None
        if isinstance(owner, torch.Tensor) and name == "grad":
            known = self.tensors.get(id(owner))
            return self.places.at(owner if known is None else known[1], "grad", Kind.GRAD, "a gradient")
        if isinstance(owner, torch.Tensor):
            known = self.tensors.get(id(owner))
            return self.places.at(owner if known is None else known[1], name, Kind.ATTRIBUTE)
        descriptor = _look_up(type(owner), name)
        if isinstance(descriptor, types.MemberDescriptorType) and _is_of_python(descriptor.__objclass__):
            return self.places.at(owner, descriptor, Kind.SLOT, repr(name))
        if isinstance(owner, tuple) and type(descriptor).__name__ == "_tuplegetter":  # of a named tuple
            return self._item(owner, getattr(type(owner), "_fields").index(name))  # noqa: B009
        if isinstance(descriptor, (types.GetSetDescriptorType, types.MemberDescriptorType)):
            return None if name == "__dict__" else self.places.at(owner, name, Kind.ATTRIBUTE)
        if hasattr(type(descriptor), "__set__"):
            return None  # a property: its code is followed
        names = _dict_of(owner)
        if names is not None and (is_write or name in names or descriptor is MISSING):
            return self.places.at(names, name, Kind.ITEM)
        for base in type(owner).__mro__:
            if name in base.__dict__:
                return self.places.at(base, name, Kind.CLASS)
        return None

    def _read_attribute(self, owner: Any, name: str) -> int:
        if isinstance(owner, torch.Tensor) and name != "grad" and _look_up(type(owner), name) is not MISSING:
            if name == "_base":
                self._asked_for_view(sys._getframe(2))
            # torch's own code keeps versions as they are: `_unsafe_preserve_version_counter`.
            if name in _FACTS and not sys._getframe(2).f_code.co_filename.startswith(_TORCH):
                known = self.tensors.get(id(owner))
                self._note(self.places.at(owner if known is None else known[1], name, Kind.ATTRIBUTE))
            # Else a fact that is compared for every tensor, or something that the call makes.
            return _OUTSIDE if name == "__dict__" else 0
        if isinstance(owner, torch.jit.ScriptModule):
            self._refuse_scripted()
        if isinstance(owner, types.ModuleType):
            place = self.places.at(owner.__dict__, name, Kind.ITEM)
            self._note(place)
            if self._is_foreign(owner.__name__):
                self.shallow.add(place)
                return _OUTSIDE
            return _FOLLOW | _OUTSIDE
        found = self._resolve(owner, name)
        if not isinstance(owner, (type, torch.Tensor)):
            if id(owner) in self._origins:  # another container may take its place
                self._note_methods(type(owner))
            else:
                self._note_class(owner)
            names = _dict_of(owner)
            if names is not None and name not in names:
                self._note(
                    self.places.at(names, name, Kind.ITEM)
                )  # nothing: an attribute would hide the class's
        kind = owner if isinstance(owner, type) else type(owner)
        if isinstance(owner, type):
            self._note_methods(owner)
            if name == "__dict__":
                self._whole_class(owner)
        if found is None or found.kind is Kind.CLASS:
            # Nothing: a name in a class would hide that of its bases.
            for base in kind.__mro__:
                if found is not None and base is found.container:
                    break
                if not self._is_foreign(base.__module__):
                    self._note(self.places.at(base, name, Kind.CLASS))
        if found is None:
            self._meet_descriptor(owner, name)
            if isinstance(owner, BUFFERS):  # a field of a record
                self.whole(owner)
            return _OUTSIDE
        value = found.get()
        if found.kind is Kind.ATTRIBUTE and not isinstance(owner, torch.Tensor) and not is_simple(value):
            if isinstance(owner, BUFFERS):  # another view of the same memory
                self.whole(owner)
            if isinstance(owner, types.FunctionType):
                self._note(found)
            return _OUTSIDE  # an object in C makes it anew each time
        self._note(found)
        if found.kind is Kind.CLASS and self._is_foreign(found.container.__module__):
            self.shallow.add(found)
            return _OUTSIDE
        if found.kind is Kind.CLASS and hasattr(value, "__get__"):
            self._meet_descriptor(owner, name)
            return _OUTSIDE
        return _FOLLOW | _OUTSIDE

    def _whole_class(self, kind: type) -> None:
        """All names of a class are looked at."""
        if not self._is_foreign(kind.__module__):
            names = self.places.at(dict_of_class(kind), None, Kind.OBJECT, "the names of a class")
            self.structures[names] = None
            self._note(names)
            for name, value in list(kind.__dict__.items()):
                if name not in ("__dict__", "__weakref__"):
                    self._note_and_meet(self.places.at(kind, name, Kind.CLASS), value)

    def _read_whole_attribute(self, owner: Any, name: str) -> None:
        self._read_attribute(owner, name)
        found = self._resolve(owner, name)
        if found is not None and found in self.reads:
            self._note_and_meet(found, found.get())

    def _refuse_scripted(self) -> None:
        self.refuse(
            f"it calls a scripted module at {user_line(2)}, whose attributes can't be compared; use "
            "the module itself"
        )

    def _meet_descriptor(self, owner: Any, name: str) -> None:
        """A descriptor of the user's may have state of its own."""
        descriptor = _look_up(owner if isinstance(owner, type) else type(owner), name)
        if descriptor is not MISSING and not self._is_foreign(type(descriptor).__module__):
            self._note_class(descriptor)
            self._meet(descriptor, None)

    # -- objects -------------------------------------------------------------------------------------------

    def _note_and_meet(self, place: Place, value: Any, is_deep: bool = True) -> None:
        self._note(place)
        if place in self.writes:
            return  # what the call itself has put there is its own
        self.pinned.add(place)
        self._meet(value, place)
        if is_deep and isinstance(value, (*CONTAINERS, *BUFFERS, frozenset)):
            self.whole(value)

    def _meet(self, value: Any, place: Place | None) -> None:
        """Count an object as outside. `place`: where it was found."""
        if isinstance(value, types.MethodType):
            self._meet(value.__func__, None)
            self._meet(value.__self__, None)
            return
        is_bound = isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType))
        if is_bound and not isinstance(value.__self__, types.ModuleType):
            self._meet(value.__self__, None)
        _witness.add(value)
        if type(value) in weakref.ProxyTypes:
            self._meet(_witness.behind(value), None)
        if not isinstance(value, torch.Tensor):
            self._kept.append(value)
            self._met_ids.add(id(value))
        if isinstance(value, (*CONTAINERS, *BUFFERS, frozenset)) and place is not None:
            self._origins.setdefault(id(value), place)
        elif isinstance(value, torch.Tensor):
            if id(value) not in self.tensors:
                where = place or self.places.at(value, None, Kind.OBJECT, "a tensor")
                self._note(where)
                self.tensors[id(value)] = value, where
        elif isinstance(value, GENERATORS):
            self.generators[id(value)] = value
        elif isinstance(value, functools.partial):
            self._enter_partial(value, is_outside=True)

    def _note_class(self, value: Any) -> None:
        self._note(self.places.at(value, None, Kind.TYPE, f"the class of a {type(value).__name__}"))
        self._note_methods(type(value))

    def _note_methods(self, kind: type) -> None:
        """Operators and methods of a class of the user's: torch and Python call them without a read."""
        if kind in self._classes:
            return
        self._classes.add(kind)
        for base in kind.__mro__:
            if not self._is_foreign(base.__module__):
                for name, value in list(base.__dict__.items()):
                    if isinstance(value, (types.FunctionType, property, staticmethod, classmethod)):
                        self._note(self.places.at(base, name, Kind.CLASS))

    def _whole_container(self, value: Any, place: Place, is_deep: bool = True) -> None:
        if place in self._deep or (not is_deep and place in self._shallow_done):
            return
        (self._deep if is_deep else self._shallow_done).add(place)
        self.structures[place] = None
        self._note(place)
        self._num_elements += len(value)
        if self._num_elements > _MAX_ELEMENTS:
            self.refuse(
                f"it looks at more than {_MAX_ELEMENTS} objects, {len(value)} of them in {place.name}; pass "
                "what it needs as arguments"
            )
            return
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            if isinstance(value, dict):
                self._meet(key, None)
            element = dict.__getitem__(value, key) if isinstance(value, dict) else value[key]
            self._note_and_meet(self._item(value, key), element, is_deep)

    def _whole_buffer(self, value: Any, place: Place) -> None:
        if getattr(value, "nbytes", 0) > MAX_COMPARED:
            what = "a NumPy array" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
            self.refuse(
                f"it uses {place.name}, {what} that is too large to be compared in each call; pass "
                "it as an argument"
            )
            return
        self._note(place)
        self.contents[place] = None
        has_objects = isinstance(value, np.ndarray) and value.dtype.hasobject
        if isinstance(value, (set, frozenset)) or has_objects:
            for element in value.ravel() if has_objects else value:
                self._meet(element, None)

    def _enter_partial(self, partial: Any, is_outside: bool) -> bool:
        """Look at the parts of a partial, which may be outside if it is not. Whether it runs Python."""
        parts = (partial.func, *partial.args, *partial.keywords.values())
        if is_outside:
            for name in ("func", "args", "keywords"):
                self._note(self.places.at(partial, name, Kind.ATTRIBUTE, f"{name} of a partial"))
            for part in parts:
                self._meet(part, None)
            self.whole(partial.keywords)
        is_python = isinstance(partial.func, (types.FunctionType, types.MethodType))
        for part in parts[1:]:
            if _witness.is_outside(part):
                self.moved(part) if is_python else self.whole(part)
        return is_python

    def _enter_cache(self, wrapper: Any) -> None:
        """What a cached function has read is known only if it runs: take all names of its code."""
        function = inspect.unwrap(wrapper)
        if not isinstance(function, types.FunctionType) or self._is_foreign(function.__module__):
            return
        self.caches[id(wrapper)] = wrapper
        self.entered(function)
        names = function.__code__.co_names
        for instruction in dis.get_instructions(function.__code__):
            if instruction.opname == "LOAD_GLOBAL" and instruction.argval in function.__globals__:
                self._read_whole(self.places.at(function.__globals__, instruction.argval, Kind.ITEM), names)
        for cell in function.__closure__ or ():
            self._read_whole(self.places.at(cell, None, Kind.CELL), names)

    def _read_whole(self, place: Place, names: tuple[str, ...]) -> None:
        value = place.get()
        self._note(place)
        self._meet(value, place)
        if isinstance(value, types.ModuleType):
            if not self._is_foreign(value.__name__):
                for name in (name for name in names if name in value.__dict__):
                    self._read_whole_attribute(value, name)
        elif not isinstance(value, torch.nn.Module):
            self.whole(value)

    def _asked_for_view(self, frame: types.FrameType) -> None:
        if self.code_kind(frame.f_code, frame.f_globals) == _USERS:
            self.refuse(
                f"it asks whether a tensor is a view at {user_line(3)}, which is not compared; ask outside"
            )

    def _call_reference(self, reference: Any) -> None:
        if _witness.is_outside(reference):
            place = self.places.at(reference, None, Kind.WEAK, "a weak reference")
            self._note(place)
            if (value := weakref.ref.__call__(reference)) is not None:
                self._meet(value, place)

    def _format(self, function: Any, args: tuple[Any, ...]) -> None:
        """A text with places is filled: it may take attributes of attributes of what it is given."""
        text = function.__self__ if isinstance(getattr(function, "__self__", None), str) else args[0]
        fields = [field or "" for _, field, _, _ in string.Formatter().parse(text)]
        if any("." in field or "[" in field for field in fields):
            self.refuse(f"it formats a text that names attributes at {user_line(2)}; use an f-string")
        for arg in args:
            if _witness.is_outside(arg):
                self.whole(arg)

    def _call_wrapper(self, wrapper: Any, args: tuple[Any, ...]) -> None:
        owner, name = wrapper.__self__, wrapper.__name__
        if isinstance(owner, weakref.ref) and name == "__call__":
            self._call_reference(owner)
            return
        if args and isinstance(args[0], str) and name in ("__getattribute__", "__setattr__", "__delattr__"):
            if name == "__getattribute__":
                self._read_attribute(owner, args[0])
            elif _witness.is_outside(owner):
                self.write(_ATTRIBUTE, owner, args[0])
        elif _witness.is_outside(owner):
            self.whole(owner)

    def _call_getter(self, getter: Any, args: tuple[Any, ...]) -> None:
        for path in getter.__reduce__()[1]:
            owner = args[0]
            for name in str(path).split("."):
                if not _witness.is_outside(owner):
                    break
                self._read_whole_attribute(owner, name)
                owner = getattr(owner, name, None)  # as the getter will do at once

    def _name_of(self, value: Any) -> str:
        for place in self.reads:
            if place.get() is value:
                return place.name
        return f"a {type(value).__name__}"

    def _is_foreign(self, module: str | None) -> bool:
        """Whether code or a class belongs to an installed package, not to the user's project."""
        package = (module or "").partition(".")[0]
        return package in _KNOWN_PACKAGES or (package != self._package and _is_installed(package))


@functools.cache
def _is_installed(package: str) -> bool:
    """Whether a package comes with Python or is installed in site-packages."""
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None:
        return package in sys.stdlib_module_names
    return "site-packages" in file or "dist-packages" in file or file.startswith(_STDLIB)


def _asking(frame: types.FrameType) -> types.FrameType | None:
    """The frame, or the one behind it if it is that of a function of torch's that asks for a setting."""
    is_torchs = frame.f_code.co_filename.startswith(_TORCH) and c_calls.is_asking(frame.f_code.co_name)
    return frame.f_back if is_torchs else frame


def _is_of_python(kind: type) -> bool:
    """Whether a class was made by a `class` statement."""
    return bool(kind.__flags__ & (1 << 9))


def _look_up(kind: type, name: str) -> Any:
    """What a class or its bases have under a name, without running any code; else `MISSING`."""
    for base in kind.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return MISSING


def _dict_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object; None if it has no `__dict__`. Runs no code of the user's."""
    try:
        # A thread's own attributes are not where other objects have theirs.
        is_local = isinstance(value, _thread._local)
        found = value.__dict__ if is_local else object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _names_of(value: Any) -> list[str]:
    """The attributes that an object has itself, in `__dict__` and in slots."""
    names = [name for name in _dict_of(value) or () if name != STEPS_KEY]
    for base in type(value).__mro__:
        names += [n for n, s in base.__dict__.items() if isinstance(s, types.MemberDescriptorType)]
    return names
