"""The priority of the builder process and of its compilers: steps first, builds in the time that is left.

`SCHED_IDLE` takes only processor time that nobody else wants, and the kernel counts a processor that runs
nothing else as idle: a thread of the step that wakes up gets it at once. A low priority by `nice` does
neither. It also means nothing between two sessions where the kernel groups processes by session
(`sched_autogroup_enabled`), so the builder process stays in the session of its parent.

A build that somebody waits for has normal priority, and so has a build that gets nowhere because other
programs take all processors. The kernel allows a process to leave `SCHED_IDLE` only with the right to raise
priorities (`RLIMIT_NICE`, or root). Without it the build goes on as before.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

IDLE, NORMAL = "idle", "normal"
_LOWEST = 19


def set_own(priority: str) -> None:
    """Set the priority of this process's group: its threads and its compilers. New ones inherit it."""
    set_group(os.getpgrp(), priority)


def set_group(group: int, priority: str) -> None:
    """Set the priority of all threads of a process group, as far as that is allowed."""
    for thread in _threads_of_group(group) or ([0] if group == os.getpgrp() else []):
        # It may have ended, or the right to raise it may be missing.
        with contextlib.suppress(OSError):
            _set(thread, priority)


def _set(thread: int, priority: str) -> None:
    if hasattr(os, "SCHED_IDLE"):
        policy = os.SCHED_IDLE if priority == IDLE else os.SCHED_OTHER
        os.sched_setscheduler(thread, policy, os.sched_param(0))
    elif priority == IDLE:
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST)


def _threads_of_group(group: int) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            # After the name, which is in parentheses: state, parent, group.
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                found += [int(path.name) for path in (process / "task").iterdir()]
    return found
