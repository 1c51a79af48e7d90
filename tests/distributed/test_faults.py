"""Ranks that differ, end or hang: every other rank raises within the time-out, and names the collective."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lazystep
from tests.pool import Pool, World, raised_by

from .test_steps import make, step

TIMEOUT = 8.0


def differ(world: World) -> str:
    """Another collective on each rank, in a program that is new to both."""
    size = 3 + world.rank
    dist.all_reduce(torch.ones(2).to("lazy"), group=world.group)
    dist.all_reduce(torch.ones(size).to("lazy"), group=world.group)
    return raised_by(lambda: lazystep.mark_step(wait=True))


def leave_the_loop(world: World) -> str:
    """Rank 1 goes on to another program while rank 0 repeats the known one."""

    def reduce(size: int) -> None:
        dist.all_reduce(torch.ones(size).to("lazy"), group=world.group)
        lazystep.mark_step(wait=True)

    for _ in range(3):
        reduce(2)
    return raised_by(lambda: reduce(2 + world.rank))


@pytest.mark.parametrize("function", [differ, leave_the_loop])
def test_ranks_that_record_different_programs_are_told_the_first_difference(function: Any) -> None:
    pool = Pool(2, collective_timeout=TIMEOUT)
    try:
        raised = pool.run(function, timeout=240)
    finally:
        pool.close()
    for text in raised:
        assert text.startswith("StepError: step "), text
    assert any("different programs" in text for text in raised)
    told = next(text for text in raised if "different programs" in text)
    assert "all_reduce(3 x torch.float32, 'sum'" in told
    assert "test_faults.py:" in told, "the user's line"


def end_or_stop(world: World, how: int) -> dict[str, Any]:
    ddp, optimizer = make(world)
    for _ in range(3):
        step(ddp, optimizer)
    lazystep.wait_device_ops()
    dist.barrier(group=world.group)
    if world.rank == 1:
        os.kill(os.getpid(), how)
    raised = raised_by(lambda: (step(ddp, optimizer), lazystep.wait_device_ops()))
    again = raised_by(lambda: (step(ddp, optimizer), lazystep.wait_device_ops()))
    return {"raised": raised, "again": again}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_others_raise_when_a_rank_ends_or_hangs(how: int) -> None:
    pool = Pool(2, collective_timeout=TIMEOUT)
    try:
        pool.start(end_or_stop, how)
        [survivor] = pool.gather([0], timeout=240)
        if how == signal.SIGSTOP:
            os.kill(pool.processes[1].pid or 0, signal.SIGCONT)
    finally:
        pool.close()
    assert survivor["raised"].startswith("StepError: step 4 failed in lazystep.")
    assert "all_reduce of" in survivor["raised"]
    assert "over the 2 ranks of 'lazystep:0' failed on rank 0" in survivor["raised"]
    assert "StepError" in survivor["again"]
    assert pool.processes[0].exitcode is not None, "its process has ended"


def fail_between_collectives(world: World) -> list[str]:
    """Rank 0 can't compute what the second collective of the step would send."""
    index = torch.tensor([0, 9 * (1 - world.rank)])

    def reduce() -> None:
        first = torch.ones(2).to("lazy")
        dist.all_reduce(first, group=world.group)
        second = torch.ones(4).to("lazy").index_select(0, index.to("lazy"))
        dist.all_reduce(second, group=world.group)
        lazystep.mark_step(wait=True)

    return [raised_by(reduce), raised_by(reduce)]


def test_no_collective_of_a_later_step_meets_one_that_another_rank_waits_for() -> None:
    pool = Pool(2, collective_timeout=TIMEOUT)
    try:
        (failed, again), (waited, _) = pool.run(fail_between_collectives, timeout=240)
    finally:
        pool.close()
    assert "failed in aten.index_select.default" in failed
    assert "the process group is broken. A step failed on rank 0 between its collectives" in again
    assert waited.startswith("StepError: step ")
    assert "all_reduce of 2" in waited


def read_on_one_rank(world: World) -> str:
    """Rank 0 reads between two collectives, so its first program ends there."""
    first, second = (torch.ones(size).to("lazy") for size in (2, 3))

    def reduce() -> None:
        dist.all_reduce(first, group=world.group)
        if world.rank == 0:
            first.tolist()
        dist.all_reduce(second, group=world.group)
        lazystep.mark_step(wait=True)

    return raised_by(reduce)


def come_to_the_second_step_alone(world: World) -> str:
    """Rank 1 does not come to the second step, in which the ranks exchange the order of the buckets."""
    ddp, optimizer = make(world)
    step(ddp, optimizer)
    lazystep.wait_device_ops()
    return raised_by(lambda: step(ddp, optimizer)) if world.rank == 0 else "nothing"


def make_the_group_anew(world: World, path: str) -> dict[str, str]:
    """Rank 0 has recorded a collective of the old group that never ran. The new group has the same name."""

    def reduce(size: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        x = torch.full((size,), float(world.rank + 1)).to("lazy")
        dist.all_reduce(x, group=group)
        return x

    assert reduce(2, world.group).tolist() == [3.0, 3.0]
    left = reduce(3, world.group) if world.rank == 0 else torch.zeros(3).to("lazy")
    dist.destroy_process_group()
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group(
        "gloo", store=dist.FileStore(path, 2), rank=world.rank, world_size=2, timeout=timeout
    )
    total = reduce(4)
    return {
        "total": str(total.tolist()),
        "left": raised_by(left.tolist),
        "lost": raised_by(lazystep.wait_device_ops),
    }


def test_a_read_on_one_rank_alone_is_told_as_such() -> None:
    pool = Pool(2, collective_timeout=TIMEOUT)
    try:
        for raised in pool.run(read_on_one_rank, timeout=240):
            assert "Ranks have recorded different programs" in raised
            assert "where a value is read: read it on all ranks, or in a step closure" in raised
    finally:
        pool.close()


def test_a_message_that_another_rank_does_not_send_is_named() -> None:
    pool = Pool(2, collective_timeout=TIMEOUT)
    try:
        raised, _ = pool.run(come_to_the_second_step_alone, timeout=240)
    finally:
        pool.close()
    assert raised.startswith("CollectiveError: rank 0 exchanges the order of the buckets"), raised
    assert "has not come to this place within 8 s" in raised


def test_what_was_recorded_for_a_destroyed_group_never_runs_in_a_new_one(tmp_path: Path) -> None:
    pool = Pool(2, collective_timeout=TIMEOUT)
    try:
        first, second = pool.run(make_the_group_anew, str(tmp_path / "store"), timeout=240)
    finally:
        pool.close()
    assert first["total"] == second["total"] == str([3.0] * 4)
    assert "destroyed" in first["left"]
    assert second["left"] == second["lost"] == "nothing"
