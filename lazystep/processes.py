"""Names for processes, by which another process can tell whether one still runs.

Directories of checkpoints and of libraries may be shared by hosts, or by containers of one host. There a
process number says nothing by itself: the same number may be a living process here and a dead one there. So
a name holds the process number and where that number counts: the boot of the machine, and the namespace of
process numbers in it.
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

_NAME = re.compile(r"(\d+)@([0-9a-f]+)")


def this_process() -> str:
    """The name of this process: its number and its place."""
    return f"{os.getpid()}@{place()}"


def has_ended(name: str) -> bool | None:
    """Whether the process of this name has ended; None if the name is of another place, or is none."""
    found = _NAME.fullmatch(name)
    return None if found is None or found[2] != place() else not _is_running(int(found[1]))


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


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # no process has a number that large
        return False
    except PermissionError:
        return True  # it belongs to another user
    return True
