"""What a data-parallel step is: one program, early launches, late waits; and what is refused."""

from __future__ import annotations

import copy
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lazystep
from tests.pool import Pool, World, raised_by

from .cases import BUCKET_CAP_MB, mlp

COUNTERS = (
    "programs_executed",
    "cache_misses",
    "synchronizations",
    "collectives_launched",
    "program_agreements",
)


def make(world: World, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    options = {"bucket_cap_mb": BUCKET_CAP_MB, **options}
    ddp = DistributedDataParallel(mlp().to("lazy"), process_group=world.group, **options)
    return ddp, torch.optim.AdamW(ddp.parameters(), fused=True)


def step(ddp: Any, optimizer: torch.optim.Optimizer, size: int = 4) -> torch.Tensor:
    loss = ddp(torch.ones(size, 6).to("lazy")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    lazystep.mark_step()
    return loss.detach()


def count_steps(world: World) -> dict[str, Any]:
    ddp, optimizer = make(world)
    for _ in range(2):
        step(ddp, optimizer)
    lazystep.wait_device_ops()
    lazystep.metrics.reset()
    with (
        tempfile.TemporaryDirectory() as directory,
        lazystep.profile(Path(directory) / "trace.json") as timeline,
    ):
        for _ in range(5):
            step(ddp, optimizer)
        lazystep.wait_device_ops()
    found: dict[str, Any] = {name: lazystep.metrics.counter_value(name) for name in COUNTERS}
    found["num_buckets"] = len(ddp.reducer.buckets)
    found["collectives"] = [span for span in timeline.spans() if span.category == "collective"]
    found["program"] = str(lazystep.debug.last_program())
    found["is torch's"] = type(ddp).__mro__[1] is DistributedDataParallel
    found["keys"] = list(ddp.state_dict())[:1]
    return found


def test_a_step_is_one_program_with_one_reduction_per_bucket(lazy_pool: Pool) -> None:
    for found in lazy_pool.run(count_steps, timeout=240):
        assert found["num_buckets"] >= 2
        assert found["programs_executed"] == 5
        assert found["collectives_launched"] == 5 * found["num_buckets"]
        assert found["cache_misses"] == found["synchronizations"] == found["program_agreements"] == 0
        assert found["is torch's"]
        assert found["keys"] == ["module.0.weight"]


def test_reductions_are_launched_in_backward_and_buckets_are_updated_as_they_arrive(lazy_pool: Pool) -> None:
    for found in lazy_pool.run(count_steps, timeout=240):
        lines = found["program"].splitlines()
        launches = [n for n, line in enumerate(lines) if "all_reduce_" in line]
        waits = [n for n, line in enumerate(lines) if "lazystep.wait_" in line]
        updates = [n for n, line in enumerate(lines) if "_fused_adamw_" in line]
        backward = [n for n, line in enumerate(lines) if "tanh_backward" in line]
        assert len(launches) == len(waits) == len(updates) == found["num_buckets"]
        assert launches[0] < backward[-1], "the first bucket is on its way while backward computes"
        for launch, wait in zip(launches[2:], waits, strict=False):
            assert launch < wait, "two more buckets are launched before a bucket is waited for"
        for update, next_wait in zip(updates, waits[1:], strict=False):
            assert update < next_wait, "a bucket is updated before the next one is waited for"


def bytes_over_activations(world: World) -> list[float]:
    """The largest number of bytes that a step's program holds in mid-step, over the gradients' bytes."""
    found = []
    for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(40))).to("lazy")
        ddp = DistributedDataParallel(model, process_group=world.group, bucket_cap_mb=0.015)
        optimizer = torch.optim.AdamW(ddp.parameters(), **options)
        for _ in range(3):
            ddp(torch.ones(1, 64).to("lazy")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            lazystep.mark_step()
        assert len(ddp.reducer.buckets) == 40
        program = lazystep.debug.last_program()
        assert program is not None
        last = {
            program.values[value].storage: position
            for position, instruction in enumerate(program.instructions)
            for value in (*instruction.reads(), *instruction.defines())
        }
        alive: set[int] = set()
        largest = 0
        for position, instruction in enumerate(program.instructions):
            made = {program.values[value].storage for value in instruction.defines()}
            alive |= {storage for storage in made if not program.storages[storage].is_input}
            largest = max(largest, sum(program.storages[storage].nbytes for storage in alive))
            alive = {storage for storage in alive if last[storage] > position}
        activations = 40 * 64 * 4
        gradients = sum(parameter.numel() * 4 for parameter in model.parameters())
        found.append((largest - activations) / gradients)
    return found


def test_gradients_take_a_small_part_of_their_size_when_there_are_many_buckets(lazy_pool: Pool) -> None:
    for found in lazy_pool.run(bytes_over_activations, timeout=240):
        assert max(found) <= 0.15, found


def test_the_timeline_has_a_row_for_each_reduction_of_a_step(lazy_pool: Pool) -> None:
    for found in lazy_pool.run(count_steps, timeout=240):
        spans, num_buckets = found["collectives"], found["num_buckets"]
        assert [span.row for span in spans] == [f"collective {n}" for n in range(num_buckets)] * 5
        for first, second in zip(spans[::num_buckets], spans[1::num_buckets], strict=True):
            assert first.start < second.start < first.end < second.end, "both are under way at once"
            assert first.args["waited"] <= first.end - first.start


def drop_results(world: World) -> list[float]:
    kept = torch.full((3,), float(world.rank + 1)).to("lazy")
    if world.rank == 0:
        dist.all_reduce(torch.ones(3).to("lazy"), group=world.group)  # its result is dropped
    else:
        other = torch.ones(3).to("lazy")
        dist.all_reduce(other, group=world.group)
    dist.all_reduce(kept, group=world.group)
    mine = torch.ones(3)
    lazystep.mark_step()
    dist.all_reduce(mine, group=world.group)  # on the training thread, beside the queued step
    return [*kept.tolist(), *mine.tolist()]


def test_a_dropped_result_is_reduced_all_the_same_and_never_mixes_with_the_users(lazy_pool: Pool) -> None:
    assert lazy_pool.run(drop_results, timeout=240) == [[3.0, 3.0, 3.0, 2.0, 2.0, 2.0]] * 2


def collectives(world: World) -> list[list[float]]:
    lazystep.metrics.reset()
    rank, size, group = float(world.rank), world.size, world.group

    def lazy(*values: float) -> torch.Tensor:
        return torch.tensor(values).to("lazy")

    largest, strided, gathered = lazy(rank, -rank), torch.eye(2).to("lazy").t() * rank, lazy(*[0.0] * size)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    dist.broadcast(strided, 1, group=group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer releases have another name for it
        dist.all_gather_into_tensor(gathered, lazy(rank), group=group)
    parts = [lazy(0.0) for _ in range(size)]
    dist.all_gather(parts, lazy(rank + 1), group=group)
    functional = torch.ops._c10d_functional
    summed = functional.wait_tensor(functional.all_reduce(lazy(rank, 1.0), "sum", group.group_name))
    scattered = functional.reduce_scatter_tensor(lazy(*range(size)), "sum", size, group.group_name)
    source = lazy(rank).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        whole = functional_collectives.all_gather_tensor(lazy(rank, 1.0)[None], 1, group).flatten()
        functional_collectives.all_gather_tensor_autograd(source, 0, group).square().sum().backward()
    assert source.grad is not None
    coalesced = functional.all_gather_into_tensor_coalesced([lazy(rank), lazy(-rank)], size, group.group_name)
    assert lazystep.metrics.counter_value("synchronizations") == 0
    ones = [1] * size
    exchanged = functional.all_to_all_single(lazy(*[rank] * size), ones, ones, group.group_name) + 1
    assert lazystep.metrics.counter_value("synchronizations") == 1, "it runs on the training thread"
    found = [largest, strided.flatten(), gathered, torch.cat(parts), summed, scattered]
    found += [*coalesced, exchanged, whole, source.grad]
    return [t.tolist() for t in found]


def test_ordinary_collectives_are_recorded(lazy_pool: Pool) -> None:
    for rank, found in enumerate(lazy_pool.run(collectives, num_ranks=3, timeout=240)):
        gathered, parts = [0.0, 1.0, 2.0], [1.0, 2.0, 3.0]
        recorded, others = found[:6], found[6:]
        assert recorded == [[2.0, 0.0], [1.0, 0.0, 0.0, 1.0], gathered, parts, [3.0, 3.0], [3.0 * rank]]
        assert others[:3] == [gathered, [0.0, -1.0, -2.0], parts]
        assert others[3:] == [[0.0, 1.0, 1.0, 1.0, 2.0, 1.0], [6.0 * rank]]


def refusals(world: World) -> list[str]:
    class Own(DistributedDataParallel):
        pass

    ddp, _ = make(world)
    embedding = nn.Embedding(3, 4, sparse=True).to("lazy")
    return [
        raised_by(lambda: DistributedDataParallel(embedding, process_group=world.group)),
        raised_by(lambda: make(world, skip_all_reduce_unused_params=True)),
        raised_by(lambda: ddp.register_comm_hook(None, lambda state, bucket: None)),
        raised_by(ddp.join),
        raised_by(lambda: Own(mlp().to("lazy"), process_group=world.group)),
    ]


def test_what_is_not_supported_is_refused_with_the_way_out(lazy_pool: Pool) -> None:
    for sparse, unused, hook, join, subclass in lazy_pool.run(refusals, timeout=240):
        assert "UnsupportedError" in sparse
        assert "sparse=False" in sparse
        assert "find_unused_parameters=True" in unused
        assert "default hooks" in hook
        assert "DistributedSampler" in join
        assert "lazystep.distributed.DistributedDataParallel" in subclass


def forget_a_parameter(world: World, **options: Any) -> str:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]).to("lazy")
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    ddp = DistributedDataParallel(model, process_group=world.group, **options)
    ddp(torch.ones(1, 2).to("lazy")).sum().backward()
    return raised_by(lambda: ddp(torch.ones(1, 2).to("lazy")))


def test_a_parameter_without_a_gradient_is_named_at_the_next_forward(lazy_pool: Pool) -> None:
    for raised in lazy_pool.run(forget_a_parameter, timeout=240):
        assert "1.weight, 1.bias" in raised
        assert "find_unused_parameters=True to DistributedDataParallel, or" in raised


def change_a_static_graph(world: World, first: int, second: int) -> list[str]:
    """Two layers, of which the first backward uses `first`, and the second one `second`."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]).to("lazy")
    layers = [first]
    model.forward = lambda x: nn.Sequential(*model[: layers[0]])(x)  # type: ignore[method-assign]
    ddp = DistributedDataParallel(model, process_group=world.group, static_graph=True)
    found = []
    for num_layers in (first, second, second):
        layers[0] = num_layers
        found.append(raised_by(lambda: ddp(torch.ones(1, 2).to("lazy")).sum().backward()))
        ddp.zero_grad()
        lazystep.mark_step(wait=True)
    return found


def test_a_static_graph_that_changes_is_refused(lazy_pool: Pool) -> None:
    for unused in lazy_pool.run(change_a_static_graph, 1, 1, timeout=240):
        assert unused == ["nothing"] * 3
    for fewer in lazy_pool.run(change_a_static_graph, 2, 1, timeout=240):
        assert fewer[:2] == ["nothing"] * 2
        assert "1.weight, 1.bias" in fewer[2]
        assert (
            "find_unused_parameters=True to DistributedDataParallel instead of static_graph=True" in fewer[2]
        )
    for more in lazy_pool.run(change_a_static_graph, 1, 2, timeout=240):
        assert "the first backward of a static graph did not expect" in more[1]


def count_static_graph(world: World) -> dict[str, int]:
    """Counts of three steps of a static graph that uses one of two layers, after the first three."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]).to("lazy")
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    ddp = DistributedDataParallel(model, process_group=world.group, static_graph=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for number in range(6):
        if number == 3:
            lazystep.wait_device_ops()
            lazystep.metrics.reset()
        ddp(torch.ones(1, 2).to("lazy")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        lazystep.mark_step()
    lazystep.wait_device_ops()
    names = ("programs_executed", "collectives_launched", "cache_misses", "synchronizations")
    return {name: int(lazystep.metrics.counter_value(name)) for name in names}


def test_a_static_graph_with_unused_parameters_is_one_program(lazy_pool: Pool) -> None:
    for counts in lazy_pool.run(count_static_graph, timeout=240):
        assert counts == {
            "programs_executed": 3, "collectives_launched": 3, "cache_misses": 0, "synchronizations": 0
        }  # fmt: skip


def other_shapes(world: World) -> str:
    model = nn.Linear(2, 2 + world.rank).to("lazy")
    return raised_by(lambda: DistributedDataParallel(model, process_group=world.group))


def test_other_shapes_on_another_rank_are_an_error_on_both(lazy_pool: Pool) -> None:
    for raised in lazy_pool.run(other_shapes, timeout=240):
        assert "the parameters of the model differ between ranks" in raised


def copy_model(world: World) -> list[bool]:
    ddp, optimizer = make(world)
    step(ddp, optimizer)
    twin = copy.deepcopy(ddp.module)
    return [torch.equal(a.cpu(), b.cpu()) for a, b in zip(ddp.parameters(), twin.parameters(), strict=True)]


def test_a_copy_of_the_module_has_its_values(lazy_pool: Pool) -> None:
    for equal in lazy_pool.run(copy_model, timeout=240):
        assert all(equal)


def toggle_sync(world: World) -> tuple[list[float], int]:
    """One captured step, called inside and outside of no_sync."""
    ddp, _ = make(world)

    @lazystep.step(audit_every=0)
    def backward(x: torch.Tensor) -> torch.Tensor:
        ddp(x).square().mean().backward()
        gradient = ddp.module[0].bias.grad
        total = gradient.sum().detach()
        ddp.zero_grad()
        return total

    totals = []
    for number in range(12):
        x = torch.full((2, 6), float(world.rank + 1))
        if number % 2:
            with ddp.no_sync():
                totals.append(backward(x).item())
        else:
            totals.append(backward(x).item())
    return totals, backward.num_replayed


def test_a_captured_step_knows_whether_it_reduces(lazy_pool: Pool) -> None:
    (first, replayed), (second, _) = lazy_pool.run(toggle_sync, timeout=240)
    assert first[0::2] == second[0::2], "reduced: the same on both ranks"
    assert first[1] != second[1], "not reduced: each rank's own"
    assert len(set(first[2::2])) == len(set(first[1::2])) == 1
    assert replayed >= 4
