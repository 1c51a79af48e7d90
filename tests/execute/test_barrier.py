"""The step API: what a barrier queues, what a read waits for, and what the counters say of both."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lazystep
from benchmarks import models
from lazystep import config, metrics
from tests.helpers import count, descend

gate = threading.Event()
entered = threading.Event()


@torch.library.custom_op("lazystep_tests::gated", mutates_args=())
def gated(x: torch.Tensor) -> torch.Tensor:
    """Waits on the executor thread until the test opens the gate."""
    entered.set()
    assert gate.wait(30), "the test never opened the gate"
    return x + 1


gated.register_fake(lambda x: torch.empty_like(x))
tickets = threading.Semaphore(0)


@torch.library.custom_op("lazystep_tests::ticketed", mutates_args=())
def ticketed(x: torch.Tensor) -> torch.Tensor:
    """Waits on the executor thread until the test gives it a ticket."""
    entered.set()
    assert tickets.acquire(timeout=30), "the test never gave a ticket"
    return x + 1


ticketed.register_fake(lambda x: torch.empty_like(x))


@pytest.fixture
def closed_gate() -> Iterator[threading.Event]:
    gate.clear()
    entered.clear()
    yield gate
    gate.set()


def test_mark_step_returns_while_the_step_still_runs(closed_gate: threading.Event, runtime: Any) -> None:
    x = gated(torch.ones(2, device="lazy"))
    lazystep.mark_step()
    assert entered.wait(30)
    # The executor is inside the step, and we are here.
    assert count("programs_executed") == 0
    assert runtime.executor.num_in_flight == 1
    closed_gate.set()
    assert x.tolist() == [2.0, 2.0]
    lazystep.wait_device_ops()
    assert count("programs_executed") == 1


def test_read_waits_for_its_own_step_only(closed_gate: threading.Event) -> None:
    early = torch.ones(2, device="lazy") * 3
    lazystep.mark_step()
    late = gated(early)
    lazystep.mark_step()
    assert entered.wait(30)
    assert early.tolist() == [3.0, 3.0]  # would hang if it waited for the step behind
    closed_gate.set()
    assert late.tolist() == [4.0, 4.0]


def test_wait_waits_for_this_step(value_of: Any) -> None:
    x = torch.ones(2, device="lazy") + 1
    lazystep.mark_step(wait=True)
    assert value_of(x) is not None


def test_wait_for_an_empty_step_waits_for_those_before_it(closed_gate: threading.Event, runtime: Any) -> None:
    x = gated(torch.ones(2, device="lazy"))
    lazystep.mark_step()
    threading.Timer(0.2, closed_gate.set).start()
    lazystep.mark_step(wait=True)
    assert runtime.executor.num_in_flight == 0
    assert x.tolist() == [2.0, 2.0]
    x.add_(torch.bernoulli(x))  # fails: these are no probabilities
    lazystep.mark_step()
    with pytest.raises(lazystep.StepError, match="p_in"):
        lazystep.mark_step(wait=True)


def test_steps_in_flight_are_bounded(closed_gate: threading.Event) -> None:
    with config.override(max_in_flight=2):
        x = gated(torch.ones(1, device="lazy"))
        lazystep.mark_step()
        assert entered.wait(30)
        x = x + 1
        lazystep.mark_step()
        x = x + 1
        blocked = threading.Thread(target=lazystep.mark_step)
        blocked.start()
        blocked.join(0.3)
        assert blocked.is_alive()
        # The waiting thread holds no lock: others go on recording.
        y = torch.ones(1, device="lazy") * 2
        closed_gate.set()
        blocked.join(30)
        assert not blocked.is_alive()
    assert x.item() == 4.0
    assert y.item() == 2.0
    assert count("seconds_waiting") > 0


def test_thread_that_waits_for_a_place_wakes_for_two_steps(runtime: Any) -> None:
    """It finds its caches cold, so it does not wake for each step that ends."""
    entered.clear()
    in_flight: list[int] = []

    def train() -> None:
        lazystep.mark_step()
        in_flight.append(runtime.executor.num_in_flight)

    with config.override(max_in_flight=4):
        x = torch.ones(1, device="lazy")
        for _ in range(4):
            x = ticketed(x)
            lazystep.mark_step()
        x = x + 1
        blocked = threading.Thread(target=train)
        blocked.start()
        for _ in range(2):  # while four steps are in flight, and three
            assert entered.wait(30)
            blocked.join(0.2)
            assert blocked.is_alive()
            entered.clear()
            tickets.release()
        blocked.join(30)
        assert in_flight == [3]
        tickets.release(2)
    assert x.item() == 6.0


def test_read_of_what_a_failed_step_did_not_write_tells_of_the_failure_once() -> None:
    x = torch.zeros(3, device="lazy")
    lazystep.mark_step()
    x.add_(torch.bernoulli(torch.full((3,), 2.0, device="lazy")))  # fails before it writes
    lazystep.mark_step()
    with pytest.raises(lazystep.StepError, match="p_in"):
        x.tolist()
    assert x.tolist() == [0.0, 0.0, 0.0]
    lazystep.mark_step()


def make_loop() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)).to("lazy")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    x = torch.randn(16, 4).to("lazy")
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    descend(loss, optimizer)
    lazystep.mark_step()
    return loss.detach()


def test_steady_state_is_one_program_one_execution_no_sync_one_hit() -> None:
    model, optimizer = make_loop()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    for _ in range(3):
        train_step(model, optimizer)
        schedule.step()
    lazystep.wait_device_ops()
    metrics.reset()
    for _ in range(20):
        train_step(model, optimizer)
        schedule.step()
    lazystep.wait_device_ops()
    assert count("programs_recorded") == count("programs_executed") == count("cache_hits") == 20
    assert count("cache_misses") == count("synchronizations") == 0
    assert count("instructions_recorded") == count("instructions_executed")


def test_second_kind_of_step_is_guessed_too() -> None:
    model, optimizer = make_loop()

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            out = model(torch.ones(2, 4, device="lazy")).sum()
        lazystep.mark_step()
        return out

    for _ in range(3):
        train_step(model, optimizer)
        evaluate()
    lazystep.wait_device_ops()
    metrics.reset()
    for _ in range(4):
        train_step(model, optimizer)
        evaluate()
    lazystep.wait_device_ops()
    assert count("cache_hits") == count("programs_executed") == 8
    assert count("cache_misses") == 0


def test_loop_that_never_marks_a_step_gets_automatic_barriers() -> None:
    with config.override(max_instructions=50):
        x = torch.zeros(3, device="lazy")
        for _ in range(200):
            x = x + 1
        assert x.tolist() == [200.0] * 3
    assert count("automatic_barriers") == 4
    assert count("programs_executed") == 5


def test_sync_multi_runs_what_its_tensors_need_and_caches_the_program(value_of: Any) -> None:
    base = torch.zeros(4).to("lazy")
    for _ in range(3):
        base[1:3].add_(1)
        view = base.view(2, 2)
        lazystep.sync_multi([view], ["lazy"])
        assert value_of(view) is not None
    assert view.tolist() == [[0.0, 3.0], [3.0, 0.0]]
    assert count("cache_misses") <= 2
    assert count("programs_executed") == 3
    executed = count("programs_executed")
    lazystep.sync_multi([view, base], [])
    assert count("programs_executed") == executed


def test_reads_keep_the_order_of_in_place_ops() -> None:
    x = torch.ones(3, device="lazy")
    lazystep.mark_step()
    alias = x.view(3, 1)
    x.mul_(2)
    assert alias.sum().item() == 6.0
    x.add_(1)
    assert x[0].item() == 3.0
    assert alias.tolist() == [[3.0], [3.0], [3.0]]


def test_tensor_ids_are_unique_and_stable() -> None:
    x = torch.ones(2, device="lazy")
    y = x.view(2)
    number = lazystep.get_tensor_id(x)
    assert lazystep.get_tensor_id(y) != number
    x.add_(1)
    x.resize_(1)
    lazystep.mark_step(wait=True)
    assert lazystep.get_tensor_id(x) == number


def test_to_cpu_takes_any_tree_and_synchronizes_once() -> None:
    x = torch.ones(2, device="lazy") * 2
    host = torch.zeros(1)
    tree = {"a": [x, 3, "text"], "b": (x + 1, None), "c": host}
    moved = lazystep.to_cpu(tree)
    assert moved["a"][0].device.type == moved["b"][0].device.type == "cpu"
    assert moved["a"][1:] == [3, "text"]
    assert moved["c"] is host
    assert moved["b"][0].tolist() == [3.0, 3.0]
    assert count("programs_executed") == 1
    moved["a"][0].zero_()
    assert x.tolist() == [2.0, 2.0]


def test_a_live_tensor_more_or_less_does_not_make_a_new_program() -> None:
    x = torch.ones(3).to("lazy")
    kept = []
    for step in range(6):
        a = x + 1
        b = a * 2
        if step in (0, 3):
            kept.append(a)
        del a
        lazystep.mark_step()
    # The first program returns both; steps in which `a` died early use it as it is.
    assert count("cache_misses") == 1
    assert [t.tolist() for t in kept] == [[2.0] * 3] * 2
    assert b.tolist() == [4.0] * 3


def test_program_cache_is_bounded(runtime: Any) -> None:
    with config.override(program_cache_size=4):
        for n in range(1, 12):
            torch.ones(n, device="lazy").add_(1).sum().item()
        assert len(runtime.programs) <= 4


def test_live_tensors_after_a_step_are_those_of_eager() -> None:
    def live_elements() -> int:
        gc.collect()
        return sum(
            t.numel()
            for t in gc.get_objects()
            if type(t) is torch.Tensor and t.device.type == "cpu" and t.numel() >= 1000
        )

    before = live_elements()  # what other test modules keep
    weight = torch.ones(50, 50).to("lazy").requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    for _ in range(2):
        hidden = (weight @ weight).relu() @ weight
        descend(hidden.sum(), optimizer)
        del hidden
        lazystep.mark_step(wait=True)
    # The weight and its momentum; no activation, no gradient.
    assert live_elements() - before == 2 * 2500


def test_a_thousand_steps_do_not_grow() -> None:
    model, optimizer = make_loop()
    for _ in range(20):
        train_step(model, optimizer)
    lazystep.wait_device_ops()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(1000):
        train_step(model, optimizer)
    lazystep.wait_device_ops()
    gc.collect()
    assert len(gc.get_objects()) - before < 200
    assert count("cache_misses") <= 3


def test_steps_leave_nothing_for_the_garbage_collector() -> None:
    def live_bytes() -> int:
        tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.device.type == "cpu"]
        return sum(t.numel() * t.element_size() for t in tensors)

    model, make_batch, loss_fn = models.gpt(num_layers=1, dropout=0.1)
    model.to("lazy")
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        x, y = make_batch()
        descend(loss_fn(model(x.to("lazy")), y.to("lazy")), optimizer)
        lazystep.mark_step(wait=True)

    for _ in range(3):
        step()
    gc.collect()
    gc.disable()
    try:
        before = live_bytes()
        for _ in range(10):
            step()
        # One cycle through a batch, a mask or an activation would show here ten times.
        assert live_bytes() == before
    finally:
        gc.enable()


def test_barrier_does_no_work_per_instruction_in_the_steady_state(
    monkeypatch: pytest.MonkeyPatch, runtime_module: Any, dispatch: Any, extension: Any
) -> None:
    model, optimizer = make_loop()
    for _ in range(3):
        train_step(model, optimizer)
    calls: list[str] = []
    monkeypatch.setattr(runtime_module, "assemble", lambda *a: calls.append("assemble"))
    monkeypatch.setattr(dispatch, "user_source", lambda *a: calls.append("source"))
    num_lookups = extension.num_lookups()
    for _ in range(3):
        train_step(model, optimizer)
    assert calls == []
    assert extension.num_lookups() == num_lookups


def test_kernel_that_warns_in_the_background_does_not_fail_its_step(capfd: Any) -> None:
    """The warning was given at the op's line. Here warnings are errors, as in `pytest -W error`."""
    with config.override(max_in_flight=2):
        for _ in range(3):  # interpreted, then as generated code
            out, x = torch.zeros(2).to("lazy"), torch.ones(2, 2).to("lazy")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.add(x, x, out=out)
            lazystep.mark_step()
            lazystep.wait_device_ops()
            assert out.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert count("steps_failed") == 0
    assert capfd.readouterr().err.count("An output with one or more elements was resized") == 3


def test_executor_uses_as_many_threads_as_the_training_thread() -> None:
    seen: list[int] = []

    @torch.library.custom_op("lazystep_tests::count_threads", mutates_args=())
    def count_threads(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return x.clone()

    count_threads.register_fake(lambda x: torch.empty_like(x))
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 3, 2):
            torch.set_num_threads(num_threads)
            count_threads(torch.ones(1, device="lazy")).item()
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 3, 2]
