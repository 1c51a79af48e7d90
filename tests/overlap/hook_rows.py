"""The rows of the communication hooks: the baseline is plain DDP with the hook registered."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)

from lazystep import overlap
from lazystep.overlap.refusals import QUANTIZATION_RUNS_ON_GLOO

from .row import HOOKS, row, simple
from .training import Run, Script, mlp


def hooked(run: Run, hook: Any, state: Any, model: nn.Module | None = None, **ddp_options: Any) -> None:
    """The baseline of a hook is plain DDP with the hook registered."""
    ddp = run.ddp(model or mlp(), **ddp_options)
    optimizer = run.optimizer(ddp.parameters())
    if run.overlapped:
        run.overlap(ddp, optimizer, hook=hook, hook_state=state)
    else:
        ddp.register_comm_hook(state, hook)
    run.train(ddp, optimizer)


row("no hook", HOOKS)(simple)
row("allreduce_hook", HOOKS)(lambda run: hooked(run, default_hooks.allreduce_hook, run.world.group))
row("allreduce_hook", HOOKS, num_ranks=3)(
    lambda run: hooked(run, default_hooks.allreduce_hook, run.world.group)
)
row("fp16_compress_hook", HOOKS)(lambda run: hooked(run, default_hooks.fp16_compress_hook, run.world.group))
row("lazystep.overlap.bf16_hook", HOOKS)(lambda run: hooked(run, overlap.bf16_hook, run.world.group))
row("bf16_compress_hook of torch", HOOKS, refused_at="set-up", words="lazystep.overlap.bf16_hook")(
    lambda run: hooked(run, default_hooks.bf16_compress_hook, run.world.group)
)


def power_state(run: Run) -> Any:
    return powerSGD_hook.PowerSGDState(
        run.world.group, matrix_approximation_rank=1, start_powerSGD_iter=3, min_compression_rate=0.5
    )


row("powerSGD_hook, one bucket", HOOKS)(
    lambda run: hooked(run, powerSGD_hook.powerSGD_hook, power_state(run), bucket_cap_mb=None)
)
row("batched_powerSGD_hook", HOOKS, refused_at="set-up", words="fails, in plain DDP too")(
    lambda run: hooked(run, powerSGD_hook.batched_powerSGD_hook, power_state(run), bucket_cap_mb=None)
)


@row("powerSGD_hook, several buckets", HOOKS, refused_at="set-up", words="deadlocks on gloo")
def power_sgd_buckets(run: Run) -> None:
    if run.overlapped:  # plain DDP would hang
        hooked(run, powerSGD_hook.powerSGD_hook, power_state(run))


def quantized(hook: Any) -> Script:
    def script(run: Run) -> None:
        if run.overlapped or not QUANTIZATION_RUNS_ON_GLOO:  # else plain DDP would hang
            hooked(run, hook, run.world.group)

    return script


for hook in (quantization_hooks.quantization_pertensor_hook, quantization_hooks.quantization_perchannel_hook):
    words = "deadlocks on gloo" if QUANTIZATION_RUNS_ON_GLOO else "on gloo it raises IndexError"
    row(f"{hook.__name__}, several buckets", HOOKS, refused_at="set-up", words=words)(quantized(hook))


def local_state(run: Run, subgroup: Any) -> Any:
    return post_localSGD_hook.PostLocalSGDState(run.world.group, subgroup, start_localSGD_iter=3)


@row("post_localSGD_hook, with a subgroup", HOOKS)
def local_sgd(run: Run) -> None:
    alone = dist.new_group([run.world.rank], use_local_synchronization=True)
    hooked(run, post_localSGD_hook.post_localSGD_hook, local_state(run, alone))
    dist.destroy_process_group(alone)


row("post_localSGD_hook, without a subgroup", HOOKS, refused_at="set-up", words="subgroup")(
    lambda run: hooked(run, post_localSGD_hook.post_localSGD_hook, local_state(run, None))
)
row("noop_hook", HOOKS)(lambda run: hooked(run, debugging_hooks.noop_hook, None))


def half_of_the_sum(group, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
    """A user's own: returns a new tensor, not the bucket's."""
    doubled = bucket.buffer() * 0.5
    work = dist.all_reduce(doubled, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0] * 1.5)


row("a user's own hook", HOOKS)(lambda run: hooked(run, half_of_the_sum, run.world.group))
row("a user's own hook, bucket views", HOOKS)(
    lambda run: hooked(run, half_of_the_sum, run.world.group, gradient_as_bucket_view=True)
)
row("fp16_compress_wrapper", HOOKS, overlaps=False)(
    lambda run: hooked(
        run, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), run.world.group
    )
)
