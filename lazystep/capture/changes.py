"""What has changed in places: in a call, which is an effect of it, or since an earlier call."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch

from ._places import is_same
from .places import MISSING, Place
from .surroundings import Found, Surroundings, TensorFacts, are_same, have_same_structure
from .testimony import Testimony
from .traced import is_traced, plain
from .values import CONTAINERS, describe

_WAY_OUT = "which a replay would not; do that outside"


class Effect(NamedTuple):
    """A place that holds something else after the call than before."""

    place: Place
    before: Found
    after: Found

    @property
    def changes_list(self) -> bool:
        """Whether a list has changed that stays the same object."""
        is_same_object = self.before.value is self.after.value
        return is_same_object and isinstance(self.before.value, (list, collections.deque))


def find_effects(testimony: Testimony, before: Surroundings, after: Surroundings) -> Iterator[Effect]:
    """What a call has changed in the places that were known before it began."""
    not_compared = testimony.numbers | testimony.present
    for place in testimony.used_places():
        if place not in before or place in testimony.shallow:
            continue
        old, new = before[place], after[place]
        # The same value again: no effect if the place is compared, so that it is there anyway.
        is_compared = place in testimony.reads and place not in not_compared
        is_put = place in testimony.writes and not is_compared and not isinstance(new.value, CONTAINERS)
        is_untouched = is_traced(new.value) and new.value.expression == ("place", place)
        if not is_untouched and (is_put or not are_same(old, new)):
            yield Effect(place, old, new)


def describe_change(effect: Effect) -> str:
    """An effect in a message."""
    before, after = effect.before.value, effect.after.value
    if isinstance(before, CONTAINERS) and before is after:
        old, new = (
            detail[1] if type(detail[1]) is int else len(detail[1])
            for detail in (effect.before.detail, effect.after.detail)
        )
        kind = type(before).__name__
        what = (
            f"the length of a {kind}, {effect.place.name}, from {old} to {new}" if old != new else f"a {kind}"
        )
        return f"it changes {what}, {_WAY_OUT}"
    if isinstance(before, torch.Tensor) and before is after:
        if effect.before.detail.version is not None:
            return f"it changes {effect.place.name}, a CPU tensor, {_WAY_OUT}"
        return f"it changes requires_grad or hooks of {effect.place.name}, {_WAY_OUT}"
    if before is after:
        return f"it changes what is in {effect.place.name}, a {type(before).__name__}, {_WAY_OUT}"
    return f"it changes {effect.place.name} from {describe(before)} to {describe(plain(after))}, {_WAY_OUT}"


def find_difference(
    testimony: Testimony,
    before: Surroundings,
    earlier: tuple[Surroundings, Surroundings],
    pinned: set[Place],
    counts: Collection[int],
) -> str:
    """What a call has found changed since an earlier one, with both values; empty if nothing.

    `earlier`: what was in the places before and after the earlier call. `pinned`: places of numbers that must
    stay the same. `counts`: ids of tensors that are followed.
    """
    for place in testimony.reads:
        if place not in before or place in testimony.numbers or id(before[place].value) in counts:
            continue
        known = earlier[0] if place in earlier[0] else earlier[1]
        if place in known:
            old, new = known[place], before[place]
            if place in testimony.present and old.value is not MISSING and new.value is not MISSING:
                continue
            old = old._replace(value=plain(old.value))
            if _is_other(old, new, place in testimony.structures):
                return f"{place.name} from {_describe_found(old)} to {_describe_found(new)}"
    for place in testimony.numbers & pinned:
        known = earlier[0] if place in earlier[0] else earlier[1]
        if place in before and place in known and not is_same(known[place].value, before[place].value):
            return f"{place.name} from {known[place].value!r} to {before[place].value!r}"
    return ""


def _is_other(old: Found, new: Found, is_structure: bool) -> bool:
    """Whether a place that is compared before a replay holds something else."""
    a, b = old.detail, new.detail
    if isinstance(a, TensorFacts) and isinstance(b, TensorFacts):
        types = [None if facts.handle is None else facts.handle.type for facts in (a, b)]
        return types[0] is not types[1] or a.flags != b.flags or a.version != b.version
    if isinstance(old.value, CONTAINERS) and isinstance(new.value, CONTAINERS):
        return type(old.value) is not type(new.value) or (is_structure and not have_same_structure(a, b))
    return not are_same(old, new)


def _describe_found(found: Found) -> str:
    """What was in a place, in a message."""
    if isinstance(found.detail, TensorFacts) and found.detail.handle is not None:
        return f"a tensor {found.detail.handle.type}"
    if isinstance(found.value, CONTAINERS):
        detail = found.detail[1]
        return f"a {type(found.value).__name__} of {detail if type(detail) is int else len(detail)}"
    return describe(plain(found.value))
