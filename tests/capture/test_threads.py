"""Several threads, each with a model and a step of its own: neither changes the other's numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch

import lazystep
from tests.helpers import nightly

NUM_THREADS = 8
Queue = SimpleQueue[float]


def run_threads(work: Callable[[int], Any], num_threads: int = NUM_THREADS) -> list[Any]:
    """`work(number)` on each thread, all at once. Raises what the first of them has raised."""
    results: list[Any] = [None] * num_threads
    start = threading.Barrier(num_threads)

    def run(number: int) -> None:
        start.wait(60)
        try:
            results[number] = work(number)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a thread is stuck"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def train(number: int, device: str, num_steps: int, reported: Queue | None = None) -> list[float]:
    """The losses of a model of one's own; the step of the lazy device is a captured one."""
    generator = torch.Generator().manual_seed(number)
    weight = torch.randn(6, 6 + number, generator=generator).to(device).requires_grad_()
    x = torch.randn(4, 6, generator=generator).to(device)
    optimizer = torch.optim.AdamW([weight], lr=0.01 * (number + 1))

    def report(loss: torch.Tensor) -> None:
        assert reported is not None
        reported.put(loss.item())

    def step() -> torch.Tensor:
        loss = (x @ weight).tanh().square().mean() * (number + 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if reported is not None:
            lazystep.add_step_closure(report, (loss.detach(),), run_async=True)
        return loss.detach()

    call = lazystep.step(step, audit_every=0) if device == "lazy" else step
    losses = [call() for _ in range(num_steps)]
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("num_steps", [40, *nightly([200])])
def test_captured_steps_of_eight_threads_equal_eager(num_steps: int) -> None:
    eager = run_threads(lambda number: train(number, "cpu", num_steps))
    assert run_threads(lambda number: train(number, "lazy", num_steps)) == eager
    assert lazystep.metrics.counter_value("programs_replayed") > 0


def test_closures_see_the_values_of_their_own_thread() -> None:
    reported: list[Queue] = [SimpleQueue() for _ in range(4)]
    losses = run_threads(lambda number: train(number, "lazy", 20, reported[number]), 4)
    lazystep.flush_step_closures(60)
    assert [[queue.get_nowait() for _ in range(20)] for queue in reported] == losses


def test_call_that_another_thread_disturbs_is_not_captured_and_says_so() -> None:
    x = torch.ones(3).to("lazy")
    other: list[torch.Tensor] = []

    def record_elsewhere() -> None:
        other.append(x * 3)

    @lazystep.step(fullgraph=True)
    def step() -> torch.Tensor:
        thread = threading.Thread(target=record_elsewhere)
        thread.start()
        thread.join()
        return x + 1

    for _ in range(5):
        assert step().tolist() == [2.0] * 3
    assert step.num_replayed == 0
    assert "another thread recorded ops" in step.explain()
    assert [t.tolist() for t in other] == [[3.0] * 3] * 5


def test_backward_on_autograds_thread_is_part_of_the_call() -> None:
    weight = torch.ones(3, device="lazy", requires_grad=True)

    @lazystep.step
    def step() -> None:
        (weight * 2).sum().backward()
        with torch.no_grad():
            weight.sub_(0.1 * weight.grad)
        weight.grad = None

    for _ in range(6):
        step()
    assert step.num_replayed >= 2
    expected = torch.ones(3)
    for _ in range(6):
        expected.sub_(0.1 * torch.full((3,), 2.0))
    assert torch.equal(weight.detach().cpu(), expected)
