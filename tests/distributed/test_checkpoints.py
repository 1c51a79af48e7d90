"""One checkpoint of several ranks: parts of sharded state, other numbers of ranks, and ranks that die."""

from __future__ import annotations

import errno
import os
import random
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import lazystep
from lazystep import checkpoint
from lazystep.checkpoint.files import Files
from lazystep.checkpoint.tensor_file import read
from tests.pool import Pool, World, raised_by

from .test_sharded import assert_equal, build
from .test_steps import step

TIMEOUT = 3.0


def save(world: World, root: str) -> dict[str, Any]:
    """Train, save in step 3, and go on: the whole state as of step 3, and what comes after it."""
    ddp, opt = build(world, "lazy", True, "AdamW, fused")
    random.seed(world.rank)
    kept: dict[str, Any] = {}
    lazystep.metrics.reset()
    with checkpoint.save_every(root, {"model": ddp, "opt": opt}, 3, process_group=world.group) as saver:
        for number in range(1, 6):
            step(ddp, opt)
            saver(number, position=10 * world.rank + number)
            if number == 3:
                waits = lazystep.metrics.counter_value("synchronizations")
                kept = whole(ddp, opt)
                drawn = random.random()
    return {"kept": kept, "drawn": drawn, "waits": waits, "after": whole(ddp, opt)}


def whole(ddp: Any, opt: Any) -> dict[str, Any]:
    state = opt.state_dict()
    state["state"] = {n: {k: v.cpu() for k, v in values.items()} for n, values in state["state"].items()}
    return {"model": {name: value.cpu() for name, value in ddp.state_dict().items()}, "opt": state}


def load(world: World, root: str, shards: bool, device: str) -> dict[str, Any]:
    ddp, opt = build(world, device, shards, "AdamW, fused")
    found = checkpoint.latest(root)
    assert found is not None
    loaded = checkpoint.load(found, {"model": ddp, "opt": opt}, process_group=world.group)
    drawn = random.random()
    kept = whole(ddp, opt)
    if device == "lazy":
        for _ in range(2):
            step(ddp, opt)
    return {"loaded": loaded, "drawn": drawn, "kept": kept, "after": whole(ddp, opt)}


def test_ranks_write_their_parts_and_any_number_of_ranks_loads_them(lazy_pool: Pool, tmp_path: Path) -> None:
    root = str(tmp_path)
    saved = lazy_pool.run(save, root, timeout=240)
    assert [rank["waits"] for rank in saved] == [0, 0], "nothing waits for a value, and nothing is gathered"
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-00000003"]
    num_bytes = sum(p.nbytes for p in saved[0]["kept"]["model"].values())
    for name in ("tensors.safetensors", "rank-1.safetensors"):
        tensors = read(bytearray((tmp_path / "step-00000003" / name).read_bytes()))
        states = [
            tensor for place, tensor in tensors.items() if place.startswith("state.opt.") and tensor.dim()
        ]
        assert abs(sum(tensor.nbytes for tensor in states) - num_bytes) <= 1024, "half of the two states"
    assert not list(tmp_path.glob(".writing-*"))
    for rank, found in enumerate(lazy_pool.run(load, root, True, "lazy", timeout=240)):
        assert_equal(found["kept"], saved[0]["kept"])
        assert_equal(found["after"], saved[0]["after"])
        assert found["drawn"] == saved[rank]["drawn"], "the generators of each rank"
        assert found["loaded"].extra == {"position": 10 * rank + 3}
    for shards, device in ((True, "lazy"), (False, "cpu")):
        for found in lazy_pool.run(load, root, shards, device, num_ranks=3, timeout=240):
            assert found["loaded"].step == 3
            assert_equal(found["kept"], saved[0]["kept"])


class Disturbed(Files):
    """From the second checkpoint on, kills its process or fails at the first write of a file."""

    def __init__(self, how: str) -> None:
        self._how = how
        self.is_armed = False

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.is_armed:
            if self._how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(descriptor, data)


def disturb(world: World, root: str, victim: int, how: str) -> dict[str, Any]:
    ddp, opt = build(world, "lazy", True, "AdamW, fused")
    files = Disturbed(how)
    state = {"model": ddp, "opt": opt}
    saver = checkpoint.save_every(root, state, 1, process_group=world.group, files=files)
    step(ddp, opt)
    saver(1)
    saver.flush()
    dist.barrier(group=world.group)
    files.is_armed = world.rank == victim
    if how == "killed":
        assert saver._ranks is not None
        saver._ranks = saver._ranks._replace(
            timeout=TIMEOUT
        )  # of the group, which would take long to connect
    saver.now(2)
    raised = raised_by(saver.close)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lazystep.LazyStepWarning)  # that it is not written, once more
        lazystep.mark_step(wait=True)
    found = checkpoint.latest(root)
    return {"raised": raised, "latest": found.step if found else None}


@pytest.mark.parametrize(
    ("victim", "how"),
    [(0, "disk full"), (1, "disk full"), (1, "killed"), pytest.param(0, "killed", marks=pytest.mark.nightly)],
)
def test_a_rank_that_can_not_write_means_no_commit_and_no_hang(
    tmp_path: Path, request: Any, victim: int, how: str
) -> None:
    is_killed = how == "killed"
    pool = Pool(2) if is_killed else request.getfixturevalue("lazy_pool")
    survivors = [1 - victim] if is_killed else [0, 1]
    try:
        pool.start(disturb, str(tmp_path), victim, how)
        found = dict(zip(survivors, pool.gather(survivors, timeout=200), strict=True))
    finally:
        if is_killed:
            pool.close()
    for rank, told in found.items():
        assert told["raised"].startswith("CheckpointError"), told
        assert told["latest"] == 1, "the one before is whole"
        if is_killed:
            missing = "rank 1 has not written its part" if victim else "rank 0 has not"
            assert missing in told["raised"]
            assert "the time-out of the process group" in told["raised"]
        elif rank == victim:
            assert "No space left" in told["raised"]
        else:
            assert ("rank 1 could not write" if victim else "rank 0 has given up") in told["raised"]
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]
    if not (is_killed and victim == 0):  # else the next run removes what is left
        assert not list(tmp_path.glob(".writing-*"))
