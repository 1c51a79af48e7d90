"""Rows about the optimizer, the model or its settings that are refused, nearly all of them at set-up."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from .models import Convolutions, GroupCounter, SignDescent
from .row import row, start
from .rows import with_optimizer
from .training import Run, mlp


@row("double registration", refused_at="set-up", words="already")
def twice(run: Run) -> None:
    ddp, optimizer = start(run)
    run.overlap(ddp, optimizer)
    run.train(ddp, optimizer)


@row("two optimizers that share parameters", refused_at="set-up", words="another optimizer")
def overlapping(run: Run) -> None:
    ddp = run.ddp(mlp())
    first, second = run.optimizer(ddp.parameters()), run.optimizer(list(ddp.parameters())[:2])
    run.overlap(ddp, first)
    run.overlap(ddp, second)
    run.train(ddp, first, second)


def hooked_before(run: Run, register: Callable[[DistributedDataParallel], object]) -> None:
    ddp = run.ddp(mlp())
    register(ddp)
    optimizer = run.optimizer(ddp.parameters())
    run.overlap(ddp, optimizer)
    run.train(ddp, optimizer)


row("an existing hook", refused_at="set-up", words="has a communication hook already")(
    lambda run: hooked_before(
        run, lambda ddp: ddp.register_comm_hook(run.world.group, default_hooks.allreduce_hook)
    )
)
row("an existing built-in hook", refused_at="set-up", words="has a communication hook already")(
    lambda run: hooked_before(
        run, lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    )
)
row("LBFGS", refused_at="set-up", words="LBFGS")(lambda run: with_optimizer(run, torch.optim.LBFGS))
row("a third-party optimizer, undeclared", refused_at="set-up", words="per_parameter=True")(
    lambda run: with_optimizer(run, SignDescent)
)
row("a group-level counter, wrongly declared per parameter", refused_at="backward", words="num_steps")(
    lambda run: with_optimizer(run, GroupCounter, True)
)


row("SyncBatchNorm on the CPU", refused_at="set-up", words="SyncBatchNorm")(
    lambda run: start(run, nn.SyncBatchNorm.convert_sync_batchnorm(Convolutions()))
)


@row("DDP mixed precision", refused_at="set-up", words="mixed precision")
def mixed_precision(run: Run) -> None:
    ddp = run.ddp(mlp())
    ddp.mixed_precision = object()  # the real one can't be made without an accelerator
    run.overlap(ddp, run.optimizer(ddp.parameters()))


@row("the python reducer", refused_at="set-up", words="python reducer")
def python_reducer(run: Run) -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        start(run)


@row("FSDP, or no DDP at all", refused_at="set-up", words="FSDP")
def not_ddp(run: Run) -> None:
    model: Any = mlp()
    run.overlap(model, run.optimizer(model.parameters()))


@row("ZeroRedundancyOptimizer", refused_at="set-up", words="ZeroRedundancyOptimizer")
def zero(run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import itself warns
        from torch.distributed.optim import ZeroRedundancyOptimizer
    ddp = run.ddp(mlp())
    made = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, process_group=run.world.group, lr=0.1)
    run.overlap(ddp, made)


row("settings that differ between ranks", refused_at="set-up", words="differs between ranks")(
    lambda run: with_optimizer(run, lambda p: torch.optim.SGD(p, lr=0.1 * (1 + run.world.rank)))
)
row("a refusal on one rank only", refused_at="set-up", words="SignDescent")(
    lambda run: with_optimizer(run, torch.optim.SGD if run.world.rank == 0 else SignDescent)
)
row("skip_all_reduce_unused_params", refused_at="set-up", words="skip_all_reduce_unused_params")(
    lambda run: start(run, find_unused_parameters=True, skip_all_reduce_unused_params=True)
)


@row("delay_all_reduce_named_params", refused_at="set-up", words="delay_all_reduce_named_params")
def delayed(run: Run) -> None:
    model = mlp()
    options = {"param_to_hook_all_reduce": model[0].weight}
    start(run, model, delay_all_reduce_named_params=[("6.weight", model[6].weight)], **options)


@row("`step` replaced on the instance", refused_at="set-up", words="replaced")
def replaced_step(run: Run) -> None:
    ddp = run.ddp(mlp())
    optimizer = run.optimizer(ddp.parameters())
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign,assignment]
    run.overlap(ddp, optimizer)
