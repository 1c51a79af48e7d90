"""Guards: the conditions under which a replay is valid.

Guards receive everything that the step function can reach (`Reach`) and remember its values at the start of
a recorded call. A replay is allowed only if all of it is unchanged. The same comparison finds side effects of
the recorded call.
"""

from __future__ import annotations

import array
import itertools
import operator
import pickle
import random
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from ..record.tensor import HAS_HOOKS, gradient_flags
from .ambient import hooks_of_tensors, modes
from .reach import Reach

_MAX_TENSOR = 1 << 16  # bytes of a CPU tensor that is compared as a whole
_WAY_OUT = "which a replay would not; do that outside"


class Guards:
    """Modes, flags, hooks, numbers and structure around the function, as they were when this object was made.

    `hold` runs before every replay, so it reads flat lists that were made once.
    """

    def __init__(self, reach: Reach, host_state: Collection[int]) -> None:
        """`host_state`: ids of the CPU tensors that a replay updates itself."""
        self._reach = reach
        # CPU tensors are compared by version: a value that the step computes from one is a replay's constant.
        self._host = [
            place
            for place in reach.tensors
            if isinstance(value := place.get(), torch.Tensor)
            and value.device.type == "cpu"
            and id(value) not in host_state
        ]
        self._counts = [
            (place.container, place.key) for place in reach.tensors if id(place.get()) in host_state
        ]
        # Items first, because they are the fastest to read.
        known = [(place, False) for place in reach.simple] + [(place, True) for place in reach.held]
        known.sort(key=lambda one: one[0].kind != "item")
        places = [place for place, _ in known]
        self._is_held = [is_held for _, is_held in known]
        self._places = places
        self._items = [(place.container, place.key) for place in places if place.kind == "item"]
        self._others = [place for place in places if place.kind != "item"]
        fields = [module.__dict__ for module in reach.modules]
        self._dicts = [f[name] for f in fields for name in ("_modules", "_parameters") if f[name]]
        self._modes = modes()
        self._values = self._read_values()
        self._tuples = self._read_tuples()
        self._sizes = self._read_sizes()
        self._num_fields = list(map(len, reach.fields))
        self._contents = self._read_contents()
        self._objects = self._read_objects()
        self._flags = self._read_flags()
        self._groups = self._read_groups()
        self._versions = self._read_versions()
        self._random = self._read_random()

    def _read_values(self) -> list[Any]:
        return [container[key] for container, key in self._items] + [place.get() for place in self._others]

    def _read_tuples(self) -> list[Any]:
        tuples = [place.get() for place in self._reach.tuples]
        return [(type(value), len(value) if isinstance(value, tuple) else 0) for value in tuples]

    def _read_sizes(self) -> list[Any]:
        # For a dict, its keys in order: code may iterate over them.
        return [list(c) if isinstance(c, dict) else len(c) for c in self._reach.sizes]

    def _read_contents(self) -> list[Any]:
        return list(map(_contents_of, self._reach.contents))

    def _read_objects(self) -> list[Any]:
        """Submodules, parameters and optimizer state, which are compared by identity."""
        objects: list[Any] = list(itertools.chain.from_iterable(map(dict.values, self._dicts)))
        for optimizer in self._reach.optimizers:
            objects.append(optimizer.state)
            objects += optimizer.state.values()
            for group in optimizer.param_groups:
                objects += group["params"]
        if self._reach.holds_groups:
            objects += [group for optimizer in self._reach.optimizers for group in optimizer.param_groups]
        objects += [container[key] for container, key in self._counts]
        return objects

    def _read_flags(self) -> list[Any]:
        tensors = self._reach.tensors_with_gradients()
        flags: list[Any] = [gradient_flags(tensors)]
        if any(self._reach.hooks):
            flags += map(tuple, self._reach.hooks)  # each hook has its own number
        if max(flags[0], default=0) >= HAS_HOOKS:
            flags += map(tuple, hooks_of_tensors(tensors))
        return flags

    def _read_groups(self) -> list[Any]:
        return [
            value
            for optimizer in self._reach.optimizers
            for group in optimizer.param_groups
            for key, value in group.items()
            if key != "params" and not _is_traced_kind(value)
        ]

    def _read_versions(self) -> list[_Version]:
        return [_Version(place.get()) for place in self._host]

    def _read_random(self) -> list[Any]:
        # A replay repeats draws from a `torch.Generator`: `RecordedCall` checks those.
        generators = [g for g in self._reach.generators if not isinstance(g, torch.Generator)]
        return list(map(_state_of_generator, generators))

    def hold(self) -> bool:
        """Whether everything is as it was when the recorded call began."""
        try:
            return (
                modes() == self._modes
                and _are_same(self._read_objects(), self._objects)
                and self._hold_values()
                and self._read_flags() == self._flags
                and self._read_groups() == self._groups
                and self._read_sizes() == self._sizes
                and list(map(len, self._reach.fields)) == self._num_fields
                and self._read_tuples() == self._tuples
                and (not self._reach.contents or self._read_contents() == self._contents)
                and (not self._host or self._read_versions() == self._versions)
            )
        except (KeyError, IndexError):
            return False

    def _hold_values(self) -> bool:
        now = self._read_values()
        # Identity first: in most calls nothing has changed, and identity is cheap to compare.
        return _are_same(now, self._values) or all(map(_is_same, now, self._values, self._is_held))

    def difference(self, other: Guards) -> str:
        """The first difference to the start of another call, among the places that both calls can reach.

        Empty if there is none.
        """
        before = {place.identity: value for place, value in zip(other._places, other._values, strict=True)}
        for place, now, is_held in zip(self._places, self._values, self._is_held, strict=True):
            old = before.get(place.identity, now)
            if not _is_same(old, now, is_held):
                return f"{place.name}, {_describe_change(old, now, is_held)},"
        if self._modes != other._modes:
            return "one of torch's modes (gradients, autocast, default type)"
        if self._tuples != other._tuples:
            return "the type or length of a tuple"
        if self._contents != other._contents:
            return "a set or an array"
        if not _are_same(self._objects, other._objects):
            return "its modules, parameters or optimizer state"
        if self._flags != other._flags:
            return "requires_grad, gradients or hooks"
        if self._versions != other._versions:
            return "a tensor on the CPU"
        return "an optimizer's options" if self._groups != other._groups else ""

    def find_side_effect(self) -> str:
        """A change that the recorded call itself has made and a replay would not make; empty if none."""
        try:
            now = self._read_values()
        except (KeyError, IndexError):
            return f"it removes an attribute or an item, {_WAY_OUT}"
        for place, before, after, is_held in zip(self._places, self._values, now, self._is_held, strict=True):
            # A place that held None may now hold a tensor: that is state, not a side effect.
            if before is not None and not _is_same(before, after, is_held):
                change = _describe_change(before, after, is_held)
                return f"it changes {place.name} {change}, {_WAY_OUT}"
        for container, before, after in zip(self._reach.sizes, self._sizes, self._read_sizes(), strict=True):
            if before != after:
                kind = type(container).__name__
                if isinstance(before, list):
                    before, after = len(before), len(after)
                what = f"the length of a {kind} from {before} to {after}" if before != after else f"a {kind}"
                return f"it changes {what}, {_WAY_OUT}"
        pairs = zip(self._reach.contents, self._contents, self._read_contents(), strict=True)
        for container, before, after in pairs:
            if before != after:
                return f"it changes what is in a {type(container).__name__}, {_WAY_OUT}"
        for place, before, after in zip(self._host, self._versions, self._read_versions(), strict=True):
            if before != after:
                return f"it changes {place.name}, a CPU tensor, {_WAY_OUT}"
        if self._read_random() != self._random:
            return (
                "it draws random numbers with Python or NumPy; draw them on the lazy device, or pass them "
                "as arguments"
            )
        return ""


class _Version:
    """A CPU tensor at one moment. Keeps the tensor alive, because a new tensor could get a dead one's id."""

    __slots__ = ("contents", "number", "tensor")

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.number = self.contents = None
        if not isinstance(tensor, torch.Tensor):
            return
        if not tensor.is_inference():
            self.number = tensor._version
        # NumPy, `.data` and other processes write without a new version: compare small tensors by value.
        if tensor.layout == torch.strided and (tensor.nbytes <= _MAX_TENSOR or tensor.is_inference()):
            self.contents = _bytes_of(tensor)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Version)
            and self.tensor is other.tensor
            and self.number == other.number
            and self.contents == other.contents
        )

    __hash__ = None  # type: ignore[assignment]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).numpy().tobytes())


def _are_same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _is_same(a: Any, b: Any, is_held: bool) -> bool:
    return a is b or (not is_held and _types_of(a) == _types_of(b) and bool(a == b))


def _types_of(value: Any) -> Any:
    """The types in a value: 1 and 1.0 are equal in Python, but an op treats them differently."""
    return [tuple, *map(_types_of, value)] if type(value) is tuple else type(value)


def _describe_change(before: Any, after: Any, is_held: bool) -> str:
    if is_held:
        return f"from one {type(before).__name__} to another {type(after).__name__}"
    return f"from {before!r} to {after!r}"


def _contents_of(container: Any) -> Any:
    if isinstance(container, np.ndarray):
        return container.dtype, container.shape, container.tobytes()
    if isinstance(container, array.array):
        return container.tobytes()
    return bytes(container) if isinstance(container, bytearray) else frozenset(container)


def _state_of_generator(generator: Any) -> Any:
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    is_numpys = generator is np.random or isinstance(generator, np.random.RandomState)
    return pickle.dumps(generator.get_state()) if is_numpys else generator.getstate()


def _is_traced_kind(value: Any) -> bool:
    return type(value) is float or (
        type(value) is tuple and bool(value) and all(type(v) is float for v in value)
    )
