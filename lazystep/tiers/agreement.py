"""Ranks agree on the collectives of a program before they run it.

Gloo aborts the process if two ranks bring buffers of different sizes to a collective, and hangs if one rank
launches what the other does not. So before the first run of a program, and before each change to another
known program, the ranks of a group compare the list of its launches through the group's store. A difference
is an error on every rank, which names the first launch that differs and the user's lines. While a loop
repeats, nothing is compared and nothing is sent.

The rest of the program may differ: one rank may have a shorter batch, another may still record what a third
one replays, or run on the reference what a third one runs natively.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import metrics
from ..errors import CollectiveError, LazyStepError
from ..execute.communicate import Communicated, failure_of, note, take_communicated
from ..execute.executable import InstructionError
from ..process_groups import StepGroup, find_group
from ..program.collectives import describe, group_of, launches_of
from ..program.program import Program


class Communication:
    """The collectives of one program, on the executor thread."""

    def __init__(self, program: Program) -> None:
        # Of the launches among the instructions.
        self._positions = [n for n, one in enumerate(program.instructions) if group_of(one)]
        # By group: each launch in words, which must be the same on all ranks, and its line, which may differ.
        self._launches: dict[str, list[tuple[str, str]]] = {}
        for launch in launches_of(program):
            told = describe(program, launch), launch.where
            self._launches.setdefault(group_of(launch), []).append(told)
        self._numbers = {
            name: _number_of(collective for collective, _ in launches)
            for name, launches in self._launches.items()
        }

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a step inside the block. Blocks first if this rank comes from another program.

        Raises an `InstructionError` before anything has run if the other ranks do not agree.
        """
        try:
            self._agree()
        except CollectiveError as error:
            raise InstructionError(self._positions[0], none_started=True) from error
        failure: InstructionError | None = None
        try:
            yield
        except InstructionError as error:
            failure = error
            raise
        finally:
            self.end(take_communicated(), failure)

    def agreements(self) -> list[tuple[Any, int]] | None:
        """The groups, and the numbers that they must have agreed on; None if a group has been destroyed."""
        try:
            return [(find_group(name).connected, number) for name, number in self._numbers.items()]
        except LazyStepError:
            return None  # the run in Python says which

    def end(self, communicated: Communicated, error: InstructionError | None = None) -> None:
        """A run has ended. `error`: how it has failed; its cause becomes the collective's error."""
        note(communicated)
        if error is None:
            return
        if communicated.failed is not None:
            launch, reason = communicated.failed
            error.__cause__ = failure_of(launch, reason)
            if error.all_started:
                error.position = self._positions[launch.number]
            self._explain(error)
        self._break(communicated, error)

    def _agree(self) -> None:
        for name, launches in self._launches.items():
            group = find_group(name)
            if group.connected.agreed == self._numbers[name]:
                continue
            if group.failure:
                raise CollectiveError(f"{name!r}: the process group is broken. {group.failure}")
            _announce(group, launches)
            _compare(group, launches)
            group.connected.agreed = self._numbers[name]

    def _break(self, communicated: Communicated, error: InstructionError) -> None:
        """Refuse further collectives if the other ranks are still waiting for some of this step.

        The next step's would meet them instead, and give wrong numbers.
        """
        num_launches = sum(len(launches) for launches in self._launches.values())
        if communicated.num_launched == num_launches and not communicated.num_pending:
            return
        for name in self._launches:
            group = find_group(name)
            group.fail(
                f"A step failed on rank {group.rank} between its collectives, which the other ranks wait "
                f"for: {type(error.__cause__).__name__}: {error.__cause__}"
            )

    def _explain(self, error: InstructionError) -> None:
        """Add to a failed collective that another rank has gone on to another program, if one has."""
        assert error.__cause__ is not None
        for name, launches in self._launches.items():
            group = find_group(name)
            for rank in range(group.size):
                key = _key(group.num_agreements, rank)
                if rank != group.rank and group.store.check([key]):
                    found = _difference(group, launches, rank, json.loads(group.store.get(key)))
                    if found:
                        error.__cause__.args = (f"{error.__cause__} {found}",)
                        return


def _number_of(collectives: Iterable[str]) -> int:
    """A number for these collectives, by which they are known without Python."""
    digest = hashlib.sha256("\n".join(collectives).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _key(number: int, rank: int) -> str:
    return f"program/{number}/{rank}"


def _announce(group: StepGroup, launches: list[tuple[str, str]]) -> None:
    metrics.count("program_agreements")
    group.store.set(_key(group.num_agreements, group.rank), json.dumps(launches))


def _compare(group: StepGroup, launches: list[tuple[str, str]]) -> None:
    """Wait until every rank has said which collectives it runs next, and compare them with this rank's."""
    number = group.num_agreements
    group.num_agreements += 1
    for rank in range(group.size):
        try:
            group.store.wait([_key(number, rank)], group.timeout)
            theirs = json.loads(group.store.get(_key(number, rank)))
        except RuntimeError as error:
            group.fail(f"Rank {rank} did not come to a program of rank {group.rank}.")
            first = launches[0]
            raise CollectiveError(
                f"rank {group.rank} is about to run a program that begins with {first[0]}, recorded at "
                f"{first[1]}. Rank {rank} has not come to it within {group.timeout.total_seconds():g} s: it "
                "has ended, hangs, or goes on with another program. All ranks must take the same way through "
                "the loop."
            ) from error
        found = _difference(group, launches, rank, theirs)
        if found:
            group.fail(found)
            raise CollectiveError(found)
    if number:  # every rank has come this far, so all of them have read the announcement before
        group.store.delete_key(_key(number - 1, group.rank))


def _difference(
    group: StepGroup, ours: list[tuple[str, str]], rank: int, theirs: list[tuple[str, str]]
) -> str:
    """The first launch that differs between this rank and another one, in words; empty if none does."""
    nothing = ("no further collective", "the end of the program")
    for number in range(max(len(ours), len(theirs))):
        our_launch, our_line = ours[number] if number < len(ours) else nothing
        their_launch, their_line = theirs[number] if number < len(theirs) else nothing
        if our_launch != their_launch:
            hint = ""
            if nothing[0] in (our_launch, their_launch):
                hint = (
                    " A program ends at mark_step, and where a value is read: read it on all ranks, or in a "
                    "step closure."
                )
            return (
                f"Ranks have recorded different programs. Their collective {number} is {our_launch} at "
                f"{our_line} on rank {group.rank}, and {their_launch} at {their_line} on rank {rank}. All "
                f"ranks must record the same collectives in the same order.{hint}"
            )
    return ""
