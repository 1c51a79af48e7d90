"""Native steps back to back without the interpreter lock: [Note: chain] in chain.h. Counted, not timed."""

from __future__ import annotations

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
