"""The autograd engine's queue of callbacks: code that runs at the end of `backward()`, on its thread.

The one place that touches these private parts of torch. DDP itself relies on them (its finalizer is
such a callback), so they are as stable as DDP is.

[Note: before and after the finalizer] DDP calls a communication hook for each bucket, in order. Right
after the hook of the last bucket has returned it queues its finalizer, which waits for all futures and
writes the gradients. So a callback queued in the hook of the last bucket runs *before* the finalizer,
with all of backward's computation done and reductions still in flight: the place to update. A callback
queued from that callback runs *after* the finalizer: the place to raise, since an error before it would
leave the reducer expecting a reduction that never ends. A static graph's first iteration is the
exception: DDP calls all hooks from inside its finalizer, and both callbacks run after it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable


def in_backward() -> bool:
    """Whether this thread is inside `backward()`. A rank that has joined runs hooks outside of it."""
    return torch._C._current_graph_task_id() != -1


def queue_callback(callback: Callable[[], None]) -> None:
    """Run `callback` at the end of the current backward, after what is queued already."""
    Variable._execution_engine.queue_callback(callback)
