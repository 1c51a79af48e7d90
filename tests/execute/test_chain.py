"""Native steps back to back without the interpreter lock: [Note: chain] in chain.h. Counted, not timed."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lazystep
from lazystep import config
from lazystep.execute import executor as executor_module
from lazystep.execute.chain import make_chain
from lazystep.execute.native import NativeExecutable
from tests.helpers import count

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("auto_tier")]
SIZE = 8


class Trained:
    """A small captured step with an optimizer, a schedule and an op that fails on infinite numbers."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(SIZE, 1).to(device)
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        self.call: Any = lazystep.step(audit_every=0)(self.train) if device == "lazy" else self.train

    def train(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = (self.layer(x).squeeze(1) - target).square().mean() + torch.histc(target, 4).sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def step(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        x, target = torch.randn(4, SIZE, generator=generator), torch.randn(4, generator=generator)
        loss: torch.Tensor = self.call(x, target)
        self.schedule.step()
        return loss.detach()

    def state(self) -> list[torch.Tensor]:
        found = [*self.layer.parameters()]
        found += [value for one in self.optimizer.state.values() for value in one.values()]
        return [tensor.detach().cpu() for tensor in found]


@pytest.fixture
def chain(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The executor's chain, in which the executor thread waits for as long as it takes."""
    monkeypatch.setattr(executor_module, "_POOL_PATIENCE", 60.0)
    with config.override(tune_threads=False):  # times would decide when the number of threads is measured
        yield runtime.executor._chain


def until_chained(trained: Trained, chain: Any) -> Iterator[int]:
    """Train until the executor thread is in the chain. The numbers of further steps."""
    number = 0
    for number in range(8):
        trained.step(number)
        lazystep.wait_device_ops()
        if number == 4:
            assert lazystep.wait_for_compile(300)
    config.settings.build_after = 1_000_000  # the rest of a test needs no library; `auto_tier` puts it back
    before = chain.num_run
    while chain.num_run == before:
        number += 1
        assert number < 5000, "the executor never takes a step without Python"
        trained.step(number)
    return itertools.count(number + 1)


def test_steps_without_python_equal_steps_with_it(chain: Any) -> None:
    """The same numbers, with the learning rate of each step, and the lock is taken once for all of them."""
    lazy = Trained("lazy")
    numbers = until_chained(lazy, chain)
    first = next(numbers)
    lazystep.metrics.reset()
    returns = chain.num_returns
    losses = [lazy.step(first + n) for n in range(30)]
    assert chain.num_returns == returns, "the executor thread took the interpreter lock in between"
    lazystep.wait_device_ops()
    assert chain.num_returns <= returns + 1
    # A few of the steps before end after the reset.
    assert 30 <= count("programs_executed") <= 30 + config.settings.max_in_flight
    assert count("native_executions") == count("programs_executed")
    assert count("programs_replayed") == 30
    with config.override(tier="reference"):
        other = Trained("lazy")
        want = [other.step(n) for n in range(first + 30)][first:]
        lazystep.wait_device_ops()
    for got, expected in zip(losses, want, strict=True):
        torch.testing.assert_close(got.cpu(), expected.cpu(), rtol=1e-5, atol=1e-6)
    for got, expected in zip(lazy.state(), other.state(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_busy_python_thread_costs_the_executor_no_handover(chain: Any) -> None:
    trained = Trained("lazy")
    numbers = until_chained(trained, chain)
    is_over = threading.Event()

    def spin() -> None:
        while not is_over.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        before, returns = chain.num_run, chain.num_returns
        for _ in range(20):
            trained.step(next(numbers))
        assert chain.num_returns == returns
    finally:
        is_over.set()
        thread.join()
    lazystep.wait_device_ops()
    assert chain.num_run - before >= 20


class Gate:
    """Holds the runs that go through Python."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_runs = 0
        self._has_come, self._may_run = threading.Event(), threading.Event()
        run = NativeExecutable.run

        def held(native: NativeExecutable, *arguments: Any) -> list[torch.Tensor]:
            self.num_runs += 1
            self._has_come.set()
            assert self._may_run.wait(60)
            return run(native, *arguments)

        monkeypatch.setattr(NativeExecutable, "run", held)

    def open_soon(self) -> None:
        """Open while the calling thread waits. Before, wait for the first run: the caller does not run it."""
        assert self._has_come.wait(60)
        threading.Timer(0.05, self._may_run.set).start()


def test_steps_that_are_queued_behind_a_step_in_python_need_no_python(
    chain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each of them goes through Python while the next ones are queued: the chain begins by luck."""
    trained = Trained("lazy")
    numbers = until_chained(trained, chain)
    lazystep.wait_device_ops()
    gate = Gate(monkeypatch)
    runs, returns = chain.num_run, chain.num_returns
    for _ in range(6):
        trained.step(next(numbers))
    gate.open_soon()
    lazystep.wait_device_ops()
    assert gate.num_runs == 1
    assert chain.num_run == runs + 5
    assert chain.num_returns == returns + 1, "a thread that waits for all steps ended the chain before"


def test_a_read_of_an_earlier_step_ends_the_chain_behind_that_step(
    chain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained("lazy")
    numbers = until_chained(trained, chain)
    lazystep.wait_device_ops()
    gate = Gate(monkeypatch)
    runs, returns = chain.num_run, chain.num_returns
    losses = [trained.step(next(numbers)) for _ in range(6)]
    gate.open_soon()
    read = losses[2].item()
    lazystep.wait_device_ops()
    assert losses[2].item() == read
    assert gate.num_runs == 1
    assert chain.num_run == runs + 5
    assert chain.num_returns <= returns + 2


def test_a_thread_that_waits_for_ends_wakes_when_enough_runs_have_ended() -> None:
    chain = make_chain()
    waiting = [threading.Thread(target=chain.wait_for_ends, args=(wanted, 60.0)) for wanted in (2, 4)]
    for thread in waiting:
        thread.start()
    chain.note_end()
    assert chain.num_wakes == 0
    chain.note_end()
    waiting[0].join()
    chain.note_end()
    assert chain.num_wakes == 1
    chain.note_end()
    waiting[1].join()
    assert chain.num_wakes == 2
    chain.wait_for_ends(4, 60.0)  # they have ended already


def test_a_full_queue_wakes_the_training_thread_once_for_half_of_the_places(
    chain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "_LOOK_AROUND", 60.0)
    trained = Trained("lazy")
    numbers = until_chained(trained, chain)
    wakes = chain.num_wakes
    for _ in range(64):
        trained.step(next(numbers))
    assert chain.num_wakes - wakes <= 64 // (config.settings.max_in_flight // 2) + 1


@contextlib.contextmanager
def num_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_the_number_of_threads_is_measured_without_python(
    runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs become slow beside a busy thread: there, of all places, the lock must not be taken."""
    monkeypatch.setattr(executor_module, "_POOL_PATIENCE", 60.0)
    chain = runtime.executor._chain
    with config.override(tune_threads=True), num_threads(2):
        trained = Trained("lazy")
        numbers = until_chained(trained, chain)
        licence = next(
            one.licence for one in reversed(runtime.remembered_programs()) if one.licence is not None
        )
        while runtime.executor.num_in_flight:
            pass  # no thread waits in Python, which would end the chain
        threads = licence.library.threads
        for _ in range(1100):  # so many that the choice is made, whatever it was about
            threads.took(1e-9)
        for _ in range(4):
            threads.took(1.0)
        tried, runs, returns = set(), chain.num_run, chain.num_returns
        for _ in range(6):
            tried.add(threads.next())
            trained.step(next(numbers))
            while runtime.executor.num_in_flight:
                pass
        assert tried == {1, 2}
        assert chain.num_run == runs + 6
        assert chain.num_returns == returns


def test_a_read_gets_its_value_and_the_chain_goes_on_later(chain: Any) -> None:
    """The results of steps in the chain, of the last one and of earlier ones, on two threads."""
    lazy = Trained("lazy")
    numbers = until_chained(lazy, chain)
    for _ in range(3):
        losses = [lazy.step(next(numbers)) for _ in range(3)]
        read: list[float] = []
        reader = threading.Thread(target=lambda: read.append(losses[0].item()))  # noqa: B023
        reader.start()
        assert all(loss.item() > 0 for loss in reversed(losses))
        reader.join()
        assert read == [losses[0].item()]
    # The executor gave its pool back for the reads: a thread that does not read gets the chain again.
    before = chain.num_run
    for _ in range(2000):
        lazy.step(next(numbers))
        if chain.num_run > before:
            break
    assert chain.num_run > before


def test_closures_see_the_values_of_their_steps(chain: Any) -> None:
    """A snapshot of a parameter is copied before the next step writes it, so that step needs Python."""
    lazy = Trained("lazy")
    numbers = until_chained(lazy, chain)
    seen: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    for _ in range(6):
        lazy.step(next(numbers))
        lazystep.add_step_closure(seen.append, (lazy.layer.weight.detach(),), run_async=True)
        wanted.append(lazy.layer.weight.detach().clone())
        lazystep.mark_step()
        lazy.step(next(numbers))
    lazystep.flush_step_closures()
    for got, want in zip(seen, wanted, strict=True):
        assert torch.equal(got, want.cpu())


def test_an_eager_edit_between_two_steps_is_in_order(chain: Any) -> None:
    """An op outside of the step is a program of its own: behind the steps in the chain, before the next."""
    lazy = Trained("lazy")
    numbers = until_chained(lazy, chain)
    for _ in range(4):
        for _ in range(3):
            lazy.step(next(numbers))
        with torch.no_grad():
            lazy.layer.weight.zero_()
        before = lazy.layer.weight.detach().clone()
        lazy.step(next(numbers))
        assert before.abs().sum().item() == 0
        assert 0 < lazy.layer.weight.abs().max().item() < 0.02, "one step of AdamW from zero"


def test_a_failing_step_is_raised_and_the_steps_behind_it_do_not_run(chain: Any) -> None:
    lazy = Trained("lazy")
    numbers = until_chained(lazy, chain)
    lazystep.wait_device_ops()
    for _ in range(2000):  # into the chain again
        before = chain.num_run
        lazy.step(next(numbers))
        if chain.num_run > before:
            break

    def fail() -> None:
        lazy.call(torch.zeros(4, SIZE), torch.full((4,), torch.inf))
        for _ in range(20):
            lazy.step(next(numbers))
        lazystep.wait_device_ops()

    with pytest.raises(lazystep.StepError, match=r"native\) failed in aten\.histc\.default.*test_chain\.py"):
        fail()
    with pytest.raises(lazystep.StepError, match="half updated"):
        lazy.layer.weight.tolist()
    # The damaged parameters are refused by each later step, too.
    with pytest.raises(lazystep.LazyStepError, match="half updated"):
        lazy.step(next(numbers)).item()
    with torch.no_grad():
        for tensor in lazy.layer.parameters():
            tensor.zero_()
        for state in lazy.optimizer.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()
    assert lazy.step(next(numbers)).item() > 0


def test_numbers_and_tensors_that_do_not_fit_take_the_way_through_python(chain: Any) -> None:
    """The tier `reference`, and a lazy argument that is not there yet."""
    lazy = Trained("lazy")
    numbers = until_chained(lazy, chain)
    lazystep.wait_device_ops()
    before = count("reference_executions")
    with config.override(tier="reference"):
        for _ in range(3):
            lazy.step(next(numbers))
        lazystep.wait_device_ops()
    assert count("reference_executions") == before + 3
    target = torch.zeros(4).to("lazy") + 1
    loss = lazy.call(torch.zeros(4, SIZE), target)
    assert loss.item() > 0


def test_an_interrupt_in_the_chain_leaves_whole_steps(chain: Any) -> None:
    lazy = Trained("lazy")
    numbers = until_chained(lazy, chain)
    for _ in range(10):
        timer = threading.Timer(0.002, signal.raise_signal, (signal.SIGINT,))

        def train_until_interrupted(timer: threading.Timer = timer) -> None:
            timer.start()
            while True:
                lazy.step(next(numbers))

        with pytest.raises(KeyboardInterrupt):
            train_until_interrupted()
        timer.join()
        lazystep.wait_device_ops()
        steps = {int(one["step"].item()) for one in lazy.optimizer.state.values()}
        assert len(steps) == 1
