"""Recipes: how a replay makes what a recorded call has returned, kept or passed to a closure.

A leaf of a result is an output of the program, something that was there before the call, a number that is
computed, or a constant. Anything else is a reason not to replay.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..record.handle import Handle, Handles
from ..record.tensor import find_handle, wrap
from ._places import is_same
from .places import MISSING, Place
from .recorded import RecordedCall
from .traced import Expression, is_traced, plain
from .values import describe, is_simple


class NotReplayableError(Exception):
    """Two calls do not make a replay; the message says which input, number or result is unexplained."""


class UnsettledError(NotReplayableError):
    """The two calls do not agree yet; the next call may agree."""


# Makes a leaf of the result, or of a closure's arguments, at a replay.
Recipe = Callable[["Context"], Any]


class Context:
    """The values that recipes of a running replay read."""

    __slots__ = ("before", "fresh", "leaves", "number", "outputs", "tensors")

    def __init__(self, leaves: Sequence[Any], number: Callable[[int], Any], before: Sequence[Any]) -> None:
        self.leaves = leaves
        self.number = number  # the value of an expression, by its number
        self.before = before  # what `Guards.hold` has found
        self.outputs: Handles[Handle]
        self.fresh: list[Handle] = []  # draws and other memory that this replay has made for itself
        self.tensors: dict[int, torch.Tensor] = {}

    def tensor(
        self, handle: Handle, key: int, make: Callable[[torch.Tensor], torch.Tensor] | None
    ) -> torch.Tensor:
        """A tensor for this value. Leaves that were one object, with this key, become one object again."""
        if key not in self.tensors:
            tensor = wrap(handle)
            self.tensors[key] = tensor if make is None else make(tensor)
        return self.tensors[key]


class Recipes:
    """Finds a recipe for each leaf of a recorded call's results, effects and closure arguments."""

    def __init__(
        self, call: RecordedCall, expressions: list[Expression], fresh: Mapping[Handle, int]
    ) -> None:
        """`fresh`: values that each replay makes anew before its program runs, and the number of each."""
        assert call.program is not None
        self._made = {h: n for n, h in enumerate(call.program.outputs) if h is not None}
        self._fresh = dict(fresh)
        # Tensors that existed when the call began, by identity and by handle: the argument or place of each.
        self._tensors: dict[int, int | Place] = {}
        self._values: dict[Handle, int | Place] = {}
        self._is_outside: Callable[[Any], bool] = call.is_outside
        self._as_left: Callable[[Any], Any] = call.as_left
        for number, leaf in enumerate(call.leaves):
            self._add(leaf, number)
        for place in call.testimony.places_with_values():
            self._add(call.before[place].value, place)
        # Places that recipes read. State can move from place to place, so all are read when a replay begins,
        # before any place is overwritten.
        self.positions: dict[Place, int] = {}  # filled when the guards are made
        self._expressions = expressions  # the replay's list: numbers among the leaves are added to it

    def _add(self, tensor: Any, source: int | Place) -> None:
        if isinstance(tensor, torch.Tensor):
            self._tensors.setdefault(id(tensor), source)
            handle = find_handle(tensor)
            if handle is not None:
                self._values.setdefault(handle, source)

    def _take(self, source: int | Place) -> Recipe:
        if isinstance(source, int):
            return lambda context: context.leaves[source]
        return lambda context: context.before[self.positions[source]]

    def finish(self, positions: Mapping[Place, int]) -> None:
        """All recipes are found. They keep none of the call's tensors alive."""
        self.positions.update(positions)
        self._made.clear()
        self._fresh.clear()
        self._values.clear()
        self._is_outside = self._as_left = bool  # the methods of the call would keep it alive

    def is_made(self, value: Any) -> bool:
        """Whether the step itself made this tensor."""
        handle = find_handle(value)
        return handle is not None and handle in self._made

    def position_of(self, value: Any) -> int:
        """Which output of the program this tensor is."""
        handle = find_handle(value)
        assert handle is not None
        return self._made[handle]

    def find(self, old: Any, new: Any, what: str) -> Recipe:
        """The recipe for the leaf `new`; `old` is the same leaf in the earlier call."""
        handle = find_handle(new)
        if handle is not None and handle in self._made:
            position, key, make = self._made[handle], id(new), _kind_of_tensor(new)
            return lambda context: context.tensor(context.outputs[position], key, make)
        if handle is not None and handle in self._fresh:
            number, key, make = self._fresh[handle], id(new), _kind_of_tensor(new)
            return lambda context: context.tensor(context.fresh[number], key, make)
        if id(new) in self._tensors:
            return self._take(self._tensors[id(new)])
        if isinstance(new, torch.Tensor):
            if handle in self._values and not new.requires_grad:
                # Another tensor object with the same value, such as `detach` returns.
                same = self._take(self._values[handle])
                return lambda context: _another_tensor(same(context))
            if old is new:
                return lambda context: new
            raise NotReplayableError(
                f"it {what} a tensor that the step did not make, another one in each call; make it an "
                "argument of the step, or make it inside with an op on the lazy device"
            )
        if is_traced(new):
            self._expressions.append(new.expression)
            index = len(self._expressions) - 1
            return lambda context: context.number(index)
        if old is new or (type(old) is type(new) and _same(old, new)):
            return lambda context: new
        raise NotReplayableError(f"it {what} {old!r} in one call and {new!r} in the next")

    def keep(self, new: Any) -> Recipe:
        """The recipe for what the call leaves in a place: also containers, made anew in each replay."""
        if isinstance(new, torch.Tensor) or is_traced(new):
            return self.find(new if self._is_outside(new) else None, new, "keeps")
        if new is MISSING or (is_simple(new) and not _has_traced(new)) or self._is_outside(new):
            return lambda context: new
        if type(new) is list or (isinstance(new, tuple) and not isinstance(new, torch.Size)):
            parts = [self.keep(part) for part in self._as_left(new)]
            if hasattr(new, "_fields"):
                make = type(new)
                return lambda context: make(*[part(context) for part in parts])
            kind = type(new)
            return lambda context: kind([part(context) for part in parts])
        if type(new) in (dict, collections.OrderedDict):
            items = [(key, self.keep(part)) for key, part in self._as_left(new).items()]
            mapping = type(new)
            return lambda context: mapping([(key, part(context)) for key, part in items])
        raise NotReplayableError(f"it keeps {describe(new)}, which a replay can't make")


def _kind_of_tensor(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A function that turns a plain tensor into a parameter or a leaf; None if it is a plain result."""
    if isinstance(tensor, torch.nn.Parameter):
        wants_gradient = tensor.requires_grad
        return lambda made: torch.nn.Parameter(made, wants_gradient)
    if tensor.requires_grad and tensor.is_leaf:
        return torch.Tensor.requires_grad_
    return None


def _another_tensor(tensor: Any) -> Any:
    handle = find_handle(tensor)
    return tensor if handle is None else wrap(handle)


def _has_traced(value: Any) -> bool:
    return any(map(_has_traced, value)) if isinstance(value, tuple) else is_traced(value)


def _same(a: Any, b: Any) -> bool:
    try:
        return is_same(plain(a), plain(b)) or bool(a == b)
    except Exception:
        return False
