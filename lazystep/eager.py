"""Running ops on CPU tensors from inside a dispatch handler, as eager runs them.

The one place that sets torch's dispatch keys for that. Knows nothing of the lazy device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .openmp import set_num_threads

_VIEW_KEYS = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor)


@contextmanager
def eager_dispatch() -> Iterator[None]:
    """Below autograd, but with conjugate and negative views resolved, as eager runs a kernel.

    torch runs a dispatch handler with every key above Python switched off, and the keys that resolve such
    views are among them. A kernel that makes such a view internally then reads it unresolved:
    `linalg.lstsq` on complex numbers returned wrong residuals.
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
    """`eager_dispatch` on one thread: for copies and draws, whose results do not depend on the number."""
    num_threads = torch.get_num_threads()
    set_num_threads(1)
    try:
        with eager_dispatch():
            yield
    finally:
        set_num_threads(num_threads)
