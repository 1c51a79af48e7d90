"""Guards: the conditions under which a replay is valid.

A captured call has read places (`Witness`), and found something in each (`Surroundings`). A replay is allowed
if each place holds what it held then: the same object, an equal plain value, a list of the same length, a
tensor of the same type. What a replay reads anew (tensors, numbers that are followed) may differ. Nothing
else is compared, but for torch's modes and global hooks, which no code reads by a name.
"""

from __future__ import annotations

import enum
import gc
from collections.abc import Collection
from typing import Any

import torch

from ..record._recorder import TensorFlags, plain_modes
from ..record.tensor import HAS_GRADIENT, HAS_HOOKS, find_handle, gradient_flags
from ._places import Plan, dict_of_class, is_same
from .ambient import HOOKS_OF_ALL, hooks_of_tensors, modes
from .c_calls import answer_of
from .place_finder import dict_of
from .places import MISSING, Kind, Place
from .surroundings import Found, Surroundings, TensorFacts, detail_of
from .testimony import Testimony
from .values import CONTAINERS, Version, describe, is_simple


class Get(enum.IntEnum):
    """How a row of a plan gets its value. Mirrored in src/plan.h."""

    DICT_ITEM = 0
    ITEM = 1
    CELL = 2
    SLOT = 3
    CLASS = 4
    ATTRIBUTE = 5
    OBJECT = 6
    WEAK = 7
    CONTEXT = 8
    TYPE_OF = 9
    GRAD = 10
    NO_GRAD = 11  # a gradient that must be missing: the flags of the tensor tell, too


class Check(enum.IntEnum):
    """What a row of a plan checks. Mirrored in src/plan.h."""

    ANY = 0
    IS = 1
    VALUE = 2
    HAS_TYPE = 3
    MISSING = 4
    SIZE = 5
    KEYS = 6
    SAME_AS = 7
    UNLIKE = 8


_GETS = {
    Kind.ITEM: Get.ITEM,
    Kind.CELL: Get.CELL,
    Kind.SLOT: Get.SLOT,
    Kind.CLASS: Get.CLASS,
    Kind.ATTRIBUTE: Get.ATTRIBUTE,
    Kind.GRAD: Get.GRAD,
    Kind.OBJECT: Get.OBJECT,
    Kind.WEAK: Get.WEAK,
    Kind.CONTEXT: Get.CONTEXT,
    Kind.TYPE: Get.TYPE_OF,
}
_MODE_NAMES = (
    "gradient mode",
    "inference mode",
    "autocast",
    "the type of autocast",
    "autocast's cache of casts",
    "casts that autocast keeps around the call",
    "the default type",
    "deterministic algorithms",
    "anomaly mode",
    "hooks of saved tensors",
    "a setting of torch or of this thread",
    "the transforms of torch.func",
)


class Guards:
    """What a captured call has found in the places that it has read."""

    def __init__(
        self,
        testimony: Testimony,
        before: Surroundings,
        followed: Collection[Place],
        counts: Collection[int],
        ambient: tuple[Any, ...],
    ) -> None:
        """`followed`: places of numbers that a replay reads. `counts`: ids of tensors that it updates."""
        self._shallow = testimony.shallow
        self._present = testimony.present
        self._before = before
        self._followed = followed
        self._counts = counts
        self._modes, self._plain_modes, self._hooks = ambient
        self._rows: list[tuple[Any, ...]] = []
        self._places: list[Place] = []
        self._numbers: dict[Place, int] = {}  # the row of each place
        self._aliases: dict[int, int] = {}  # the row of each list, dict and tuple, by id
        self.outputs: dict[Place, int] = {}  # positions in the values that `hold` returns
        self._num_outputs = 0
        self._names: list[Place] = []  # the places of the outputs
        self._structures = testimony.structures
        self._tensors: list[int] = []  # positions of tensors among the outputs
        self._flags: list[int] = []
        # Positions of tensors that must not have a gradient, with the place of the gradient.
        self._without_gradient: dict[int, Place] = {}
        self._types: list[Any] = []
        self._buffers: list[tuple[int, Any]] = []  # positions of sets and arrays, with their contents
        self._versions: list[tuple[int, Version]] = []  # of CPU tensors
        for place in testimony.reads:
            self._add(place, place in testimony.contents)
        self._add_identities(testimony)
        # What is in caches, which is kept here: no other object has these ids.
        self._caches = [(cache, _contents_of(cache)) for cache in testimony.caches.values()]
        self._told = list(testimony.told.items())
        self._plan = Plan(self._rows)
        # Whether there is a gradient is compared where its place holds None, and else a matter of that place.
        ignored = bytes(0 if n in self._without_gradient else HAS_GRADIENT for n in self._tensors)
        self._tensor_flags = TensorFlags(self._tensors, bytes(self._flags), ignored)
        tensors = [
            place.get() if place.kind is Kind.WEAK else before[place].value
            for place in (self._names[position] for position in self._tensors)
        ]
        # Which tensors are one object, if the step asks for that.
        self._partition = _partition(tensors) if testimony.compares_tensors else None
        self._has_hooks = any(flags & HAS_HOOKS for flags in self._flags)
        self._tensor_hooks = [list(one) for one in hooks_of_tensors(tensors)]
        self._has_rare = self._partition is not None or bool(
            self._hooks or self._has_hooks or self._buffers or self._versions or self._caches or self._told
        )

    # -- what to compare -----------------------------------------------------------------------------------

    def _add(self, place: Place, has_contents: bool) -> int:
        if place in self._numbers:
            return self._numbers[place]
        is_path = type(place.container) is Place
        parent = self._add(place.container, False) if is_path else -1
        found = self._before[place]
        check, expected, is_output = self._check(place, found, has_contents)
        get = _GETS[place.kind]
        if get is Get.ITEM and not is_path and isinstance(place.container, dict):
            get = Get.DICT_ITEM
        container = None if is_path else place.container
        if get is Get.GRAD and found.value is None and self.outputs.get(place.container) in self._tensors:
            get = Get.NO_GRAD
            self._without_gradient[self.outputs[place.container]] = place
        if get is Get.CLASS:
            get, container = Get.DICT_ITEM, dict_of_class(place.container)
        number = len(self._rows)
        is_container = isinstance(found.value, CONTAINERS) and not isinstance(found.value, tuple)
        is_tensor = isinstance(found.value, torch.Tensor) and is_output
        first = self._aliases.setdefault(id(found.value), number) if is_container or is_tensor else number
        if first != number and is_tensor:  # one tensor in two places: it stays one
            check, expected, is_output = Check.SAME_AS, first, False
            self.outputs[place] = self.outputs[self._places[first]]
        # An object is that object with its class and its dict.
        key = dict_of(container) if get is Get.TYPE_OF and not is_path else place.key
        self._rows.append((get, check, is_output, parent, container, key, expected))
        self._places.append(place)
        self._numbers[place] = number
        if first != number and is_container:  # so does one list
            self._rows.append((get, Check.SAME_AS, False, parent, container, place.key, first))
            self._places.append(place)
        if is_output:
            position = self.outputs[place] = self._num_outputs
            self._num_outputs += 1
            self._names.append(place)
            self._add_output(position, found, has_contents)
        return number

    def _add_identities(self, testimony: Testimony) -> None:
        """Containers that must be certain objects, and those that must stay apart.

        A number that is written into one list is not what a replay reads from another, unless they are one.
        And something may hold a container that is in a place, too, such as `get = table.__getitem__` or a
        partial: that goes on with the old container when the place gets another one. So does a cached
        function with the tensor or the container that it has returned.
        """
        identified = {id(self._before[place].value) for place in testimony.identified_places}
        identified.update(testimony.held)
        for cache in testimony.caches.values():
            identified.update(_kept_by(cache))
        for place in {**testimony.reads, **dict.fromkeys(testimony.identified_places)}:
            if id(self._before[place].value) in identified:  # in this place, too
                self._add_again(place, Check.IS, self._before[place].value)
        by_key: dict[Any, dict[Place, None]] = {}
        for place in testimony.used_places():
            if type(place.container) is Place and place.kind is Kind.ITEM:
                by_key.setdefault((type(place.key), place.key), {})[place.container] = None
        for place in testimony.writes:
            if type(place.container) is not Place or place.kind is not Kind.ITEM:
                continue
            written = place.container
            for other in by_key[type(place.key), place.key]:
                values = [self._before[one].value for one in (written, other)]
                if values[0] is not values[1] and type(values[0]) is type(values[1]):
                    self._add_again(other, Check.UNLIKE, self._add(written, False))

    def _add_again(self, place: Place, check: Check, expected: Any) -> None:
        row = self._rows[self._add(place, False)]
        self._rows.append((row[0], check, False, *row[3:6], expected))
        self._places.append(place)

    def _check(self, place: Place, found: Found, has_contents: bool) -> tuple[Check, Any, bool]:
        value = found.value
        if value is MISSING:
            return Check.MISSING, None, False
        if place in self._present:
            return Check.ANY, None, False
        if place in self._shallow or place.kind is Kind.TYPE:
            return Check.IS, value, False
        if place.kind is Kind.WEAK:  # holding the object itself would keep it alive
            return Check.HAS_TYPE, value, isinstance(found.detail, TensorFacts)
        if place.kind is Kind.OBJECT and not isinstance(value, torch.Tensor):
            if place in self._structures:
                return (*_structure(found), False)
            return Check.ANY, None, has_contents
        if isinstance(value, torch.Tensor):
            if id(value) in self._counts or (found.detail.handle is None and found.detail.version is None):
                return Check.IS, value, False
            return Check.HAS_TYPE, type(value), True
        if place in self._followed:
            return Check.HAS_TYPE, type(value), True
        if has_contents:
            return Check.HAS_TYPE, type(value), True
        if isinstance(value, CONTAINERS) and not (is_simple(value) and place not in self._structures):
            return (
                (*_structure(found), False)
                if place in self._structures
                else (Check.HAS_TYPE, type(value), False)
            )
        return (Check.VALUE if is_simple(value) else Check.IS), value, False

    def _add_output(self, position: int, found: Found, has_contents: bool) -> None:
        facts = found.detail
        if isinstance(facts, TensorFacts):
            self._tensors.append(position)
            self._flags.append(facts.flags)
            self._types.append(None if facts.handle is None else facts.handle.type)
            if facts.version is not None:
                self._versions.append((position, facts.version))
        elif has_contents:
            self._buffers.append((position, facts))

    # -- comparing -----------------------------------------------------------------------------------------

    def hold(self) -> list[Any] | None:
        """The values of the places that a replay reads (see `outputs`); None if something has changed.

        The list is not to be changed: the next call may return it again.
        """
        values = self._plan.read()
        if isinstance(values, int):
            return None
        now = plain_modes()
        if (now != self._plain_modes or now < 0) and modes() != self._modes:
            return None
        if any(HOOKS_OF_ALL) != bool(self._hooks) or not self._tensor_flags.hold(values):
            return None
        return values if not self._has_rare or self._holds_rarely(values) else None

    def _holds_rarely(self, values: list[Any]) -> bool:
        """Compare what most steps do not have."""
        tensors = [values[position] for position in self._tensors]
        if self._partition is not None and _partition(tensors) != self._partition:
            return False
        if self._hooks and [list(one) for one in HOOKS_OF_ALL] != self._hooks:
            return False
        if self._has_hooks and [list(o) for o in hooks_of_tensors(tensors)] != self._tensor_hooks:
            return False
        return (
            all(detail_of(values[position]) == contents for position, contents in self._buffers)
            and all(Version(values[position]) == version for position, version in self._versions)
            and all(_contents_of(cache).keys() >= held.keys() for cache, held in self._caches)
            and all(is_same(answer_of(function, args), value) for (function, args), value in self._told)
        )

    def types_of(self) -> list[Any]:
        """The types of the lazy tensors among the outputs, None for others, in their order."""
        return self._types

    @property
    def names(self) -> list[Place]:
        """The place of each output; of a tensor in several places, the first."""
        return self._names

    @property
    def num_looked_at(self) -> int:
        """How many rows and dicts the last comparison has looked at. For tests."""
        return self._plan.num_looked_at

    @property
    def tensor_positions(self) -> list[int]:
        """The positions of tensors among the outputs."""
        return self._tensors

    def difference(self) -> str:
        """What has changed since the captured call, with the old and the new value; empty if nothing has."""
        values = self._plan.read()
        if isinstance(values, int):
            place = self._places[values]
            return _describe(place, self._before[place], self._rows[values][1])
        if changed := ambient_change((self._modes, self._plain_modes, self._hooks)):
            return changed
        tensors = [values[position] for position in self._tensors]
        places = self._names
        for position, _tensor, flags in zip(self._tensors, tensors, gradient_flags(tensors), strict=True):
            if flags & HAS_GRADIENT and position in self._without_gradient:
                grad = self._without_gradient[position]
                return _describe(grad, self._before[grad], Check.VALUE)
            old = self._before[places[position]].detail.flags
            if flags & ~HAS_GRADIENT != old:
                if (flags ^ old) & 1:
                    return (
                        f"requires_grad of {places[position].name} from {bool(old & 1)} to {bool(flags & 1)}"
                    )
                return f"the hooks of {places[position].name}, or whether it is a leaf,"
        for position, type_ in zip(self._tensors, self._types, strict=True):
            handle = find_handle(values[position])
            if type_ is not None and (handle is None or handle.type is not type_):
                now_type = values[position].device if handle is None else handle.type
                return f"the type of {places[position].name} from {type_} to {now_type}"
        if not self._holds_rarely(values):
            for position, contents in self._buffers:
                if detail_of(values[position]) != contents:
                    return f"the contents of {places[position].name}"
            for position, version in self._versions:
                if Version(values[position]) != version:
                    return f"{places[position].name}, a tensor on the CPU"
            return "the hooks of a tensor, or a cached function"
        return ""


def ambient() -> tuple[Any, ...]:
    """Torch's modes and global hooks now, for `Guards`."""
    hooks = [list(one) for one in HOOKS_OF_ALL]
    return modes(), plain_modes(), hooks if any(hooks) else []


def ambient_change(before: tuple[Any, ...]) -> str:
    """Which of torch's modes or global hooks is another now, with both values; empty if none is."""
    old_modes, _, old_hooks = before
    new_modes, _, new_hooks = ambient()
    for number, (old, new) in enumerate(zip(old_modes, new_modes, strict=False)):
        if old != new:
            name = _MODE_NAMES[number] if number < len(_MODE_NAMES) else "a mode"
            if isinstance(old, tuple) and isinstance(new, tuple):
                return name  # numbers that say nothing to a reader
            return f"{name} from {old!r} to {new!r}"
    if len(old_modes) != len(new_modes):
        return "the modes that torch is in"
    return "the hooks of all modules or optimizers" if old_hooks != new_hooks else ""


def _structure(found: Found) -> tuple[Check, Any]:
    if not isinstance(found.value, CONTAINERS):
        return Check.ANY, None
    return (Check.KEYS if isinstance(found.value, dict) else Check.SIZE), found.detail


def _partition(tensors: list[Any]) -> list[int]:
    first: dict[int, int] = {}
    return [first.setdefault(id(tensor), len(first)) for tensor in tensors]


def _contents_of(cache: Any) -> dict[tuple[int, int], Any]:
    """The keys of a `functools.lru_cache` and what it has for each, by their ids.

    The counts of `cache_info` do not tell whether other code has cleared and filled it.
    """
    tables = [part for part in gc.get_referents(cache) if type(part) is dict and part is not vars(cache)]
    return {(id(pair[0]), id(pair[1])): pair for table in tables for pair in table.items()}


def _kept_by(cache: Any) -> set[int]:
    """The ids of the tensors and containers that a `functools.lru_cache` may return, or that are in these."""
    found: set[int] = set()
    # A cache without a limit has them in a dict, and one with a limit tells the garbage collector of each.
    waiting = [part for part in gc.get_referents(cache) if part is not vars(cache)]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, (torch.Tensor, *CONTAINERS)) or id(one) in found:
            continue
        found.add(id(one))
        if not isinstance(one, torch.Tensor):
            waiting += gc.get_referents(one)  # and not by its methods, which may be the user's
    return found


def _describe(place: Place, before: Found, check: Check) -> str:
    now = place.get()
    if check in (Check.SIZE, Check.KEYS) and type(now) is type(before.value):
        if check is Check.SIZE or len(now) != len(before.detail[1]):
            old = before.detail[1] if check is Check.SIZE else len(before.detail[1])
            return f"the length of {place.name} from {old} to {len(now)}"
        return f"the keys of {place.name}"
    if check is Check.UNLIKE:
        return f"{place.name}, which was another object than one that the step writes,"
    if check is Check.SAME_AS:
        return f"{place.name}, which was one object with another place,"
    old, new = describe(before.value), describe(now)
    return f"{place.name} from {old} to {new if new != old else f'another {type(now).__name__}'}"
