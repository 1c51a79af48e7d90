"""Private attributes of a DDP model that overlap reads: its hook slot, its settings, its join context.

No other module reads private attributes of DistributedDataParallel, so a new release of torch has to be
checked only here.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from .bucket import Hook


def registered_hook(ddp: DistributedDataParallel) -> tuple[Hook, Any] | None:
    """The model's communication hook and its state; None if there is no hook, or if it is a C++ hook."""
    return ddp._comm_hooks[0] if ddp._comm_hooks else None


def hook_name(ddp: DistributedDataParallel) -> str | None:
    """The name that DDP logs for the model's hook, also for a C++ hook."""
    name: str | None = ddp._get_ddp_logging_data().get("comm_hook")
    return name or None


def divides_by_active_ranks(ddp: DistributedDataParallel) -> bool:
    """Whether the model is inside `join(divide_by_initial_world_size=False)`, where the divisor shrinks."""
    by_initial_size: bool = getattr(ddp, "_divide_by_initial_world_size", True)
    return bool(ddp._join_config.enable) and not by_initial_size


def uses_python_reducer(ddp: DistributedDataParallel) -> bool:
    """Whether compiled autograd reduces each gradient by itself, so that there are no buckets."""
    return bool(ddp._use_python_reducer)


def delays_reductions(ddp: DistributedDataParallel) -> bool:
    """Whether `delay_all_reduce_named_params` takes parameters out of the buckets."""
    return bool(ddp._delay_all_reduce_params)


def smallest_bucket_bytes(ddp: DistributedDataParallel) -> int:
    """The size that fits into every bucket. The first bucket is smaller, unless a cap was given."""
    return min(int(ddp._bucket_config.first_bucket_bytes_cap), int(ddp.bucket_bytes_cap))
