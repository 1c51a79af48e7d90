"""`overlap_optimizer` beyond the numbers: events, hooks that fire once, checkpoints, counts, lifetimes."""

from __future__ import annotations

import copy
import gc
import json
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lazystep import metrics
from lazystep.overlap import overlap_optimizer
from tests.helpers import descend
from tests.pool import Pool, World, raised_by

from .training import BUCKET_CAP_MB, OPTIMIZERS, largest_difference, mlp, tensors_in


def make(world: World, optimizer: str = "SGD", **options: Any) -> tuple[DistributedDataParallel, Any]:
    torch.manual_seed(3)
    ddp = DistributedDataParallel(mlp(), process_group=world.group, bucket_cap_mb=BUCKET_CAP_MB, **options)
    return ddp, OPTIMIZERS[optimizer](ddp.parameters())


def train(ddp: Any, optimizer: Any, steps: range, world: World) -> None:
    for step in steps:
        torch.manual_seed(10 * step + world.rank)
        descend(ddp(torch.randn(4, 6)).square().mean(), optimizer)


# -- events --------------------------------------------------------------------------------------


def hold_the_last_bucket(world: World) -> dict[str, Any]:
    """A hook whose last reduction ends only after an update has been logged."""
    handle: Any = None
    held: list[tuple[int, bool]] = []

    def holding(state, bucket):  # type: ignore[no-untyped-def]
        work = dist.all_reduce(bucket.buffer().div_(world.size), group=world.group, async_op=True)
        if not bucket.is_last() or bucket.index() == 0:  # the first iteration has one bucket
            return work.get_future().then(lambda future: future.value()[0])
        released: Any = torch.futures.Future()
        buffer, number = bucket.buffer(), handle.events()[-1].backward

        def release() -> None:
            work.wait()
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                if any(e.backward == number and e.update_end for e in handle.events()):
                    held.append((number, True))
                    break
                time.sleep(0.001)
            else:
                held.append((number, False))
            released.set_result(buffer)

        threading.Thread(target=release, daemon=True).start()
        return released

    ddp, optimizer = make(world)
    handle = overlap_optimizer(ddp, optimizer, hook=holding)
    train(ddp, optimizer, range(4), world)
    entries = [(e.backward, e.bucket, e.updated) for e in handle.events()]
    ordered = [
        e.ready <= e.reduce_start <= e.reduce_end <= e.update_start <= e.update_end for e in handle.events()
    ]
    by_pass: dict[int, list[Any]] = {}
    for e in handle.events():
        by_pass.setdefault(e.backward, []).append(e)
    overlapping = [
        passes[0].update_end <= passes[-1].reduce_end for number, passes in by_pass.items() if number > 1
    ]
    trace = json.loads(json.dumps(handle.timeline()))
    return {"held": held, "entries": entries, "ordered": ordered, "overlapping": overlapping, "trace": trace}


def test_first_bucket_is_updated_while_the_last_is_still_being_reduced(pool: Pool) -> None:
    for rank, seen in enumerate(pool.run(hold_the_last_bucket)):
        assert seen["held"] == [(2, True), (3, True), (4, True)]
        assert seen["overlapping"] == [True, True, True]
        assert all(seen["ordered"])
        # One bucket of all 8 parameters first; DDP then rebuilds them to three.
        assert [entry[:2] for entry in seen["entries"]] == [(1, 0)] + [
            (n, b) for n in (2, 3, 4) for b in range(3)
        ]
        assert sum(updated for _, _, updated in seen["entries"]) == 4 * 8
        spans = [event for event in seen["trace"]["traceEvents"] if event["ph"] == "X"]
        assert len(spans) == 2 * len(seen["entries"])
        assert {event["pid"] for event in spans} == {rank}
        assert all(event["dur"] >= 0 for event in spans)
        names = [e["args"]["name"] for e in seen["trace"]["traceEvents"] if e["ph"] == "M"]
        assert names == [f"rank {rank}", "updates", *(f"reduction of bucket {n}" for n in range(3))]


# -- counts --------------------------------------------------------------------------------------


def count(world: World) -> dict[str, Any]:
    metrics.reset()
    ddp, optimizer = make(world)
    fired: list[str] = []
    gradients_seen: list[bool] = []
    optimizer.register_step_post_hook(lambda *_: fired.append("post, before"))
    handle = overlap_optimizer(ddp, optimizer)
    optimizer.register_step_post_hook(lambda o, *_: fired.append("post, after"))

    def look(o: Any, args: Any, kwargs: Any) -> None:
        fired.append("pre")
        gradients_seen.append(all(p.grad is not None for p in ddp.parameters()))

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for step in range(3):
        torch.manual_seed(step)
        ddp(torch.randn(4, 6)).square().mean().backward()
        kept = [p.grad.clone() for p in ddp.parameters()]
        optimizer.step()
        same = all(torch.equal(p.grad, g) for p, g in zip(ddp.parameters(), kept, strict=True))
        scheduler.step()  # with warnings as errors: torch's check that step() came first must pass
        optimizer.zero_grad()
    handle.wait()
    return {
        "fired": fired,
        "gradients seen": all(gradients_seen),
        "gradients kept": same,
        "statistics": handle.statistics,
        "backwards": metrics.counter_value("overlap_backwards"),
        "updated": metrics.counter_value("overlap_parameters_updated"),
        "lr": scheduler.get_last_lr(),
    }


def test_hooks_fire_once_and_every_update_is_counted(pool: Pool) -> None:
    for seen in pool.run(count):
        assert seen["fired"] == ["pre", "post, before", "post, after", "pre"] * 3
        assert seen["gradients seen"]
        assert seen["gradients kept"]
        statistics = seen["statistics"]
        assert (statistics.backwards, statistics.buckets) == (3, 1 + 3 + 3)
        assert (statistics.parameters_updated, statistics.parameters_left) == (3 * 8, 0)
        assert (seen["backwards"], seen["updated"]) == (3, 24)
        assert seen["lr"] == pytest.approx([0.05 * 0.1**3])


def pre_hook_that_changes_gradients(world: World, when: str) -> str:
    ddp, optimizer = make(world)

    def double(o: Any, args: Any, kwargs: Any) -> None:
        for p in ddp.parameters():
            p.grad *= 2

    if when == "before":
        optimizer.register_step_pre_hook(double)
    overlap_optimizer(ddp, optimizer)
    if when == "after":
        optimizer.register_step_pre_hook(double)
    return raised_by(lambda: train(ddp, optimizer, range(2), world))


@pytest.mark.parametrize("when", ["before", "after"])
def test_pre_hook_that_changes_gradients_is_noticed(pool: Pool, when: str) -> None:
    for message in pool.run(pre_hook_that_changes_gradients, when):
        assert "the gradient of 0.weight was changed" in message


# -- checkpoints ---------------------------------------------------------------------------------


def train_and_resume(world: World, optimizer: str, first: bool, second: bool) -> list[torch.Tensor]:
    """Four steps, a checkpoint into new objects, four more; overlapped or not in each half."""
    ddp, opt = make(world, optimizer)
    if first:
        overlap_optimizer(ddp, opt)
    train(ddp, opt, range(4), world)
    saved = copy.deepcopy({"model": ddp.module.state_dict(), "optimizer": opt.state_dict()})
    ddp, opt = make(world, optimizer)
    if second:
        overlap_optimizer(ddp, opt)
    ddp.module.load_state_dict(saved["model"])
    opt.load_state_dict(saved["optimizer"])
    train(ddp, opt, range(4, 8), world)
    return [*tensors_in(ddp.module.state_dict()), *tensors_in(opt.state_dict())]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "AdamW fused"])
def test_checkpoints_cross_over_between_plain_and_overlapped(pool: Pool, optimizer: str) -> None:
    expected = pool.run(train_and_resume, optimizer, False, False)
    for first, second in ((True, False), (False, True), (True, True)):
        for rank, state in enumerate(pool.run(train_and_resume, optimizer, first, second)):
            assert len(state) > 8
            differences = map(largest_difference, state, expected[rank])
            assert max(differences) == 0


# -- lifetimes -----------------------------------------------------------------------------------


def collected(world: World, options: dict[str, Any]) -> list[bool]:
    ddp, optimizer = make(world, **options)
    handle = overlap_optimizer(ddp, optimizer)
    train(ddp, optimizer, range(2), world)
    references = [weakref.ref(thing) for thing in (ddp, ddp.module, optimizer, handle)]
    dist.barrier(world.group)
    del ddp, optimizer, handle
    gc.collect()
    return [reference() is None for reference in references]


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_model_and_optimizer_are_freed(pool: Pool, options: dict[str, Any]) -> None:
    assert pool.run(collected, options) == [[True] * 4, [True] * 4]


def threads(world: World) -> set[str]:
    before = {thread.ident for thread in threading.enumerate()}
    ddp, optimizer = make(world)
    overlap_optimizer(ddp, optimizer)
    train(ddp, optimizer, range(3), world)
    return {
        thread.name
        for thread in threading.enumerate()
        if thread.ident not in before and not thread.name.startswith("Dummy")  # gloo's, seen by a callback
    }


def test_no_threads_are_started(pool: Pool) -> None:
    assert pool.run(threads) == [set(), set()]
