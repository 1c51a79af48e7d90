"""The facts of a run at its end: counters, programs and reasons, lines that waited.

`collect` returns them as plain data, for `run.json`; `to_text` makes the closing report of `lazystep run`.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

from .. import config, metrics
from .._version import __version__
from ..capture.notes import reasons
from ..program.program import Program
from ..runtime import runtime
from ..tiers.history import describe

FORMAT = 1


def collect() -> dict[str, Any]:
    """The facts so far, for the whole process. Does not synchronize: see `lazystep.wait_device_ops`."""
    return {
        "format": FORMAT,
        "versions": versions(),
        "settings": changed_settings(),
        "counters": {name: metrics.counter_value(name) for name in metrics.counter_names()},
        "synchronizations": [list(row) for row in metrics.synchronizations()],
        "programs": [program._asdict() for program in describe(runtime.remembered_programs())],
        "steps": list(reasons),
    }


def main_program() -> Program | None:
    """The program that ran the most instructions, usually the training step; None if nothing was recorded."""
    programs = runtime.remembered_programs()
    most = max(programs, key=lambda p: p.num_runs * len(p.program.instructions), default=None)
    return runtime.last_program if most is None else most.program


def versions() -> dict[str, Any]:
    """The versions of the software, and the machine."""
    return {
        "lazystep": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }


def changed_settings() -> dict[str, Any]:
    """The settings that differ from their defaults."""
    now = dataclasses.asdict(config.settings)
    return {f.name: now[f.name] for f in dataclasses.fields(config.Settings) if now[f.name] != f.default}


def to_text(facts: Mapping[str, Any]) -> str:
    """The closing report: programs and builds with reasons, steps, waits with lines, closures."""
    counters = facts["counters"]

    def n(name: str) -> Any:
        return counters.get(name, 0)

    def seconds(name: str) -> str:
        return f"{n('seconds_' + name):.2f} s"

    rows = [
        f"programs   {n('cache_misses')} made, {n('programs_executed')} runs: "
        f"{n('native_executions')} native, {n('reference_executions')} on the reference executable, "
        f"{n('native_checks')} on both"
    ]
    for program in facts["programs"]:
        rows.append(
            f"  program {program['number']}: {program['num_instructions']} instructions from "
            f"{program['line']}, run {program['num_runs']} times; {program['standing']}"
        )
        if program["number"] > 1:
            rows.append(f"    new because {program['why']}")
    failed = [name.partition(":")[2] for name in counters if name.startswith("builds_failed:")]
    rows.append(
        f"compiles   {n('builds_started')} started, {n('builds_succeeded')} succeeded in "
        f"{seconds('building')}, {n('disk_hits')} found on disk"
        + "".join(f", {n('builds_failed:' + kind)} failed: {kind}" for kind in failed)
    )
    if facts["steps"]:
        rows.append(f"steps      {n('step_calls_recorded')} recorded, {n('programs_replayed')} replayed")
        rows += [f"  {text}" for text in facts["steps"]]
    rows.append(f"syncs      {n('synchronizations')}")
    rows += [f"  {times} times {reason} at {line}" for reason, line, times in facts["synchronizations"]]
    rows.append(
        f"closures   {n('closures_run_sync')} on the training thread, {n('closures_run_async')} off it, "
        f"{n('closures_failed')} failed, {n('closures_dropped')} dropped"
    )
    rows.append(
        f"waits      {seconds('waiting')} for steps, {seconds('waiting_for_closures')} for the "
        f"closure queue, {seconds('waiting_for_compile')} for builds"
    )
    rows.append(f"time       {seconds('executing')} executing, {seconds('recording')} recording")
    return "\n".join(rows)
