"""OpenMP thread pools: there is one, and it belongs to the thread that has work.

libgomp keeps a pool of threads for every thread that has run a parallel region. If all pools together have
more threads than there are processors, libgomp's barriers stop spinning, and every parallel region has to
wake sleeping threads. After a single large CPU op on the training thread, the executor's steps took 3 (MLP)
to 8 times (LSTM) as long; beside a sleeping executor with a pool, eager steps took 2 to 3 times as long. So
a thread gives its pool back before another one computes: the pool's threads end, and libgomp makes new ones
when they are needed again. This takes 0.1 ms, and 4 to 12 ms while another thread wants the processors, so it
is done when a thread goes idle, never between two steps.

Spinning is harmful while another process computes: a thread spins while the thread that it waits for has no
processor. So while a compiler runs, a second pool is kept on purpose, which makes the barriers sleep: on 2
cores a GPT made 15 steps a second instead of 0.4 to 10.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .extensions import RUNNER

_PAUSE_SOFT = 1  # omp_pause_soft: settings are kept
_SHARED_SIZE = 1 << 18  # elements: large enough that torch splits the op between threads
_num_sleeping = 0  # threads inside `sleeping_barriers`: there is one that builds


def release_pool() -> None:
    """End the calling thread's pool. Costs a microsecond if the thread has none."""
    if _pause_address:
        # Not through ctypes: with cold caches that takes 15 microseconds, and each replay comes here.
        _call_c(_pause_address, _PAUSE_SOFT)


def set_num_threads(num_threads: int) -> None:
    """Set the number of OpenMP threads for the calling thread only; torch's function is for all threads."""
    _set_num_threads(num_threads)


@contextlib.contextmanager
def sleeping_barriers() -> Iterator[None]:
    """Keep a pool on the calling thread: with more threads than processors, libgomp's barriers sleep."""
    global _num_sleeping
    torch.zeros(_SHARED_SIZE).add_(1)
    _num_sleeping += 1
    try:
        yield
    finally:
        _num_sleeping -= 1
        release_pool()


def are_barriers_sleeping() -> bool:
    """Whether a pool is kept on purpose: then nothing is gained by giving another one back."""
    return _num_sleeping > 0


def can_release() -> bool:
    """Whether torch's OpenMP library can end a thread's pool."""
    return _pause_address != 0


def thread_setter_address() -> int:
    """The address of the C function behind `set_num_threads`, for C++; 0 if there is none."""
    return _address_of(_set_num_threads)


def _address_of(function: Callable[[int], int]) -> int:
    if function is _nothing:
        return 0
    pointer = ctypes.cast(function, ctypes.c_void_p)  # type: ignore[arg-type]
    return pointer.value or 0


def _nothing(_: int) -> int:
    return 0  # another OpenMP library, or none: only speed is lost


@functools.cache
def _libraries() -> list[Any]:
    # torch loads its own libgomp, which is not visible globally. So find it among the mapped files.
    found = []
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text().splitlines()
        for path in sorted({line.split(maxsplit=5)[-1] for line in maps if "libgomp" in line}):
            with contextlib.suppress(OSError):
                # Not CDLL: giving up the interpreter lock for a microsecond means to wait for it again.
                found.append(ctypes.PyDLL(path))
    return found


def _find(name: str) -> Callable[[int], int]:
    for library in _libraries():
        with contextlib.suppress(AttributeError):
            function: Any = getattr(library, name)
            function.argtypes = [ctypes.c_int]
            return function  # type: ignore[no-any-return]
    return _nothing


_call_c: Callable[[int, int], int] = RUNNER.load().call_c
_pause_address = _address_of(_find("omp_pause_resource_all"))
_set_num_threads = _find("omp_set_num_threads")
# The threads of a pool are not there in a forked child, which would wait for them in its first parallel op.
os.register_at_fork(before=release_pool)
