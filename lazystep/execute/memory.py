"""Memory that a native step frees is kept for the next one.

A step allocates all its intermediates and frees them again, and glibc's malloc gives large blocks back to
the system at once: the next step gets them page by page, zeroed. For a small conv net that was 3,300 page
faults and 8 of the 31 ms of a step. Whether it happens depends on what lies at the end of the heap, so two
runs of one script differ by a fifth.
"""

from __future__ import annotations

import ctypes
import functools
import sys

# Of malloc.h: from which size a block is a mapping of its own, how much free memory at the end of a heap is
# given back, and how much is asked for at a time.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _M_TOP_PAD = -3, -1, -2
_LARGEST = 2**31 - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Have malloc keep what is freed, for the whole process. False where malloc is not glibc's."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # Older releases take no more than 32 MB for the first.
    has_threshold = mallopt(_M_MMAP_THRESHOLD, 2**30) or mallopt(_M_MMAP_THRESHOLD, 2**25)
    return bool(has_threshold and mallopt(_M_TRIM_THRESHOLD, _LARGEST) and mallopt(_M_TOP_PAD, 2**26))
