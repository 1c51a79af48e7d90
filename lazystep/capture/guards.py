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

from ..record.tensor import HAS_HOOKS, find_handle, gradient_flags
from ._places import Plan, dict_of_class, is_same
from .ambient import hooks_of_all, hooks_of_tensors, modes
from .places import MISSING, Kind, Place
from .surroundings import Found, Surroundings, TensorFacts, detail_of
from .values import CONTAINERS, Version, describe, is_simple
from .witness import Witness


class Get(enum.IntEnum):
    """How a row of a plan gets its value. Mirrored in src/places.c."""

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


class Check(enum.IntEnum):
    """What a row of a plan checks. Mirrored in src/places.c."""

    ANY = 0
    IS = 1
    VALUE = 2
    HAS_TYPE = 3
    MISSING = 4
    SIZE = 5
    KEYS = 6
    SAME_AS = 7


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
_WITHOUT_GRADIENT = bytes(flags & ~2 for flags in range(256))  # whether it is there is a place's business
_MODE_NAMES = (
    "gradient mode",
    "inference mode",
    "autocast",
    "the type of autocast",
    "the default type",
    "deterministic algorithms",
    "hooks of saved tensors",
)


class Guards:
    """What a captured call has found in the places that it has read."""

    def __init__(
        self,
        witness: Witness,
        before: Surroundings,
        followed: Collection[Place],
        counts: Collection[int],
        ambient: tuple[Any, ...],
    ) -> None:
        """`followed`: places of numbers that a replay reads. `counts`: ids of tensors that it updates."""
        self._shallow = witness.shallow
        self._present = witness.present
        self._before = before
        self._followed = followed
        self._counts = counts
        self._modes, self._hooks = ambient
        self._rows: list[tuple[Any, ...]] = []
        self._places: list[Place] = []
        self._numbers: dict[Place, int] = {}  # the row of each place
        self._aliases: dict[int, int] = {}  # the row of each list, dict and tuple, by id
        self.outputs: dict[Place, int] = {}  # positions in the values that `hold` returns
        self._num_outputs = 0
        self._names: list[Place] = []  # the places of the outputs
        self._structures = witness.structures
        self._tensors: list[int] = []  # positions of tensors among the outputs
        self._flags: list[int] = []
        self._types: list[Any] = []
        self._buffers: list[tuple[int, Any]] = []  # positions of sets and arrays, with their contents
        self._versions: list[tuple[int, Version]] = []  # of CPU tensors
        for place in witness.reads:
            self._add(place, place in witness.contents)
        # The objects that are in caches, which are kept here: no other object has their ids.
        self._caches = [(cache, _contents_of(cache)) for cache in witness.caches.values()]
        self._told = list(witness.told.items())
        self._sort_rows()
        self._plan = Plan(self._rows)
        self._flag_bytes = bytes(self._flags)
        tensors = [
            place.get() if place.kind is Kind.WEAK else before[place].value
            for place in (self._names[position] for position in self._tensors)
        ]
        # Which tensors are one object, if the step asks for that.
        self._partition = _partition(tensors) if witness.compares_tensors else None
        self._has_hooks = any(flags & HAS_HOOKS for flags in self._flags)
        self._tensor_hooks = [list(one) for one in hooks_of_tensors(tensors)]

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
        if get is Get.CLASS:
            get, container = Get.DICT_ITEM, dict_of_class(place.container)
        number = len(self._rows)
        is_container = isinstance(found.value, CONTAINERS) and not isinstance(found.value, tuple)
        is_tensor = isinstance(found.value, torch.Tensor) and is_output
        first = self._aliases.setdefault(id(found.value), number) if is_container or is_tensor else number
        if first != number and is_tensor:  # one tensor in two places: it stays one
            check, expected, is_output = Check.SAME_AS, first, False
            self.outputs[place] = self.outputs[self._places[first]]
        self._rows.append((get, check, is_output, parent, container, place.key, expected))
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

    def _sort_rows(self) -> None:
        """Put rows of one dict side by side if no other row needs them: see [Note: versions of dicts]."""
        rows = self._rows
        needed = {row[3] for row in rows} | {row[6] for row in rows if row[1] is Check.SAME_AS}
        quiet = [
            number
            for number, row in enumerate(rows)
            if row[0] is Get.DICT_ITEM and not row[2] and row[1] < Check.SIZE and number not in needed
        ]
        quiet.sort(key=lambda number: id(rows[number][4]))
        is_quiet = set(quiet)
        order = quiet + [number for number in range(len(rows)) if number not in is_quiet]
        moved = {old: new for new, old in enumerate(order)} | {-1: -1}
        self._rows = [
            (*row[:3], moved[row[3]], *row[4:6], moved[row[6]] if row[1] is Check.SAME_AS else row[6])
            for row in (rows[number] for number in order)
        ]
        self._places = [self._places[number] for number in order]

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
        """The values of the places that a replay reads (see `outputs`); None if something has changed."""
        values = self._plan.read()
        if isinstance(values, int):
            return None
        if modes() != self._modes or any(hooks_of_all()) != bool(self._hooks):
            return None
        tensors = [values[position] for position in self._tensors]
        flags = gradient_flags(tensors)
        if flags.translate(_WITHOUT_GRADIENT) != self._flag_bytes:
            return None
        return values if self._holds_rarely(values, tensors, flags) else None

    def _holds_rarely(self, values: list[Any], tensors: list[torch.Tensor], flags: bytes) -> bool:
        """Compare what most steps do not have."""
        if self._partition is not None and _partition(tensors) != self._partition:
            return False
        if self._hooks and [list(one) for one in hooks_of_all()] != self._hooks:
            return False
        if self._has_hooks and [list(o) for o in hooks_of_tensors(tensors)] != self._tensor_hooks:
            return False
        return (
            all(detail_of(values[position]) == contents for position, contents in self._buffers)
            and all(Version(values[position]) == version for position, version in self._versions)
            and all(_contents_of(cache).keys() >= held.keys() for cache, held in self._caches)
            and all(is_same(function(*args), value) for (function, args), value in self._told)
        )

    def types_of(self) -> list[Any]:
        """The types of the lazy tensors among the outputs, None for others, in their order."""
        return self._types

    @property
    def names(self) -> list[Place]:
        """The place of each output; of a tensor in several places, the first."""
        return self._names

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
        now = modes()
        for number, (old, new) in enumerate(zip(self._modes, now, strict=False)):
            if old != new:
                name = _MODE_NAMES[number] if number < len(_MODE_NAMES) else "a mode"
                return f"{name} from {old!r} to {new!r}"
        if len(self._modes) != len(now):
            return "the modes that torch is in"
        if [list(one) for one in hooks_of_all()] != (self._hooks or [[] for _ in hooks_of_all()]):
            return "the hooks of all modules or optimizers"
        tensors = [values[position] for position in self._tensors]
        places = self._names
        for position, _tensor, flags in zip(self._tensors, tensors, gradient_flags(tensors), strict=True):
            old = self._before[places[position]].detail.flags
            if flags & ~2 != old:
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
        if not self._holds_rarely(values, tensors, gradient_flags(tensors)):
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
    hooks = [list(one) for one in hooks_of_all()]
    return modes(), hooks if any(hooks) else []


def _structure(found: Found) -> tuple[Check, Any]:
    if not isinstance(found.value, CONTAINERS):
        return Check.ANY, None
    return (Check.KEYS if isinstance(found.value, dict) else Check.SIZE), found.detail


def _partition(tensors: list[Any]) -> list[int]:
    first: dict[int, int] = {}
    return [first.setdefault(id(tensor), len(first)) for tensor in tensors]


def _contents_of(cache: Any) -> dict[int, Any]:
    """The keys and results in a `functools.lru_cache`, by id.

    A cache without a limit keeps them in a dict, and one with a limit in a list. The counts of `cache_info`
    do not tell whether other code has cleared and filled it.
    """
    found: list[Any] = []
    for part in gc.get_referents(cache):
        found += part.values() if type(part) is dict else [part]
    return {id(one): one for one in found}


def _describe(place: Place, before: Found, check: Check) -> str:
    now = place.get()
    if check in (Check.SIZE, Check.KEYS) and type(now) is type(before.value):
        if check is Check.SIZE or len(now) != len(before.detail[1]):
            old = before.detail[1] if check is Check.SIZE else len(before.detail[1])
            return f"the length of {place.name} from {old} to {len(now)}"
        return f"the keys of {place.name}"
    if check is Check.SAME_AS:
        return f"{place.name}, which was one object with another place,"
    old, new = describe(before.value), describe(now)
    return f"{place.name} from {old} to {new if new != old else f'another {type(now).__name__}'}"
