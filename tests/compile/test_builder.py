"""Faults of the compiler and of the process that builds."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import lazystep
from lazystep import config
from lazystep.compile import builder as builder_module
from lazystep.compile import key
from tests.builds import X, cache, repeat, run_square_sum, square_sum
from tests.helpers import count

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("own_cache")]


@pytest.fixture
def compiler() -> Iterator[Callable[[str], None]]:
    def forget() -> None:
        key.find_compiler.cache_clear()
        key.environment.cache_clear()

    with pytest.MonkeyPatch.context() as patch:

        def use(path: str) -> None:
            patch.setenv("CXX", path)
            forget()

        yield use
        lazystep.wait_for_compile(300)  # with the compiler that it was asked for with
    forget()


def test_build_thread_ends_with_the_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is in an op of torch's when the interpreter ends aborts the process."""
    monkeypatch.setattr(builder_module, "COMMAND", ("sleep", "60"))
    is_building = threading.Event()

    @contextlib.contextmanager
    def slow() -> Iterator[None]:
        is_building.set()
        time.sleep(0.2)
        yield

    x = torch.ones(3, device="lazy")
    program = lazystep.debug.pending_program([x + 1])
    lazystep.mark_step()
    delivered: list[Any] = []
    builder = builder_module.Builder(slow)
    builder.submit(builder_module.Request(program, {}, 1, delivered.append))
    assert is_building.wait(60)
    thread = builder._thread
    assert thread is not None
    builder.close()
    assert not thread.is_alive()
    assert delivered == []
    assert builder._process is None, "it has been killed"


def test_no_compiler_is_one_warning(compiler: Callable[[str], None]) -> None:
    compiler("no-such-compiler")
    with pytest.warns(lazystep.LazyStepWarning, match="no-such-compiler") as caught:
        run_square_sum()
        lazy = X.to("lazy")
        repeat(lambda: lazy.sin())
    assert len(caught) == 1
    assert count("builds_failed:no_compiler") == 2
    assert count("native_executions") == 0
    assert cache().entries() == []


def test_failing_compiler_poisons_nothing(
    compiler: Callable[[str], None], runtime: Any, tmp_path: Path
) -> None:
    script = tmp_path / "broken-c++"
    script.write_text('#!/bin/sh\necho broken 1.0\n[ "$1" = --version ]\n')
    script.chmod(0o755)
    compiler(str(script))
    with pytest.warns(lazystep.LazyStepWarning, match="a step can't be made native") as caught:
        run_square_sum()
        lazy = X.to("lazy")
        repeat(lambda: square_sum(lazy), 8)
    assert len(caught) == 1
    assert count("builds_failed") == 1
    # Not tried again.
    assert count("builds_requested") == 1
    assert cache().entries() == []
    assert "stays on the reference executable" in lazystep.debug.explain()
    # Nor is the process used again that has met it: Inductor asks about a compiler once.
    assert runtime.tiers.builder._process is None


def test_what_saves_most_is_built_first_and_what_is_pointless_is_dropped() -> None:
    gate, is_busy, served = threading.Event(), threading.Event(), []

    class Gated(builder_module.Builder):
        def _serve(self, request: builder_module.Request) -> Any:
            is_busy.set()
            gate.wait(60)
            served.append(request.num_threads)
            raise builder_module.BuildError("lowering", "no build is needed here")

    own = Gated()
    worths = {1: 5.0, 2: 1.0, 3: 6.0, 4: 2.0, 5: 7.0}  # by number of threads, which names a request here
    delivered = []
    for number in worths:
        if number == 2:
            assert is_busy.wait(60)
        worth = functools.partial(worths.__getitem__, number)
        own.submit(builder_module.Request(None, {}, number, delivered.append, worth))  # type: ignore[arg-type]
    worths |= {2: 9.0, 4: 0.0}
    gate.set()
    assert own.wait_idle(60)
    assert served == [1, 2, 5, 3]  # the first was taken at once
    assert len(delivered) == 4
    assert count("builds_dropped") == 1
    own.close()


@pytest.mark.usefixtures("own_builder")
def test_crashed_builder_is_restarted_and_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = (sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(7)")
    monkeypatch.setattr(builder_module, "COMMAND", crash)
    lazy = X.to("lazy")
    warns_of_one = pytest.warns(lazystep.LazyStepWarning, match="can't be made native .* process died")
    with pytest.warns(lazystep.LazyStepWarning, match="died 3 times"), warns_of_one:
        for n in range(5):
            assert torch.equal(repeat(lambda n=n: lazy.reshape(-1)[n:] * 2), X.reshape(-1)[n:] * 2)
        lazystep.mark_step()
    assert count("builder_starts") == 3
    assert count("builds_failed:crash") >= 4
    assert count("native_executions") == 0


def test_killed_builder_does_not_disturb_the_loop(own_builder: builder_module.Builder) -> None:
    lazy = X.to("lazy")
    results = []
    for number in range(60):
        results.append(square_sum(lazy))
        lazystep.mark_step()
        process = own_builder._process
        if process is not None and number > 20:
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.05)
    else:
        pytest.fail("the builder was never started")
    with pytest.warns(lazystep.LazyStepWarning, match="process died"):
        assert lazystep.wait_for_compile(60)
    assert all(r.cpu().tolist() == square_sum(X).tolist() for r in results)
    assert count("builds_failed:crash") == 1
    # The next program gets a new one.
    assert repeat(lambda: lazy * 3).tolist() == (X * 3).tolist()
    assert count("native_executions") >= 1


@pytest.mark.usefixtures("own_builder")
def test_build_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder_module, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    with config.override(build_timeout=0.5), pytest.warns(lazystep.LazyStepWarning, match="build_timeout"):
        run_square_sum()
        lazystep.mark_step()
    assert count("builds_failed:timeout") == 1


def test_killed_process_that_gets_no_processor_time_is_no_error() -> None:
    process: Any = mock.Mock()
    process.wait.side_effect = subprocess.TimeoutExpired("worker", 5)
    assert builder_module._wait_for_end(process) is None


def test_two_answers_in_one_read_are_two_lines() -> None:
    """The process is prepared and has built before anybody reads."""
    builder = builder_module.Builder()
    with subprocess.Popen(["printf", r"first\nsecond\n"], stdout=subprocess.PIPE) as process:
        process.wait()
        assert builder._read_line(process) == b"first"
        assert builder._read_line(process) == b"second"
        with pytest.raises(EOFError, match="exit status 0"):
            builder._read_line(process)
