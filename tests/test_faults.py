"""Injected faults: nothing hangs, no error is lost, and the runtime goes on afterwards."""

from __future__ import annotations

import gc
import os
import subprocess
import textwrap
import threading
import weakref
from typing import Any
from unittest import mock

import pytest
import torch

import lazystep
from lazystep import config, metrics
from lazystep.execute.executor import Executor
from tests.helpers import run_python


@torch.library.custom_op("lazystep_tests::failing", mutates_args=())
def failing(x: torch.Tensor, fails: bool) -> torch.Tensor:
    if fails:
        raise ArithmeticError("injected")
    return x + 1


failing.register_fake(lambda x, fails: torch.empty_like(x))


def run_script(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", textwrap.dedent(code), **environ)


def test_failure_is_raised_at_the_next_barrier_with_op_and_line() -> None:
    y = failing(torch.ones(2, device="lazy"), True)
    with pytest.raises(lazystep.StepError) as error:
        lazystep.mark_step(wait=True)
    assert "lazystep_tests.failing.default" in str(error.value)
    assert "test_faults.py" in str(error.value)
    assert isinstance(error.value.__cause__, ArithmeticError)
    assert metrics.counter_value("steps_failed") == 1
    # Once: the next barrier is clean. What the step should have made keeps telling.
    lazystep.mark_step(wait=True)
    for _ in range(2):
        with pytest.raises(lazystep.StepError, match="injected"):
            y.tolist()
    with pytest.raises(lazystep.StepError, match="injected"):
        (y + 1).tolist()
    assert failing(torch.ones(2, device="lazy"), False).tolist() == [2.0, 2.0]


def test_failure_is_raised_at_a_read_and_then_not_again_at_the_barrier() -> None:
    y = failing(torch.ones(2, device="lazy"), True)
    with pytest.raises(lazystep.StepError, match="injected"):
        y.tolist()
    lazystep.mark_step(wait=True)


def test_translated_programs_name_the_failing_line_too() -> None:
    index = torch.zeros(1, dtype=torch.int64)
    for step in range(4):
        source = torch.ones(13, device="lazy")  # a shape of its own, so a program of its own
        index.fill_(77 if step == 3 else 0)
        picked = source.index_select(0, index.to("lazy"))
        lazystep.mark_step()
    with pytest.raises(lazystep.StepError, match=r"aten.index_select.default, recorded at .*test_faults.py"):
        picked.tolist()


def test_state_written_before_the_failure_is_refused_until_overwritten() -> None:
    touched = torch.zeros(3).to("lazy")
    untouched = torch.zeros(3).to("lazy")
    touched.add_(1)
    failing(untouched, True)
    keep = failing(untouched, True)
    untouched.add_(1)
    with pytest.raises(lazystep.StepError):
        lazystep.mark_step(wait=True)
    del keep
    with pytest.raises(lazystep.StepError, match="half updated"):
        touched.tolist()
    with pytest.raises(lazystep.StepError, match="half updated"):
        touched + 1
    # Nothing had written it when the step failed: it is as before the step.
    assert untouched.tolist() == [0.0, 0.0, 0.0]
    touched.copy_(torch.full((3,), 5.0))
    assert (touched + 1).tolist() == [6.0, 6.0, 6.0]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_loop_that_reads_nothing_is_told_again_in_each_step(captured: bool, in_place: bool) -> None:
    state = {"x": torch.ones(3).to("lazy")}

    def step(index: torch.Tensor) -> torch.Tensor:
        x = state["x"].add_(1) if in_place else state["x"] + 1
        state["x"] = x
        return x.index_select(0, index)

    replayed = lazystep.step(step)

    def call(index: int) -> None:
        _kept = (replayed if captured else step)(torch.tensor([index]).to("lazy"))
        lazystep.mark_step()
        lazystep.wait_device_ops()

    for _ in range(5):
        call(2)
    with pytest.raises(lazystep.StepError, match=r"failed in aten\.index_select"):
        call(9)
    for _ in range(3):
        with pytest.raises(lazystep.StepError, match="half updated" if in_place else "did not run"):
            call(2)
    state["x"] = torch.zeros(3).to("lazy")
    call(2)
    assert state["x"].tolist() == [1.0] * 3
    assert (replayed.num_replayed > 0) == captured


def test_steps_queued_behind_a_failure_fail_only_where_they_depend_on_it() -> None:
    gate = threading.Event()

    @torch.library.custom_op("lazystep_tests::failing_late", mutates_args=())
    def failing_late(x: torch.Tensor) -> torch.Tensor:
        gate.wait(30)
        raise ArithmeticError("injected")

    failing_late.register_fake(lambda x: torch.empty_like(x))
    other = torch.zeros(2).to("lazy")
    bad = failing_late(torch.ones(2, device="lazy"))
    lazystep.mark_step()
    dependent = bad * 2
    lazystep.mark_step()
    other.add_(1)
    lazystep.mark_step()
    gate.set()
    with pytest.raises(lazystep.StepError, match=r"step \d+ failed in lazystep_tests\.failing_late") as error:
        lazystep.wait_device_ops()
    assert not hasattr(error.value, "__notes__")  # the dependent step is not a failure of its own
    with pytest.raises(lazystep.StepError, match="injected"):
        dependent.tolist()
    assert other.tolist() == [1.0, 1.0]


def test_out_of_memory_names_the_op_releases_buffers_and_a_smaller_step_works() -> None:
    seen: list[Any] = []

    @torch.library.custom_op("lazystep_tests::seen", mutates_args=())
    def see(x: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(x))
        return x.clone()

    see.register_fake(lambda x: torch.empty_like(x))

    def step(size: int) -> torch.Tensor:
        small = see(torch.ones(1000, device="lazy") * 2)
        big = torch.zeros(size, device="lazy")
        return (big[:1000] + small).sum()

    total = step(1 << 55)
    with pytest.raises(lazystep.StepError, match=r"step \d+ failed in aten.zeros.default.*test_faults.py"):
        lazystep.mark_step(wait=True)
    gc.collect()
    assert seen
    assert seen[0]() is None
    del total
    assert step(2000).item() == 2000.0


def test_interrupt_while_python_is_asked_leaves_a_usable_recording(
    monkeypatch: pytest.MonkeyPatch, dispatch: Any
) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    x = torch.ones(3).to("lazy")
    for name in ("decide", "user_source"):  # before and after the entry is made
        monkeypatch.setattr(dispatch, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            x.mul(torch.ones(len(name), 1).to("lazy"))
        monkeypatch.undo()
        assert (x + 1).tolist() == [2.0, 2.0, 2.0]


def test_interrupt_while_waiting_and_executing() -> None:
    done = run_script("""
        import os, signal, threading, torch, lazystep
        gate = threading.Event()

        @torch.library.custom_op("scripts::gated", mutates_args=())
        def gated(x: torch.Tensor) -> torch.Tensor:
            gate.wait(30)
            return x + 1

        gated.register_fake(lambda x: torch.empty_like(x))
        y = gated(torch.ones(2, device="lazy"))
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            y.tolist()
        except KeyboardInterrupt:
            print("interrupted")
        gate.set()
        print(y.tolist(), (y + 1).tolist())
    """)
    assert done.stdout.split("\n")[:2] == ["interrupted", "[2.0, 2.0] [3.0, 3.0]"], done.stderr


def test_waiting_is_bounded() -> None:
    gate = threading.Event()

    @torch.library.custom_op("lazystep_tests::stuck", mutates_args=())
    def stuck(x: torch.Tensor) -> torch.Tensor:
        gate.wait(30)
        return x.clone()

    stuck.register_fake(lambda x: torch.empty_like(x))
    y = stuck(torch.ones(1, device="lazy"))
    try:
        with config.override(wait_timeout=0.2):
            with pytest.raises(lazystep.WaitTimeoutError, match="still running"):
                y.tolist()
            with pytest.raises(lazystep.WaitTimeoutError, match="in flight"):
                lazystep.wait_device_ops()
    finally:
        gate.set()
    assert y.tolist() == [1.0]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LAZYSTEP_MAX_IN_FLIGHT", "many"),
        ("LAZYSTEP_MAX_IN_FLIGHT", "0"),
        ("LAZYSTEP_SOURCE_LINES", "maybe"),
        ("LAZYSTEP_EXIT_TIMEOUT", "-1"),
    ],
)
def test_bad_environment_variable_is_named_at_import(variable: str, value: str) -> None:
    done = run_script("import lazystep", **{variable: value})
    assert done.returncode != 0
    assert f"ConfigError: {variable}='{value}'" in done.stderr


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_is_refused_and_the_parent_goes_on() -> None:
    x = torch.ones(2, device="lazy") + 1
    lazystep.mark_step()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            uses = (lambda: x + 1, lambda: torch.zeros(1, device="lazy"), x.tolist, lazystep.mark_step)
            for use in uses:
                with pytest.raises(lazystep.ForkError, match="spawn"):
                    use()
            assert torch.ones(2).add(1).tolist() == [2.0, 2.0]  # CPU tensors are fine
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert x.tolist() == [2.0, 2.0]


def test_exit_drains_queued_steps() -> None:
    done = run_script("""
        import time, torch, lazystep

        @torch.library.custom_op("scripts::slow", mutates_args=())
        def slow(x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.5)
            print("ran", flush=True)
            return x + 1

        slow.register_fake(lambda x: torch.empty_like(x))
        y = slow(torch.ones(1, device="lazy"))
        lazystep.mark_step()
    """)
    assert done.stdout.strip() == "ran"
    assert done.returncode == 0, done.stderr


def test_exit_with_a_stuck_step_is_bounded_and_reports_what_was_dropped() -> None:
    done = run_script(
        """
        import threading, torch, lazystep

        @torch.library.custom_op("scripts::stuck", mutates_args=())
        def stuck(x: torch.Tensor) -> torch.Tensor:
            threading.Event().wait(100)
            return x + 1

        stuck.register_fake(lambda x: torch.empty_like(x))
        y = stuck(torch.ones(1, device="lazy"))
        lazystep.mark_step()
        z = y + 1
        lazystep.mark_step()
        """,
        LAZYSTEP_EXIT_TIMEOUT="1",
    )
    assert done.returncode == 0, done.stderr
    assert "step 1 (2 instructions) was dropped at exit" in done.stderr
    assert "step 2 (1 instructions) was dropped at exit" in done.stderr


@pytest.mark.parametrize("where", ["a step", "a closure"])
def test_exit_status_is_kept_where_a_thread_comes_back_too_late(where: str) -> None:
    # Python ends a thread that asks for its lock too late, and an op of torch's asks in a destructor.
    done = run_script(
        f"""
        import sys, torch, lazystep
        x = torch.ones(64, 64, device="lazy")

        def endless(x):
            while True:
                torch.mm(x, x)

        if {where!r} == "a closure":
            lazystep.add_step_closure(endless, (x,), run_async=True)
        else:
            for _ in range(20_000):
                x = torch.mm(x, x)
        lazystep.mark_step()
        print("written", end="")
        sys.exit(3)
        """,
        LAZYSTEP_EXIT_TIMEOUT="0.1",
        LAZYSTEP_TIER="reference",
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout == "written"
    assert "was dropped at exit" in done.stderr


def test_exit_handlers_may_use_the_device_before_and_after_ours() -> None:
    done = run_script("""
        import atexit, threading, torch

        def late():
            x = torch.ones(2, device="lazy") + 1
            lazystep.mark_step()
            print("late", x.tolist(), threading.active_count())

        atexit.register(late)  # runs after lazystep's own handler
        import lazystep

        def early():
            print("early", (torch.ones(2, device="lazy") * 2).tolist())

        atexit.register(early)
        torch.ones(1, device="lazy").item()
    """)
    assert done.stdout.splitlines() == ["early [2.0, 2.0]", "late [2.0, 2.0] 1"], done.stderr


def test_failure_that_nobody_looked_at_is_printed_and_fails_the_process() -> None:
    done = run_script("""
        import torch, lazystep
        x = torch.ones(3, device="lazy")
        y = x.index_select(0, torch.tensor([7], device="lazy"))
        lazystep.mark_step()
    """)
    assert done.returncode == 1
    assert "nobody looked at this failure" in done.stderr
    assert "aten.index_select.default" in done.stderr


def test_torchs_own_lazy_backend_is_refused() -> None:
    done = run_script("""
        import torch._lazy.ts_backend
        try:
            import lazystep
        except RuntimeError as error:
            print(type(error).__name__, error)
    """)
    assert done.stdout.startswith("LazyStepError torch's own TorchScript lazy backend"), done.stderr


def test_failure_that_a_read_of_half_updated_memory_has_raised_is_not_raised_by_the_barrier() -> None:
    touched = torch.zeros(3).to("lazy")
    touched.add_(1)
    keep = failing(torch.ones(3, device="lazy"), True)
    with pytest.raises(lazystep.StepError, match="half updated"):
        touched.tolist()
    lazystep.mark_step(wait=True)
    del keep


def test_failure_that_an_op_or_a_write_has_raised_is_not_raised_by_the_barrier(runtime: Any) -> None:
    for use in (lambda t: t + 1, lambda t: t[:1].zero_()):
        touched = torch.zeros(3).to("lazy")
        touched.add_(1)
        keep = failing(torch.ones(3, device="lazy"), True)
        runtime.flush()
        runtime.executor.wait_idle()
        with pytest.raises(lazystep.StepError, match="half updated"):
            use(touched)
        lazystep.mark_step(wait=True)
        del keep


def test_failure_that_a_closure_has_read_is_raised_by_the_flush_and_not_by_the_barrier(runtime: Any) -> None:
    bad = failing(torch.ones(2, device="lazy"), True)
    lazystep.add_step_closure(print, (bad,), run_async=True)
    context = lazystep.get_device_context()
    runtime.flush(context)
    context.run_closures()
    with pytest.raises(lazystep.ClosureError, match="injected"):
        lazystep.flush_step_closures(30)
    lazystep.mark_step(wait=True)


def test_other_failures_are_still_raised_after_a_read(runtime: Any) -> None:
    first = failing(torch.ones(2, device="lazy"), True)
    runtime.flush()
    second = failing(torch.ones(3, device="lazy"), True)
    runtime.flush()
    with pytest.raises(lazystep.StepError, match="injected"):
        first.tolist()
    runtime.executor.wait_idle()
    with pytest.raises(lazystep.StepError, match="injected"):
        lazystep.mark_step()
    del second


def test_step_that_fails_inside_the_executor_is_reported_once(
    runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise TypeError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr("lazystep.tiers.tiered.TieredExecutable.run", broken)
        y = torch.ones(5, device="lazy") * 7
        with pytest.raises(lazystep.StepError, match="a bug of ours"):
            y.tolist()
    lazystep.mark_step(wait=True)


def test_step_behind_the_end_of_the_executor_fails_as_any_other() -> None:
    run: Any = mock.Mock(step=1, num_threads=torch.get_num_threads(), flushes_denormals=False)
    run.execute.side_effect = TypeError("a bug of ours")
    run.executable.program.instructions = ()
    executor = Executor()
    executor.close(1.0)
    executor.submit(run)
    run.abandon.assert_called_once()
    (failure,) = executor.take_failures()
    assert "a bug of ours" in str(failure)
