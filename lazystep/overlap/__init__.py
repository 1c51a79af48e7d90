"""Overlap: update parameters while gradients are still being reduced, on DDP, equal to plain DDP.

    overlap_optimizer(ddp, optimizer)         # the loop stays as it is
    optimizer_in_backward(model, optimizer)   # without DDP: gradients are freed as they are used

There are also building blocks for code that registers its own communication hook: `hook_then_optimizer`
with `OptimizerHookState` and `as_functional`, and `apply_optim_in_backward_hook` with
`OptimInBackwardHookState`. Overlap does not need the lazy device: it works on eager and compiled models.

Reading order: `backward_callbacks` (the points in backward where code can run), `bucket` and `average` (the
tensors that DDP reduces, and the arithmetic), `bucket_queue` (wait for and update buckets in order),
`partial_step` and `early_steps` (step some parameters of an ordinary optimizer early), `side_stream`,
`event_log`, `health` and `peers` (what a bucket's update needs around it), `choice` (whether it pays),
`engine` (ties these together for one DDP model), `refusals`, `overlap_optimizer`, `in_backward`,
`building_blocks`, `compress`. Torch's private parts are used in `ddp_internals` and `optimizer_internals`.
"""

from .building_blocks import (
    OptimInBackwardHookState,
    OptimizerHookState,
    apply_optim_in_backward_hook,
    as_functional,
    hook_then_optimizer,
)
from .choice import Decision
from .compress import bf16_hook
from .engine import Statistics
from .event_log import BucketEvents
from .in_backward import InBackwardHandle, optimizer_in_backward
from .overlap_optimizer import OverlapHandle, overlap_optimizer

__all__ = [
    "BucketEvents",
    "Decision",
    "InBackwardHandle",
    "OptimInBackwardHookState",
    "OptimizerHookState",
    "OverlapHandle",
    "Statistics",
    "apply_optim_in_backward_hook",
    "as_functional",
    "bf16_hook",
    "hook_then_optimizer",
    "optimizer_in_backward",
    "overlap_optimizer",
]
