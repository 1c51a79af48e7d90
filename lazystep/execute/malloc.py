"""Keeps the memory that a step frees for the next one, and gives back what a check has freed.

A step allocates all its intermediates and frees them again. glibc's malloc returns large blocks to the system
at once, and the next step gets them back page by page, zeroed. For a small conv net this cost 3,300 page
faults and 8 of the 31 ms of a step. Whether malloc does so depends on the block at the end of the heap, so
two runs of the same script differ by a fifth.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from pathlib import Path

# Constants of malloc.h: the size from which a block gets its own mapping, the amount of free memory at the
# end of a heap that is returned to the system, and the amount that is requested at a time.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _M_TOP_PAD = -3, -1, -2
_M_ARENA_MAX = -8
_LARGEST = 2**31 - 1


def _set_option(option: int, value: int) -> bool:
    """Set an option of malloc, for the whole process. False if malloc is not glibc's, or refuses it."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(option, value))


@functools.cache
def share_heaps() -> bool:
    """Let threads that start later share the heaps of those before them. False if malloc is not glibc's.

    A step runs on the executor's thread or, if it is waited for, on the waiting one. With a heap for each
    thread, both keep the intermediates of a whole step: a GPT of 50 million parameters took 1.53 GB, with
    one heap 1.22, as eager. Whoever has chosen a number of heaps keeps it.
    """
    if "MALLOC_ARENA_MAX" in os.environ or "glibc.malloc.arena_max" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    return _set_option(_M_ARENA_MAX, 1)


@functools.cache
def keep_freed_memory() -> bool:
    """Make malloc keep freed memory, for the whole process. False if malloc is not glibc's."""
    # Older releases of glibc accept at most 32 MB for this threshold.
    has_threshold = _set_option(_M_MMAP_THRESHOLD, 2**30) or _set_option(_M_MMAP_THRESHOLD, 2**25)
    return has_threshold and _set_option(_M_TRIM_THRESHOLD, _LARGEST) and _set_option(_M_TOP_PAD, 2**26)


def give_freed_memory_back() -> bool:
    """Return freed memory to the system once, for the whole process. False if malloc is not glibc's.

    Takes milliseconds, and the next step gets its memory page by page: for rare events such as a check.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return False
    trim.argtypes = [ctypes.c_size_t]
    return bool(trim(0))


def available_memory() -> int | None:
    """Bytes that this process can still use: of the machine and of its control group. None if unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        # "max" if there is no limit, which is no number.
        limit = int(_CONTROL_GROUP.joinpath("memory.max").read_text())
        found.append(limit - int(_CONTROL_GROUP.joinpath("memory.current").read_text()))
    return min(found) if found else None


_CONTROL_GROUP = Path("/sys/fs/cgroup")
