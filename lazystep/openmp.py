"""One OpenMP pool: the executor's.

libgomp keeps a pool of threads for every thread that has run a parallel region. As soon as all pools
together have more threads than there are processors, its barriers stop spinning and every parallel
region pays for waking a thread. After a single large CPU op on the training thread the executor's
steps took 3 (MLP) to 8 times (LSTM) as long. So whoever else computes does it on one thread, or gives its
pool back before the executor runs: the threads are ended, and made again if they are needed again.

Beside a neighbour that computes, the same spinning is ruinous: a thread spins while the one that it waits
for has no processor. So while a compiler is at work a second pool is kept on purpose, and barriers sleep:
on 2 cores a GPT made 15 steps a second in place of 0.4 to 10.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

_PAUSE_SOFT = 1  # omp_pause_soft: settings are kept
_SHARED_SIZE = 1 << 18  # elements: several times what torch gives to one thread


def release_pool() -> None:
    """End the calling thread's pool. Costs a microsecond where there is none."""
    _pause(_PAUSE_SOFT)


def set_num_threads(num_threads: int) -> None:
    """How many threads the calling thread uses; torch's own function concerns every thread."""
    _set_num_threads(num_threads)


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
    return _pause is not _nothing


def thread_setter_address() -> int:
    """The address of what `set_num_threads` calls, for C++; 0 if there is none."""
    if _set_num_threads is _nothing:
        return 0
    pointer = ctypes.cast(_set_num_threads, ctypes.c_void_p)  # type: ignore[arg-type]
    return pointer.value or 0


def _nothing(_: int) -> int:
    return 0  # another OpenMP, or none: only speed is lost


@functools.cache
def _libraries() -> list[Any]:
    # torch brings its own libgomp, which is not visible globally: the one that is mapped is the one.
    found = []
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text().splitlines()
        for path in sorted({line.split(maxsplit=5)[-1] for line in maps if "libgomp" in line}):
            with contextlib.suppress(OSError):
                found.append(ctypes.CDLL(path))
    return found


def _find(name: str) -> Callable[[int], int]:
    for library in _libraries():
        with contextlib.suppress(AttributeError):
            function: Any = getattr(library, name)
            function.argtypes = [ctypes.c_int]
            return function  # type: ignore[no-any-return]
    return _nothing


_pause = _find("omp_pause_resource_all")
_set_num_threads = _find("omp_set_num_threads")
