"""The average over ranks inside a communication hook, bit for bit equal to built-in DDP.

Built-in DDP scales a gradient in one of two ways. It multiplies a dense gradient by 1/divisor while copying
it into the bucket. It divides by the divisor when the gradient is already a view of the bucket, when the
gradient is sparse, and for batched copies. The two results are equal if the divisor is a power of two;
otherwise they can differ in the last bit, for example on three ranks.
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
    """Scale the bucket in place by 1/divisor, with the rounding of built-in DDP."""
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
    """Start the sum of `buffer` over the group's ranks. Does not wait; `done` runs when the sum has ended."""
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None

    def take(future: torch.futures.Future[Any]) -> Tensor:
        done()
        result: Tensor = future.value()[0]  # raises the reduction's error, if it failed
        return result

    reduced: Future = work.get_future().then(take)
    return reduced
