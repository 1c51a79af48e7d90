"""The two front ends record the same programs: equal as text, source lines included."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import models

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lazystep.record.native._recorder") is None,
    reason="the native recorder is not built",
)
WORKER = Path(__file__).parent / "front_end_worker.py"


class Worker:
    """A process that records with one front end."""

    def __init__(self, recorder: str) -> None:
        root = str(WORKER.parent.parent)
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"LAZYSTEP_RECORDER": recorder, "PYTHONPATH": root},
        )
        assert self._read() == {"native": recorder == "native"}

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the worker has died"
        return json.loads(line)

    def ask(self, **task: object) -> list[str]:
        assert self.process.stdin is not None
        print(json.dumps(task), file=self.process.stdin, flush=True)
        texts: list[str] = self._read()
        return texts


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    workers = [Worker("python"), Worker("native")]
    yield workers
    for worker in workers:
        worker.process.communicate(timeout=60)
        assert worker.process.returncode == 0


@pytest.mark.parametrize("model", models.MODELS)
def test_programs_of_a_model_are_equal(workers: list[Worker], model: str) -> None:
    python, native = (worker.ask(model=model) for worker in workers)
    assert len(python) == 3
    assert all("aten." in text for text in python)
    assert native == python


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    ops=st.lists(st.tuples(st.integers(0, 45), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=25)
)
def test_programs_of_random_ops_are_equal(workers: list[Worker], ops: list[tuple[int, int, int]]) -> None:
    python, native = (worker.ask(ops=ops) for worker in workers)
    assert native == python
