"""Who writes a temporary directory, and whether that process still lives (see processes.py)."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

from ..processes import has_ended, this_process
from .files import Files

# A temporary directory of another host is taken for left behind when nothing in it has changed for this many
# seconds. A writer changes a file with every few megabytes, and its waits (for a value, for another rank) end
# after minutes by default. If it was only stopped for so long, its commit fails with an error.
FOREIGN_AGE = 24 * 3600.0
_TEMPORARY = re.compile(r"\.(?:writing|removing)-(\d+@[0-9a-f]+)-\w+")
_OLD_TEMPORARY = re.compile(r"\.(?:writing|removing)-\d+-\w+")  # of earlier releases: any host's


def new_token() -> str:
    """A name for what this process writes, which no other process anywhere has."""
    return f"{this_process()}-{uuid.uuid4().hex[:8]}"


def is_left_behind(path: Path, now: float) -> bool:
    """Whether a path is a temporary directory whose process is dead; of another host, whether it is old.

    `now` is by the clock of the file system, because hosts have clocks of their own: see `clock_of`.
    """
    found = _TEMPORARY.fullmatch(path.name)
    ended = has_ended(found[1]) if found else None
    if ended is not None:
        return ended
    return (found or _OLD_TEMPORARY.fullmatch(path.name)) is not None and now - _changed(path) > FOREIGN_AGE


def clock_of(root: Path, files: Files) -> float:
    """The time by the clock of the file system: that of a new directory."""
    probe = root / f".removing-{new_token()}"
    files.make_directory(probe)
    try:
        return probe.stat().st_mtime
    finally:
        files.remove(probe)


def _changed(path: Path) -> float:
    """When something in a directory was written last."""
    return max(entry.stat().st_mtime for entry in [path, *path.iterdir()])
