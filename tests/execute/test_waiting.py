"""Who waits for a step runs it; an idle executor keeps no thread pool. Counted, never timed."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lazystep
from lazystep import config
from lazystep.execute import executor as executor_module
from tests.helpers import count, descend, run_python

HERE = "steps_run_while_waiting"


@pytest.fixture
def long_head_start(monkeypatch: pytest.MonkeyPatch, runtime: Any) -> Iterator[None]:
    """A thread that is expected to wait gets all the time it needs, whatever else the machine does."""
    monkeypatch.setattr(executor_module, "_HEAD_START", 30.0)
    settle(runtime)
    yield
    runtime.executor._num_awaited = 0


def settle(runtime: Any) -> None:
    """Read until the executor has given its pool back and expects the next read."""
    runtime.executor._num_needed = executor_module._NUM_WAITS
    for _ in range(200):
        if runtime.executor.expects_wait and not runtime.executor._has_pool:
            return
        (torch.ones(2, device="lazy") + 1).tolist()
    raise AssertionError("the executor never expects a wait")


def test_a_loop_that_reads_each_step_runs_it_itself_and_equals_eager(long_head_start: None) -> None:
    losses = {}
    for device in ("cpu", "lazy"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        before = count(HERE)
        losses[device] = []
        for _ in range(6):
            x = torch.randn(16, 4).to(device)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            descend(loss, optimizer)
            losses[device].append(loss.item())
    assert losses["lazy"] == losses["cpu"]
    assert count(HERE) - before == 6
    assert count("synchronizations:item") == 6


def test_replays_that_are_read_run_on_the_training_thread(runtime: Any, long_head_start: None) -> None:
    weight = torch.zeros(3).to("lazy")

    @lazystep.step(audit_every=0)
    def step(x: torch.Tensor) -> torch.Tensor:
        weight.add_(x)
        return weight.sum()

    for _ in range(4):
        step(torch.ones(3)).item()
    settle(runtime)
    before, replayed = count(HERE), step.num_replayed
    assert [step(torch.ones(3)).item() for _ in range(5)] == [15.0, 18.0, 21.0, 24.0, 27.0]
    assert step.num_replayed - replayed == count(HERE) - before == 5


def test_sync_closures_run_their_step(long_head_start: None) -> None:
    seen: list[float] = []
    before = count(HERE)
    for number in range(3):
        x = torch.full((2,), float(number), device="lazy") * 2
        lazystep.add_step_closure(lambda value: seen.append(value.sum().item()), (x,))
        lazystep.mark_step()
    assert seen == [0.0, 4.0, 8.0]
    assert count(HERE) - before == 6, "the step, and what the closure records"


def test_who_does_not_wait_leaves_the_step_to_the_executor(runtime: Any) -> None:
    runtime.executor._num_awaited = 0
    x = torch.zeros(2, device="lazy")
    before = count(HERE)
    for _ in range(10):
        x = x + 1
        lazystep.mark_step()
        assert not runtime.executor.expects_wait
    lazystep.wait_device_ops()
    assert x.tolist() == [10.0, 10.0]
    assert count(HERE) - before <= 4, "at most the steps in flight when the thread began to wait"


def test_a_head_start_of_no_use_takes_more_waits_until_the_next(
    monkeypatch: pytest.MonkeyPatch, runtime: Any
) -> None:
    monkeypatch.setattr(executor_module, "_HEAD_START", 0.01)
    settle(runtime)
    needed = runtime.executor._num_needed
    x = torch.ones(2, device="lazy") + 1
    lazystep.mark_step()
    other = threading.Thread(target=lambda: lazystep.to_cpu(x))  # not the thread that has queued the step
    other.start()
    other.join(30)
    assert not other.is_alive()
    assert runtime.executor._num_needed == 2 * needed
    assert not runtime.executor.expects_wait


# -- the step is the executor's, whichever thread runs it ---------------------------------------------


@contextlib.contextmanager
def _dispatch_mode() -> Iterator[None]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Forbid(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert "cosh" not in str(func) or any(
                isinstance(a, torch.Tensor) and a.device.type == "lazy" for a in args
            ), "the step ran under the user's mode"
            return func(*args, **(kwargs or {}))

    with Forbid():
        yield


MODES: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "device": lambda: torch.device("meta"),
    "dispatch mode": _dispatch_mode,
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_the_waiting_thread_do_not_reach_the_step(mode: str, long_head_start: None) -> None:
    generator = torch.Generator().manual_seed(0)
    host = torch.randn(4, 4, generator=generator, dtype=torch.complex64)
    x = host.to("lazy")
    real = host.real.clone().to("lazy")
    lazystep.mark_step(wait=True)
    before = count(HERE)
    # The conjugate is a view that kernels must resolve: a dispatch handler runs with that switched off.
    product = torch.matmul(x.conj(), x).resolve_conj()
    other = torch.matmul(real, real).cosh()
    lazystep.mark_step()
    with MODES[mode]():
        lazystep.sync_multi([product, other])
    assert count(HERE) - before == 1
    assert torch.equal(product.cpu(), torch.matmul(host.conj(), host))
    assert torch.equal(other.cpu(), torch.matmul(host.real.clone(), host.real.clone()).cosh())
    assert not lazystep.to_cpu(other).is_inference()
    other.add_(1)  # an inference tensor would refuse
    assert torch.equal(other.cpu(), torch.matmul(host.real.clone(), host.real.clone()).cosh() + 1)


def test_number_of_threads_is_the_waiting_threads_own_again(long_head_start: None) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        x = torch.ones(4, device="lazy") + 1
        lazystep.mark_step()
        torch.set_num_threads(2)
        start = count(HERE)
        assert x.tolist() == [2.0] * 4
        assert count(HERE) - start == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_failure_on_the_waiting_thread_is_kept_and_reported_once(long_head_start: None) -> None:
    table = torch.zeros(3, 2).to("lazy")
    index = torch.tensor([7]).to("lazy")
    kept = torch.ones(2).to("lazy")
    before = count(HERE)
    kept.add_(1)
    bad = torch.nn.functional.embedding(index, table)
    with pytest.raises(lazystep.StepError, match="embedding"):
        bad.tolist()
    assert count(HERE) - before == count("steps_failed") == 1
    lazystep.mark_step()  # raised by the read: not again
    with pytest.raises(lazystep.StepError, match="half updated"):
        kept.tolist()
    kept.copy_(torch.ones(2))
    assert kept.tolist() == [1.0, 1.0]


def test_failure_that_no_read_reports_comes_at_the_barrier(long_head_start: None) -> None:
    bad = torch.nn.functional.embedding(torch.tensor([7]).to("lazy"), torch.zeros(3, 2).to("lazy"))
    before = count(HERE)
    with pytest.raises(lazystep.StepError, match="embedding"):
        lazystep.mark_step(wait=True)
    assert count(HERE) - before == 1
    with pytest.raises(lazystep.StepError, match="embedding"):
        bad.tolist()


def test_steps_behind_an_interrupted_read_still_run(
    monkeypatch: pytest.MonkeyPatch, long_head_start: None
) -> None:
    execute = executor_module._execute

    def execute_with_signal(run: Any) -> Any:
        monkeypatch.setattr(executor_module, "_execute", execute)
        signal.raise_signal(signal.SIGINT)
        return execute(run)

    x = torch.ones(2).to("lazy")
    lazystep.mark_step(wait=True)
    monkeypatch.setattr(executor_module, "_execute", execute_with_signal)
    first = x + 1
    lazystep.mark_step()
    second = first + 1
    lazystep.mark_step()
    with pytest.raises(KeyboardInterrupt):
        first.tolist()
    seen: list[Any] = []
    other = threading.Thread(target=lambda: seen.append(second.tolist()))  # only the executor may run it
    other.start()
    other.join(20)
    assert seen == [[3.0, 3.0]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_signals_wait_until_the_step_is_whole(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, long_head_start: None
) -> None:
    class AlarmError(Exception):
        pass

    def handle(*_: Any) -> None:
        raise AlarmError

    execute = executor_module._execute

    def execute_with_signal(run: Any) -> Any:
        signal.raise_signal(number)
        return execute(run)

    earlier = signal.signal(number, handle)
    try:
        x = torch.ones(2).to("lazy")
        lazystep.mark_step(wait=True)
        monkeypatch.setattr(executor_module, "_execute", execute_with_signal)
        before = count(HERE)
        x.add_(1)
        y = x * 2
        with pytest.raises(AlarmError):
            y.tolist()
        assert count(HERE) - before == 1
        assert signal.getsignal(number) is handle
        monkeypatch.setattr(executor_module, "_execute", execute)
        assert y.tolist() == [4.0, 4.0]
        assert x.tolist() == [2.0, 2.0]
    finally:
        signal.signal(number, earlier)


def test_a_step_that_waits_for_itself_is_an_error(
    monkeypatch: pytest.MonkeyPatch, runtime: Any, long_head_start: None
) -> None:
    """A finalizer may read a lazy tensor while its thread runs a step."""
    execute, errors = executor_module._execute, []

    def execute_and_wait(run: Any) -> Any:
        for wait in (run.wait, runtime.executor.wait_idle):
            with pytest.raises(lazystep.LazyStepError, match="wait") as caught:
                wait()
            errors.append(caught.value)
        return execute(run)

    monkeypatch.setattr(executor_module, "_execute", execute_and_wait)
    before = count(HERE)
    assert (torch.ones(2, device="lazy") + 1).tolist() == [2.0, 2.0]
    assert count(HERE) - before == 1
    assert len(errors) == 2


# -- when the waiting thread must not run it ----------------------------------------------------------


def test_custom_ops_stay_on_the_executor_thread(long_head_start: None) -> None:
    names: list[str] = []

    @torch.library.custom_op("lazystep_tests::name_thread", mutates_args=())
    def name_thread(x: torch.Tensor) -> torch.Tensor:
        names.append(threading.current_thread().name)
        return x.clone()

    name_thread.register_fake(lambda x: torch.empty_like(x))
    before = count(HERE)
    for _ in range(3):
        assert name_thread(torch.ones(1, device="lazy")).item() == 1.0
    assert names == ["lazystep-executor"] * 3
    assert count(HERE) == before


def test_other_threads_wait_for_the_executor(long_head_start: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "_HEAD_START", 0.01)
    x = torch.ones(2, device="lazy") + 1
    lazystep.mark_step()
    before, seen = count(HERE), []
    other = threading.Thread(target=lambda: seen.append(x.tolist()))
    other.start()
    other.join(30)
    assert seen == [[2.0, 2.0]]
    assert count(HERE) == before


def test_a_step_runs_on_the_executor_while_a_call_is_observed(long_head_start: None) -> None:
    before = count(HERE)

    @lazystep.step
    def reads(x: torch.Tensor) -> float:
        return (x + 1).sum().item()

    with pytest.warns(lazystep.LazyStepWarning, match="recorded in each call"):
        assert [reads(torch.ones(2)) for _ in range(2)] == [4.0, 4.0]
    assert count(HERE) == before


def test_first_in_first_out_whoever_runs(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads at random places among steps in flight: the order of steps is the order of barriers."""
    execute, order, at_once = executor_module._execute, [], []
    running = threading.Semaphore(1)

    def execute_alone(run: Any) -> Any:
        at_once.append(running.acquire(blocking=False))
        order.append(run.step)
        try:
            return execute(run)
        finally:
            running.release()

    monkeypatch.setattr(executor_module, "_execute", execute_alone)
    x = torch.zeros(2, device="lazy")
    for number in range(60):
        x = x + 1
        lazystep.mark_step()
        if number % 7 < 3:
            assert x[0].item() == number + 1
    assert x.tolist() == [60.0, 60.0]
    assert order == sorted(order)
    assert all(at_once)


def test_waiting_is_bounded_while_another_thread_runs_the_step(
    runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, gate = executor_module._execute, threading.Event()

    def execute_behind_gate(run: Any) -> Any:
        assert gate.wait(30)
        return execute(run)

    lazystep.wait_device_ops()
    monkeypatch.setattr(runtime.executor, "_num_awaited", 0)
    monkeypatch.setattr(runtime.executor, "_has_pool", True)  # so the executor thread runs it
    monkeypatch.setattr(executor_module, "_execute", execute_behind_gate)
    x = torch.ones(1, device="lazy") + 1
    try:
        with config.override(wait_timeout=0.2), pytest.raises(lazystep.WaitTimeoutError, match="still"):
            x.tolist()
    finally:
        gate.set()
    assert x.tolist() == [2.0]


def test_pool_is_given_back_before_the_reader_wakes(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = executor_module._execute

    def execute_when_awaited(run: Any) -> Any:
        while runtime.executor._num_unread:
            threading.Event().wait(0.001)
        return execute(run)

    monkeypatch.setattr(executor_module, "_execute", execute_when_awaited)
    monkeypatch.setattr(executor_module, "_POOL_PATIENCE", 30.0)
    runtime.executor._has_pool = True  # so the executor thread runs the step
    runtime.executor._num_awaited = 0
    before, here = count("pools_given_back"), count(HERE)
    x = torch.ones(2, device="lazy") + 1
    lazystep.mark_step()
    assert x.tolist() == [2.0, 2.0]
    assert not runtime.executor._has_pool
    assert count("pools_given_back") - before == 1
    assert count(HERE) == here


def test_pool_is_kept_while_a_compiler_runs(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "are_barriers_sleeping", lambda: True)
    runtime.executor._has_pool = True
    before = count("pools_given_back")
    for _ in range(3):
        assert (torch.ones(2, device="lazy") + 1).tolist() == [2.0, 2.0]
    assert runtime.executor._has_pool
    assert count("pools_given_back") == before


# -- pools --------------------------------------------------------------------------------------------

POOLS = """
import json, os, resource, sys, time
import torch, lazystep
from lazystep.execute.executor import Executor
from lazystep.openmp import can_release
from lazystep.runtime import runtime

torch.set_num_threads(os.cpu_count())
weights = [torch.randn(256, 256) for _ in range(8)]

def eager():
    x = torch.ones(64, 256)
    for weight in weights:
        x = (x @ weight).tanh()

def num_switches(choose=min):
    # Of several rounds: another process may add some.
    eager()
    found = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        for _ in range(8):
            eager()
        found.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)
    return choose(found)

def num_tasks():
    return len(os.listdir("/proc/self/task"))

def train(read):
    x = torch.ones(64, 256).to("lazy")
    for _ in range(4):
        for weight in lazy:
            x = (x @ weight).tanh()
        lazystep.mark_step()
    return x.sum().item() if read == "item" else lazystep.wait_device_ops()

def wait_for_give_back():
    deadline = time.monotonic() + 60
    while (runtime.executor.num_in_flight or runtime.executor._has_pool) and time.monotonic() < deadline:
        time.sleep(0.01)

num_before = num_switches()
lazy = [weight.to("lazy") for weight in weights]
give_back, Executor._give_pool_back = Executor._give_pool_back, lambda self: None
train("item")
num_kept, num_tasks_kept = num_switches(max), num_tasks()
Executor._give_pool_back = give_back
train("item")
wait_for_give_back()
num_item = num_switches()
train("wait")
wait_for_give_back()
num_wait = num_switches()
x = lazy[0] @ lazy[1]
lazystep.mark_step()  # nobody waits
wait_for_give_back()
num_unread, num_tasks_now = num_switches(), num_tasks()
here = lazystep.metrics.counter_value("steps_run_while_waiting")
for _ in range(8):
    (lazy[0] @ lazy[1]).sum().item()
here = lazystep.metrics.counter_value("steps_run_while_waiting") - here
child = os.fork()
if child == 0:
    eager()  # hangs if the child believes that it has the parent's threads
    os._exit(0)
status = os.waitpid(child, 0)[1]
print(json.dumps({
    "can_release": can_release(), "cores": os.cpu_count(), "status": status,
    "before": num_before, "kept": num_kept, "after": [num_item, num_wait, num_unread], "here": here,
    "tasks kept": num_tasks_kept, "tasks": num_tasks_now,
}))
"""


def test_eager_ops_have_the_pool_for_themselves_while_the_executor_idles() -> None:
    # Spinning for ever, a thread sleeps at a barrier only where libgomp has turned spinning off. There are
    # fewer places than steps, so the executor runs some of them even if the machine is busy.
    environ = {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "infinity", "LAZYSTEP_TIER": "reference"}
    environ["LAZYSTEP_MAX_IN_FLIGHT"] = "2"
    done = run_python("-W", "ignore", "-c", POOLS, **environ)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if not found["can_release"] or found["cores"] < 2:
        pytest.skip("one processor, or an OpenMP library without omp_pause_resource_all")
    assert found["status"] == 0
    # The executor's pool has one thread less than there are cores: the training thread is the last one.
    assert found["tasks kept"] - found["tasks"] >= 1, found
    # 16 parallel regions in each of 8 rounds: with a second pool, many of them sleep.
    assert found["kept"] > 20, found
    for after in found["after"]:
        assert after <= found["before"] + 10, found
    assert found["here"] >= 1
