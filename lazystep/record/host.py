"""Running ops on host tensors from inside a dispatch handler."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_VIEW_KEYS = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor)


@contextmanager
def eager_dispatch() -> Iterator[None]:
    """Below autograd, but with conjugate and negative views resolved, as eager runs a kernel.

    torch runs a dispatch handler with every key above Python switched off, those that resolve such
    views among them. A kernel that makes one internally then reads it unresolved: `linalg.lstsq` on
    complex numbers returned wrong residuals.
    """
    guard = torch._C._SetExcludeDispatchKeyGuard
    with (
        torch._C._AutoDispatchBelowADInplaceOrView(),
        guard(_VIEW_KEYS[0], False),
        guard(_VIEW_KEYS[1], False),
        guard(_VIEW_KEYS[2], False),
    ):
        yield


@contextmanager
def serial_dispatch() -> Iterator[None]:
    """`eager_dispatch` on one thread: for copies and draws, whose results do not depend on the number.

    libgomp keeps a pool of threads per calling thread. A second pool beside the executor's means more
    threads than cores, and then libgomp stops spinning and every parallel region pays for a wake-up:
    programs took 1.6 (MLP) and 2.0 (LSTM) times as long.
    """
    num_threads = torch.get_num_threads()
    _set_num_threads(1)
    try:
        with eager_dispatch():
            yield
    finally:
        _set_num_threads(num_threads)


def _find_omp_set_num_threads() -> Callable[[int], object]:
    """libgomp's own function, which concerns the calling thread alone; torch's concerns every thread."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
        path = next(line.split()[-1] for line in maps if "libgomp" in line)
        function: Callable[[int], object] = ctypes.CDLL(path).omp_set_num_threads
    except (OSError, StopIteration, AttributeError):
        return _leave_num_threads  # another OpenMP library: only speed is lost
    return function


def _leave_num_threads(num_threads: int) -> None:
    del num_threads


_set_num_threads = _find_omp_set_num_threads()


def thread_setter_address() -> int:
    """The address of libgomp's function, for C++; 0 if there is none."""
    if _set_num_threads is _leave_num_threads:
        return 0
    pointer = ctypes.cast(_set_num_threads, ctypes.c_void_p)  # type: ignore[arg-type]
    return pointer.value or 0
