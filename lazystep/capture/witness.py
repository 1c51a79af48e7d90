"""The witness of a call: what src/witness.c tells becomes places.

`src/witness.c` looks on while the call runs. It tells a `Witness` of each distinct read from an object that
was there before the call, each write, and each object that C code looks at as a whole. The witness passes it
on: objects and attributes to `Objects`, classes to `Classes`, functions in C to `CallsOfC`. They find the
places (`PlaceFinder`), and note them in the `Testimony`, which is what the call leaves behind.
"""

from __future__ import annotations

import builtins
import gc
import os
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import _tensor_str
from torch.nn.utils import parametrize

from ..record.source import user_line
from . import _witness, c_calls, visible
from ._places import is_same
from .called import CallsOfC
from .classes import Classes
from .code_owners import CodeKind, CodeOwners, is_called_by_the_user, is_torchs
from .objects import Objects
from .outside import Outside
from .place_finder import Access, PlaceFinder
from .places import MISSING, Kind, Place
from .surroundings import Surroundings
from .testimony import FOLLOW, OUTSIDE, Testimony
from .traced import Trace, TracedFloat, TracedInt, following, is_traced, plain

_BUILTINS = frozenset(vars(builtins))
# Queues, futures, events and barriers are made of conditions.
_BETWEEN_THREADS = (threading.Condition.wait.__code__, threading.Condition.notify.__code__)

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
    """Looks on while one call runs, and fills its testimony."""

    def __init__(self, testimony: Testimony, before: Surroundings, trace: Trace, package: str) -> None:
        """`before`: what is in the known places now. `package`: the user's own, even if it is installed."""
        self._testimony = testimony
        self._places = testimony.places
        self._before = before
        self._trace = trace
        self._owners = CodeOwners(package)
        self._outside = Outside()
        self._finder = PlaceFinder(testimony.places)
        self._classes = Classes(testimony, self._owners, self._outside)
        self._objects = Objects(testimony, before, self._finder, self._classes, self._owners, self._outside)
        self._calls = CallsOfC(testimony, self._finder, self._objects, self._owners)
        self._threshold: tuple[int, int, int] = (0, 0, 0)

    def run(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        roots: list[Any],
        given: list[Any],
    ) -> Any:
        """Call the function and look on. `roots`: objects of its arguments. `given`: lists and dicts."""
        self._outside.begin()
        self._outside.given.update(map(id, given))
        with self._collecting_nothing():
            _witness.begin(self, TracedFloat, TracedInt, torch.Tensor)
            try:
                for root in (function, os.environ, *roots):
                    if isinstance(root, torch.Tensor):
                        _witness.add(root)  # an argument: its place is its position
                        self._outside.arguments.add(id(root))
                    else:
                        self._objects.meet(root, None)
                self._classes.note_tensor_operators()
                return _witness.call(function, args, kwargs)
            finally:
                failure = _witness.end()
                if failure is not None:
                    self._testimony.refuse(f"looking on failed, which is a bug of lazystep: {failure!r}")
                    self.failure = failure

    @contextmanager
    def _collecting_nothing(self) -> Iterator[None]:
        """No collection in mid-call: it would run finalizers and callbacks that are none of the step's code.

        Not by `gc.disable`, because the step may ask for that, and do it. It may collect by itself, too.
        """
        self._threshold = gc.get_threshold()
        callbacks = gc.callbacks[:]
        gc.set_threshold(0)
        gc.callbacks.clear()
        try:
            yield
        finally:
            gc.callbacks[:0] = callbacks
            if gc.get_threshold()[0] == 0:  # else the step has set another one
                gc.set_threshold(*self._threshold)

    # -- what a recorded call asks -------------------------------------------------------------------------

    def is_outside(self, value: Any) -> bool:
        """Whether the call found this object, and did not make it."""
        return self._outside.is_met(value) or id(value) in self._finder.tensors

    def copied(self, tensor: torch.Tensor) -> None:
        """All attributes that the user has set on a tensor are read."""
        self._objects.copied(tensor)

    def places_of_leaves(self) -> list[Place]:
        """The places of tensors that the call has met and that get a gradient in backward."""
        # A comprehension, because a name would keep the last tensor alive.
        return [where for one, where in self._finder.tensors.values() if one.is_leaf and one.requires_grad]

    def release_tensors(self) -> None:
        """Let go of the tensors that the call has met: a value that only we hold must not be an output."""
        self._finder.tensors.clear()

    def release(self) -> None:
        """Let go of every object that the call has met: others may hold them weakly."""
        self._outside.release()
        self._finder.release()

    # -- what C asks: code --------------------------------------------------------------------------------

    def code_kind(self, code: types.CodeType, names: dict[str, Any]) -> int:
        """Whether code is the user's, another package's, or not to be looked at."""
        if code in _BETWEEN_THREADS and is_called_by_the_user(sys._getframe(1), ()):
            self._testimony.refuse(
                f"it waits for another thread, or hands something to it, at {user_line(1)}, and a replay "
                "would not; do that outside and pass what you get as an argument"
            )
        return int(self._owners.kind_of(code, names))

    def entered(self, function: types.FunctionType) -> None:
        """A function of the user's runs that the call did not make."""
        self._objects.enter_function(function)

    def entered_elsewhere(self, function: types.FunctionType) -> None:
        """A function of another package runs that shares variables with the functions around it."""
        if not is_torchs(function.__code__):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                place = self._places.at(cell, None, Kind.CELL, repr(name))
                if not callable(place.get()):  # the function that a decorator has got stays the same
                    _witness.add(cell)

    def returned(self, value: Any) -> None:
        """Code of another package has returned an object that others hold, too."""
        if isinstance(value, types.ModuleType):  # that `importlib.import_module` has found, say
            self._testimony.note_shallow(self._places.at(sys.modules, value.__name__, Kind.ITEM))
        if not self._outside.is_made(value):
            self._objects.meet(value, None)

    def call_of(self, value: Any) -> None:
        """An object is called or entered: its class says what that does."""
        self._classes.note_call(value)

    def super_base(self, this: type, owner: Any, name: str) -> type | None:
        """The class in which `super(this, owner).name` is found."""
        return self._classes.find_super(this, owner, name)

    def imported(self, name: str, names: dict[str, Any], level: int) -> None:
        """A module is imported inside the call. It is met as the value that the import returns."""
        self._read_builtin(names, "__import__")
        if level:
            above = (names.get("__package__") or "").rsplit(".", level - 1)[0]
            name = f"{above}.{name}" if name else above
        parts = name.split(".")
        for number in range(1, len(parts) + 1):
            place = self._places.at(sys.modules, ".".join(parts[:number]), Kind.ITEM)
            self._testimony.note_shallow(place)

    # -- reads and writes ----------------------------------------------------------------------------------

    def read(self, kind: int, owner: Any, key: Any) -> int:
        """A place is read. Answers how to treat the value."""
        if kind == Access.GLOBAL:
            return self._read_global(owner, key)
        if kind == Access.CELL:
            self._testimony.note(self._places.at(owner, None, Kind.CELL))
            return FOLLOW | OUTSIDE
        if kind == Access.ITEM:
            self.hashed(key)
            self._testimony.note(self._finder.item(owner, key))
            return FOLLOW | OUTSIDE
        return self._objects.read_attribute(owner, key, sys._getframe(1))

    def read_frame(self, name: str) -> None:
        """An attribute of a frame is read, which the call itself has got."""
        self._objects.read_frame(name)

    def _read_global(self, names: dict[str, Any], key: str) -> int:
        place = self._places.at(names, key, Kind.ITEM)
        self._testimony.note(place)
        is_foreign = self._owners.is_foreign(names.get("__name__"))
        if is_foreign:
            self._testimony.shallow.add(place)
        if key == "_cache" and names is vars(parametrize):
            self._testimony.refuse(
                f"it uses torch.nn.utils.parametrize.cached at {user_line(1)}, which leaves another cache in "
                "each call; go without it, or compute the weights once and use torch.func.functional_call"
            )
        if key not in names:
            self._read_builtin(names, key, is_foreign)
            return OUTSIDE if not is_foreign or self._is_looked_into(vars(builtins).get(key)) else 0
        if is_foreign:
            return OUTSIDE if self._is_looked_into(names[key]) else 0
        return FOLLOW | OUTSIDE

    def _is_looked_into(self, value: Any) -> bool:
        """Whether reads from a value in a global of another package are compared.

        A module's are: somebody may replace `torch.nn.functional.linear`, which `nn.Linear` finds there. So
        are those from an object of a class of the user's, which has taken the place of a package's own, and
        from the settings that decide what the text of a tensor is.
        """
        is_looked_into = isinstance(value, (types.ModuleType, type(_tensor_str.PRINT_OPTS)))
        return is_looked_into or not self._owners.is_foreign(type(value).__module__)

    def _read_builtin(self, names: dict[str, Any], key: str, is_shallow: bool = True) -> None:
        """A name is read that the module does not have. `names`: its globals."""
        found = names.get("__builtins__", builtins)
        place = self._places.at(found if isinstance(found, dict) else vars(found), key, Kind.ITEM)
        self._testimony.note(place)
        if is_shallow or key in _BUILTINS:  # else a name that somebody has put there
            self._testimony.shallow.add(place)

    def met(self, value: Any, kind: int, owner: Any, key: Any) -> None:
        """An object was found in a place, or C code returned it."""
        if kind == Access.RESULT:  # of a weak reference or a context variable, say
            reads = self._testimony.reads
            known = (p for p in reads if p.kind in (Kind.WEAK, Kind.CONTEXT) and p.get() is value)
            self._objects.meet(value, next(known, None))
            return
        if isinstance(owner, types.ModuleType) and self._owners.is_foreign(owner.__name__):
            is_foreign = self._owners.kind_of_frame(sys._getframe(1)) == CodeKind.FOREIGN
            if is_foreign and not self._is_looked_into(value):
                return
        place = self._finder.find(kind, owner, key)
        is_there = place is not None and place.get() is value  # and not what a descriptor has made of it
        is_known = not isinstance(value, torch.Tensor) or id(value) in self._finder.tensors
        if not (is_there or is_known) and self._outside.is_made(value):
            return  # `__getattr__` of a module gives back what the call has put there: `functional_call`
        self._objects.meet(value, place if is_there else None)

    def write(self, kind: int, owner: Any, key: Any, must_be_there: int) -> None:
        """A place is about to be written or deleted. `must_be_there`: that raises if nothing is there."""
        if kind == Access.ITEM:
            self.hashed(key)
        if kind == Access.ATTRIBUTE and key == "__dict__":
            self._testimony.refuse(
                f"it replaces the __dict__ of a {type(owner).__name__}; set its attributes"
            )
            self._testimony.writes[self._places.at(owner, key, Kind.ATTRIBUTE)] = None
        place = self._finder.find(kind, owner, key, is_write=True)
        if place is not None:
            if must_be_there:
                self._note_presence(place)
            self._testimony.writes[place] = None

    def contains(self, container: dict[Any, Any], key: Any) -> None:
        """Whether a dict has a key is asked."""
        self.hashed(key)
        self._note_presence(self._finder.item(container, key))

    def hashed(self, key: Any) -> None:
        """A container that the call did not make is asked for a key. A tensor is the key that it is."""
        if isinstance(key, torch.Tensor):
            self._objects.asked_for_id(key)

    def _note_presence(self, place: Place) -> None:
        if place not in self._testimony.used_places():
            self._testimony.note(place)
            if place.get() is not MISSING:
                self._testimony.present.add(place)

    def unpacked(self, container: Any) -> None:
        """A list or tuple is unpacked into variables: its length matters, and each element is read."""
        self._testimony.note_structure(self._finder.container(container))
        for number in range(len(container)):
            self._testimony.note(self._finder.item(container, number))

    def matched(self, subject: Any, names: tuple[str, ...], num_positional: int) -> None:
        """A `match` statement takes attributes of an object."""
        for name in names:
            self._objects.read_whole_attribute(subject, name)
        if num_positional:
            self._objects.whole(subject)

    # -- numbers -------------------------------------------------------------------------------------------

    def number(self, kind: int, owner: Any, key: Any, value: Any) -> Any:
        """A number was read: the traced number that takes its place, or None to leave it."""
        testimony = self._testimony
        place = self._finder.find(kind, owner, key)
        if place is None or place in testimony.writes or place in testimony.shallow:
            return None
        if place.get() is not value:
            return None
        if place in self._before and self._before[place].value is not value:
            if not is_same(self._before[place].value, value):
                testimony.refuse(f"C code changes {place.name}, which is then read; change it outside")
            return None
        testimony.note(place)  # by now it may be known by the place of its container
        testimony.numbers.add(place)
        return self._trace.number(value, ("place", place))

    def followed(self, container: Any) -> Any:
        """The elements of a list, tuple or dict are copied: the same elements, with traced numbers."""
        self._objects.sized(container)
        is_dict = isinstance(container, dict)
        made = {}
        for key, value in list(container.items() if is_dict else enumerate(container)):
            traced = self.number(Access.ITEM, container, key, value) if type(value) in (float, int) else None
            if traced is None:
                self._objects.note_and_meet(self._finder.item(container, key), value, is_deep=False)
            made[key] = value if traced is None else traced
        return made if is_dict else type(container)(made.values())

    def sought(self, number: Any, container: Any) -> Any:
        """Code asks whether a number is in a container: the plain one. All elements are compared with it."""
        if plain(number) != plain(number):
            self._testimony.refuse(f"it asks whether NaN is in a container at {user_line(1)}; ask outside")
            same = (one for one in container if plain(one) is plain(number))
            return next(same, plain(number))  # Python finds NaN by its identity
        for element in container:
            if isinstance(element, (int, float)):
                number == element  # noqa: B015 - becomes a guard
        return plain(number)

    def stored(self, kind: int, owner: Any, key: Any) -> None:
        """A traced number is about to be put somewhere."""
        self._testimony.numbers_stored.append((kind, owner, key))

    def pin(self, number: Any) -> Any:
        """C code takes a traced number: the plain one."""
        return number.pin()

    def plain(self, number: Any) -> Any:
        """The type of a traced number is asked for: the plain one."""
        return plain(number)

    def original(self, number: Any) -> Any:
        """Whether a number is a certain object is asked: the object that was read."""
        if is_traced(number):
            self._testimony.refuse(f"it asks whether two numbers are one object at {user_line(1)}; use ==")
            return number.original
        return number

    def constant(self, value: float) -> Any:
        """A number that meets a traced one."""
        return self._trace.number(value, value)

    # -- C code --------------------------------------------------------------------------------------------

    def classify(self, function: Any) -> int:
        """How to treat the arguments of a function in C."""
        if c_calls.is_numpys(function):
            self._objects.note_numpy()
        return int(c_calls.classify(function))

    def called(self, function: Any, args: tuple[Any, ...]) -> int:
        """A function in C is called that `c_calls` wants to know of. Answers whether it keeps results."""
        return self._calls.called(function, args, sys._getframe(1))

    def called_with_nothing(self, function: Any) -> None:
        """A function in C is called without arguments: it may return a state that nothing else tells."""
        self._calls.called_with_nothing(function, sys._getframe(1))

    def follow(self, function: Any) -> Any:
        """The version of a function that follows numbers, or that knows what the witness has changed."""
        return self._get_threshold if function is gc.get_threshold else following(function)

    def _get_threshold(self) -> tuple[int, int, int]:
        self._testimony.told[gc.get_threshold, ()] = self._threshold
        return self._threshold

    def visible(self, function: Any) -> Any:
        """A function that does the same as one in C, and whose doing is seen."""
        return visible.caller(function)

    def whole(self, value: Any) -> None:
        """C code looks at an object as a whole."""
        self._objects.whole(value)

    def moved(self, value: Any) -> None:
        """C code looks at an object or passes it on."""
        self._objects.moved(value)

    def passed(self, value: Any) -> None:
        """The elements of a container are passed on, as objects."""
        self._objects.passed(value)

    def sized(self, value: Any) -> None:
        """The length or the keys of a container matter."""
        self._objects.sized(value)

    def taken(self, iterator: Any) -> None:
        """Something is taken from an iterator that the call did not make."""
        self._objects.taken(iterator)

    def identified(self, container: Any) -> None:
        """Whether a container is a certain object is asked: an equal one is not as good."""
        self._objects.identified(container)

    def identity(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Whether two tensors are one is asked."""
        self._objects.compared(left, right)
