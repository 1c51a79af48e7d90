"""The closure handlers alone: order, bounds, errors, exit. No lazy device."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import lazystep
from lazystep import metrics
from lazystep.closure import AsyncClosureHandler, ClosureHandler, WhenFull
from lazystep.config import Settings
from tests.helpers import failing


class Gate:
    """A closure that waits inside the worker until the test opens it."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.open.wait(30), "the test never opened the gate"


def blocked(handler: AsyncClosureHandler) -> Gate:
    """The gate that the worker now waits at."""
    gate = Gate()
    handler.run(gate)
    assert gate.entered.wait(30)
    return gate


@pytest.fixture
def handler() -> Iterator[AsyncClosureHandler]:
    made = AsyncClosureHandler(max_queue_size=2)
    yield made
    made.close(5)


def test_sync_closures_run_in_order_behind_one_that_raises() -> None:
    ran: list[int] = []
    one, two, three = (partial(ran.append, number) for number in (1, 2, 3))
    closures = [one, failing("first"), two, failing("second"), three]
    with pytest.raises(ArithmeticError, match="first") as error:
        ClosureHandler()(closures)
    assert ran == [1, 2, 3]
    assert "second" in error.value.__notes__[0]
    assert any(entry.name == "closure" for entry in error.traceback)  # its own traceback


def test_async_closures_run_in_order_off_the_calling_thread(handler: AsyncClosureHandler) -> None:
    ran: list[tuple[int, int]] = []
    for n in range(50):
        handler.run(lambda n=n: ran.append((n, threading.get_ident())))
    handler.flush(30)
    assert [n for n, _ in ran] == list(range(50))
    assert {ident for _, ident in ran} != {threading.get_ident()}
    assert len({ident for _, ident in ran}) == 1


def test_async_failure_is_named_once_and_the_worker_lives(handler: AsyncClosureHandler) -> None:
    ran: list[int] = []
    handler.run(failing("injected"))
    handler.put(lambda: ran.append(1))
    with pytest.raises(lazystep.ClosureError, match=r"failing.<locals>.closure.*injected") as error:
        handler.flush(30)
    assert isinstance(error.value.__cause__, ArithmeticError)
    handler.run(lambda: ran.append(2))
    handler.flush(30)
    assert ran == [1, 2]


def test_old_failure_is_raised_before_anything_new_is_queued(handler: AsyncClosureHandler) -> None:
    ran: list[int] = []
    handler.run(failing("old"))
    while handler.num_waiting or handler._running is not None:
        time.sleep(0.001)
    with pytest.raises(lazystep.ClosureError, match="old"):
        handler.run(lambda: ran.append(1))
    handler.flush(30)
    assert ran == []  # the caller knows that it was not queued
    handler.run(lambda: ran.append(1))
    handler.flush(30)
    assert ran == [1]


def test_system_exit_in_a_closure_does_not_end_the_worker(handler: AsyncClosureHandler) -> None:
    def leave() -> None:
        raise SystemExit(3)

    handler.run(leave)
    with pytest.raises(lazystep.ClosureError, match="SystemExit"):
        handler.flush(30)
    done = threading.Event()
    handler.run(done.set)
    assert done.wait(30)


def test_full_queue_makes_the_caller_wait_without_a_lock(handler: AsyncClosureHandler) -> None:
    gate = blocked(handler)
    ran: list[int] = []
    handler.run(lambda: ran.append(1))
    handler.run(lambda: ran.append(2))
    third = threading.Thread(target=handler.run, args=(lambda: ran.append(3),))
    third.start()
    third.join(0.3)
    assert third.is_alive()
    assert handler._condition.acquire(timeout=5)  # the waiting thread does not hold it
    handler._condition.release()
    gate.open.set()
    third.join(30)
    assert not third.is_alive()
    handler.flush(30)
    assert ran == [1, 2, 3]
    assert metrics.counter_value("closure_queue_waits") == 1
    assert metrics.counter_value("seconds_waiting_for_closures") > 0


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(WhenFull.DROP_OLDEST, [2, 3]), (WhenFull.DROP_NEWEST, [1, 2]), (WhenFull.RAISE, [1, 2])],
)
def test_full_queue_policies(policy: WhenFull, expected: list[int]) -> None:
    handler = AsyncClosureHandler(2, policy)
    gate = blocked(handler)
    ran: list[int] = []
    for n in (1, 2):
        handler.run(lambda n=n: ran.append(n))
    if policy is WhenFull.RAISE:
        with pytest.raises(lazystep.QueueFullError, match="2 closures are waiting"):
            handler.run(lambda: ran.append(3))
    else:
        handler.run(lambda: ran.append(3))
        assert metrics.counter_value("closures_dropped") == 1
    gate.open.set()
    handler.flush(30)
    assert ran == expected
    assert handler.close(5) == []


def test_closure_that_blocks_for_ever_is_named_with_its_stack(handler: AsyncClosureHandler) -> None:
    gate = blocked(handler)
    with pytest.raises(lazystep.WaitTimeoutError, match=r"(?s)Gate.*is running.*test_handlers\.py.*wait"):
        handler.flush(0.2)
    assert "Gate" in handler.close(0.1)[0]
    gate.open.set()


def test_worker_that_dies_with_a_full_queue_wakes_the_caller(
    handler: AsyncClosureHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()

    def die(closure: Callable[[], None]) -> None:
        closure()
        raise MemoryError("the loop itself failed")

    monkeypatch.setattr(handler, "_attempt", die)
    handler.run(gate)
    assert gate.entered.wait(30)
    ran: list[int] = []
    handler.run(lambda: ran.append(1))
    handler.run(lambda: ran.append(2))
    errors: list[BaseException] = []

    def produce() -> None:
        try:
            handler.run(lambda: ran.append(3))
        except lazystep.LazyStepError as error:
            errors.append(error)

    producer = threading.Thread(target=produce)
    producer.start()
    time.sleep(0.1)
    monkeypatch.undo()
    gate.open.set()
    producer.join(30)
    assert not producer.is_alive()
    assert "the closure worker died" in str(errors[0])
    assert isinstance(errors[0].__cause__, MemoryError)
    handler.run(lambda: ran.append(4))  # a new worker takes over, nothing queued is lost
    handler.flush(30)
    assert ran == [1, 2, 4]


def test_closure_may_add_beyond_the_bound_but_not_wait_for_itself(handler: AsyncClosureHandler) -> None:
    ran: list[int] = []

    def add_many() -> None:
        for n in range(10):
            handler.put(lambda n=n: ran.append(n))

    handler.run(add_many)
    handler.flush(30)
    assert ran == list(range(10))
    handler.run(handler.flush)
    with pytest.raises(lazystep.ClosureError, match="can't wait for the worker"):
        handler.flush(30)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_starts_with_an_empty_handler(handler: AsyncClosureHandler) -> None:
    gate = blocked(handler)
    handler.run(lambda: None)
    pid = os.fork()
    if pid == 0:
        done = threading.Event()
        waiting = handler.num_waiting
        handler.run(done.set)
        os._exit(0 if waiting == 0 and done.wait(10) else 1)
    _, status = os.waitpid(pid, 0)
    gate.open.set()
    handler.flush(30)
    assert os.waitstatus_to_exitcode(status) == 0


def test_bounds_come_from_both_variables_and_ours_wins() -> None:
    theirs, ours = {"LTC_MAX_ASYNC_QUEUE": "7"}, {"LAZYSTEP_MAX_ASYNC_QUEUE": "3"}
    assert Settings.from_environ(theirs).max_async_queue == 7
    assert Settings.from_environ(theirs | ours).max_async_queue == 3
    with pytest.raises(lazystep.ConfigError, match="LTC_MAX_ASYNC_QUEUE='x'"):
        Settings.from_environ({"LTC_MAX_ASYNC_QUEUE": "x"})
    with pytest.raises(ValueError, match="max_queue_size = 0"):
        AsyncClosureHandler(0)


def test_stress_keeps_the_order_of_each_thread_and_loses_nothing() -> None:
    handler = AsyncClosureHandler(max_queue_size=64)
    ran: dict[int, list[int]] = {n: [] for n in range(4)}

    def produce(thread: int) -> None:
        for n in range(25_000):
            handler.put(lambda n=n: ran[thread].append(n))

    threads = [threading.Thread(target=produce, args=(n,)) for n in range(4)]
    longest = 0
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        longest = max(longest, handler.num_waiting)
        time.sleep(0.001)
    handler.flush(120)
    assert all(numbers == list(range(25_000)) for numbers in ran.values())
    assert longest <= 64
    assert handler.close(5) == []


class Gated(RuleBasedStateMachine):
    """With a gate that may be closed."""

    gate: Gate | None = None

    @precondition(lambda self: self.gate is not None)
    @rule()
    def release(self) -> None:
        assert self.gate is not None
        self.gate.open.set()
        self.gate = None


class Handlers(Gated):
    """Random sequences of adding, failing, blocking and flushing, against a list."""

    def __init__(self) -> None:
        super().__init__()
        self.handler = AsyncClosureHandler(max_queue_size=3)
        self.ran: list[int] = []
        self.expected: list[int] = []
        self.failures: list[str] = []
        self.next = 0

    def has_room(self) -> bool:
        return self.gate is None or self.handler.num_waiting < 3

    @precondition(has_room)
    @rule()
    def add(self) -> None:
        n, self.next = self.next, self.next + 1
        self.handler.put(lambda: self.ran.append(n))
        self.expected.append(n)

    @precondition(has_room)
    @rule()
    def fail(self) -> None:
        name, self.next = f"failure {self.next}", self.next + 1
        self.handler.put(failing(name))
        self.failures.append(name)

    @precondition(lambda self: self.gate is None)
    @rule()
    def block(self) -> None:
        self.gate = Gate()
        self.handler.put(self.gate)
        assert self.gate.entered.wait(30)

    @precondition(lambda self: self.gate is not None and not self.has_room())
    @rule()
    def add_to_a_full_queue(self) -> None:
        n, self.next = self.next, self.next + 1
        blocked = threading.Thread(target=self.handler.put, args=(lambda: self.ran.append(n),))
        blocked.start()
        blocked.join(0.02)
        assert blocked.is_alive()
        self.expected.append(n)
        self.release()
        blocked.join(30)
        assert not blocked.is_alive()

    @precondition(lambda self: self.gate is not None)
    @rule()
    def flush_is_bounded(self) -> None:
        with pytest.raises(lazystep.WaitTimeoutError):
            self.handler.flush(0.01)

    @precondition(lambda self: self.gate is None)
    @rule()
    def flush(self) -> None:
        try:
            self.handler.flush(30)
            raised = []
        except lazystep.ClosureError as error:
            raised = [str(error), *getattr(error, "__notes__", [])]
        assert len(raised) == len(self.failures)
        assert all(name in text for name, text in zip(self.failures, raised, strict=True))
        self.failures.clear()
        assert self.ran == self.expected

    @invariant()
    def order_is_kept(self) -> None:
        assert self.ran == self.expected[: len(self.ran)]

    def teardown(self) -> None:
        if self.gate is not None:
            self.release()
        self.flush()
        assert self.handler.close(5) == []


Handlers.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHandlers = Handlers.TestCase
