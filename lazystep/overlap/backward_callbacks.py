"""The autograd engine's queue of callbacks: code that runs at the end of `backward()`, on backward's thread.

This is the only module that uses these private parts of torch. DDP relies on them too (its finalizer is such
a callback), so they are as stable as DDP is.

[Note: before and after the finalizer] DDP calls a communication hook for each bucket, in order. Right
after the hook of the last bucket returns, DDP queues its finalizer, which waits for all futures and
writes the gradients. This gives us two places:

- A callback queued in the hook of the last bucket runs *before* the finalizer. Backward's computation is
  done and reductions are still in flight, so parameters are updated here.
- A callback queued from that callback runs *after* the finalizer. Errors are raised here: an error before
  the finalizer would leave the reducer expecting a reduction that never ends.

The first iteration of a static graph is different: DDP calls all hooks from inside its finalizer, and both
callbacks run after it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable


def in_backward() -> bool:
    """Whether this thread is inside `backward()`. A rank that has joined calls hooks outside of backward."""
    return torch._C._current_graph_task_id() != -1


def queue_callback(callback: Callable[[], None]) -> None:
    """Run `callback` at the end of the current backward, after the callbacks that are already queued."""
    Variable._execution_engine.queue_callback(callback)
