"""What has to be known of a DDP model and has no public name: its hook slot, its settings, its join context.

The one place that reads these private attributes of DistributedDataParallel; a new release of torch is
checked here.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from .bucket import Hook


def registered_hook(ddp: DistributedDataParallel) -> tuple[Hook, Any] | None:
    """The communication hook in the model's only slot, with its state; None for none, and for a C++ one."""
    return ddp._comm_hooks[0] if ddp._comm_hooks else None


def hook_name(ddp: DistributedDataParallel) -> str | None:
    """The name that DDP logs for its hook, a C++ one included."""
    name: str | None = ddp._get_ddp_logging_data().get("comm_hook")
    return name or None


def divides_by_active_ranks(ddp: DistributedDataParallel) -> bool:
    """Whether this is inside `join(divide_by_initial_world_size=False)`: then the divisor shrinks."""
    by_initial_size: bool = getattr(ddp, "_divide_by_initial_world_size", True)
    return bool(ddp._join_config.enable) and not by_initial_size


def uses_python_reducer(ddp: DistributedDataParallel) -> bool:
    """Whether compiled autograd reduces each gradient by itself: there are no buckets."""
    return bool(ddp._use_python_reducer)


def delays_reductions(ddp: DistributedDataParallel) -> bool:
    """Whether `delay_all_reduce_named_params` takes parameters out of the buckets."""
    return bool(ddp._delay_all_reduce_params)


def smallest_bucket_bytes(ddp: DistributedDataParallel) -> int:
    """What fits any bucket, the first one included, which is smaller unless a cap was given."""
    return min(int(ddp._bucket_config.first_bucket_bytes_cap), int(ddp.bucket_bytes_cap))
