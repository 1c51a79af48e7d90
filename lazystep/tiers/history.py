"""The programs of this process in order of appearance, with the reason why each new one differs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from .. import metrics
from ..notices import notice
from ..program.difference import first_difference, nearest
from ..program.program import Program
from .tiered import TieredExecutable

# A storm is `_STORM` new programs in the last `_WINDOW` barriers, after the first `_SETTLED` barriers.
_STORM, _WINDOW, _SETTLED = 48, 64, 64


class ProgramFacts(NamedTuple):
    """Facts about a program: its first line, why it exists, how often it ran, and on which executable."""

    number: int
    num_instructions: int
    line: str
    num_runs: int
    num_native_runs: int
    why: str
    standing: str


class History:
    """Remembers the last programs. Not thread-safe: the barrier holds the recorder's lock."""

    def __init__(self) -> None:
        self._programs: deque[TieredExecutable] = deque(maxlen=128)
        self._recent: deque[bool] = deque(maxlen=_WINDOW)
        self._num_barriers = 0
        self._num_programs = 0
        self._has_warned = False

    def repeated(self) -> None:
        """Note that a barrier found its program in the cache."""
        self._num_barriers += 1
        self._recent.append(False)

    def appeared(self, executable: TieredExecutable) -> None:
        """Note that a barrier made a new program. Gives notice of a storm of new programs."""
        self._num_barriers += 1
        self._recent.append(True)
        is_storm = sum(self._recent) >= _STORM and self._num_barriers >= _SETTLED
        if is_storm and not self._has_warned:
            self._has_warned = True
            metrics.count("program_storms")
            notice(
                "storm",
                f"{sum(self._recent)} of the last {len(self._recent)} steps were new programs, and a program "
                f"that does not repeat is never compiled. Against the most similar one: "
                f"{_why(executable.program, [e.program for e in self._programs])}",
            )
        self._num_programs += 1
        executable.number = self._num_programs
        self._programs.append(executable)

    def programs(self) -> list[TieredExecutable]:
        """The remembered programs, in order of appearance."""
        return list(self._programs)


def describe(programs: Sequence[TieredExecutable]) -> list[ProgramFacts]:
    """The facts about each program. Call it without a lock: comparing programs takes time."""
    facts = []
    for position, one in enumerate(programs):
        instructions = one.program.instructions
        facts.append(
            ProgramFacts(
                number=one.number,
                num_instructions=len(instructions),
                line=instructions[0].where if instructions else "an unknown line",
                num_runs=one.num_runs,
                num_native_runs=one.num_native_runs,
                why=_why(one.program, [p.program for p in programs[:position]]),
                standing=one.standing,
            )
        )
    return facts


def explain(programs: Sequence[TieredExecutable]) -> str:
    """For every program, as text: how often it ran, why it exists, and why it has no library, if so."""
    total = programs[-1].number if programs else 0
    rows = [f"{total} programs" + (", the last ones:" if total > len(programs) else "")]
    for one in describe(programs):
        native = f", {one.num_native_runs} natively" if one.num_native_runs else ""
        rows.append(
            f"program {one.number}: {one.num_instructions} instructions from {one.line}, "
            f"run {one.num_runs} times{native}"
        )
        if one.number > 1:
            rows.append(f"  new because {one.why}")
        rows.append(f"  {one.standing}")
    return "\n".join(rows)


def _why(program: Program, earlier: Sequence[Program]) -> str:
    known = nearest(program, earlier)
    if known is None:
        return "it is the first one"
    return first_difference(known, program) or "the memory behind its inputs is shared differently"
