"""Overlap: update parameters while gradients are still being reduced, on DDP, equal to plain DDP.

    overlap_optimizer(ddp, optimizer)         # the loop stays as it is
    optimizer_in_backward(model, optimizer)   # without DDP: gradients are freed as they are used

and the building blocks, for those who register a communication hook themselves: `hook_then_optimizer`
with `OptimizerHookState` and `as_functional`, `apply_optim_in_backward_hook` with
`OptimInBackwardHookState`. Independent of the lazy device: it serves eager and compiled models.

Reading order: `backward_callbacks` (where in backward code can run), `bucket` and `average` (what DDP
reduces, and how), `bucket_queue` (waiting and updating in order), `partial_step` and `early_steps` (an
ordinary optimizer, some parameters earlier), `engine` (all of it, for one DDP model).
"""

from .building_blocks import (
    OptimInBackwardHookState,
    OptimizerHookState,
    apply_optim_in_backward_hook,
    as_functional,
    hook_then_optimizer,
)
from .compress import bf16_hook
from .engine import Statistics
from .event_log import BucketEvents
from .in_backward import InBackwardHandle, optimizer_in_backward
from .overlap_optimizer import OverlapHandle, overlap_optimizer

__all__ = [
    "BucketEvents",
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
