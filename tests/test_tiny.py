"""Every idea of the package in a few lines each: read this file first. Eager PyTorch is the truth."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lazystep
from lazystep import config, overlap
from tests.helpers import count


@pytest.fixture(autouse=True)
def no_programs(runtime: Any) -> None:
    runtime.programs.clear()


def test_op_is_recorded_and_runs_when_somebody_looks() -> None:
    x = torch.ones(3, device="lazy")
    y = x * 2 + 1
    # Types and shapes are known at once; nothing has been computed.
    assert (y.device.type, y.dtype, y.shape) == ("lazy", torch.float32, (3,))
    assert "aten.mul.Tensor" in str(lazystep.debug.pending_program([y]))
    assert count("programs_executed") == 0
    assert y.tolist() == [3.0, 3.0, 3.0]
    assert count("programs_executed") == 1


def test_step_is_one_program_and_an_equal_step_finds_it_again() -> None:
    weight = torch.zeros(2).to("lazy")
    for _ in range(3):
        weight.add_(1).mul_(2)
        lazystep.mark_step()  # queues what was recorded, and returns
    lazystep.wait_device_ops()
    assert (count("programs_executed"), count("cache_misses"), count("cache_hits")) == (3, 1, 2)
    program = lazystep.debug.last_program()
    assert program is not None
    assert [i.op for i in program.instructions] == ["aten.add_.Tensor", "aten.mul_.Tensor"]
    assert weight.tolist() == [14.0, 14.0]


def test_read_waits_for_what_it_needs_and_is_counted_with_its_line() -> None:
    gate = threading.Event()

    @torch.library.custom_op("lazystep_tiny::wait", mutates_args=())
    def wait(x: torch.Tensor) -> torch.Tensor:
        assert gate.wait(30)
        return x.clone()

    wait.register_fake(torch.empty_like)
    early = torch.ones(2, device="lazy") * 3
    lazystep.mark_step()
    late = wait(early)
    lazystep.mark_step()
    assert early.tolist() == [3.0, 3.0]  # would not return if it waited for `late`
    gate.set()
    assert late.sum().item() == 6.0
    waits = [(reason, line.split(":")[0]) for reason, line, _ in lazystep.metrics.synchronizations()]
    assert waits == [("to host", __file__), ("item", __file__)]


def test_numbers_are_inputs_so_a_schedule_makes_no_new_program() -> None:
    def train(device: str) -> list[float]:
        weight = torch.ones(2).to(device).requires_grad_()
        optimizer = torch.optim.SGD([weight], lr=1.0)
        for number in range(6):
            optimizer.param_groups[0]["lr"] = 0.5**number
            weight.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            lazystep.mark_step()
        return weight.tolist()

    assert train("lazy") == train("cpu")
    assert (count("cache_misses"), count("cache_hits")) == (1, 5)


def test_random_numbers_come_from_eagers_stream() -> None:
    def draw(device: str) -> list[torch.Tensor]:
        torch.manual_seed(7)
        x = torch.ones(5, device=device)
        drawn = [nn.functional.dropout(x, 0.5), torch.rand(3), torch.randn(4, device=device)]
        return [t.cpu() for t in [*drawn, torch.get_rng_state()]]

    assert all(map(torch.equal, draw("lazy"), draw("cpu")))


def test_views_and_updates_in_place_share_memory_as_in_eager() -> None:
    def update(device: str) -> list[Any]:
        base = torch.arange(6.0, device=device).reshape(2, 3)
        row, column = base[1], base[:, 0]
        row.mul_(10)
        lazystep.mark_step()
        column += row[2]
        return [base.tolist(), row.tolist(), column.tolist()]

    assert update("lazy") == update("cpu") == [[[50, 1, 2], [80, 40, 50]], [80, 40, 50], [50, 80]]


@pytest.mark.parametrize("run_async", [False, True])
def test_step_closure_sees_the_values_of_its_own_step(run_async: bool) -> None:
    total = torch.zeros((), device="lazy")
    seen: list[float] = []
    for _ in range(4):
        total.add_(1)
        lazystep.add_step_closure(lambda t: seen.append(t.item()), (total,), run_async=run_async)
        lazystep.mark_step()
    lazystep.flush_step_closures(30)
    assert seen == [1.0, 2.0, 3.0, 4.0]
    assert count("programs_executed") == 4


def test_failed_step_names_op_and_line_and_an_overwrite_heals_the_tensor() -> None:
    weight = torch.zeros(3).to("lazy")
    weight.add_(1)
    row = weight.index_select(0, torch.tensor([7]).to("lazy"))  # recorded: the index is not known yet
    with pytest.raises(lazystep.StepError, match=r"aten\.index_select\.default, .*test_tiny\.py:\d+"):
        lazystep.mark_step(wait=True)
    with pytest.raises(lazystep.StepError, match="half updated"):
        weight.tolist()
    weight.copy_(torch.full((3,), 5.0))
    assert (weight + 1).tolist() == [6.0, 6.0, 6.0]
    del row


def make_training(device: str) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, train_step


def test_captured_step_is_recorded_then_replayed_and_equals_eager_bitwise() -> None:
    model, train_step = make_training("cpu")
    losses = [train_step(torch.randn(16, 4)).item() for _ in range(8)]
    lazy_model, function = make_training("lazy")
    step = lazystep.step(function, audit_every=0)
    assert [step(torch.randn(16, 4)).item() for _ in range(8)] == losses
    for got, want in zip(lazy_model.parameters(), model.parameters(), strict=True):
        assert torch.equal(got.cpu(), want)
    assert (step.num_recorded, step.num_replayed) == (3, 5), step.explain()


def test_change_around_a_captured_step_is_noticed() -> None:
    options = {"scale": 2.0}
    step = lazystep.step(lambda x: x * options["scale"], audit_every=0)
    assert [step(torch.ones(1)).item() for _ in range(4)] == [2.0] * 4
    assert step.num_replayed == 2
    options["scale"] = 3.0
    assert step(torch.ones(1)).item() == 3.0


def test_native_library_computes_what_eager_does() -> None:
    x = torch.linspace(0, 1, 5)
    with config.override(tier="native"):  # waits for the build; the tier `auto` goes on meanwhile
        results = [(x.to("lazy").sin() + 1).cpu() for _ in range(2)]
    torch.testing.assert_close(results, [x.sin() + 1] * 2)
    # The first run was made by both executables, and compared.
    assert (count("builds_succeeded"), count("native_mismatches"), count("native_executions")) == (1, 0, 1)


def test_overlap_updates_inside_backward_and_equals_plain_ddp() -> None:
    """In one process; tests/overlap has it in two and three, against every form of DDP."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain = nn.Linear(3, 2)
        early = copy.deepcopy(plain)
        for model in (plain, early):
            ddp = DistributedDataParallel(model)
            optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
            if model is early:
                overlap.overlap_optimizer(ddp, optimizer)
            for number in range(3):
                before = model.weight.detach().clone()
                ddp(torch.full((4, 3), number + 1.0)).square().sum().backward()
                assert torch.equal(model.weight, before) == (model is plain)  # the other one is updated
                optimizer.step()
                optimizer.zero_grad()
        assert all(map(torch.equal, plain.parameters(), early.parameters()))
    finally:
        dist.destroy_process_group()


def test_explain_says_which_programs_there_are_why_and_what_waits() -> None:
    for size in (2, 2, 3):
        y = torch.ones(size).to("lazy") * 2
        lazystep.mark_step()
    y.tolist()
    text = lazystep.debug.explain()
    assert text.startswith("2 programs")
    assert "run 2 times" in text
    assert "new because" in text
    assert f"1 times to host at {__file__}" in text
