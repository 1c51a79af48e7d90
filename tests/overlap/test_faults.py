"""What fails: a rank that dies, an update that raises, a reduction that raises; and the way back."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lazystep.overlap import overlap_optimizer
from tests.helpers import descend
from tests.pool import Pool, World, raised_by

from .training import BUCKET_CAP_MB, mlp


def make(world: World, kind: Any = torch.optim.SGD, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(3)
    ddp = DistributedDataParallel(mlp(), process_group=world.group, bucket_cap_mb=BUCKET_CAP_MB)
    optimizer = kind(ddp.parameters(), lr=0.1, momentum=0.9)
    return ddp, optimizer, overlap_optimizer(ddp, optimizer, **options)


def step(ddp: Any, optimizer: Any, seed: int, world: World) -> None:
    torch.manual_seed(10 * seed + world.rank)
    descend(ddp(torch.randn(4, 6)).square().mean(), optimizer)


def values(ddp: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in ddp.parameters()]


# -- a rank dies ---------------------------------------------------------------------------------


def train_until_killed(world: World, kill_at: int, bucket_to_kill: int) -> dict[str, Any]:
    passes = 0

    def averaging_or_dying(state, bucket):  # type: ignore[no-untyped-def]
        nonlocal passes
        passes += bucket.index() == 0
        if world.rank == 1 and passes == kill_at and bucket.index() == bucket_to_kill:
            os.kill(os.getpid(), signal.SIGKILL)
        work = dist.all_reduce(bucket.buffer().div_(world.size), group=world.group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp, optimizer, handle = make(world, hook=averaging_or_dying)
    for number in range(kill_at - 1):
        step(ddp, optimizer, number, world)
    before = values(ddp)
    torch.manual_seed(99)
    loss = ddp(torch.randn(4, 6)).square().mean()
    calls = (loss.backward, optimizer.step, optimizer.step, lambda: ddp(torch.randn(4, 6)))
    raised = [raised_by(call) for call in calls]
    changed = [not torch.equal(a, b) for a, b in zip(before, values(ddp), strict=True)]
    last = [e for e in handle.events() if e.backward == kill_at]
    return {
        "raised": raised,
        "num_changed": sum(changed),
        "num_updated": sum(e.updated for e in last),
        "buckets_updated": [e.bucket for e in last if e.updated],
        "num_buckets": len(last),
    }


@pytest.mark.parametrize("bucket_to_kill", [0, 2])
def test_survivor_of_a_killed_rank_raises_and_updates_nothing_from_a_failed_reduction(
    bucket_to_kill: int,
) -> None:
    pool = Pool(2, collective_timeout=10)
    try:
        pool.start(train_until_killed, 3, bucket_to_kill)
        [survivor] = pool.gather([0], timeout=60)
    finally:
        pool.close()
    backward, stepped, again, forward = survivor["raised"]
    assert again == stepped
    assert backward.startswith("RuntimeError"), "gloo's own error"
    assert stepped.startswith("OverlapError: an earlier step failed")
    assert forward.startswith("OverlapError: an earlier step failed")
    assert survivor["num_buckets"] == 3
    # Earlier buckets may have been reduced and updated; the one that failed and those behind it were not.
    assert all(bucket < bucket_to_kill for bucket in survivor["buckets_updated"])
    assert survivor["num_changed"] == survivor["num_updated"]


# -- an update raises ----------------------------------------------------------------------------


class FailsOnce(torch.optim.SGD):
    """Raises in the update of one bucket, on one rank, in one step."""

    fail_at = -1
    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == self.fail_at:
            raise MemoryError("no memory left for the momentum")
        return super().step(closure)


def fail_and_recover(world: World) -> dict[str, Any]:
    ddp, optimizer, _ = make(world, FailsOnce, per_parameter=True)
    step(ddp, optimizer, 0, world)
    saved = copy.deepcopy((ddp.state_dict(), optimizer.state_dict()))
    if world.rank == 0:
        optimizer.fail_at = optimizer.calls + 2  # the second bucket
    seen: dict[str, Any] = {"raised": [], "notes": []}
    torch.manual_seed(10 + world.rank)
    loss = ddp(torch.randn(4, 6)).square().mean()
    for call in (loss.backward, optimizer.step, optimizer.step, lambda: ddp(torch.randn(4, 6))):
        seen["raised"].append(raised_by(call, seen["notes"]))
    optimizer.load_state_dict(saved[1])
    seen["after half a reload"] = raised_by(lambda: ddp(torch.randn(4, 6)))
    ddp.load_state_dict(saved[0])
    optimizer.zero_grad()
    for number in range(1, 4):
        step(ddp, optimizer, number, world)
    seen["after"] = values(ddp)
    return seen


def train_four_steps(world: World) -> list[torch.Tensor]:
    ddp, optimizer, _ = make(world)
    for number in range(4):
        step(ddp, optimizer, number, world)
    return values(ddp)


def test_failed_update_raises_on_every_rank_and_reloading_recovers(pool: Pool) -> None:
    failed, other = pool.run(fail_and_recover)
    backward, stepped, again, forward = failed["raised"]
    assert again == stepped
    assert backward == "MemoryError: no memory left for the momentum", "the original type"
    assert any("updating" in note and ".weight" in note for note in failed["notes"]), failed["notes"]
    assert "MemoryError" in stepped
    assert "MemoryError" in forward
    backward, *_, forward = other["raised"]  # step() may come before the news
    assert backward == "nothing"
    assert "an update failed on rank 0" in forward
    for seen, expected in zip((failed, other), pool.run(train_four_steps), strict=True):
        assert seen["after half a reload"].startswith("OverlapError")
        assert all(map(torch.equal, seen["after"], expected)), "DDP's reducer went on undamaged"


# -- a reduction raises --------------------------------------------------------------------------


def fail_in_the_future(world: World, how: str) -> dict[str, Any]:
    broken = False

    def failing(state, bucket):  # type: ignore[no-untyped-def]
        if broken and bucket.index() == 1 and how == "at once":
            raise ArithmeticError("refused by the hook")

        def take(future: Any) -> torch.Tensor:
            if broken and bucket.index() == 1:
                raise ArithmeticError("lost on the way")
            return future.value()[0]

        work = dist.all_reduce(bucket.buffer().div_(world.size), group=world.group, async_op=True)
        return work.get_future().then(take)

    ddp, optimizer, handle = make(world, hook=failing)
    step(ddp, optimizer, 0, world)
    step(ddp, optimizer, 1, world)
    before, broken = values(ddp), True
    loss = ddp(torch.randn(4, 6)).square().mean()
    raised = [raised_by(call) for call in (loss.backward, optimizer.step)]
    changed = sum(not torch.equal(a, b) for a, b in zip(before, values(ddp), strict=True))
    first = [e.updated for e in handle.events() if e.backward == 3 and e.bucket == 0]
    return {"raised": raised, "changed": changed, "first": first}


@pytest.mark.parametrize("how", ["in the future", "at once"])
def test_hook_that_fails_leaves_later_buckets_alone(pool: Pool, how: str) -> None:
    for seen in pool.run(fail_in_the_future, how):
        backward, stepped = seen["raised"]
        assert "lost on the way" in backward or "refused by the hook" in backward
        assert stepped.startswith("OverlapError: an earlier step failed")
        assert seen["changed"] == sum(seen["first"])
        assert (seen["changed"] > 0) == (how == "in the future")


# -- between backward and step -------------------------------------------------------------------


def reload_between(world: World, what: str) -> str:
    ddp, optimizer, _ = make(world)
    step(ddp, optimizer, 0, world)
    saved = copy.deepcopy((ddp.state_dict(), optimizer.state_dict()))
    ddp(torch.randn(4, 6)).square().mean().backward()
    optimizer.load_state_dict(saved[1])
    if what == "both":
        ddp.load_state_dict(saved[0])
    return raised_by(optimizer.step)


def test_reload_of_the_optimizer_alone_before_step_is_refused(pool: Pool) -> None:
    for message in pool.run(reload_between, "optimizer"):
        assert message.startswith("OverlapError: ")
        assert "param_groups were replaced between backward() and step()" in message
    assert pool.run(reload_between, "both") == ["nothing", "nothing"]


def remove_too_early(world: World) -> str:
    ddp, _, handle = make(world)
    ddp(torch.randn(4, 6)).square().mean().backward()
    return raised_by(handle.remove)


def test_remove_before_step_is_refused(pool: Pool) -> None:
    for message in pool.run(remove_too_early):
        assert message.startswith("OverlapError: ")
        assert "call optimizer.step() before remove()" in message
