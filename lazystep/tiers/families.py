"""Families of programs that differ in sizes only, and the libraries that their members share.

A program that has no library of its own joins its family with its first run. When the family has enough
members, it asks for one build, with symbols for the sizes that vary. From then on a program that the library
serves is native from its first run. That run is compared with the reference, as every library's first run is.
So a wrong generalization is found and never used for that member, and no further member joins its library.

All of this belongs to the executor thread, except for the delivery of a build.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from .. import metrics
from ..compile.builder import Builder, BuildError, Request
from ..compile.cache import Library
from ..config import settings
from ..execute.library import Call, load
from ..execute.thread_choice import ThreadChoice
from ..family.expression import to_text
from ..family.fit import Fit, NoFitError, fit
from ..family.plan import Plan, Region, region_from_data
from ..family.skeleton import Kind, Place, Skeleton, skeleton_of
from ..program.program import Number, Program
from ..program.signature import Signature

# The least recently used go first.
_MAX_FAMILIES, _MAX_MEMBERS = 64, 64
# With this many members a fit is mostly right, so that the family does not wait for one of them to repeat.
_ENOUGH_MEMBERS = 3


class FamilyLibrary:
    """A loaded library of a family, and the programs that it serves."""

    def __init__(self, library: Library, region: Region, call: Call) -> None:
        self.library = library
        self.region = region
        self.call = call
        # A program runs on it, so that it counts among the loaded libraries.
        self.is_used = False
        # A member's result disagreed with the reference: nobody else joins.
        self.is_wrong = False
        # The choice of the member that came last: a good guess for the next one.
        self.threads: ThreadChoice | None = None


class Served(NamedTuple):
    """A member and its family's library: what the member needs to run on it."""

    family_library: FamilyLibrary
    symbols: tuple[int, ...]

    @property
    def tag(self) -> str:
        """The member's name on disk."""
        return "-".join(map(str, self.symbols))

    def carriers(self) -> tuple[torch.Tensor, ...]:
        """Tensors without memory of their own, whose sizes tell the library the numbers that no input has."""
        symbols = zip(self.family_library.region.fit.symbols, self.symbols, strict=True)
        return tuple(
            torch.empty_strided((value,), (0,), dtype=torch.uint8) for one, value in symbols if one.carries
        )


class Member:
    """A program in its family."""

    def __init__(
        self,
        family: Family,
        numbers: tuple[int, ...],
        program: Program,
        signature: Signature,
        fixed: Mapping[int, Number],
    ) -> None:
        self.family = family
        self.numbers = numbers
        self.program = program
        self.signature = signature
        self.fixed = fixed
        # Runs on the reference, and how long they took.
        self.num_runs = 0
        self.seconds = 0.0
        # It has a library, the family's or its own, and asks for no other.
        self.has_library = False

    def find_library(self) -> Served | None:
        """The family's library for this program, if there is one by now. Loads nothing and never waits."""
        return self.family.find_library(self.numbers)

    def count_run(self) -> bool:
        """A run on the reference begins. True if the family takes care of a library for the program."""
        self.num_runs += 1
        return self.family.advance(self)


class Families:
    """The families of this process, by skeleton and number of threads."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._families: OrderedDict[tuple[str, int], Family] = OrderedDict()
        self.num_families = 0

    def join(
        self, program: Program, signature: Signature, fixed: Mapping[int, Number], num_threads: int
    ) -> Member:
        """The program as a member of its family, which may be new. Reads the disk for a new one."""
        skeleton = skeleton_of(program, signature, fixed)
        key = skeleton.key, num_threads
        family = self._families.get(key)
        if family is None:
            self.num_families += 1
            family = self._families[key] = Family(self.num_families, skeleton, num_threads, self._builder)
            if len(self._families) > _MAX_FAMILIES:
                self._families.popitem(last=False)
        self._families.move_to_end(key)
        return family.add(skeleton.numbers, program, signature, fixed)

    def known(self) -> list[Family]:
        """The families, in order of appearance. From any thread."""
        families = list(self._families.values())  # at once: the executor may add one
        return sorted(families, key=lambda family: family.number)

    def describe(self) -> list[str]:
        """The families with several members, as lines of text. From any thread."""
        return [row for family in self.known() if family.num_members > 1 for row in family.describe()]


class Family:
    """Programs with the same skeleton. See the module."""

    def __init__(self, number: int, skeleton: Skeleton, num_threads: int, builder: Builder) -> None:
        self.number = number
        self.num_members = 0  # ever
        self.libraries: list[FamilyLibrary] = []
        # Why the last attempt failed, and how many members took part in it.
        self.reason = ""
        self._num_refused = 0
        self._key = skeleton.key
        self._places = skeleton.places
        self._num_threads = num_threads
        self._builder = builder
        self._members: OrderedDict[tuple[int, ...], Member] = OrderedDict()
        self._is_building = False
        # Set by the build thread. Taken over by the executor thread.
        self._delivered: FamilyLibrary | BuildError | None = None
        self._is_delivered = threading.Event()
        for library in builder.find_family(skeleton.key, num_threads):
            self._take(_load(library))

    def add(
        self,
        numbers: tuple[int, ...],
        program: Program,
        signature: Signature,
        fixed: Mapping[int, Number],
    ) -> Member:
        """A program that has just appeared."""
        member = Member(self, numbers, program, signature, fixed)
        if numbers not in self._members:  # else it has left the program cache and come again
            self.num_members += 1
        self._members[numbers] = member
        self._members.move_to_end(numbers)
        if len(self._members) > _MAX_MEMBERS:
            self._members.popitem(last=False)
        return member

    def find_library(self, numbers: Sequence[int]) -> Served | None:
        """The library that serves a program with these numbers."""
        self._take_delivery()
        for library in self.libraries:
            if not library.is_wrong:
                symbols = library.region.bind(numbers)
                if symbols is not None:
                    return Served(library, symbols)
        return None

    def advance(self, member: Member) -> bool:
        """A member is about to run on the reference. Asks for a build if it is time.

        False if the member is on its own: it has no relatives, or they can't share a library.
        """
        if self._is_building:
            return True
        if len(self._members) < 2 or not self._may_try():
            return False
        is_waiting = settings.tier == "native"
        unserved = [one for one in self._members.values() if not one.has_library]
        num_runs = sum(one.num_runs for one in unserved)
        is_enough = len(self._members) >= _ENOUGH_MEMBERS or member.num_runs >= settings.build_after
        if is_waiting or (is_enough and num_runs >= settings.build_after):
            return self._ask(unserved)
        return True

    def _may_try(self) -> bool:
        # What two members could not tell, three may.
        return not self.reason or (self._num_refused < _ENOUGH_MEMBERS <= len(self._members))

    def _ask(self, unserved: Sequence[Member]) -> bool:
        members = list(self._members.values())
        try:
            found = fit(self._places, [one.numbers for one in members])
        except NoFitError as error:
            self._refuse(f"{error}{_where(error.place, members[-1].program)}", len(members))
            return False
        first = _to_trace(unserved, members)
        bound = [found.bind(one.numbers) for one in members]
        symbols = tuple(values for values in bound if values is not None)
        assert len(symbols) == len(members), "a fit holds for those that it was made from"
        plan = Plan(self._key, found, first.numbers, symbols)
        self._is_building = True
        self._is_delivered.clear()
        self._num_refused = len(members)
        request = Request(
            first.program,
            first.fixed,
            self._num_threads,
            _deliverer(weakref.ref(self)),
            _worth(weakref.ref(self)),
            plan,
        )
        metrics.count("family_builds_requested")
        self._builder.submit(request)
        return True

    def wait_for_build(self) -> None:
        """Block until the build that was asked for has ended. For the tier `native` only."""
        if self._is_building and not self._is_delivered.is_set():
            metrics.count("executor_waits_for_compile")
            self._is_delivered.wait(settings.build_timeout)

    def distrust(self, library: FamilyLibrary) -> None:
        """A member's first run disagreed with the reference. No further member runs on the library."""
        library.is_wrong = True
        metrics.count("family_mismatches")

    def _refuse(self, reason: str, num_members: int) -> None:
        self.reason = reason
        self._num_refused = num_members
        metrics.count("families_refused")

    def _take_delivery(self) -> None:
        if self._is_building and self._is_delivered.is_set():
            delivered, self._delivered = self._delivered, None
            self._is_building = False
            assert delivered is not None
            self._take(delivered)

    def _take(self, result: FamilyLibrary | BuildError) -> None:
        if isinstance(result, BuildError):
            self._refuse(str(result), self._num_refused)
            return
        self.reason = ""
        self.libraries.append(result)
        metrics.count("family_libraries_loaded")

    def deliver(self, result: Library | BuildError) -> None:
        """A build has ended. The library is loaded here, on the build thread, so that no step waits."""
        self._delivered = result if isinstance(result, BuildError) else _load(result)
        self._is_delivered.set()

    @property
    def worth(self) -> float:
        """The seconds that its members without a library have spent on the reference. From any thread."""
        return sum(one.seconds for one in list(self._members.values()) if not one.has_library) + 1e-9

    # -- for people ----------------------------------------------------------------------------------

    def describe(self) -> list[str]:
        """What the family is, in lines: members, symbols, libraries, or why there is none."""
        rows = [f"family {self.number}: {self.num_members} programs that differ in sizes only"]
        members = list(self._members.values())
        for library in self.libraries:
            served = [one for one in members if library.region.bind(one.numbers) is not None]
            rows.append(f"  a library for {len(served)} of the last {len(members)}, where {library.region}")
            rows += [f"    {text}" for text in self._symbols(library.region.fit, served)]
            if library.is_wrong:
                rows.append("    it disagreed with the reference, so no other program runs on it")
        if self._is_building:
            rows.append("  on the reference executable while a library for all of them is being built")
        if self.reason:
            rows.append(f"  they share no library: {self.reason}")
        return rows

    def _symbols(self, found: Fit, members: Sequence[Member]) -> list[str]:
        rows = []
        for number, one in enumerate(found.symbols):
            place = self._places[one.number]
            values = sorted({member.numbers[one.number] for member in members})
            program = members[-1].program if members else None
            shown = f"{values[0]} to {values[-1]}" if values else "none"
            expressed = "" if not one.carries else f" ({to_text(found.expressions[one.number])})"
            rows.append(f"s{number}: {_name(place)}{expressed}{_where(place, program)}, so far {shown}")
        return rows


def _name(place: Place) -> str:
    if place.kind is Kind.SIZE:
        return (
            f"size {place.which} of input {place.where}"
            if place.which >= 0
            else f"length of input {place.where}"
        )
    return {Kind.GEOMETRY: "a stride or offset", Kind.LITERAL: "a number", Kind.FIXED: "a number"}[place.kind]


def _to_trace(unserved: Sequence[Member], members: Sequence[Member]) -> Member:
    """The member that the library is traced from: the commonest, the largest of equals.

    torch guesses sizes by it. It takes a size of 0 or 1 for a special case, and the graph would then hold for
    that size alone. So a member is preferred in which no number that varies is 0 or 1, such as a padding.
    """
    columns = zip(*(one.numbers for one in members), strict=True)
    varying = [place for place, column in enumerate(columns) if len(set(column)) > 1]

    def rank(one: Member) -> tuple[int, int, int]:
        num_special = sum(one.numbers[place] in (0, 1) for place in varying)
        return -num_special, one.num_runs, sum(one.numbers)

    return max(unserved, key=rank)


def _where(place: Place | None, program: Program | None) -> str:
    """Where a number of a program is, for messages."""
    if place is None or program is None:
        return ""
    if place.kind is Kind.LITERAL:
        return f", an argument of {program.instructions[place.where].label}"
    if place.kind is Kind.FIXED:
        return f", an argument of {program.user_of_slot(place.where)}"
    return f", taken by {program.user_of(program.inputs[place.where])}"


def _load(library: Library) -> FamilyLibrary | BuildError:
    try:
        assert library.family is not None
        return FamilyLibrary(library, region_from_data(library.family), load(library.path))
    except (RuntimeError, OSError, ValueError, TypeError, KeyError) as error:
        return BuildError("load", f"the library can't be loaded: {error}")


def _deliverer(target: weakref.ref[Family]) -> Callable[[Library | BuildError], None]:
    def deliver(result: Library | BuildError) -> None:
        family = target()
        if family is not None:
            family.deliver(result)

    return deliver


def _worth(target: weakref.ref[Family]) -> Callable[[], float]:
    def worth() -> float:
        family = target()
        return 0.0 if family is None else family.worth

    return worth
