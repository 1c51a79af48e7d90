"""Keeps the memory that a native step frees for the next step.

A step allocates all its intermediates and frees them again. glibc's malloc returns large blocks to the system
at once, and the next step gets them back page by page, zeroed. For a small conv net this cost 3,300 page
faults and 8 of the 31 ms of a step. Whether malloc does so depends on the block at the end of the heap, so
two runs of the same script differ by a fifth.
"""

from __future__ import annotations

import ctypes
import functools
import sys

# Constants of malloc.h: the size from which a block gets its own mapping, the amount of free memory at the
# end of a heap that is returned to the system, and the amount that is requested at a time.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _M_TOP_PAD = -3, -1, -2
_LARGEST = 2**31 - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Make malloc keep freed memory, for the whole process. False if malloc is not glibc's."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # Older releases of glibc accept at most 32 MB for this threshold.
    has_threshold = mallopt(_M_MMAP_THRESHOLD, 2**30) or mallopt(_M_MMAP_THRESHOLD, 2**25)
    return bool(has_threshold and mallopt(_M_TRIM_THRESHOLD, _LARGEST) and mallopt(_M_TOP_PAD, 2**26))
