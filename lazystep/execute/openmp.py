"""One OpenMP pool: the executor's.

libgomp keeps a pool of threads for every thread that has run a parallel region. As soon as all pools
together have more threads than there are processors, its barriers stop spinning and every parallel
region pays for waking a thread. After a single large CPU op on the training thread the executor's
steps took 3 (MLP) to 8 times (LSTM) as long. So whoever else has computed gives its pool back before
the executor runs: the threads are ended, and made again if they are needed again.

Beside a neighbour that computes, the same spinning is ruinous: a thread spins while the one that it waits
for has no processor. So while a compiler is at work a second pool is kept on purpose, and barriers sleep:
on 2 cores a GPT made 15 steps a second in place of 0.4 to 10.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator

import torch

_PAUSE_SOFT = 1  # omp_pause_soft: settings are kept
_SHARED_SIZE = 1 << 18  # elements: several times what torch gives to one thread


def release_pool() -> None:
    """End the calling thread's pool. Costs a microsecond where there is none."""
    _pause()(_PAUSE_SOFT)


@contextlib.contextmanager
def sleeping_barriers() -> Iterator[None]:
    """Have a pool on the calling thread, so that there are more threads than processors."""
    torch.zeros(_SHARED_SIZE).add_(1)
    try:
        yield
    finally:
        release_pool()


def can_release() -> bool:
    """Whether torch's OpenMP is one that gives pools back."""
    return _pause() is not _nothing


def _nothing(kind: int) -> int:
    return 0


@functools.cache
def _pause() -> Callable[[int], int]:
    # torch brings its own libgomp, which is not visible globally: the one that is mapped is the one.
    try:
        with open("/proc/self/maps") as file:
            paths = {line.split(maxsplit=5)[-1].strip() for line in file if "libgomp" in line}
    except OSError:
        paths = set()
    for path in sorted(paths):
        try:
            pause = ctypes.CDLL(path).omp_pause_resource_all
        except (OSError, AttributeError):
            continue
        pause.argtypes, pause.restype = [ctypes.c_int], ctypes.c_int
        return pause
    return _nothing  # another OpenMP, or none: nothing to give back
