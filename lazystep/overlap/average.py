"""The reduction of built-in DDP, bit for bit, as a communication hook does it.

Built-in DDP multiplies a dense gradient by 1/divisor while it copies it into the bucket, and divides
where there is nothing to copy (the gradient is a view of the bucket already), sparse gradients and
batched copies. Both are the same number when the divisor is a power of two, and differ in the last bit
otherwise: three ranks show it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .bucket import Bucket, Future

# Whether a parameter's gradient was a view of its bucket before the bucket became ready.
WasView = Callable[[Tensor], bool]


def scale(bucket: Bucket, divisor: int, was_view: WasView | None = None, divide: bool = False) -> None:
    """Scale the bucket in place by 1/divisor, as built-in DDP rounds it."""
    buffer = bucket.buffer
    if divide or buffer.is_sparse:
        buffer.div_(divisor)
    elif was_view is None or divisor & (divisor - 1) == 0:
        buffer.mul_(1.0 / divisor)
    else:
        offset = 0
        for p in bucket.parameters:
            part = buffer[offset : offset + p.numel()]
            offset += p.numel()
            if was_view(p):
                part.div_(divisor)
            else:
                part.mul_(1.0 / divisor)


def sum_over_ranks(
    buffer: Tensor, group: dist.ProcessGroup, done: Callable[[], None] = lambda: None
) -> Future:
    """Start the sum of `buffer` over the group's ranks. Does not wait; `done` runs when it has ended."""
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None

    def take(future: torch.futures.Future[Any]) -> Tensor:
        done()
        result: Tensor = future.value()[0]  # raises what the reduction raised
        return result

    reduced: Future = work.get_future().then(take)
    return reduced
