"""Processes that share a cache, are killed, or end in the middle of a build."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lazystep import config
from tests.builds import cache
from tests.helpers import ROOT

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("own_cache")]

SCRIPT = """
import json, os, sys, time, torch, lazystep
from lazystep import metrics
x = torch.arange(12.0).reshape(3, 4)
lazy = x.to("lazy")
def step():
    out = (lazy * lazy).sum(1) + 1
    lazystep.mark_step()
    return out
{body}
"""
TRAIN = """
for n in range(6):
    out = step()
    if n == 2:
        lazystep.wait_for_compile(300)
assert out.cpu().tolist() == ((x * x).sum(1) + 1).tolist()
names = ("builds_started", "builds_succeeded", "native_executions", "disk_hits")
print(json.dumps({n: metrics.counter_value(n) for n in names}))
"""
SPAWN = """
for n in range(600):
    step()
    process = lazystep.runtime.runtime.tiers.builder._process
    if process is not None:
        break
    time.sleep(0.05)
print(process.pid, flush=True)
"""


def start(body: str, **environ: str) -> subprocess.Popen[str]:
    settings = {"LAZYSTEP_TIER": "auto", "LAZYSTEP_BUILD_AFTER": "2"}
    settings["LAZYSTEP_CACHE_DIR"] = config.settings.cache_dir
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(body=body)],
        env={**os.environ, **settings, "PYTHONPATH": str(ROOT), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, int]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    result: dict[str, int] = json.loads(out.splitlines()[-1])
    return result


def test_processes_that_build_the_same_program_share_one_entry() -> None:
    counts = [finish(process) for process in [start(TRAIN) for _ in range(3)]]
    assert sum(c["builds_started"] for c in counts) == 1
    assert all(c["native_executions"] >= 1 for c in counts)
    (entry,) = cache().entries()
    assert cache().verify(entry.key) == ""


def test_kill_at_any_point_leaves_a_usable_cache() -> None:
    for delay in (0.0, 2.0, 6.0):
        process = start(SPAWN + "\nfor n in range(100000): step(); time.sleep(0.01)\n")
        assert process.stdout is not None
        builder = int(process.stdout.readline())
        time.sleep(delay)
        process.kill()
        process.communicate(timeout=60)
        assert _ends(builder), "the builder outlived its parent"
        for entry in cache().entries():
            assert cache().verify(entry.key) == ""
    counts = finish(start(TRAIN))
    assert counts["native_executions"] >= 1


def test_exit_does_not_wait_for_a_build() -> None:
    process = start(SPAWN)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert _ends(int(out.splitlines()[-1]))
    assert cache().entries() == []


def _ends(pid: int) -> bool:
    for _ in range(200):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
