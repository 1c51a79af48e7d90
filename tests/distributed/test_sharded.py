"""Sharded optimizer state: what a rank keeps, what it sends, and how the whole state is had and loaded.

That losses, parameters and states are those of plain DDP is in the table of test_parity.
"""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lazystep
from lazystep.distributed import shard_optimizer
from lazystep.distributed.partition import BLOCK, Partition
from tests.helpers import nightly
from tests.pool import Pool, World, raised_by

from .cases import BUCKET_CAP_MB, CASES, MORE_OPTIMIZERS, OPTIMIZERS, mlp
from .test_native import STEADY_AT, train_natively
from .test_parity import check
from .test_steps import COUNTERS, make, step

SHARDED = [name for name, case in CASES.items() if case.shards]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_parts_cover_each_parameter_and_are_balanced(num_ranks: int) -> None:
    sizes = [1, 63, 64, 65, 0, 1000, 4096, 7, 7, 7, 12345]
    partition = Partition(num_ranks)
    widths = [0] * num_ranks
    for size in sizes:
        cuts = partition.add(size)
        assert cuts[0] == 0
        assert cuts[-1] == size
        assert all(cut % BLOCK == 0 or cut == size for cut in cuts)
        for rank in range(num_ranks):
            assert cuts[rank] <= cuts[rank + 1]
            widths[rank] += cuts[rank + 1] - cuts[rank]
    assert max(widths) - min(widths) <= 2 * BLOCK


def states_of(optimizer: Any) -> list[torch.Tensor]:
    return [v for state in optimizer.state.values() for v in state.values() if v.dim()]


def count_steps(world: World) -> dict[str, Any]:
    ddp, optimizer = make(world, shard_optimizer_state=True)
    for _ in range(2):
        step(ddp, optimizer)
    lazystep.wait_device_ops()
    lazystep.metrics.reset()
    for _ in range(5):
        step(ddp, optimizer)
    lazystep.wait_device_ops()
    found: dict[str, Any] = {name: lazystep.metrics.counter_value(name) for name in COUNTERS}
    found["num_buckets"] = len(ddp.reducer.buckets)
    found["program"] = str(lazystep.debug.last_program())
    found["parameters"] = sum(p.nbytes for p in ddp.parameters())
    found["state"] = sum(t.nbytes for t in states_of(optimizer))
    found["memory"] = sum(t.untyped_storage().nbytes() for t in states_of(optimizer))
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_keeps_and_updates_its_part_in_one_program(lazy_pool: Pool, num_ranks: int) -> None:
    ranks = lazy_pool.run(count_steps, num_ranks=num_ranks, timeout=240)
    whole = 2 * ranks[0]["parameters"]  # the two states of AdamW
    assert sum(found["state"] for found in ranks) == whole
    for found in ranks:
        assert found["memory"] == found["state"], "no part is a view of the whole"
        assert abs(found["state"] - whole / num_ranks) <= 2 * 4 * BLOCK
        assert found["programs_executed"] == 5
        assert found["collectives_launched"] == 5 * 2 * found["num_buckets"]
        assert found["cache_misses"] == found["synchronizations"] == found["program_agreements"] == 0
        lines = found["program"].splitlines()

        def at(text: str, lines: list[str] = lines) -> list[int]:
            return [n for n, line in enumerate(lines) if text in line]

        reductions, gathers, updates = at("all_reduce_"), at("all_gather_"), at("_fused_adamw_")
        waits = at("lazystep.wait_")
        assert len(reductions) == len(gathers) == len(updates) == found["num_buckets"] >= 2
        assert reductions[0] < at("tanh_backward")[-1], "in flight while backward computes"
        # Each bucket is updated, and its parts are sent, before the next one is waited for.
        for update, gather, next_wait in zip(updates, gathers, waits[1:], strict=False):
            assert update < gather < next_wait
        assert gathers[-1] < waits[found["num_buckets"]], "no gather is waited for before the last is sent"


@pytest.mark.parametrize("optimizer", nightly([*OPTIMIZERS, *MORE_OPTIMIZERS]))
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_optimizer_that_works_element_by_element(
    lazy_pool: Pool, optimizer: str, num_ranks: int
) -> None:
    check(lazy_pool, "sharded state, clip_grad_norm_, schedule", optimizer, num_ranks)


@pytest.mark.parametrize("name", nightly([name for name in SHARDED if not CASES[name].not_replayed]))
def test_sharded_state_natively(lazy_pool: Pool, name: str) -> None:
    optimizer = "SGD" if "batch norm" in name else "AdamW, fused"
    args = (optimizer, False, STEADY_AT + 4, ["auto"] * 2, name)
    for rank in lazy_pool.run(train_natively, *args, timeout=280):
        assert rank["distance"] < (3e-2 if CASES[name].autocast is not None else 1e-3)
        assert rank["all"]["native_mismatches"] == 0
        assert rank["steady"]["native_executions"] == 4


# -- the whole state --------------------------------------------------------------------------------------


def build(world: World, device: str, shards: bool, optimizer: str) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(mlp(), Scaled()).to(device)
    ddp = DistributedDataParallel(model, process_group=world.group, bucket_cap_mb=BUCKET_CAP_MB)
    groups = [{"params": list(ddp.module[0].parameters())}, {"params": list(ddp.module[1].parameters())}]
    made = {**OPTIMIZERS, **MORE_OPTIMIZERS}[optimizer](groups)
    made.param_groups[1]["lr"] = 0.001
    return ddp, shard_optimizer(ddp, made) if shards else made


class Scaled(nn.Module):
    """Has a parameter without a dimension, of which one rank has all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def resume(
    world: World, shards: bool, device: str, optimizer: str, loaded: Any, num_steps: int
) -> dict[str, Any]:
    """Train some steps, from a whole state if there is one, and return the whole state."""
    ddp, opt = build(world, device, shards, optimizer)
    if loaded:
        ddp.load_state_dict(loaded["model"])
        opt.load_state_dict(loaded["opt"])
    data = torch.Generator().manual_seed(7 + world.rank)
    for _ in range(num_steps):
        ddp(torch.randn(4, 6, generator=data).to(device)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if device == "lazy":
            lazystep.mark_step()
    state = opt.state_dict()
    state["state"] = {
        n: {name: value.cpu() for name, value in values.items()} for n, values in state["state"].items()
    }
    return {"model": {name: value.cpu() for name, value in ddp.state_dict().items()}, "opt": state}


def assert_equal(found: Any, expected: Any) -> None:
    assert found["opt"]["param_groups"] == expected["opt"]["param_groups"]
    assert found["opt"]["state"].keys() == expected["opt"]["state"].keys()
    for n, state in expected["opt"]["state"].items():
        assert list(found["opt"]["state"][n]) == list(state)
        for name, value in state.items():
            other = found["opt"]["state"][n][name]
            assert other.shape == value.shape
            assert torch.equal(other, value), (n, name)
    for name, value in expected["model"].items():
        assert torch.equal(found["model"][name], value), name


@pytest.mark.parametrize("optimizer", ["AdamW, fused", "NAdam"])
def test_the_whole_state_is_that_of_plain_ddp_and_goes_to_other_numbers_of_ranks(
    lazy_pool: Pool, optimizer: str
) -> None:
    def run(num_ranks: int, shards: bool, device: str, loaded: Any, num_steps: int) -> Any:
        args = (shards, device, optimizer, loaded, num_steps)
        return lazy_pool.run(resume, *args, num_ranks=num_ranks, timeout=240)

    expected = run(2, False, "cpu", None, 3)[0]
    for found in run(2, True, "lazy", None, 3):
        assert_equal(found, expected)
    onward = run(3, False, "cpu", expected, 2)[0]
    # From two ranks to three, and from state that was not sharded; and back to state that is not.
    sharded = run(3, True, "lazy", expected, 2)
    for found in sharded:
        assert_equal(found, onward)
    assert_equal(run(2, False, "lazy", sharded[2], 2)[0], run(2, False, "cpu", onward, 2)[0])


def load_into_a_capture(world: World) -> list[float]:
    """A captured step goes on with the state that was loaded, with parameters that moved, with a new rate."""
    losses = []
    for device in ("cpu", "lazy"):
        ddp, opt = build(world, device, device == "lazy", "AdamW, fused")

        def train_step(x: torch.Tensor, ddp: Any = ddp, opt: Any = opt) -> torch.Tensor:
            loss = ddp(x).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        run: Any = lazystep.step(audit_every=0)(train_step) if device == "lazy" else train_step
        x = torch.ones(4, 6).to(device)
        kept = opt.state_dict()
        for number in range(18):
            losses.append(run(x).cpu())
            if number == 5:
                kept = copy.deepcopy(opt.state_dict())
            if number == 8:
                opt.load_state_dict(kept)
            if number == 11:
                opt.param_groups[0]["lr"] = 0.2
            if number == 14:
                weight = ddp.module[0][0].weight
                weight.data = weight.data + 1
    assert run.num_replayed >= 6, run.explain()
    return [float(loss) for loss in losses]


def test_a_captured_step_sees_a_loaded_state_and_parameters_that_moved(lazy_pool: Pool) -> None:
    for losses in lazy_pool.run(load_into_a_capture, timeout=240):
        assert losses[:18] == losses[18:]
        assert len(set(losses[:18])) == 18


# -- refusals and failures --------------------------------------------------------------------------------


def refusals(world: World) -> list[str]:
    ddp, optimizer = make(world)
    parameters = list(ddp.parameters())
    cpu = nn.Linear(2, 2)
    stranger = nn.Linear(2, 2).to("lazy")
    sgd = torch.optim.SGD
    shard_optimizer(ddp, optimizer)
    return [
        raised_by(lambda: shard_optimizer(ddp, torch.optim.LBFGS(parameters))),
        raised_by(lambda: shard_optimizer(cpu, sgd(cpu.parameters()))),
        raised_by(lambda: shard_optimizer(ddp, sgd([*parameters, *stranger.parameters()]))),
        raised_by(lambda: shard_optimizer(ddp, sgd(parameters, differentiable=True))),
        raised_by(lambda: optimizer.step(lambda: torch.zeros(()))),
    ]


def test_what_can_not_be_sharded_is_refused_with_the_way_out(lazy_pool: Pool) -> None:
    for norms, cpu, stranger, differentiable, closure in lazy_pool.run(refusals, timeout=240):
        assert all(text.startswith("UnsupportedError: sharded") for text in (norms, cpu, stranger, closure))
        assert "LBFGS, which may not work element by element" in norms
        assert "element_by_element=True" in norms
        assert "test_sharded.py:" in norms
        assert "ZeroRedundancyOptimizer" in cpu
        assert "an optimizer of its own" in stranger
        assert "differentiable=True" in differentiable
        assert "call the closure first" in closure


def fail(world: World) -> list[str]:
    ddp, optimizer = make(world, shard_optimizer_state=True)
    step(ddp, optimizer)
    kept = optimizer.state_dict()
    lazystep.mark_step()
    group = ddp._step_group
    # Rank 0 alone wants the state.
    alone = "nothing"
    if world.rank == 0:
        timeout, group.timeout = group.timeout, timedelta(seconds=0.5)
        alone = raised_by(optimizer.state_dict)
        group.timeout = timeout
    else:
        optimizer._lazystep_shards.shards._num_exchanges += 1  # type: ignore[attr-defined]
    # A step that raises.
    ddp(torch.ones(4, 6).to("lazy")).square().mean().backward()
    betas = optimizer.param_groups[0]["betas"]
    optimizer.param_groups[0]["betas"] = None
    raised = raised_by(optimizer.step)
    optimizer.param_groups[0]["betas"] = betas
    again = raised_by(optimizer.step)
    optimizer.load_state_dict(kept)
    optimizer.zero_grad()
    step(ddp, optimizer)
    lazystep.wait_device_ops()
    return [alone, raised, again]


def test_a_failed_step_and_a_lonely_rank_are_told(lazy_pool: Pool) -> None:
    (alone, raised, again), _ = lazy_pool.run(fail, timeout=240)
    assert "rank 1 has not called it within 0.5 s" in alone
    assert "Call it on all ranks" in alone
    assert "TypeError" in raised
    assert "load_state_dict makes the optimizer usable again" in again
