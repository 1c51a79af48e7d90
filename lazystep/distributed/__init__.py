"""Data-parallel lazy steps: forward, backward, reductions and updates of a rank are one program.

    model = DDP(Net().to("lazy"))       # torch's own name: a script stays as it is

`DistributedDataParallel` on a lazy module records the reduction of each bucket of gradients where the
bucket's last gradient is recorded. Numbers equal those of torch's DDP on the CPU bit for bit.

Reading order: `reducer` (buckets, and their reduction), `partition`, `shards` and `sharded`
(optimizer state that is spread over the ranks), `data_parallel` (torch's class on lazy modules).
The collectives themselves are instructions: `program/collectives.py`.
"""

from .data_parallel import DistributedDataParallel
from .sharded import shard_optimizer

__all__ = ["DistributedDataParallel", "shard_optimizer"]
