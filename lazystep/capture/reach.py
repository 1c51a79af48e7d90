"""Everything that a step function can reach: the places of its state, and the values that guards compare.

Code reaches closure variables and globals by name, and from them attributes, also by name. So this module
collects the names that the code uses, and looks these names up in the namespaces (objects, classes, modules)
that it meets. Functions found there bring more names and more namespaces; the search ends when nothing new
is found. An attribute that no code names is ignored: a trainer may count its steps without ending the replay.

`Guards`, `RecordedCall` and `Replay` use the resulting flat lists.
"""

from __future__ import annotations

import argparse
import array
import contextvars
import dis
import functools
import inspect
import logging
import operator
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from .ambient import (
    FIELDS_OF_MODULES,
    Hooks,
    fields_of_optimizers,
    hooks_of_all,
    hooks_of_module,
    hooks_of_optimizer,
    hooks_of_tensors,
)
from .places import Place, name_of

_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# Values that are not searched: objects reachable only through them are not the step's state.
_OPAQUE = (types.BuiltinFunctionType, torch.Size, logging.Logger)
# Packages whose code is not read: it does not change while the program runs, and its globals are its own.
_WITHOUT_STATE = frozenset(("torch", "lazystep", "numpy", "builtins"))
_FOREIGN = _WITHOUT_STATE | sys.stdlib_module_names
_MAX_OBJECTS = 50_000
_MAX_COMPARED = 1 << 20  # bytes of an array: comparing a larger one could take longer than the step
# Names that torch itself uses, so the step uses them without naming them.
_IMPLICIT = ("forward", "backward", "setup_context", "training")
# Classes of torch and Python whose own code reads no attribute that a subclass adds.
_TRANSPARENT = (object, nn.Module, torch.optim.Optimizer, types.SimpleNamespace, argparse.Namespace)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
# Code that uses one of these names can read an attribute without naming it.
_DYNAMIC = frozenset(("getattr", "hasattr", "vars", "__dict__", "eval", "exec", "globals", "locals"))
_DYNAMIC |= {"attrgetter", "asdict", "astuple", "fields", "copy", "deepcopy"}
_CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
_NOT_OPERATORS = frozenset((*_CONSTRUCTORS, "__repr__", "__str__", "__del__", "__reduce__"))
_NOT_OPERATORS |= {"__dict__", "__weakref__"}


class _Namespace:
    """The names in an object, a class or a module, and their values."""

    def __init__(self, values: Any, is_objects: bool, hidden: Collection[str] = ()) -> None:
        """`values`: a dict of names, or a class."""
        self.values: Mapping[str, Any] = values.__dict__ if isinstance(values, type) else values
        self.is_objects = is_objects  # of an object or class: code may read attributes without naming them
        self.done: set[str] = set(hidden)  # names that were already read, or that must not be read
        self._owner = values

    def place(self, name: str) -> Place:
        """The place of a name."""
        return Place(self._owner, name, "class" if isinstance(self._owner, type) else "item")


class Reach:
    """Everything that a function can reach, as flat lists."""

    def __init__(
        self, function: Callable[..., Any], roots: Sequence[Any], closures: Collection[types.CodeType] = ()
    ) -> None:
        """`closures`: code that runs after the step, whose state does not belong to the step."""
        self._closures = closures
        self._package = (getattr(function, "__module__", None) or "").partition(".")[0]
        self.tensors: list[Place] = []  # places that hold a tensor, or None so far
        self.simple: list[Place] = []  # numbers, strings and other values, compared with ==
        self.held: list[Place] = []  # functions, containers and objects, compared by identity
        self.tuples: list[Place] = []  # tuples with tensors or objects, compared by type and length
        self.sizes: list[Any] = []  # lists and dicts, compared by length or keys
        self.fields: list[Any] = []  # attributes of objects and classes, compared by their number
        self.contents: list[Any] = []  # sets, arrays and bytes, compared by contents
        self.generators: list[Any] = [random, np.random]  # random number generators
        self.modules: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.holds_groups = False  # whether an optimizer's group has a value that is not simple
        self.hooks: list[Hooks] = hooks_of_all()
        self.reason = ""  # why a replay could miss a change; empty if it can't
        self._names: set[str] = set(_IMPLICIT)
        self._namespaces: list[_Namespace] = []
        self._iterators: list[str] = []
        self._called: set[type] = set()
        self._leaves: list[Place] = []
        self._seen_tensors: set[int] = set()  # ids only: this object must not keep replaced state alive
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # the objects of `_seen`, kept alive so that their ids stay unique
        self._walk(function)
        for root in roots:
            self._walk(root)
        for hooks in hooks_of_all():
            self._walk_all(hooks.values())
        self._walk_namespaces()
        self.parameters: list[torch.Tensor] = list(
            {id(p): p for m in self.modules for p in m._parameters.values() if p is not None}.values()
        )
        for optimizer in self.optimizers:
            known = {id(p) for p in self.parameters}
            for group in optimizer.param_groups:
                self.parameters += [p for p in group["params"] if id(p) not in known]
        known = {id(p) for p in self.parameters}
        self.leaves = [place for place in self._leaves if id(place.get()) not in known]
        self.tensors += [Place(owner, None, "grad") for owner in (*self.parameters, *self.leaves)]
        for hooks in hooks_of_tensors(self.tensors_with_gradients()):
            self._walk_all(hooks.values())
        self._walk_namespaces()
        if self._iterators and "next" in self._names:
            self._give_up(
                f"it may take from {self._iterators[0]}, an iterator, which a replay would not; take from it "
                "outside and pass what you get as an argument"
            )

    def tensors_with_gradients(self) -> list[torch.Tensor]:
        """Parameters, and the tensors that are now in the places of other leaves that require gradients."""
        if not self.leaves:
            return self.parameters
        now = [place.get() for place in self.leaves]
        return self.parameters + [tensor for tensor in now if isinstance(tensor, torch.Tensor)]

    # -- names ---------------------------------------------------------------------------------------

    def _walk_function(self, function: types.FunctionType) -> None:
        code = function.__code__
        if code in self._closures:
            return
        for cell in function.__closure__ or ():
            self._slot(Place(cell, None, "cell"))
        # Judged by its globals: functions made by torch's decorators carry the user's module name.
        if self._is_foreign(function.__globals__.get("__name__")):
            return
        self.held += [Place(function, "__code__", "attribute"), Place(function, "__defaults__", "attribute")]
        self._walk_all(function.__defaults__ or ())
        self._items(function.__kwdefaults__ or {})
        self._namespaces.append(_Namespace(function.__dict__, is_objects=True, hidden=("__wrapped__",)))
        self._walk(function.__dict__.get("__wrapped__"))
        names = _names(code)
        self._names |= names.all
        globals_ = names.all if "globals" in names.all else names.globals
        for name in sorted(globals_ & function.__globals__.keys()):
            self._slot(Place(function.__globals__, name, "item"))
        package = function.__globals__.get("__package__") or ""
        for name in sorted(names.imports):
            for module in (name, f"{package}.{name}".strip(".")):
                self._walk(sys.modules.get(module))

    def _walk_namespaces(self) -> None:
        """Look up all names in all namespaces, until this brings no new names and no new namespaces."""
        is_new = True
        while is_new:
            is_new = False
            for namespace in self._namespaces.copy():
                there = namespace.values.keys() - namespace.done
                is_all = namespace.is_objects and not self._names.isdisjoint(_DYNAMIC)
                # Sorted, because the lists of two recordings are compared in order.
                for name in sorted(there if is_all else there & self._names):
                    namespace.done.add(name)
                    self._slot(namespace.place(name))
                    is_new = True

    def _walk_class(self, kind: type, is_called: bool = False) -> None:
        """`is_called`: code can reach the class itself, and may make objects of it."""
        foreign = [base for base in kind.__mro__ if base is not object and self._is_foreign(base.__module__)]
        for base in kind.__mro__:
            if self._is_foreign(base.__module__):
                continue
            if is_called and base not in self._called:
                self._called.add(base)
                for name in _CONSTRUCTORS:
                    self._walk(base.__dict__.get(name))
            if self._is_seen(base):
                continue
            namespace = _Namespace(base, is_objects=True, hidden=_NOT_OPERATORS)
            self._namespaces.append(namespace)
            self.fields.append(namespace.values)
            for name, value in namespace.values.items():
                # Operators, and methods that torch's or Python's own code calls.
                is_method = isinstance(value, types.FunctionType) and name not in _NOT_OPERATORS
                if is_method and (name.startswith("__") or any(hasattr(other, name) for other in foreign)):
                    self._slot(namespace.place(name))

    # -- values --------------------------------------------------------------------------------------

    def _slot(self, place: Place) -> None:
        value = place.get()
        if isinstance(value, torch.Tensor) or value is None:
            self.tensors.append(place)
        if isinstance(value, torch.Tensor):
            self._walk_tensor(value, place)
        if _is_simple(value):
            self.simple.append(place)
        elif isinstance(value, tuple):
            self.tuples.append(place)
            for number in range(len(value)):
                self._slot(Place(place, number, "element"))
        elif not isinstance(value, torch.Tensor):
            self.held.append(place)
            self._walk(value, place.key)

    def _walk(self, value: Any, name: Any = None) -> None:
        if isinstance(value, type):
            self._walk_class(value, is_called=True)
        if isinstance(value, (*_SIMPLE, *_OPAQUE, type, torch.Tensor)) or self._is_seen(value):
            return
        if isinstance(value, types.FunctionType):
            self._walk_function(value)
        elif isinstance(value, types.MethodType):
            self._walk_all((value.__func__, value.__self__))
        elif isinstance(value, functools.partial):
            self._walk_all((value.func, *value.args))
            self._items(value.keywords)
        elif isinstance(value, (staticmethod, classmethod)):
            self._walk(value.__func__)
        elif isinstance(value, property):
            self._walk_all((value.fget, value.fset))
        elif isinstance(value, types.ModuleType):
            if not self._is_foreign(value.__name__):
                self._namespaces.append(_Namespace(value.__dict__, is_objects=False))
        elif isinstance(value, nn.Module):
            self._walk_module(value)
        elif isinstance(value, torch.optim.Optimizer):
            self._walk_optimizer(value)
        elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            self._walk(value.optimizer)
        elif isinstance(value, (dict, list, deque, types.MappingProxyType)):
            self.sizes.append(value)
            self._items(value)
            self._walk_object(value)
        elif isinstance(value, (set, bytearray, array.array)):
            self.contents.append(value)
            self._walk_all(value)
        elif isinstance(value, (tuple, frozenset)):
            self._walk_all(value)
        elif isinstance(value, np.ndarray):
            self._walk_array(value, name)
        elif isinstance(value, _GENERATORS):
            self.generators.append(value)
        elif isinstance(value, weakref.ref):
            self._walk(value())
        elif isinstance(value, contextvars.ContextVar):
            self._slot(Place(value, value.name, "context"))
        elif isinstance(value, threading.local):
            self._namespaces.append(_Namespace(value.__dict__, is_objects=True))
        elif isinstance(value, (operator.attrgetter, operator.methodcaller)):
            for path in value.__reduce__()[1]:
                self._names.update(str(path).split("."))
        elif isinstance(value, Iterator):
            self._iterators.append(name_of(name))
            self._walk_object(value)
        else:
            # `__wrapped__` of a cached function or of another step. Not `getattr`, which could run user code.
            self._walk(inspect.getattr_static(value, "__wrapped__", None))
            self._walk_object(value)

    def _walk_all(self, values: Any) -> None:
        for value in values:
            self._walk(value)

    def _walk_array(self, value: Any, name: Any) -> None:
        if value.nbytes <= _MAX_COMPARED:
            self.contents.append(value)
        elif not isinstance(name, str) or name in self._names:
            self._give_up(
                f"it uses {name_of(name)}, a NumPy array that is too large to be compared in each call; pass "
                "it as an argument"
            )

    def _walk_tensor(self, tensor: torch.Tensor, place: Place) -> None:
        if id(tensor) in self._seen_tensors:
            return
        self._seen_tensors.add(id(tensor))
        if tensor.is_leaf and tensor.requires_grad:
            self._leaves.append(place)
        if tensor.__dict__:
            # Only the names that code uses: a sparse lazy tensor has its handle in its `__dict__`.
            self._namespaces.append(_Namespace(tensor.__dict__, is_objects=False))

    def _walk_object(self, value: Any) -> None:
        kind = type(value)
        home = kind.__module__.partition(".")[0]
        if home in _WITHOUT_STATE or (home.startswith("_") and home in sys.stdlib_module_names):
            return
        self._walk_class(kind)
        for base in kind.__mro__:
            for name, slot in base.__dict__.items():
                if isinstance(slot, types.MemberDescriptorType):
                    self._slot(Place(value, name, "attribute"))
        fields = getattr(value, "__dict__", None)
        if isinstance(fields, dict):
            self._walk_fields(value, fields, ())

    def _walk_fields(self, value: Any, fields: dict[str, Any], hidden: Collection[str]) -> None:
        """The attributes of an object: those that code names, or all if unseen code of a base reads them."""
        self.fields.append(fields)
        namespace = _Namespace(fields, is_objects=True, hidden=hidden)
        self._namespaces.append(namespace)
        has_unseen_code = any(
            base not in _TRANSPARENT and self._is_foreign(base.__module__) for base in type(value).__mro__
        )
        if has_unseen_code:
            for name in sorted(fields.keys() - namespace.done):
                if not (hidden and name.startswith("_")):
                    namespace.done.add(name)
                    self._slot(Place(fields, name, "item"))

    def _walk_module(self, module: nn.Module) -> None:
        self.modules.append(module)
        self._items(module._parameters)
        self._items(module._buffers)
        self._walk_all(module._modules.values())
        # Only the empty ones: guards compare the contents of the others anyway.
        own = (module._parameters, module._modules)
        self.fields += [module._buffers, *(fields for fields in own if not fields)]
        for hooks in hooks_of_module(module):
            self.hooks.append(hooks)
            self._walk_all(hooks.values())
        self._walk_class(type(module))
        self._walk_fields(module, module.__dict__, FIELDS_OF_MODULES)

    def _walk_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers.append(optimizer)
        for state in optimizer.state.values():
            self._items(state)
        for group in optimizer.param_groups:
            for key, value in group.items():
                if key != "params" and not _is_simple(value):
                    self.holds_groups = True  # a scheduler writes into the group, a load replaces the group
                    self._slot(Place(group, key, "item"))
        for hooks in hooks_of_optimizer(optimizer):
            self.hooks.append(hooks)
            self._walk_all(hooks.values())
        self._walk_class(type(optimizer))
        if not self._is_foreign(type(optimizer).__module__):
            self._walk_fields(optimizer, optimizer.__dict__, fields_of_optimizers())

    def _give_up(self, reason: str) -> None:
        self.reason = self.reason or reason

    def _items(self, container: Any) -> None:
        is_mapping = isinstance(container, (dict, types.MappingProxyType))
        keys = list(container) if is_mapping else range(len(container))
        for key in keys:
            self._slot(Place(container, key, "item"))

    def _is_foreign(self, module: str | None) -> bool:
        """Whether code belongs to an installed package, not to the user's project.

        The globals of such code are not searched.
        """
        package = (module or "").partition(".")[0]
        return package in _FOREIGN or (package != self._package and _is_installed(package))

    def _is_seen(self, value: Any) -> bool:
        if id(value) in self._seen:
            return True
        if len(self._seen) > _MAX_OBJECTS:
            self._give_up(f"it can reach more than {_MAX_OBJECTS} objects; pass what it needs as arguments")
            return True
        self._seen.add(id(value))
        self._kept.append(value)
        return False


class _Names(NamedTuple):
    """The names in a function and in the functions defined inside it."""

    globals: frozenset[str]
    imports: frozenset[str]  # modules that the function imports
    all: frozenset[str]  # also attributes, and string constants that are identifiers


@functools.lru_cache(4096)
def _names(code: types.CodeType) -> _Names:
    globals_, imports, words = set(), set(), set(code.co_names)
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            globals_.add(instruction.argval)
        elif instruction.opname in ("IMPORT_NAME", "IMPORT_FROM"):  # IMPORT_FROM may import a module, too
            imports.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names(constant)
            globals_ |= inner.globals
            imports |= inner.imports
            words |= inner.all
        for word in constant if isinstance(constant, tuple) else (constant,):
            if isinstance(word, str) and word.isidentifier():
                words.add(word)
    return _Names(frozenset(globals_), frozenset(imports), frozenset(words))


def _is_simple(value: Any) -> bool:
    """Whether a value is immutable and compared with ==."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_simple, value))
    return isinstance(value, _SIMPLE)


@functools.cache
def _is_installed(package: str) -> bool:
    """Whether a package is installed in site-packages, and thus not the project that the user works on."""
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file
