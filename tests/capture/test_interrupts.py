"""An interrupt or an exception of the user's during a replay leaves either no step or a whole one."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch

import lazystep
from lazystep.capture._places import Plan, is_same
from lazystep.capture.guards import Check, Get
from lazystep.interrupts import uninterrupted
from tests.helpers import nightly

pytestmark = pytest.mark.filterwarnings("ignore::lazystep.LazyStepWarning")


class Model:
    """A step that carries a count, a tensor that is replaced, an optimizer's state and random numbers."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 4).to(device)
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=0.01)
        self.average = torch.zeros(4, device=device)
        self.x = torch.arange(8.0).reshape(2, 4).to(device)

    def step(self) -> torch.Tensor:
        loss = torch.nn.functional.dropout(self.layer(self.x), 0.5).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average = 0.9 * self.average + 0.1 * self.layer.bias.detach()
        return loss.detach()

    def state(self) -> list[torch.Tensor]:
        state = self.optimizer.state[self.layer.weight]
        return [t.detach().cpu().clone() for t in (*self.layer.parameters(), self.average, state["step"])]


def train_until_interrupted(step: Any, timer: threading.Timer) -> None:
    timer.start()
    while True:
        step()


@pytest.mark.parametrize("num_interrupts", [60, *nightly([500])])
def test_interrupts_at_random_moments_leave_no_half_step(num_interrupts: int) -> None:
    """After each interrupt the state is that of some number of whole eager steps."""
    model, eager = Model("lazy"), Model("cpu")
    step = lazystep.step(model.step, audit_every=0)
    torch.manual_seed(1)
    for _ in range(6):
        step()
    assert step.num_replayed >= 2
    generator = random.Random(0)
    num_raised = 0
    for _ in range(num_interrupts):
        timer = threading.Timer(generator.uniform(0.0, 0.01), signal.raise_signal, (signal.SIGINT,))
        with pytest.raises(KeyboardInterrupt):
            train_until_interrupted(step, timer)
        num_raised += 1
        timer.join()
    assert num_raised == num_interrupts
    lazystep.mark_step(wait=True)
    got = model.state()
    torch.manual_seed(1)
    for _ in range(int(got[-1])):
        eager.step()
    for a, b in zip(got, eager.state(), strict=True):
        assert torch.equal(a, b)


# Too large to be compared in each call, and written by NumPy, which torch does not notice.
SWITCH = torch.zeros(20_000)


class Picky:
    """An object whose slot can refuse to be set. What makes it refuse is out of a witness's sight."""

    __slots__ = ("other", "value")

    def __init__(self) -> None:
        self.value = torch.zeros(2, device="lazy")
        self.other = torch.zeros(2, device="lazy")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "value" and SWITCH[0].item():
            raise RuntimeError("not now")
        super().__setattr__(name, value)


def test_replay_runs_no_code_of_the_users_that_could_stop_it_half_way() -> None:
    holder = Picky()

    @lazystep.step(audit_every=0)
    def step() -> None:
        holder.value = holder.value + 1
        holder.other = holder.other + 1

    for _ in range(5):
        step()
    num_replayed = step.num_replayed
    assert num_replayed >= 2
    SWITCH.numpy()[0] = 1
    try:
        with pytest.raises(RuntimeError, match="not now"):
            holder.value = torch.ones(2)
        step()  # a whole step: both slots are written, and `__setattr__` does not run
        assert step.num_replayed == num_replayed + 1
    finally:
        SWITCH.numpy()[0] = 0
    assert holder.value.tolist() == [6.0] * 2
    assert holder.other.tolist() == [6.0] * 2
    step()
    assert holder.value.tolist() == holder.other.tolist() == [7.0] * 2


def test_exception_of_a_recorded_call_leaves_nothing_that_waits() -> None:
    """A call that is recorded does run the user's code. What it had done before the exception is done."""
    holder = Picky()

    @lazystep.step(audit_every=0)
    def step() -> None:
        holder.other = holder.other + 1
        holder.value = holder.value + 1

    step()
    SWITCH.numpy()[0] = 1
    try:
        with pytest.raises(RuntimeError, match="not now"):
            step()
    finally:
        SWITCH.numpy()[0] = 0
    assert holder.value.tolist() == [1.0] * 2
    assert holder.other.tolist() == [2.0] * 2
    for _ in range(5):
        step()
    assert holder.value.tolist() == [6.0] * 2
    assert holder.other.tolist() == [7.0] * 2
    assert step.num_replayed >= 2


def test_interrupt_waits_for_the_end_of_the_section() -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            time.sleep(0)  # a chance for the handler to run
            done.append("section")
        done.append("never")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["section"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_section_on_another_thread_changes_no_handler() -> None:
    seen = []

    def work() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


class Interrupting:
    """A value whose comparison is interrupted, as a hook of `sys.addaudithook` or `__eq__` may be."""

    def __eq__(self, other: object) -> bool:
        raise KeyboardInterrupt

    __hash__ = None  # type: ignore[assignment]


def test_interrupt_during_the_comparison_of_places_is_not_lost() -> None:
    plan = Plan([(Get.ITEM, Check.VALUE, True, -1, [Interrupting()], 0, Interrupting())])
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            plan.read()
    with pytest.raises(KeyboardInterrupt):
        is_same(Interrupting(), Interrupting())
    assert is_same(1.0, 1.0)


def test_comparison_of_functions_runs_no_audit_hooks() -> None:
    """Hooks of `sys.addaudithook` are Python code, in which an interrupt may come. They stay for good."""
    events: list[str] | None = None

    def hook(event: str, _: Any) -> None:
        if events is not None:
            events.append(event)

    sys.addaudithook(hook)
    model = Model("lazy")
    step = lazystep.step(model.step, audit_every=0)
    for _ in range(6):
        step()
    num_replayed = step.num_replayed
    events = []
    step()
    seen, events = events, None
    assert step.num_replayed == num_replayed + 1
    assert seen == []
