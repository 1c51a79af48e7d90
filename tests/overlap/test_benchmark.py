"""The benchmark's parts: what it says when links can't be made, its interval, and the memory it measures."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

from benchmarks import link
from benchmarks.links import (
    CAPTURED,
    COMMUNICATING,
    COMPILED,
    COMPUTING,
    GOALS,
    VARIANTS,
    interval,
    link_table,
)
from benchmarks.overlap import peak_of_a_step
from benchmarks.timing import Measurements


def test_missing_tool_is_reason_enough_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/usr/sbin/{tool}")
    with pytest.raises(link.LinkError, match="no `tc` on this machine"), link.limited(1):
        pass


def test_refused_command_is_the_reason_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []

    # Two leftovers: of a process that has ended, and of this one.
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    def run(*command: str) -> str:
        ran.append(command)
        if command[:3] == ("ip", "link", "add"):
            raise link.LinkError("Operation not permitted")
        if command[1:3] == ("netns", "list"):
            return f"lazystep{ended.pid}-0 (id: 1)\nlazystep{os.getpid()}-7\nanother\n"
        return ""

    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(link, "_run", run)
    with pytest.raises(link.LinkError, match="not permitted"), link.limited(1):
        pass
    added = [command[3] for command in ran if command[1:3] == ("netns", "add")]
    deleted = [command[3] for command in ran if command[1:3] == ("netns", "del")]
    assert len(added) == 2
    assert deleted == [f"lazystep{ended.pid}-0", *added]


def test_table_has_a_row_per_variant_and_per_skipped_link() -> None:
    measured = Measurements({name: [0.2, 0.1, 0.3] for name in VARIANTS if name != COMPILED})
    measured.samples["overlap: waiting"] = [0.01]
    measured.failures[COMPILED] = "its process ended with status 1"
    table = link_table({"loopback": measured}, {"1 Gbit/s": "no `tc` on this machine"})
    assert [row[1] for row in table.rows] == [*VARIANTS, "skipped: no `tc` on this machine"]
    assert all(len(row) == len(table.columns) for row in table.rows)
    by_variant = {row[1]: row for row in table.rows}
    assert by_variant["overlap"][3] == "1.00 [1.00, 1.00] of DDP"
    assert by_variant[COMPILED][2] == "its process ended with status 1"


def test_goals_compare_with_the_best_other_and_with_the_longer_bound() -> None:
    measured = Measurements({name: [0.2, 0.2] for name in VARIANTS})
    measured.samples |= {CAPTURED: [0.12, 0.12], COMPUTING: [0.1, 0.1], COMMUNICATING: [0.05, 0.05]}
    ahead, bounded, *_ = [goal.judge({"loopback": measured}) for goal in GOALS]
    assert ahead == ("met", "loopback (DDP) 1.67")
    assert bounded == ("missed", "loopback 1.2")
    measured.failures[CAPTURED] = "a step did not run natively"
    assert GOALS[0].judge({"loopback": measured})[0] == "not measured"


def test_interval_holds_the_median() -> None:
    middle, low, high = interval([1.0, 1.1, 1.2, 1.3, 1.4, 5.0])
    assert middle == pytest.approx(1.25)
    assert 1.0 <= low < middle < high <= 5.0


def test_nine_tenths_of_the_gradients_memory_are_saved() -> None:
    def momentum(params):  # type: ignore[no-untyped-def]
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    plain, gradients, largest = peak_of_a_step(False, momentum)
    ours, _, _ = peak_of_a_step(True, momentum)
    assert largest < 0.05 * gradients
    assert plain > gradients, "all gradients exist at once"
    assert plain - ours > 0.9 * gradients
