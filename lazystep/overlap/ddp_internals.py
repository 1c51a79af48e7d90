"""Private parts of a DDP model that overlap uses: its hook slot, its reducer, its settings, its join context.

No other module uses private attributes of DistributedDataParallel, so a new release of torch has to be
checked only here.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size
from torch.nn.parallel import DistributedDataParallel


def has_hook(ddp: DistributedDataParallel) -> bool:
    """Whether the model has a communication hook that is written in Python."""
    return bool(ddp._comm_hooks)


def can_give_slot_back(ddp: DistributedDataParallel) -> bool:
    """Whether a model without our hook reduces faster: where built-in DDP scales and copies in one pass.

    Not for a static graph, which a new reducer would have to learn again. Not under `join`: ranks without
    inputs would not take part.
    """
    scales_apart = ddp.gradient_as_bucket_view or ddp.batched_grad_copy
    return not (scales_apart or ddp.static_graph or ddp._join_config.enable)


def give_slot_back(ddp: DistributedDataParallel, buckets: Sequence[Sequence[Tensor]]) -> bool:
    """Make a new reducer without a hook, which has these buckets as the old one has. Returns whether it did.

    A reducer can't be asked for certain buckets. It takes them from the order of its parameters, so
    we look for an order that gives them: the bits of a sum depend on them. All ranks must call this at the
    same place, where DDP itself would rebuild its buckets: between two steps. Blocks for rank 0.
    """
    config = ddp._bucket_config
    initial, rebuilt = config.compute_bucket_size_limits(
        static_graph=False, find_unused_parameters=ddp.find_unused_parameters
    )
    parameters = [parameter for bucket in buckets for parameter in bucket]
    if ddp.find_unused_parameters:  # such a reducer keeps the buckets that it has first, in reverse
        numbers = {parameter: number for number, parameter in enumerate(ddp.module.parameters())}
        parameters.sort(key=numbers.__getitem__)
        found = _assign(parameters, initial, [])[::-1]
    elif ddp._has_rebuilt_buckets:
        limits = rebuilt or [config.first_bucket_bytes_cap, config.bucket_bytes_cap]
        found = _assign(parameters, limits, list(range(len(parameters))))
    else:
        return False
    if found != [list(map(id, bucket)) for bucket in buckets]:
        return False
    names = {parameter: name for name, parameter in ddp.module.named_parameters()}
    ddp.reducer._remove_autograd_hooks()
    ddp._comm_hooks.clear()
    by_number = {number: names[parameter] for number, parameter in enumerate(parameters)}
    ddp._ddp_init_helper(parameters, [False] * len(parameters), by_number, False)
    if not ddp.find_unused_parameters:
        ddp.reducer._push_all_rebuilt_params()
        ddp.reducer._rebuild_buckets()
    return True


def _assign(parameters: list[Tensor], limits: list[int], order: list[int]) -> list[list[int]]:
    """torch's buckets for these parameters, by their ids."""
    buckets, _ = _compute_bucket_assignment_by_size(parameters, limits, [False] * len(parameters), order)
    return [[id(parameters[number]) for number in bucket] for bucket in buckets]


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
