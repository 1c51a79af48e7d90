"""The rows that are equal to plain DDP, and those that are refused only once training has begun."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from . import models
from .row import row, simple, start
from .training import NUM_STEPS, Run, mlp

row("plain")(simple)
row("plain", num_ranks=3)(simple)
row("gradient_as_bucket_view")(partial(simple, gradient_as_bucket_view=True))
row("gradient_as_bucket_view", num_ranks=3)(partial(simple, gradient_as_bucket_view=True))


@row("gradient_as_bucket_view, zero_grad(set_to_none=False)", num_ranks=3)
def bucket_view_kept(run: Run) -> None:
    ddp, optimizer = start(run, mlp(), gradient_as_bucket_view=True)
    for step in range(NUM_STEPS):
        run.backward(ddp(run.batch(step)).square().mean())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


row("batched_grad_copy", num_ranks=3)(partial(simple, batched_grad_copy=True))
row("static graph")(partial(simple, static_graph=True))
row("static graph, bucket views", num_ranks=3)(
    partial(simple, static_graph=True, gradient_as_bucket_view=True)
)


def branches(run: Run, use_b: Callable[[int, int], bool], set_to_none: bool = True, **options: Any) -> None:
    ddp, optimizer = start(run, models.Branches(), **{"find_unused_parameters": True, **options})
    for step in range(NUM_STEPS):
        run.backward(ddp(run.batch(step), use_b(step, run.world.rank)).square().mean())
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


row("find_unused_parameters, unused on all ranks in some steps")(
    lambda run: branches(run, lambda step, rank: step % 3 != 1)
)
row("find_unused_parameters, unused on one rank")(
    lambda run: branches(run, lambda step, rank: rank == step % 2)
)
row("find_unused_parameters, never used")(lambda run: branches(run, lambda step, rank: False))
row("find_unused_parameters, zero_grad(set_to_none=False)")(
    lambda run: branches(run, lambda step, rank: step % 3 != 1, set_to_none=False)
)
row("find_unused_parameters, bucket views", num_ranks=3)(
    lambda run: branches(run, lambda step, rank: (step + rank) % 3 != 1, gradient_as_bucket_view=True)
)
row("unused parameters of a static graph")(
    lambda run: branches(run, lambda step, rank: False, find_unused_parameters=False, static_graph=True)
)


@row("sparse gradients")
def sparse(run: Run) -> None:
    ddp = run.ddp(models.Words())
    dense = run.optimizer(ddp.module.head.parameters())
    words = torch.optim.SparseAdam(ddp.module.words.parameters(), lr=0.01)
    run.watched.append(words)
    run.overlap(ddp, dense)
    run.overlap(ddp, words)
    run.train(ddp, dense, words)


row("sparse gradients, plain SGD", num_ranks=3)(
    lambda run: with_optimizer(run, lambda p: torch.optim.SGD(p, lr=0.1), model=models.Words())
)


def accumulate(run: Run, **options: Any) -> None:
    ddp, optimizer = start(run, mlp(), **options)
    for step in range(NUM_STEPS):
        for part in range(3):
            with ddp.no_sync() if part < 2 else contextlib.nullcontext():
                run.backward(ddp(run.batch(10 * step + part)).square().mean() / 3)
        run.step(optimizer)


row("no_sync accumulation")(accumulate)
row("no_sync accumulation, bucket views", num_ranks=3)(partial(accumulate, gradient_as_bucket_view=True))


def no_sync_unused(run: Run, use_b: Callable[[int], bool], **options: Any) -> None:
    ddp, optimizer = start(run, models.Branches(), find_unused_parameters=True, **options)
    for step in range(NUM_STEPS):
        with ddp.no_sync():
            run.backward(ddp(run.batch(step), True).square().mean())
        run.backward(ddp(run.batch(step + 50), use_b(step)).square().mean())
        run.step(optimizer)


row("no_sync, then unused in the synchronized pass")(
    partial(no_sync_unused, use_b=lambda step: step % 2 == 0)
)
row(
    "no_sync, then unused in the synchronized pass, bucket views",
    num_ranks=3,
    refused_at="backward",
    words="how built-in DDP rounds it is not known",
)(partial(no_sync_unused, use_b=lambda step: False, gradient_as_bucket_view=True))


@row("a second synchronized backward before step()", refused_at="backward", words="before optimizer.step()")
def second_backward(run: Run) -> None:
    ddp, optimizer = start(run)
    for step in range(NUM_STEPS):
        run.backward(ddp(run.batch(step)).square().mean())
        run.backward(ddp(run.batch(step + 50)).square().mean())
        run.step(optimizer)


def join(run: Run, divide_by_initial_world_size: bool, **ddp_options: Any) -> None:
    ddp, optimizer = start(run, **ddp_options)
    with Join([ddp], divide_by_initial_world_size=divide_by_initial_world_size):
        run.train(ddp, optimizer, steps=range(3 + 2 * run.world.rank))
    run.train(ddp, optimizer, steps=range(20, 22))


for num_ranks in (2, 3):
    for which, is_initial in (("initial", True), ("remaining", False)):
        row(f"join, divided by the {which} number of ranks", num_ranks=num_ranks)(
            partial(join, divide_by_initial_world_size=is_initial)
        )
row("join, find_unused_parameters", num_ranks=3)(
    partial(join, find_unused_parameters=True, divide_by_initial_world_size=False)
)


@row("a subset of the parameters overlaps")
def subset(run: Run) -> None:
    ddp = run.ddp(mlp())
    optimizer = run.optimizer(ddp.parameters())
    run.overlap(ddp, optimizer, params=list(ddp.parameters())[::2])
    run.train(ddp, optimizer)


@row("the optimizer has a subset of the parameters")
def optimizer_subset(run: Run) -> None:
    ddp = run.ddp(mlp())
    optimizer = run.optimizer(list(ddp.parameters())[2:5])
    run.overlap(ddp, optimizer)
    for step in range(NUM_STEPS):
        run.backward(ddp(run.batch(step)).square().mean())
        run.step(optimizer)
        ddp.zero_grad()


@row("ignored parameters")
def ignored(run: Run) -> None:
    model = mlp()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.weight"])
    simple(run, model)


def partly_frozen() -> nn.Module:
    model = mlp()
    model[2].requires_grad_(False)
    return model


row("frozen parameters")(lambda run: simple(run, partly_frozen()))


@row("parameters unfrozen late")
def unfrozen(run: Run) -> None:
    model = partly_frozen()
    ddp, optimizer = start(run, model)
    run.train(ddp, optimizer, steps=range(3))
    model[2].requires_grad_(True)
    run.train(ddp, optimizer, steps=range(3, NUM_STEPS))


row("shared parameters")(lambda run: simple(run, models.Tied()))
row("reentrant checkpointing")(
    lambda run: simple(run, models.Checkpointed(reentrant=True), Tensor.requires_grad_)
)
row("non-reentrant checkpointing")(lambda run: simple(run, models.Checkpointed(reentrant=False)))
row("reentrant checkpointing of a layer used twice, static graph")(
    lambda run: simple(
        run, models.TwiceCheckpointed(reentrant=True), Tensor.requires_grad_, static_graph=True
    )
)
row("channels_last parameters")(
    lambda run: simple(run, models.Convolutions().to(memory_format=torch.channels_last))
)
row("channels_last parameters, bucket views")(
    lambda run: simple(
        run, models.Convolutions().to(memory_format=torch.channels_last), gradient_as_bucket_view=True
    )
)
row("transposed parameters, and one with gaps")(lambda run: simple(run, models.Transposed()))
row("complex parameters")(lambda run: simple(run, models.Complex()))


@row("float64 and float32 parameters in one model")
def mixed_types(run: Run) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).tanh().double())

    simple(run, Mixed())


row("bfloat16 parameters", num_ranks=3)(lambda run: simple(run, mlp().bfloat16(), Tensor.bfloat16))


@row("autocast to bfloat16", num_ranks=3)
def autocast(run: Run) -> None:
    ddp, optimizer = start(run)
    for step in range(NUM_STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = ddp(run.batch(step)).float().square().mean()
        run.backward(loss)
        run.step(optimizer)


@row("one bucket, then rebuilt to several")
def rebuilt(run: Run) -> None:
    # Without a cap the first iteration's buckets are made in another order than backward's.
    model = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 1000), nn.Tanh(), nn.Linear(1000, 4))
    simple(run, model, bucket_cap_mb=None)


def clipped(run: Run, after_backward: Callable[[Any], Any], **options: Any) -> None:
    ddp = run.ddp(mlp())
    optimizer = run.optimizer(ddp.parameters())
    handle = run.overlap(ddp, optimizer, **options)
    for step in range(NUM_STEPS):
        run.backward(5 * ddp(run.batch(step)).square().mean())
        norm = handle.total_norm if handle else after_backward(ddp.parameters())
        if norm is not None:
            run.seen.append(norm.clone())
        run.step(optimizer)


row("clipping by the global norm", overlaps=False)(
    lambda run: clipped(run, lambda p: nn.utils.clip_grad_norm_(p, 0.3), max_norm=0.3)
)
row("clipping by the global infinity norm", overlaps=False)(
    lambda run: clipped(
        run, lambda p: nn.utils.clip_grad_norm_(p, 0.05, "inf"), max_norm=0.05, norm_type=float("inf")
    )
)
row("clipping by value")(
    lambda run: clipped(run, lambda p: nn.utils.clip_grad_value_(p, 0.01), clip_value=0.01)
)


def touched(run: Run, touch: Callable[[Any, Any, int], object]) -> None:
    """Something is done between backward and step()."""
    ddp, optimizer = start(run)
    for step in range(NUM_STEPS):
        run.backward(5 * ddp(run.batch(step)).square().mean())
        touch(ddp, optimizer, step)
        run.step(optimizer)


@torch.no_grad()
def decay(ddp: nn.Module) -> None:
    for p in ddp.parameters():
        p.mul_(0.99)


row("clipping by hand between backward and step()", refused_at="step", words="was changed or cleared")(
    lambda run: touched(run, lambda ddp, optimizer, step: nn.utils.clip_grad_norm_(ddp.parameters(), 0.3))
)
row("hyperparameters changed between backward and step()", refused_at="step", words="lr changed")(
    lambda run: touched(
        run, lambda ddp, optimizer, step: optimizer.param_groups[0].update(lr=0.1 / (step + 1))
    )
)
row("parameters changed between backward and step()", refused_at="step", words="the value of 0.weight")(
    lambda run: touched(run, lambda ddp, optimizer, step: decay(ddp))
)
row("gradients cleared between backward and step()", refused_at="step", words="was changed or cleared")(
    lambda run: touched(run, lambda ddp, optimizer, step: optimizer.zero_grad())
)


def scaled(run: Run, clip: bool, given: bool = True) -> None:
    ddp = run.ddp(mlp())
    optimizer = run.optimizer(ddp.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
    options: dict[str, Any] = {"grad_scaler": scaler} if given else {}
    run.overlap(ddp, optimizer, **options, **({"max_norm": 0.3} if clip else {}))
    for step in range(NUM_STEPS):
        loss = ddp(run.batch(step)).square().mean()
        if step == 4 and run.world.rank == 1:
            loss = loss * float("inf")
        run.backward(scaler.scale(loss))
        if clip and not run.overlapped:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.3)
        run.stage = "step"
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    run.watched.append(scaler)


row("GradScaler, with an inf step", overlaps=False)(partial(scaled, clip=False))
row("GradScaler and clipping, with an inf step", overlaps=False)(partial(scaled, clip=True))
row("GradScaler that was not passed", refused_at="step", words="GradScaler")(
    partial(scaled, clip=False, given=False)
)


@row("torch.compile of the DDP model")
def compiled(run: Run) -> None:
    ddp, optimizer = start(run, bucket_cap_mb=None)  # dynamo's splitter wants the first bucket smaller
    run.train(torch.compile(ddp, backend="aot_eager"), optimizer)
    torch._dynamo.reset()


@row("torch.compile below DDP")
def compiled_inside(run: Run) -> None:
    simple(run, torch.compile(mlp(), backend="aot_eager"), bucket_cap_mb=None)
    torch._dynamo.reset()


@row(
    "backward(create_graph=True)",
    refused_at="backward",
    words="leaf Variable",
    note="by torch, in plain DDP too",
)
def create_graph(run: Run) -> None:
    ddp, optimizer = start(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a reference cycle
        run.backward(ddp(run.batch(0)).square().mean(), create_graph=True)
    run.step(optimizer)


@row("backward(retain_graph=True)")
def retain_graph(run: Run) -> None:
    ddp, optimizer = start(run)
    for step in range(NUM_STEPS):
        run.backward(ddp(run.batch(step)).square().mean(), retain_graph=True)
        run.step(optimizer)


@row("a detached use of a parameter, pending in the graph")
def detached_use(run: Run) -> None:
    ddp, optimizer = start(run)
    for step in range(NUM_STEPS):
        x = run.batch(step)
        # Backward of this product reads the last layer's weight long after that weight's gradient is ready.
        scale = (ddp.module[0](x) * ddp.module[6].weight.detach().sum(0)).sum()
        run.backward(ddp(x).square().mean() + scale.square() * 0.01)
        run.step(optimizer)


def scheduled(run: Run, before: bool) -> None:
    ddp = run.ddp(mlp())
    parameters = list(ddp.parameters())
    optimizer = run.optimizer([{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.02}])
    made = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)] if before else []
    run.overlap(ddp, optimizer)
    if not before:
        made = [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=NUM_STEPS + 1)]
    for step in range(NUM_STEPS):
        run.backward(ddp(run.batch(step)).square().mean())
        run.step(optimizer)
        made[0].step()
    run.seen += [torch.tensor(group["lr"]) for group in optimizer.param_groups]


row("parameter groups, a scheduler made before")(partial(scheduled, before=True))
row("parameter groups, a scheduler made after")(partial(scheduled, before=False))


@row("add_param_group and load_state_dict in mid-training")
def regrouped(run: Run) -> None:
    ddp = run.ddp(mlp())
    parameters = list(ddp.parameters())
    optimizer = run.optimizer(parameters[:4])
    run.overlap(ddp, optimizer)
    outside = nn.Parameter(torch.ones(4))
    for step in range(NUM_STEPS):
        if step == 2:
            optimizer.add_param_group({"params": parameters[4:], "lr": 0.03})
        if step == 4:
            optimizer.add_param_group({"params": [outside]})
        if step == 6:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        run.backward((ddp(run.batch(step)) * outside).square().mean())
        run.step(optimizer)
        ddp.zero_grad()
    run.seen.append(outside.detach())


@row("two optimizers on disjoint parameters")
def two_optimizers(run: Run) -> None:
    ddp = run.ddp(mlp())
    parameters = list(ddp.parameters())
    first = run.optimizer(parameters[::2])
    second = torch.optim.RMSprop(parameters[1::2], lr=0.01)
    run.watched.append(second)
    run.overlap(ddp, first)
    run.overlap(ddp, second)
    run.train(ddp, first, second)


@row("one optimizer over two DDP models")
def two_models(run: Run) -> None:
    first, second = run.ddp(mlp()), run.ddp(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = run.optimizer([*first.parameters(), *second.parameters()])
    run.overlap(first, optimizer)
    run.overlap(second, optimizer)
    for step in range(NUM_STEPS):
        run.backward(second(first(run.batch(step))).square().mean())
        run.step(optimizer)


@row("step() with a closure")
def closure(run: Run) -> None:
    ddp, optimizer = start(run)
    for step in range(NUM_STEPS):

        def evaluate(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = ddp(run.batch(step)).square().mean()
            run.backward(loss)
            return loss

        optimizer.step(evaluate)


@row("step() twice after one backward")
def step_twice(run: Run) -> None:
    ddp, optimizer = start(run)
    for step in range(NUM_STEPS):
        run.backward(ddp(run.batch(step)).square().mean())
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


@row("gradients never cleared")
def never_cleared(run: Run) -> None:
    ddp, optimizer = start(run)
    for step in range(NUM_STEPS):
        run.backward(ddp(run.batch(step)).square().mean())
        optimizer.step()


@row("removed in mid-training", num_ranks=3)
def removed(run: Run) -> None:
    ddp, optimizer = start(run)
    run.train(ddp, optimizer, steps=range(4))
    for handle in run.handles:
        handle.remove()
    run.train(ddp, optimizer, steps=range(4, NUM_STEPS))


@row("removed and overlapped again")
def overlapped_again(run: Run) -> None:
    ddp, optimizer = start(run)
    run.train(ddp, optimizer, steps=range(3))
    for handle in run.handles:
        handle.remove()
    run.train(ddp, optimizer, steps=range(3, 5))
    run.overlap(ddp, optimizer)
    run.train(ddp, optimizer, steps=range(5, NUM_STEPS))


@row("evaluation between the steps")
def evaluation(run: Run) -> None:
    ddp, optimizer = start(run, models.Convolutions())
    for step in range(NUM_STEPS):
        run.backward(ddp(run.batch(step)).square().mean())
        run.step(optimizer)
        ddp.eval()
        with torch.no_grad():
            run.seen.append(ddp(run.batch(step + 100)))
        ddp.train()


def with_optimizer(run: Run, kind: Any, per_parameter: bool = False, model: nn.Module | None = None) -> None:
    ddp = run.ddp(model or mlp())
    optimizer = kind(ddp.parameters())
    run.watched.append(optimizer)
    run.overlap(ddp, optimizer, per_parameter=per_parameter)
    run.train(ddp, optimizer)


row("a third-party optimizer, declared per parameter")(
    lambda run: with_optimizer(run, models.SignDescent, True)
)
row("a subclass whose step() calls its base's")(
    lambda run: with_optimizer(run, lambda p: models.DecayAfterwards(p, 0.1, 0.9), True)
)
