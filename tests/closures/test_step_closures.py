"""Step closures on the lazy device: values of their own step, one execution, errors, exit."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

import lazystep
from lazystep import config, metrics
from lazystep.record import snapshot
from tests.closures.test_handlers import Gate, Gated
from tests.helpers import count, failing
from tests.test_faults import run_script


@pytest.fixture(autouse=True)
def flushed() -> Any:
    yield
    lazystep.mark_step(wait=True)
    lazystep.flush_step_closures(30)


def test_closures_see_the_values_of_their_own_step_however_late_they_run() -> None:
    weight = torch.zeros(3).to("lazy")
    gate = Gate()
    seen: list[tuple[int, list[float], float]] = []

    def log(step: int, tree: dict[str, Any], *, scale: torch.Tensor) -> None:
        assert tree["weight"][0].device.type == "cpu"
        seen.append((step, tree["weight"][0].tolist(), scale.item()))

    lazystep.add_step_closure(gate, run_async=True)
    for step in range(1, 4):
        weight.add_(1)
        scale = weight.sum()
        lazystep.add_step_closure(log, (step, {"weight": [weight]}), run_async=True, kwargs={"scale": scale})
        lazystep.mark_step()
    for _ in range(10):
        weight.add_(1)
        lazystep.mark_step()
    lazystep.wait_device_ops()
    assert seen == []
    gate.open.set()
    lazystep.flush_step_closures(30)
    # torch's own handler reports 3, 3, 3 here.
    assert seen == [(1, [1.0] * 3, 3.0), (2, [2.0] * 3, 6.0), (3, [3.0] * 3, 9.0)]
    assert weight.tolist() == [13.0] * 3
    # Every step is one execution, however many closures look; and no more copies than overwritten values
    # and tensors that somebody else still holds.
    assert count("programs_executed") == 13
    assert count("snapshot_copies") <= 4


def test_value_that_nobody_else_holds_is_not_copied() -> None:
    gate = Gate()
    seen: list[float] = []
    lazystep.add_step_closure(gate, run_async=True)
    for step in range(60):  # so many that the interpreter specializes the code that counts references
        loss = (torch.ones(4) * step).to("lazy").sum()
        lazystep.add_step_closure(lambda x: seen.append(x.item()), (loss,), run_async=True)
        del loss
        lazystep.mark_step()
    gate.open.set()
    lazystep.flush_step_closures(30)
    assert seen == [4.0 * step for step in range(60)]
    assert count("snapshot_copies") == 0
    held = torch.ones(4).to("lazy").sum()
    lazystep.add_step_closure(lambda x: seen.append(x.item()), (held,), run_async=True)
    lazystep.mark_step()
    lazystep.flush_step_closures(30)
    assert count("snapshot_copies") == 1


def test_view_of_updated_memory_is_preserved() -> None:
    base = torch.zeros(4).to("lazy")
    gate = Gate()
    seen: list[list[float]] = []
    lazystep.add_step_closure(gate, run_async=True)
    base[0] = 1
    lazystep.add_step_closure(lambda v: seen.append(v.tolist()), (base.view(2, 2)[0],), run_async=True)
    lazystep.mark_step()
    base.fill_(9)
    lazystep.mark_step(wait=True)
    gate.open.set()
    lazystep.flush_step_closures(30)
    assert seen == [[1.0, 0.0]]


def test_sync_closures_run_on_the_training_thread_after_the_async_hand_over() -> None:
    order: list[tuple[str, bool]] = []
    main = threading.get_ident()

    def note(name: str, x: torch.Tensor) -> None:
        order.append((name, threading.get_ident() == main))
        assert x.item() == 2.0

    x = torch.ones(()).to("lazy") + 1
    lazystep.add_step_closure(note, ("a", x))
    lazystep.add_step_closure(note, ("b", x))
    lazystep.add_step_closure(note, ("c", x), run_async=True)
    assert order == []
    lazystep.mark_step()
    assert [n for n in order if n[1]] == [("a", True), ("b", True)]
    lazystep.flush_step_closures(30)
    assert ("c", False) in order
    assert count("programs_executed") == 1


def test_mark_step_waits_neither_for_closures_nor_for_the_device() -> None:
    gate = Gate()
    lazystep.add_step_closure(gate, run_async=True)
    x = torch.ones(2, device="lazy") + 1
    lazystep.mark_step()
    assert gate.entered.wait(30)  # the closure is running, and we are here
    gate.open.set()
    assert x.tolist() == [2.0, 2.0]


def test_sync_error_leaves_mark_step_and_the_next_step_works() -> None:
    ran: list[int] = []
    lazystep.add_step_closure(failing("mine"))
    lazystep.add_step_closure(lambda: ran.append(1))
    x = torch.ones(2, device="lazy") * 2
    with pytest.raises(ArithmeticError, match="mine"):
        lazystep.mark_step()
    assert ran == [1]
    assert x.tolist() == [2.0, 2.0]
    lazystep.mark_step()


def test_async_error_is_raised_at_the_next_barrier_naming_closure_step_and_place() -> None:
    def fail(x: torch.Tensor) -> None:
        raise ArithmeticError("injected")

    step = lazystep.get_device_context().step + 1
    lazystep.add_step_closure(fail, (torch.ones(1, device="lazy"),), run_async=True)
    lazystep.mark_step()
    while lazystep.get_device_context().num_pending():
        time.sleep(0.001)
    with pytest.raises(lazystep.ClosureError) as error:
        lazystep.mark_step()
    assert f"of step {step}, added at" in str(error.value)
    assert "test_step_closures.py" in str(error.value)
    assert "fail" in str(error.value)
    assert isinstance(error.value.__cause__, ArithmeticError)
    lazystep.mark_step()


def test_async_closure_does_not_start_at_the_barrier_that_raises_an_earlier_failure() -> None:
    ran: list[list[float]] = []
    weight = torch.zeros(2).to("lazy")

    is_over = threading.Event()  # the first barrier, which could raise a failure that is fast

    def fail() -> None:
        is_over.wait(30)
        raise RuntimeError("injected")

    def second(weight: torch.Tensor) -> None:
        ran.append(weight.tolist())

    lazystep.add_step_closure(fail, run_async=True)
    lazystep.mark_step()
    is_over.set()
    lazystep.get_device_context().async_handler.wait_idle(30)
    weight.add_(1)
    lazystep.add_step_closure(second, (weight,), run_async=True)
    with pytest.raises(RuntimeError, match="injected"):
        lazystep.mark_step()
    lazystep.get_device_context().async_handler.wait_idle(30)
    assert ran == []
    # Nothing is lost: it runs after the next barrier, with the values of its own step.
    weight.add_(1)
    lazystep.mark_step()
    lazystep.flush_step_closures(30)
    assert ran == [[1.0, 1.0]]


def test_flush_runs_the_closures_that_a_failure_has_held_back() -> None:
    ran: list[int] = []
    is_over = threading.Event()

    def fail() -> None:
        is_over.wait(30)
        raise RuntimeError("injected")

    lazystep.add_step_closure(fail, run_async=True)
    lazystep.mark_step()
    is_over.set()
    lazystep.get_device_context().async_handler.wait_idle(30)
    lazystep.add_step_closure(lambda: ran.append(1), run_async=True)
    with pytest.raises(lazystep.ClosureError):
        lazystep.mark_step()
    assert lazystep.get_device_context().num_pending() == 1
    lazystep.flush_step_closures(30)
    assert ran == [1]


def test_failed_step_reaches_its_closure_and_its_barrier() -> None:
    x = torch.ones(3, device="lazy").index_select(0, torch.tensor([7], device="lazy"))
    ran: list[int] = []
    lazystep.add_step_closure(lambda x: ran.append(1), (x,), run_async=True)
    with pytest.raises(lazystep.StepError, match="index_select"):
        lazystep.mark_step(wait=True)
    with pytest.raises(lazystep.ClosureError, match="index_select"):
        lazystep.flush_step_closures(30)
    assert ran == []


def test_closure_may_add_closures_read_tensors_and_mark_steps() -> None:
    ran: list[Any] = []
    other = torch.full((2,), 5.0).to("lazy")

    def inner(x: torch.Tensor) -> None:
        ran.append(x.tolist())

    def outer(x: torch.Tensor, raw: Any) -> None:
        ran.append((raw[0] + x.cpu()).tolist() if x.device.type == "cpu" else x.tolist())
        lazystep.add_step_closure(inner, (torch.ones(1, device="lazy"),), run_async=True)
        lazystep.mark_step()

    for run_async in (False, True):
        lazystep.add_step_closure(outer, (other, [torch.ones(2)]), run_async=run_async)
        lazystep.mark_step()
        lazystep.flush_step_closures(30)
    lazystep.mark_step()
    lazystep.flush_step_closures(30)
    assert ran == [[5.0, 5.0], [1.0], [6.0, 6.0], [1.0]]


def test_decorator_adds_in_every_nth_step() -> None:
    seen: list[tuple[int, float]] = []

    @lazystep.step_closure(run_async=True, every=3)
    def log(step: int, x: torch.Tensor) -> None:
        """Log."""
        seen.append((step, x.item()))

    x = torch.zeros(()).to("lazy")
    for step in range(7):
        x.add_(1)
        log(step, x)
        log(step, x * 10)
        lazystep.mark_step()
    lazystep.flush_step_closures(30)
    assert seen == [(0, 1.0), (0, 10.0), (3, 4.0), (3, 40.0), (6, 7.0), (6, 70.0)]
    assert log.__doc__ == "Log."


def test_run_step_closures_returns_the_context_and_ends_the_step() -> None:
    seen: list[float] = []
    x = torch.ones(2, device="lazy").sum()
    lazystep.add_step_closure(lambda x: seen.append(x.item()), (x,))
    assert lazystep.run_step_closures() is lazystep.get_device_context("lazy")
    assert seen == [2.0]


def test_captured_tensors_are_warned_about_once() -> None:
    x = torch.ones(2, device="lazy")

    def log() -> None:
        x.tolist()

    with pytest.warns(UserWarning, match="captures the lazy tensor 'x'"):
        lazystep.add_step_closure(log)
    lazystep.add_step_closure(log)
    lazystep.mark_step()


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="something to call"):
        lazystep.add_step_closure(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"write \(x,\)"):
        lazystep.add_step_closure(print, "text")
    with pytest.raises(ValueError, match="every = 0"):
        lazystep.step_closure(every=0)
    with pytest.raises(ValueError, match="cuda"):
        lazystep.add_step_closure(print, device="cuda")


def test_back_pressure_is_counted_and_holds_no_lock() -> None:
    context = lazystep.get_device_context()
    gate = Gate()
    with config.override(max_async_queue=1):
        small = lazystep.closure.AsyncClosureHandler(1)
        original, context.started_handler = context.started_handler, small
        lazystep.add_step_closure(gate, run_async=True)
        lazystep.mark_step()
        assert gate.entered.wait(30)
        for _ in range(2):
            lazystep.add_step_closure(lambda: None, run_async=True)
        blocked = threading.Thread(target=lazystep.mark_step)
        blocked.start()
        blocked.join(0.3)
        assert blocked.is_alive()
        assert (torch.ones(2, device="lazy") + 1).tolist() == [2.0, 2.0]  # recording and reading go on
        gate.open.set()
        blocked.join(30)
        assert not blocked.is_alive()
        lazystep.flush_step_closures(30)
        context.started_handler = original
    assert count("closure_queue_waits") >= 1


def test_exit_drains_closures_and_reports_what_was_dropped() -> None:
    done = run_script(
        """
        import threading, time, torch, lazystep

        def slow(x):
            time.sleep(0.3)
            print("ran", x.item(), flush=True)

        def stuck():
            threading.Event().wait(60)

        lazystep.add_step_closure(slow, (torch.ones((), device="lazy") * 4,), run_async=True)
        lazystep.mark_step()
        lazystep.add_step_closure(stuck, run_async=True)
        lazystep.mark_step()
        lazystep.add_step_closure(slow, (1,), run_async=True)
        """,
        LAZYSTEP_EXIT_TIMEOUT="2",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ran 4.0"
    assert "closure stuck of step 2" in done.stderr
    assert "closure slow of step 3" in done.stderr
    assert "never reached its barrier" in done.stderr


def test_last_failure_before_exit_is_printed_and_fails_the_process() -> None:
    done = run_script("""
        import torch, lazystep

        def fail():
            raise ArithmeticError("the last one")

        lazystep.add_step_closure(fail, run_async=True)
        lazystep.mark_step()
    """)
    assert done.returncode == 1
    assert "the last one" in done.stderr
    assert "closure fail of step 1" in done.stderr


def test_interrupt_during_a_flush_leaves_the_queue_usable() -> None:
    done = run_script("""
        import os, signal, threading, torch, lazystep
        gate = threading.Event()
        lazystep.add_step_closure(gate.wait, (30,), run_async=True)
        lazystep.mark_step()
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            lazystep.flush_step_closures()
        except KeyboardInterrupt:
            print("interrupted")
        gate.set()
        lazystep.add_step_closure(print, ("after",), run_async=True)
        lazystep.mark_step()
        lazystep.flush_step_closures()
    """)
    assert done.stdout.split() == ["interrupted", "after"], done.stderr


def test_training_with_heavy_reporting_is_bitwise_the_same_as_without() -> None:
    def train(reports: bool) -> tuple[torch.Tensor, list[float]]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4).to("lazy")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        norms: list[float] = []
        for _ in range(20):
            loss = model(torch.randn(8, 4).to("lazy")).square().mean()
            loss.backward()
            if reports:
                grads = [p.grad for p in model.parameters()]
                lazystep.add_step_closure(
                    lambda gs, p: norms.append(sum(g.norm().item() for g in gs) + p.sum().item()),
                    (grads, model.weight),
                    run_async=True,
                )
            optimizer.step()
            optimizer.zero_grad()
            lazystep.mark_step()
        lazystep.flush_step_closures(30)
        return model.weight.detach().cpu(), norms

    quiet, _ = train(False)
    metrics.reset()
    reported, norms = train(True)
    assert torch.equal(quiet, reported)
    assert len(norms) == 20
    assert count("programs_executed") <= 21


def test_step_waits_for_the_copy_of_what_it_overwrites(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closure is in the middle of copying its value when the next step is about to write there."""
    is_copying, next_is_queued = threading.Event(), threading.Event()
    weight = torch.zeros(2).to("lazy")
    seen: list[float] = []
    original = snapshot.Snapshot._copy

    def copy_slowly(self: snapshot.Snapshot, tensor: torch.Tensor) -> torch.Tensor:
        is_copying.set()
        assert next_is_queued.wait(30)
        deadline = time.monotonic() + 0.5
        while tensor.tolist() == [1.0, 1.0] and time.monotonic() < deadline:
            time.sleep(0.01)  # the step would write meanwhile, if nothing held it up
        return original(self, tensor)

    monkeypatch.setattr(snapshot.Snapshot, "_copy", copy_slowly)
    weight.add_(1)
    lazystep.add_step_closure(lambda w: seen.append(w.sum().item()), (weight,), run_async=True)
    lazystep.mark_step()
    assert is_copying.wait(30)
    weight.add_(1)
    lazystep.mark_step()
    next_is_queued.set()
    lazystep.flush_step_closures(30)
    assert seen == [2.0]
    assert weight.tolist() == [2.0, 2.0]


class Steps(Gated):
    """Random sequences of adding, failing, blocking, marking and flushing, against two lists."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.zeros(2).to("lazy")
        self.num_steps = 0
        self.added: list[tuple[str, int]] = []
        self.seen: dict[str, list[tuple[int, float]]] = {"sync": [], "async": []}
        self.expected: dict[str, list[tuple[int, float]]] = {"sync": [], "async": []}
        self.failures_added = 0
        self.failures = 0
        self.next = 0

    @rule(kind=st.sampled_from(["sync", "async"]))
    def add(self, kind: str) -> None:
        n, self.next = self.next, self.next + 1

        def closure(weight: torch.Tensor) -> None:
            self.seen[kind].append((n, weight.sum().item()))

        lazystep.add_step_closure(closure, (self.weight,), run_async=kind == "async")
        self.added.append((kind, n))

    @rule()
    def fail(self) -> None:
        lazystep.add_step_closure(failing("injected"), run_async=True)
        self.failures_added += 1

    @precondition(lambda self: self.gate is None)
    @rule()
    def block(self) -> None:
        self.gate = Gate()
        lazystep.add_step_closure(self.gate, run_async=True)

    @rule()
    def mark(self) -> None:
        self.weight.add_(1)
        self.num_steps += 1
        for kind, n in self.added:
            self.expected[kind].append((n, 2.0 * self.num_steps))
        self.added.clear()
        self.failures += self.failures_added
        self.failures_added = 0
        try:
            lazystep.mark_step()
        except lazystep.ClosureError as error:
            self.failures -= 1 + len(getattr(error, "__notes__", []))
        assert self.seen["sync"] == self.expected["sync"]

    @precondition(lambda self: self.gate is None)
    @rule()
    def flush(self) -> None:
        try:
            lazystep.flush_step_closures(30)
        except lazystep.ClosureError as error:
            self.failures -= 1 + len(getattr(error, "__notes__", []))
        assert self.failures == 0
        assert self.seen == self.expected

    @invariant()
    def order_and_values_are_kept(self) -> None:
        seen = self.seen["async"]
        assert seen == self.expected["async"][: len(seen)]

    def teardown(self) -> None:
        if self.gate is not None:
            self.release()
        self.mark()
        self.flush()
        assert self.weight.tolist() == [float(self.num_steps)] * 2


Steps.TestCase.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSteps = Steps.TestCase
