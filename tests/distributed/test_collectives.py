"""Collectives of the user's on lazy tensors: what gloo would refuse is refused where it is called."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

import lazystep
from tests.pool import Pool, World, raised_by


def refused_calls(world: World) -> dict[str, Any]:
    """Calls that no group of gloo takes, and a step of the same group behind them."""
    size, group = world.size, world.group

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype).to("lazy")

    def scatter_too_much() -> None:
        dist.reduce_scatter_tensor(zeros(2), zeros(2 * size + 1), group=group)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer releases have other names
        found = {
            "op": raised_by(lambda: dist.all_reduce(zeros(2), op=dist.ReduceOp.BAND, group=group)),
            "average": raised_by(
                lambda: dist.all_reduce(zeros(2, dtype=torch.int64), op=dist.ReduceOp.AVG, group=group)
            ),
            "type": raised_by(lambda: dist.broadcast(zeros(2, dtype=torch.int16), 0, group=group)),
            "results": raised_by(
                lambda: dist.all_gather([zeros(2) for _ in range(size + 1)], zeros(2), group=group)
            ),
            "other type": raised_by(
                lambda: dist.all_gather_into_tensor(zeros(2 * size, dtype=torch.int64), zeros(2), group=group)
            ),
            "scattered": raised_by(scatter_too_much),
        }
    total = torch.ones(2).to("lazy")
    dist.all_reduce(total, group=group)
    return {**found, "afterwards": total.tolist()}


def test_a_collective_that_gloo_refuses_is_refused_where_it_is_called(lazy_pool: Pool) -> None:
    for rank in lazy_pool.run(refused_calls, timeout=240):
        assert rank["op"].startswith("RuntimeError: gloo has no all_reduce of torch.float32 with 'band': ")
        assert rank["average"].startswith("RuntimeError: gloo has no all_reduce of torch.int64 with 'avg': ")
        assert rank["type"].startswith("RuntimeError: gloo has no broadcast of torch.int16: ")
        assert "expected 4 elements of torch.float32 in the output" in rank["results"]
        assert "got 4 of torch.int64" in rank["other type"]
        assert "expected 4 elements of torch.float32 in the input" in rank["scattered"]
        assert rank["afterwards"] == [2.0, 2.0], "the group is still of use"


def handles(world: World) -> dict[str, Any]:
    """What the `Work` of a recorded collective says."""
    x = torch.full((2,), float(world.rank + 1)).to("lazy")
    work: Any = dist.all_reduce(x, group=world.group, async_op=True)
    future = work.get_future()
    doubled = future.then(lambda ended: ended.value()[0] * 2)
    return {
        "waited": work.wait(),
        "completed": work.is_completed(),
        "results": [t.tolist() for t in work.result()],
        "value": future.wait()[0].tolist(),
        "then": doubled.wait().tolist(),
    }


def test_the_handle_of_a_recorded_collective_has_ended_and_has_its_results(lazy_pool: Pool) -> None:
    for rank in lazy_pool.run(handles, timeout=240):
        assert rank["waited"]
        assert rank["completed"]
        assert rank["results"] == [[3.0, 3.0]]
        assert rank["value"] == [3.0, 3.0]
        assert rank["then"] == [6.0, 6.0]


def line_of_a_deprecated_function(world: World) -> str:
    gathered = torch.zeros(world.size).to("lazy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_gather_into_tensor(gathered, torch.ones(1).to("lazy"), group=world.group)
    lazystep.mark_step(wait=True)
    program = lazystep.debug.last_program()
    assert program is not None
    return next(one.where for one in program.instructions if "all_gather_" in one.op)


def test_a_wrapper_of_torchs_functions_is_not_the_users_line(lazy_pool: Pool) -> None:
    for where in lazy_pool.run(line_of_a_deprecated_function, timeout=240):
        assert "test_collectives.py:" in where
