"""The pool of ranks: a call that fails says where the ranks stood, and the next call gets new ones."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankError, World


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.close()


def total(world: World) -> float:
    value = torch.tensor(world.rank + 1.0)
    dist.all_reduce(value, group=world.group)
    return float(value)


def answer_late(world: World) -> float:
    time.sleep(3)
    return -1.0


def end(world: World) -> None:
    if world.rank == 1:
        os._exit(3)
    dist.barrier(group=world.group)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (answer_late, r"ranks \[0, 1\]: no answer in time(.|\n)*in answer_late(.|\n)*in answer_late"),
        (end, "rank 1: its process has ended"),
    ],
)
def test_call_after_a_failed_one_gets_ranks_that_work(pool: Pool, function: object, told: str) -> None:
    assert pool.run(total) == [3.0, 3.0]
    before = [process.pid for process in pool.processes]
    with pytest.raises(RankError, match=told):
        pool.run(function, timeout=1)  # type: ignore[arg-type]
    time.sleep(3 if function is answer_late else 0)  # its answers are none of the next call
    assert pool.run(total) == [3.0, 3.0]
    assert not set(before) & {process.pid for process in pool.processes}


def test_call_after_one_that_returned_keeps_the_ranks(pool: Pool) -> None:
    pool.run(total)
    before = [process.pid for process in pool.processes]
    assert pool.run(total) == [3.0, 3.0]
    assert before == [process.pid for process in pool.processes]
