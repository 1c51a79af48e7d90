"""The rows that are equal to plain DDP, and those that are refused only once training has begun."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from .models import (
    Branches,
    Checkpointed,
    Complex,
    Convolutions,
    DecayAfterwards,
    SignDescent,
    Tied,
    Transposed,
    TwiceCheckpointed,
    Words,
)
from .row import row, simple, start
from .training import NUM_STEPS, Run, mlp

row("plain")(simple)
row("plain, 3 ranks", num_ranks=3)(simple)
row("gradient_as_bucket_view")(lambda run: simple(run, gradient_as_bucket_view=True))
row("gradient_as_bucket_view, 3 ranks", num_ranks=3)(lambda run: simple(run, gradient_as_bucket_view=True))


@row("gradient_as_bucket_view, zero_grad(set_to_none=False), 3 ranks", num_ranks=3)
def bucket_view_kept_3(run: Run) -> None:
    ddp, optimizer = start(run, mlp(), gradient_as_bucket_view=True)
    for step in range(NUM_STEPS):
        run.backward(ddp(run.batch(step)).square().mean())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


row("batched_grad_copy, 3 ranks", num_ranks=3)(lambda run: simple(run, batched_grad_copy=True))
row("static graph")(lambda run: simple(run, static_graph=True))
row("static graph, bucket views, 3 ranks", num_ranks=3)(
    lambda run: simple(run, static_graph=True, gradient_as_bucket_view=True)
)


def branches(run: Run, use_b: Callable[[int, int], bool], set_to_none: bool = True, **options: Any) -> None:
    ddp, optimizer = start(run, Branches(), find_unused_parameters=True, **options)
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
row("find_unused_parameters, bucket views, 3 ranks", num_ranks=3)(
    lambda run: branches(run, lambda step, rank: (step + rank) % 3 != 1, gradient_as_bucket_view=True)
)


@row("unused parameters of a static graph")
def unused_static(run: Run) -> None:
    ddp, optimizer = start(run, Branches(), static_graph=True)
    for step in range(NUM_STEPS):
        run.backward(ddp(run.batch(step), False).square().mean())
        run.step(optimizer)


@row("sparse gradients")
def sparse(run: Run) -> None:
    ddp = run.ddp(Words())
    dense = run.optimizer(ddp.module.head.parameters())
    words = torch.optim.SparseAdam(ddp.module.words.parameters(), lr=0.01)
    run.watched.append(words)
    run.overlap(ddp, dense)
    run.overlap(ddp, words)
    run.train(ddp, dense, words)


@row("sparse gradients, plain SGD, 3 ranks", num_ranks=3)
def sparse_sgd(run: Run) -> None:
    ddp = run.ddp(Words())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    run.watched.append(optimizer)
    run.overlap(ddp, optimizer)
    run.train(ddp, optimizer)


row("no_sync accumulation")(lambda run: accumulate(run))
row("no_sync accumulation, bucket views, 3 ranks", num_ranks=3)(
    lambda run: accumulate(run, gradient_as_bucket_view=True)
)


def accumulate(run: Run, **options: Any) -> None:
    ddp, optimizer = start(run, mlp(), **options)
    for step in range(NUM_STEPS):
        for part in range(3):
            with ddp.no_sync() if part < 2 else contextlib.nullcontext():
                run.backward(ddp(run.batch(10 * step + part)).square().mean() / 3)
        run.step(optimizer)


@row("no_sync, then unused in the synchronized pass")
def no_sync_unused(run: Run) -> None:
    ddp, optimizer = start(run, Branches(), find_unused_parameters=True)
    for step in range(NUM_STEPS):
        with ddp.no_sync():
            run.backward(ddp(run.batch(step), True).square().mean())
        run.backward(ddp(run.batch(step + 50), step % 2 == 0).square().mean())
        run.step(optimizer)


@row(
    "no_sync, then unused in the synchronized pass, bucket views, 3 ranks",
    num_ranks=3,
    refused_at="backward",
    words="how built-in DDP rounds it is not known",
)
def no_sync_unused_views(run: Run) -> None:
    ddp, optimizer = start(run, Branches(), find_unused_parameters=True, gradient_as_bucket_view=True)
    for step in range(NUM_STEPS):
        with ddp.no_sync():
            run.backward(ddp(run.batch(step), True).square().mean())
        run.backward(ddp(run.batch(step + 50), False).square().mean())
        run.step(optimizer)


@row(
    "a second synchronized backward before step()",
    refused_at="backward",
    words="before optimizer.step()",
)
def second_backward(run: Run) -> None:
    ddp, optimizer = start(run)
    for step in range(NUM_STEPS):
        run.backward(ddp(run.batch(step)).square().mean())
        run.backward(ddp(run.batch(step + 50)).square().mean())
        run.step(optimizer)


def join(run: Run, model: nn.Module | None = None, **options: Any) -> None:
    find_unused = options.pop("find_unused_parameters", False)
    ddp, optimizer = start(run, model or mlp(), find_unused_parameters=find_unused)
    with Join([ddp], **options):
        run.train(ddp, optimizer, steps=range(3 + 2 * run.world.rank))
    run.train(ddp, optimizer, steps=range(20, 22))


row("join, divided by the initial number of ranks")(lambda run: join(run, divide_by_initial_world_size=True))
row("join, divided by the remaining number of ranks")(
    lambda run: join(run, divide_by_initial_world_size=False)
)
row("join, divided by the initial number of ranks, 3 ranks", num_ranks=3)(
    lambda run: join(run, divide_by_initial_world_size=True)
)
row("join, divided by the remaining number of ranks, 3 ranks", num_ranks=3)(
    lambda run: join(run, divide_by_initial_world_size=False)
)
row("join, find_unused_parameters, 3 ranks", num_ranks=3)(
    lambda run: join(run, find_unused_parameters=True, divide_by_initial_world_size=False)
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


@row("frozen parameters")
def frozen(run: Run) -> None:
    model = mlp()
    model[2].requires_grad_(False)
    simple(run, model)


@row("parameters unfrozen late")
def unfrozen(run: Run) -> None:
    model = mlp()
    model[2].requires_grad_(False)
    ddp, optimizer = start(run, model)
    run.train(ddp, optimizer, steps=range(3))
    model[2].requires_grad_(True)
    run.train(ddp, optimizer, steps=range(3, NUM_STEPS))


row("shared parameters")(lambda run: simple(run, Tied()))


@row("reentrant checkpointing")
def reentrant(run: Run) -> None:
    ddp, optimizer = start(run, Checkpointed(reentrant=True))
    for step in range(NUM_STEPS):
        run.backward(ddp(run.batch(step).requires_grad_()).square().mean())
        run.step(optimizer)


row("non-reentrant checkpointing")(lambda run: simple(run, Checkpointed(reentrant=False)))


@row("reentrant checkpointing of a layer used twice, static graph")
def reentrant_twice(run: Run) -> None:
    ddp, optimizer = start(run, TwiceCheckpointed(reentrant=True), static_graph=True)
    for step in range(NUM_STEPS):
        run.backward(ddp(run.batch(step).requires_grad_()).square().mean())
        run.step(optimizer)


row("channels_last parameters")(lambda run: simple(run, Convolutions().to(memory_format=torch.channels_last)))
row("channels_last parameters, bucket views")(
    lambda run: simple(
        run, Convolutions().to(memory_format=torch.channels_last), gradient_as_bucket_view=True
    )
)
row("transposed parameters, and one with gaps")(lambda run: simple(run, Transposed()))
row("complex parameters")(lambda run: simple(run, Complex()))


@row("float64 and float32 parameters in one model")
def mixed_types(run: Run) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).tanh().double())

    simple(run, Mixed())


@row("bfloat16 parameters, 3 ranks", num_ranks=3)
def bfloat16(run: Run) -> None:
    ddp, optimizer = start(run, mlp().bfloat16())
    for step in range(NUM_STEPS):
        run.backward(ddp(run.batch(step).bfloat16()).square().mean())
        run.step(optimizer)


@row("autocast to bfloat16, 3 ranks", num_ranks=3)
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


@row("clipping by hand between backward and step()", refused_at="step", words="was changed or cleared")
def clip_by_hand(run: Run) -> None:
    ddp, optimizer = start(run)
    for step in range(NUM_STEPS):
        run.backward(5 * ddp(run.batch(step)).square().mean())
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.3)
        run.step(optimizer)


@row("hyperparameters changed between backward and step()", refused_at="step", words="lr changed")
def lr_by_hand(run: Run) -> None:
    ddp, optimizer = start(run)
    for step in range(NUM_STEPS):
        run.backward(ddp(run.batch(step)).square().mean())
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        run.step(optimizer)


@row("parameters changed between backward and step()", refused_at="step", words="the value of 0.weight")
def decay_by_hand(run: Run) -> None:
    ddp, optimizer = start(run)
    for step in range(NUM_STEPS):
        run.backward(ddp(run.batch(step)).square().mean())
        with torch.no_grad():
            for p in ddp.parameters():
                p.mul_(0.99)
        run.step(optimizer)


@row("gradients cleared between backward and step()", refused_at="step", words="was changed or cleared")
def cleared(run: Run) -> None:
    ddp, optimizer = start(run)
    run.backward(ddp(run.batch(0)).square().mean())
    optimizer.zero_grad()
    run.step(optimizer)


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


row("GradScaler, with an inf step", overlaps=False)(lambda run: scaled(run, clip=False))
row("GradScaler and clipping, with an inf step", overlaps=False)(lambda run: scaled(run, clip=True))
row("GradScaler that was not passed", refused_at="step", words="GradScaler")(
    lambda run: scaled(run, clip=False, given=False)
)


@row("torch.compile of the DDP model")
def compiled(run: Run) -> None:
    ddp = run.ddp(mlp(), bucket_cap_mb=None)  # dynamo's splitter wants the first bucket smaller
    optimizer = run.optimizer(ddp.parameters())
    run.overlap(ddp, optimizer)
    run.train(torch.compile(ddp, backend="aot_eager"), optimizer)
    torch._dynamo.reset()


@row("torch.compile below DDP")
def compiled_inside(run: Run) -> None:
    model = mlp()
    ddp, optimizer = start(run, torch.compile(model, backend="aot_eager"), bucket_cap_mb=None)
    run.train(ddp, optimizer)
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


row("parameter groups, a scheduler made before")(lambda run: scheduled(run, before=True))
row("parameter groups, a scheduler made after")(lambda run: scheduled(run, before=False))


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


@row("removed in mid-training, 3 ranks", num_ranks=3)
def removed(run: Run) -> None:
    ddp = run.ddp(mlp())
    optimizer = run.optimizer(ddp.parameters())
    handle = run.overlap(ddp, optimizer)
    run.train(ddp, optimizer, steps=range(4))
    if handle:
        handle.remove()
    run.train(ddp, optimizer, steps=range(4, NUM_STEPS))


@row("removed and overlapped again")
def overlapped_again(run: Run) -> None:
    ddp = run.ddp(mlp())
    optimizer = run.optimizer(ddp.parameters())
    handle = run.overlap(ddp, optimizer)
    run.train(ddp, optimizer, steps=range(3))
    if handle:
        handle.remove()
    run.train(ddp, optimizer, steps=range(3, 5))
    run.overlap(ddp, optimizer)
    run.train(ddp, optimizer, steps=range(5, NUM_STEPS))


@row("evaluation between the steps")
def evaluation(run: Run) -> None:
    ddp, optimizer = start(run, Convolutions())
    for step in range(NUM_STEPS):
        run.backward(ddp(run.batch(step)).square().mean())
        run.step(optimizer)
        ddp.eval()
        with torch.no_grad():
            run.seen.append(ddp(run.batch(step + 100)))
        ddp.train()


def third_party(run: Run, kind: Any, per_parameter: bool) -> None:
    ddp = run.ddp(mlp())
    optimizer = kind(ddp.parameters())
    run.watched.append(optimizer)
    run.overlap(ddp, optimizer, per_parameter=per_parameter)
    run.train(ddp, optimizer)


row("a third-party optimizer, declared per parameter")(lambda run: third_party(run, SignDescent, True))
row("a subclass whose step() calls its base's")(
    lambda run: third_party(run, lambda p: DecayAfterwards(p, 0.1, 0.9), True)
)
