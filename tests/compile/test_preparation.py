"""The builder process is started once, before the first build."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazystep
from lazystep.compile import builder as builder_module
from lazystep.compile.key import inductor_options
from tests.builds import X, cache, square_sum
from tests.helpers import count

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("own_cache")]

# Answers as the worker does, builds nothing, and notes what it was asked.
STUB = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    with open({path!r}, "a") as file:
        file.write(("build" if "program" in request else "prepare") + "\\n")
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


@pytest.mark.filterwarnings("ignore:.*a stub:lazystep.LazyStepWarning")
def test_a_process_that_has_died_leaves_no_open_pipes(
    asked: Callable[[], list[str]], runtime: Any, own_builder: builder_module.Builder
) -> None:
    runtime.on_first_op()
    wait_until(lambda: asked() == ["prepare"])
    died = own_builder._process
    assert died is not None
    died.kill()
    died.wait(60)
    lazy = X.to("lazy")
    for _ in range(3):
        square_sum(lazy)
        lazystep.mark_step(wait=True)
    wait_until(lambda: asked() == ["prepare", "build"])
    assert died.stdin is not None
    assert died.stdout is not None
    assert died.stdin.closed
    assert died.stdout.closed
    assert count("builder_starts") == 2


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


def test_cache_knows_whether_it_is_empty() -> None:
    own = cache()
    assert own.is_empty()
    (own.root / "libraries" / "one").mkdir()
    assert not own.is_empty()
    assert torch.equal(X, X.to("lazy").cpu())


def test_preparing_starts_the_compilers_and_ends_without_an_error(tmp_path: Path) -> None:
    directory = tmp_path / "own"
    directory.mkdir()
    request = json.dumps({"id": 0, "options": inductor_options(1), "directory": str(directory)})
    environ = {
        **os.environ,
        "LAZYSTEP_HEADER_DIR": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    process = subprocess.Popen(
        builder_module.COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, process_group=0
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(request.encode() + b"\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
    finally:
        builder_module._send_kill(process)  # the compilers, too: they are not waited for
        process.communicate()
    assert "error" not in answer
    assert not directory.exists()
    assert any(tmp_path.glob("**/*.lock")), "no compiler was started"
