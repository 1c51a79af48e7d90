"""Where a step function keeps its state: every attribute, variable and container slot that it can reach.

A replay reads a step's state from the places where the recording found it, and puts new values where
the recording put them. So `load_state_dict`, assignments and manual edits between two calls are seen,
and a hidden state that is rebound in each step goes on from step to step.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

_SIMPLE = (bool, int, float, str, type(None), torch.dtype, torch.device)
# What a step function can reach through these is not its state.
_OPAQUE = (types.ModuleType, type, types.BuiltinFunctionType, torch.Size, torch.Generator)
_MAX_OBJECTS = 50_000
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Place(NamedTuple):
    """A slot of a container: `container[key]`, a closure's cell, an attribute, or an element of a tuple.

    The container of an element is the place of its tuple, which is replaced when the element is set.
    """

    container: Any
    key: Any
    kind: str  # "item", "cell", "grad" or "element"

    def get(self) -> Any:
        """What is there now; None if the slot is gone."""
        if self.kind == "item":
            try:
                return self.container[self.key]
            except (KeyError, IndexError):
                return None
        if self.kind == "grad":
            return self.container.grad
        if self.kind == "element":
            elements = self.container.get()
            is_there = isinstance(elements, tuple) and self.key < len(elements)
            return elements[self.key] if is_there else None
        try:
            return self.container.cell_contents
        except ValueError:
            return None

    def set(self, value: Any) -> None:
        """Put a value there."""
        if self.kind == "item":
            self.container[self.key] = value
        elif self.kind == "grad":
            self.container.grad = value
        elif self.kind == "element":
            old = self.container.get()
            elements = [*old[: self.key], value, *old[self.key + 1 :]]
            is_named = hasattr(old, "_fields")
            self.container.set(type(old)(*elements) if is_named else type(old)(elements))
        else:
            self.container.cell_contents = value


class Reach:
    """Everything that a function can reach: places with tensors, simple values, modules, optimizers."""

    def __init__(
        self, function: Callable[..., Any], roots: Sequence[Any], closures: Collection[types.CodeType] = ()
    ) -> None:
        """`closures`: functions that run after the step, whose own state is not the step's."""
        self._closures = closures
        self.tensors: list[Place] = []
        self.simple: list[Place] = []
        self.tuples: list[Place] = []  # those that hold tensors or objects: what they consist of
        self.sizes: list[Any] = []  # lists, dicts and sets: whether they grow
        self.modules: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # ids stay unique as long as their objects live
        self._walk_function(function)
        for root in roots:
            self._walk(root)
        self.parameters = list(
            {id(p): p for m in self.modules for p in m._parameters.values() if p is not None}.values()
        )
        for optimizer in self.optimizers:
            known = {id(p) for p in self.parameters}
            for group in optimizer.param_groups:
                self.parameters += [p for p in group["params"] if id(p) not in known]
        for parameter in self.parameters:
            self.tensors.append(Place(parameter, None, "grad"))

    def _walk_function(self, function: Any) -> None:
        function = getattr(function, "__wrapped__", function)
        code = getattr(function, "__code__", None)
        if code is None or code in self._closures or self._is_seen(code):
            return
        for cell in function.__closure__ or ():
            self._slot(Place(cell, None, "cell"))
        for name in _names(code):
            if name in function.__globals__:
                self._slot(Place(function.__globals__, name, "item"))
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._walk(default)

    def _slot(self, place: Place) -> None:
        value = place.get()
        if isinstance(value, torch.Tensor) or value is None:
            self.tensors.append(place)
        if _is_simple(value):
            self.simple.append(place)
        elif isinstance(value, tuple):
            self.tuples.append(place)
            for number in range(len(value)):
                self._slot(Place(place, number, "element"))
        else:
            self._walk(value)

    def _walk(self, value: Any) -> None:
        if isinstance(value, (*_SIMPLE, *_OPAQUE, torch.Tensor)) or self._is_seen(value):
            return
        if isinstance(value, types.MethodType):
            self._walk_function(value.__func__)
            self._walk(value.__self__)
        elif isinstance(value, types.FunctionType):
            if not (value.__module__ or "").startswith(("torch.", "lazystep.")):
                self._walk_function(value)
        elif isinstance(value, nn.Module):
            self._walk_module(value)
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizers.append(value)
            for state in value.state.values():
                self._items(state)
        elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            self._walk(value.optimizer)
        elif isinstance(value, (dict, list)):
            self.sizes.append(value)
            self._items(value)
        elif isinstance(value, (tuple, frozenset, set)):
            if isinstance(value, set):
                self.sizes.append(value)
            for element in value:
                self._walk(element)
        elif _is_users(value):
            self._items(value.__dict__)

    def _walk_module(self, module: nn.Module) -> None:
        self.modules.append(module)
        for name, value in module.__dict__.items():
            if name in ("_parameters", "_buffers"):
                self._items(value)
            elif name == "_modules":
                for child in value.values():
                    self._walk(child)
            elif not name.startswith("_"):
                self._slot(Place(module.__dict__, name, "item"))

    def _items(self, container: Any) -> None:
        keys = range(len(container)) if isinstance(container, list) else list(container)
        for key in keys:
            self._slot(Place(container, key, "item"))

    def _is_seen(self, value: Any) -> bool:
        if id(value) in self._seen or len(self._seen) > _MAX_OBJECTS:
            return True
        self._seen.add(id(value))
        self._kept.append(value)
        return False

    def hook_dicts(self) -> list[dict[int, Any]]:
        """Where modules keep their hooks."""
        return [m.__dict__[name] for m in self.modules for name in _HOOKS]


def _names(code: types.CodeType) -> Iterator[str]:
    """Global names that a function may use, those of functions defined inside it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_simple(value: Any) -> bool:
    """Whether a value is known by comparison, and nothing in it can change."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_simple, value))
    return isinstance(value, _SIMPLE)


def _is_users(value: Any) -> bool:
    module = type(value).__module__ or ""
    has_dict = isinstance(getattr(value, "__dict__", None), dict)
    return has_dict and not module.startswith(("torch", "lazystep", "builtins", "numpy", "_"))
