"""What is known of a call after it was witnessed: the places that it has read, written and looked at.

Pure data. The witness fills it while the call runs; `RecordedCall`, `Guards` and `Replay` read it.
"""

from __future__ import annotations

from typing import Any

from ..record.handle import Memory
from .places import Kind, Place, Places
from .traced import is_traced

# Answers to a read, for src/witness/sink.h: follow numbers there; objects there are outside.
FOLLOW, OUTSIDE = 1, 2


class Testimony:
    """Everything that one call has read, written and looked at."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.reads: dict[Place, None] = {}
        self.writes: dict[Place, None] = {}
        self.structures: dict[Place, None] = {}  # lists, dicts and tuples that were looked at as a whole
        self.contents: dict[Place, None] = {}  # sets and arrays that were looked at
        self.present: set[Place] = set()  # of which only is compared that something is there
        self.overwritten: set[Place] = set()  # read only after the call itself had put a number there
        self.compares_tensors = False  # whether two tensors are one
        self.identified_places: set[Place] = set()  # containers of which it matters which one they are
        self.held: dict[int, Any] = {}  # containers that were met without a place, by id
        self.pinned: set[Place] = set()  # of values that C code has looked at
        self.numbers: set[Place] = set()  # places of numbers that were followed
        self.shallow: set[Place] = set()  # of other packages: compared by identity
        self.placed: set[Memory] = set()  # of lazy tensors whose `storage_offset` was asked for
        # Functions in C that tell a state, with their arguments, and what they have told.
        self.told: dict[tuple[Any, tuple[Any, ...]], Any] = {}
        self.caches: dict[int, Any] = {}  # functions with `functools.lru_cache`
        self.numbers_stored: list[tuple[int, Any, Any]] = []  # where traced numbers were put
        self.reason = ""  # why the call can't be captured

    def note(self, place: Place) -> None:
        """A place is read: what is there is compared before a replay."""
        if place not in self.overwritten:
            self.present.discard(place)
        if place not in self.reads:
            if type(place.container) is Place:
                self.note(place.container)  # before what is in it
            self.reads[place] = None
            # No number is traced before the call: what was there does not matter.
            if place in self.writes and place.kind is not Kind.ATTRIBUTE and is_traced(place.get()):
                self.overwritten.add(place)
                self.present.add(place)

    def note_shallow(self, place: Place) -> None:
        """A place is read, and what is there is compared by identity only."""
        self.note(place)
        self.shallow.add(place)

    def note_structure(self, place: Place) -> None:
        """The length or the keys of a container are read."""
        self.structures[place] = None
        self.note(place)

    def places_with_values(self) -> list[Place]:
        """The places whose tensors a replay reads: not those that are compared without a look inside."""
        return [place for place in self.reads if place not in self.present and place not in self.shallow]

    def used_places(self) -> dict[Place, None]:
        """All places that the call has read or written."""
        return {**self.reads, **self.writes}

    def refuse(self, reason: str) -> None:
        """Don't capture this call."""
        self.reason = self.reason or reason
