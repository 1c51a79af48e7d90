"""The builder process is started once, before the first build, and takes only what the machine has free."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lazystep
from lazystep.compile import builder as builder_module
from tests.builds import X, cache, square_sum
from tests.helpers import ROOT, count

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("own_cache")]

# Answers as the worker does, builds nothing, and notes what it was asked.
STUB = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    with open({path!r}, "a") as file:
        file.write(("prepare" if "options" in request and "program" not in request else
                    request.get("priority", "build")) + "\\n")
    if "id" in request:
        answer = {{"id": request["id"], "made": {{}}, "error": "a stub", "kind": "lowering"}}
        print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def asked(
    own_builder: builder_module.Builder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[], list[str]]:
    """What the builder process has been asked for."""
    path = tmp_path / "asked"
    monkeypatch.setattr(builder_module, "COMMAND", (sys.executable, "-c", STUB.format(path=str(path))))
    return lambda: path.read_text().split() if path.exists() else []


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(600):
        if is_so():
            return
        time.sleep(0.05)
    pytest.fail("it did not come")


def test_process_is_prepared_when_a_program_without_a_library_repeats(
    asked: Callable[[], list[str]], own_builder: builder_module.Builder
) -> None:
    (own_builder._open_cache().root / "libraries" / "one").mkdir()  # else it starts with the first op
    lazy = X.to("lazy")
    with lazystep.config.override(build_after=3):
        square_sum(lazy)
        lazystep.mark_step(wait=True)
        assert count("builder_starts") == 0  # a first step, which makes state, may never come again
        square_sum(lazy)
        lazystep.mark_step(wait=True)
        wait_until(lambda: asked() == ["prepare"])
    assert count("builds_requested") == 0  # it has run twice
    for n in range(4):
        (lazy + n).sin()
        lazystep.mark_step(wait=True)
    assert asked().count("prepare") == 1
    assert count("builder_starts") == 1


def test_process_is_prepared_at_the_first_op_if_there_is_no_library_at_all(
    asked: Callable[[], list[str]], runtime: Any
) -> None:
    runtime.on_first_op()
    wait_until(lambda: asked() == ["prepare"])


def test_no_process_for_a_first_op_while_there_are_libraries(
    asked: Callable[[], list[str]], runtime: Any, own_builder: builder_module.Builder
) -> None:
    (own_builder._open_cache().root / "libraries" / "one").mkdir()
    runtime.on_first_op()
    time.sleep(0.3)
    assert own_builder._process is None
    assert not own_builder._has_prepared, "the first program without a library may still ask"


def test_no_process_on_the_reference_tier(asked: Callable[[], list[str]], runtime: Any) -> None:
    with lazystep.config.override(tier="reference"):
        runtime.on_first_op()
        square_sum(X.to("lazy"))
        lazystep.mark_step(wait=True)
    time.sleep(0.3)
    assert count("builder_starts") == 0


def test_a_request_does_not_wait_for_the_preparation(
    own_builder: builder_module.Builder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "asked"
    slow = f"import time\n{STUB}".replace('if "id" in request:', 'if request.get("id"):')
    monkeypatch.setattr(builder_module, "COMMAND", (sys.executable, "-c", slow.format(path=str(path))))
    own_builder.prepare(1)  # never answered
    wait_until(path.exists)
    lazy = X.to("lazy")
    for _ in range(3):
        square_sum(lazy)
        lazystep.mark_step()
    assert lazystep.wait_for_compile(60)
    assert "build" in path.read_text()
    assert count("builds_failed:lowering") == 1


def test_who_waits_raises_the_priority_for_that_time(
    asked: Callable[[], list[str]], own_builder: builder_module.Builder
) -> None:
    own_builder.prepare(1)
    wait_until(lambda: "prepare" in asked())
    with own_builder.waiting():
        wait_until(lambda: asked()[-1] == "normal")
        with own_builder.waiting():
            pass
        assert asked()[-1] == "normal"
    wait_until(lambda: asked()[-1] == "idle")


@contextlib.contextmanager
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """The builder process as it is started; it has nothing to do."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lazystep.compile.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the system has no such policy")
def test_worker_has_the_idle_policy_and_leaves_it_on_request() -> None:
    with worker() as process:
        assert process.stdin is not None
        wait_until(lambda: os.sched_getscheduler(process.pid) == os.SCHED_IDLE)
        assert os.getsid(process.pid) == os.getsid(0), "priorities mean nothing between sessions"
        process.stdin.write(json.dumps({"priority": "normal"}).encode() + b"\n")
        process.stdin.flush()
        if os.geteuid() == 0:
            wait_until(lambda: os.sched_getscheduler(process.pid) == os.SCHED_OTHER)
            process.stdin.write(json.dumps({"priority": "idle"}).encode() + b"\n")
            process.stdin.flush()
            wait_until(lambda: os.sched_getscheduler(process.pid) == os.SCHED_IDLE)


GROUP = """
import importlib.util, os, subprocess, sys
spec = importlib.util.spec_from_file_location("priority", sys.argv[1])
priority = importlib.util.module_from_spec(spec)
spec.loader.exec_module(priority)
os.setpgid(0, 0)
priority.set_own(priority.IDLE)
child = subprocess.Popen(["sleep", "60"])
policies = [os.sched_getscheduler(child.pid)]  # inherited, as a compiler does
priority.set_own(priority.NORMAL)
policies.append(os.sched_getscheduler(child.pid))
child.kill()
print(policies, os.sched_getscheduler(os.getppid()))
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the system has no such policy")
def test_compilers_have_the_priority_of_the_worker() -> None:
    path = ROOT / "lazystep" / "compile" / "priority.py"
    done = subprocess.run(
        [sys.executable, "-c", GROUP, path], capture_output=True, text=True, timeout=60, check=True
    )
    raised = os.SCHED_OTHER if os.geteuid() == 0 else os.SCHED_IDLE
    assert done.stdout.strip() == f"{[os.SCHED_IDLE, raised]} {os.sched_getscheduler(0)}"


def test_cache_knows_whether_it_is_empty() -> None:
    own = cache()
    assert own.is_empty()
    (own.root / "libraries" / "one").mkdir()
    assert not own.is_empty()
    assert torch.equal(X, X.to("lazy").cpu())
