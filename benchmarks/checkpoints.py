"""Measure the cost of a checkpoint every 50 steps: the small GPT with AdamW.

    python -m benchmarks.checkpoints [--quick]

The variants take turns, each in its own process: eager without checkpoints, with an inline `torch.save`, and
with `torch.distributed.checkpoint.async_save`; native steps by `@lazystep.step` without checkpoints, with an
inline `lazystep.save`, and with `lazystep.checkpoint`. Steps compute on one thread, so that a machine with
two cores has a core to spare. Checkpoints are in the middle of a turn, as in a long training: after steps 26
and 76 of 100. A turn ends when its last step has run and its last checkpoint is on the disk. Processor time
is that of all threads, so it shows what the spare core does. `--quick` stays on the reference executable.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import lazystep
import lazystep.checkpoint
from benchmarks.goals import Goal
from benchmarks.goals import to_table as goals_table
from benchmarks.recording import Trainer
from benchmarks.timing import (
    Measurements,
    Neighbours,
    Report,
    Table,
    command,
    interleave,
    machine,
    peers,
)

EVERY = 50
PEER_TIMEOUT = 900.0
# By name: the device, and how the state is saved.
VARIANTS = {
    "eager, no checkpoints": ("cpu", "none"),
    "eager, inline torch.save": ("cpu", "inline"),
    "eager, torch.distributed.checkpoint async": ("cpu", "dcp"),
    "lazystep, no checkpoints": ("lazy", "none"),
    "lazystep, inline lazystep.save": ("lazy", "inline"),
    "lazystep, lazystep.checkpoint": ("lazy", "checkpoint"),
}


def processor(name: str) -> str:
    """The measurement of a variant's processor time."""
    return f"{name}: processor time"


class Worker:
    """Does the turns of one variant."""

    def __init__(self, name: str) -> None:
        torch.set_num_threads(1)
        self.name = name
        self.device, self.how = VARIANTS[name]
        self.directory = Path(tempfile.mkdtemp(prefix="lazystep-benchmark-"))
        self.trainer = Trainer("gpt", self.device)
        self.num_steps = 0
        self.pending: Any = None
        state = {"model": self.trainer.model, "opt": self.trainer.optimizer}
        self.state = state
        self.saver = (
            lazystep.checkpoint.save_every(self.directory, state, EVERY, keep=2)
            if self.how == "checkpoint"
            else None
        )
        self.step = lazystep.step(self.train) if self.device == "lazy" else self.train

    def train(self, x: Tensor, y: Tensor) -> Tensor:
        return self.trainer.step(x, y)

    def save(self) -> None:
        """Save in the way of this variant."""
        if self.saver is not None:
            self.saver.now(self.num_steps)
        elif self.how != "none":
            state = {name: thing.state_dict() for name, thing in self.state.items()}
            if self.how == "inline":
                lazystep.save(state, self.directory / "state.pt")
            else:
                self.finish()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self.pending = dcp.async_save(
                        state, checkpoint_id=self.directory / f"step-{self.num_steps}"
                    )

    def finish(self) -> None:
        """Wait for the last checkpoint."""
        if self.saver is not None:
            self.saver.flush()
        if self.pending is not None:
            self.pending.result()
            self.pending = None
            for old in sorted(self.directory.glob("step-*"), key=os.path.getmtime)[:-2]:
                shutil.rmtree(old)

    def turn(self, num_steps: int, every: int) -> Mapping[str, float]:
        """Seconds per step, from the start to the end of the last step and checkpoint."""
        start, start_processor = time.perf_counter(), time.process_time()
        for number in range(num_steps):
            self.step(*self.trainer.make_batch())
            self.num_steps += 1
            if number % every == every // 2:
                self.save()
        if self.device == "lazy":
            lazystep.wait_device_ops()
        self.finish()
        return {
            self.name: (time.perf_counter() - start) / num_steps,
            processor(self.name): (time.process_time() - start_processor) / num_steps,
        }

    def make_native(self, num_steps: int, every: int) -> Mapping[str, float]:
        """Train until the step runs natively."""
        if self.device == "lazy":
            for _ in range(4):
                self.turn(num_steps, every)
                lazystep.wait_for_compile()
        return {}

    def work(self, task: str, num_steps: int = 0, every: int = EVERY) -> Mapping[str, float]:
        """Do the named task."""
        if task == "close":
            with contextlib.suppress(OSError):
                shutil.rmtree(self.directory)
            return {}
        return {"turn": self.turn, "make_native": self.make_native}[task](num_steps, every)


def over(measured: Measurements, name: str, kind: Callable[[str], str] = str) -> float:
    """The time that checkpoints add, as a share of the time without them."""
    baseline = "eager, no checkpoints" if name.startswith("eager") else "lazystep, no checkpoints"
    return measured.spread(kind(name)).median / measured.spread(kind(baseline)).median - 1


GOALS = [
    Goal[Measurements](
        f"a checkpoint every {EVERY} steps costs at most 2 % with a spare core",
        lambda measured: {"GPT": over(measured, "lazystep, lazystep.checkpoint")},
        at_most=0.02,
        unit=" %",
        scale=100.0,
    )
]


def to_table(measured: Measurements) -> Table:
    rows = []
    for name, (_, how) in VARIANTS.items():
        shares = [f"{over(measured, name, kind):+.1%}" if how != "none" else "-" for kind in (str, processor)]
        times = [measured.spread(kind(name)).format(1e3) for kind in (str, processor)]
        rows.append([name, times[0], shares[0], times[1], shares[1]])
    note = f"Small GPT, AdamW, one thread, a checkpoint of model and optimizer every {EVERY} steps."
    columns = ["variant", "ms a step", "over no checkpoints", "processor ms a step", "over no checkpoints"]
    return Table("Checkpoints", columns, rows, note)


def run(is_quick: bool) -> Report:
    num_steps, num_repeats = (4, 1) if is_quick else (2 * EVERY, 9)
    if is_quick:
        os.environ["LAZYSTEP_TIER"] = "reference"
    with peers("benchmarks.checkpoints", list(VARIANTS), PEER_TIMEOUT) as systems:
        if not is_quick:
            for peer in systems.values():
                peer.ask(task="make_native", num_steps=10)
        every = 2 if is_quick else EVERY
        turns = {
            name: functools.partial(peer.ask, task="turn", num_steps=num_steps, every=every)
            for name, peer in systems.items()
        }
        neighbours = Neighbours(systems.values())
        measured = interleave(turns, 0 if is_quick else 1, num_repeats, max_seconds=600)
        measured.others = neighbours.share()
        for peer in systems.values():
            peer.ask(task="close")
    facts = {**machine(), "processor time taken by others": f"{measured.others:.0%}"}
    tables = [to_table(measured), goals_table(GOALS, measured, measured.others)]
    return Report("checkpoints", "python -m benchmarks.checkpoints", facts, tables, {"all": measured})


if __name__ == "__main__":
    command(__doc__, run, lambda name: Worker(name).work)
