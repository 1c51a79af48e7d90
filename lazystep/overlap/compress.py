"""lazystep's own communication hooks, for cases where torch's hook does not run on gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .bucket import Future, GradBucket, comm_hook


@comm_hook
def bf16_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future:
    """Reduce a bucket in bfloat16: cast, divide by the number of ranks, sum, cast back.

    torch's `bf16_compress_hook` computes the same, but DDP refuses it without NCCL. The hook's state is the
    process group; None means the default group. Does not wait: returns a future.

        overlap_optimizer(ddp, optimizer, hook=bf16_hook)
    """
    group = process_group if process_group is not None else dist.group.WORLD
    assert group is not None
    buffer = bucket.buffer()
    compressed = buffer.to(torch.bfloat16).div_(group.size())
    work = dist.all_reduce(compressed, group=group, async_op=True)
    assert work is not None

    def decompress(future: torch.futures.Future[Any]) -> Tensor:
        result: Tensor = future.value()[0]
        return buffer.copy_(result)

    reduced: Future = work.get_future().then(decompress)
    return reduced
