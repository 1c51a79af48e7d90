"""Who writes a temporary directory, and whether that process still lives.

A directory of checkpoints may be shared by hosts, or by containers of one host. There a process number says
nothing by itself: the same number may be a living process here and a dead one there. So the name of a
temporary directory holds the process number and where that number counts: the boot of the machine, and the
namespace of process numbers in it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import uuid
from pathlib import Path

from .files import Files

# A temporary directory of another host is taken for left behind when nothing in it has changed for this many
# seconds. A writer changes a file with every few megabytes, and its waits (for a value, for another rank) end
# after minutes by default. If it was only stopped for so long, its commit fails with an error.
FOREIGN_AGE = 24 * 3600.0
_TEMPORARY = re.compile(r"\.(?:writing|removing)-(\d+)@([0-9a-f]+)-\w+")
_OLD_TEMPORARY = re.compile(r"\.(?:writing|removing)-\d+-\w+")  # of earlier releases: any host's


def new_token() -> str:
    """A name for what this process writes, which no other process anywhere has."""
    return f"{os.getpid()}@{place()}-{uuid.uuid4().hex[:8]}"


@functools.cache
def place() -> str:
    """Where the process numbers of this process count, as a short digest."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):  # Linux has both
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink("/proc/self/ns/pid"))
    if len(parts) < 3:
        parts.append(f"{uuid.getnode():x}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def is_left_behind(path: Path, now: float) -> bool:
    """Whether a path is a temporary directory whose process is dead; of another host, whether it is old.

    `now` is by the clock of the file system, because hosts have clocks of their own: see `clock_of`.
    """
    found = _TEMPORARY.fullmatch(path.name)
    if found is not None and found[2] == place():
        return not _lives(int(found[1]))
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


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
