"""Measure what lazystep costs eager work in the same process: while it idles, and in turns with its steps.

    python -m benchmarks.neighbours [--quick]

The eager work is a training step of the same model on the CPU. The variants take turns, each in its own
process: a process without lazystep; one in which native steps have run and lazystep idles; one in which each
native step is read (`loss.item()`) and followed by eager work. `--quick` stays on the reference executable.

- *Idle*: the rate of the eager work, without lazystep = 1.
- *Alternating*: the time of the step alone and of the eager work without lazystep, over the time of both in
  turns. 1 means that neither costs the other anything.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .goals import Goal
from .goals import to_table as goals_table
from .recording import Trainer
from .timing import Measurements, Neighbours, Peer, Report, Spread, Table, command, interleave, machine

WITHOUT, IDLE, ALTERNATING = "without lazystep", "lazystep idles", "in turns with steps"
VARIANTS = (WITHOUT, IDLE, ALTERNATING)
STEP_ALONE = "step alone"
MODELS = ("mlp", "gpt", "lstm")
PEER_TIMEOUT = 900.0


class Plan(NamedTuple):
    """How much is measured. `is_native`: on native steps, which are waited for."""

    models: tuple[str, ...]
    num_steps: int
    num_repeats: int
    is_native: bool


FULL = Plan(MODELS, 30, 15, True)
QUICK = Plan(("mlp",), 2, 1, False)


class Worker:
    """Does the turns of one variant on one model."""

    def __init__(self, variant: str) -> None:
        self.variant = variant

    def work(self, task: str, **details: Any) -> Mapping[str, float]:
        """Do the named task: `make`, then `turn` any number of times."""
        return {"make": self.make, "turn": self.turn}[task](**details)

    def make(self, model: str, is_native: bool) -> dict[str, float]:
        """Make the eager model and, with lazystep, a step that has run and, if `is_native`, runs natively."""
        self.eager = Trainer(model, "cpu")
        if self.variant == WITHOUT:
            return {}
        import lazystep
        from lazystep.metrics import counter_value

        trainer = Trainer(model, "lazy")

        @lazystep.step
        def step(x: Tensor, y: Tensor) -> Tensor:
            return trainer.step(x, y)

        self.step = step
        for _ in range(8):
            self.read_step()
        if is_native:
            deadline = time.monotonic() + PEER_TIMEOUT
            while not counter_value("native_executions") and time.monotonic() < deadline:
                lazystep.wait_for_compile()
                self.read_step()
            if not counter_value("native_executions"):
                raise RuntimeError("the step is not native")
            for _ in range(30):  # the number of threads is chosen in the first runs
                self.read_step()
        return {}

    def read_step(self) -> None:
        """A step of lazystep's, and its loss."""
        self.step(*self.eager.make_batch()).item()

    def eager_step(self) -> None:
        """The eager work."""
        self.eager.step(*self.eager.make_batch()).item()

    def turn(self, num_steps: int) -> dict[str, float]:
        """Seconds for each piece of eager work; in turns, for a step alone, and for a step and eager work."""
        if self.variant != ALTERNATING:
            return {self.variant: self._seconds(num_steps, self.eager_step)}

        def both() -> None:
            self.read_step()
            self.eager_step()

        return {
            STEP_ALONE: self._seconds(num_steps, self.read_step),
            ALTERNATING: self._seconds(num_steps, both),
        }

    def _seconds(self, num_times: int, work: Any) -> float:
        work()  # whoever had the threads before gives them back
        start = time.perf_counter()
        for _ in range(num_times):
            work()
        return (time.perf_counter() - start) / num_times


Outcomes = Mapping[str, Measurements]


def idle_rate(measured: Measurements) -> Spread:
    """The rate of eager work beside an idle lazystep, without lazystep = 1."""
    return measured.speedup(IDLE, WITHOUT)


def alternating_rate(measured: Measurements) -> Spread:
    """The time of a step and of eager work, each alone, over the time of both in turns."""
    samples = measured.samples
    rounds = zip(samples[STEP_ALONE], samples[WITHOUT], samples[ALTERNATING], strict=True)
    return Spread.of([(step + eager) / both for step, eager, both in rounds])


GOALS: tuple[Goal[Outcomes], ...] = (
    Goal(
        "eager work while lazystep idles, without lazystep = 1",
        lambda outcomes: {model: idle_rate(m).median for model, m in outcomes.items()},
        at_least=0.97,
    ),
    Goal(
        "eager work in turns with steps, both alone = 1",
        lambda outcomes: {model: alternating_rate(m).median for model, m in outcomes.items()},
        at_least=0.9,
    ),
)


def measure(model: str, plan: Plan, directory: str) -> Measurements:
    """Turns of all variants on one model."""
    environ = {
        "LAZYSTEP_CACHE_DIR": os.path.join(directory, "lazystep"),
        "LAZYSTEP_TIER": "auto" if plan.is_native else "reference",
    }
    systems = {name: Peer("benchmarks.neighbours", name, PEER_TIMEOUT, environ=environ) for name in VARIANTS}
    try:
        for peer in systems.values():
            peer.ask(task="make", model=model, is_native=plan.is_native)
        turns = {
            name: functools.partial(peer.ask, task="turn", num_steps=plan.num_steps)
            for name, peer in systems.items()
        }
        neighbours = Neighbours(systems.values())
        measured = interleave(turns, 1, plan.num_repeats, max_seconds=120)
        measured.others = neighbours.share()
    finally:
        for peer in systems.values():
            peer.close()
    return measured


def to_table(outcomes: Outcomes) -> Table:
    """A row for each model."""
    rows = []
    for model, measured in outcomes.items():
        cells = [measured.spread(name).format(1e3) for name in (WITHOUT, IDLE, STEP_ALONE, ALTERNATING)]
        rates = [idle_rate(measured).format(), alternating_rate(measured).format()]
        rows.append([model, *cells, *rates, f"{measured.others:.0%}"])
    columns = ["model", "eager work, ms", IDLE, "step alone, ms", "step and work, ms", "idle", "alternating"]
    note = f"{torch.get_num_threads()} threads. The eager work is a training step of the same model."
    return Table("Eager work beside lazystep", [*columns, "others' share of the processor"], rows, note)


def run(is_quick: bool) -> Report:
    plan = QUICK if is_quick else FULL
    with tempfile.TemporaryDirectory(prefix="lazystep-neighbours-") as directory:
        outcomes = {model: measure(model, plan, directory) for model in plan.models}
    others = max(measured.others for measured in outcomes.values())
    tables = [to_table(outcomes), goals_table(GOALS, outcomes, others)]
    return Report("neighbours", "python -m benchmarks.neighbours", machine(), tables, dict(outcomes))


if __name__ == "__main__":
    command(__doc__, run, lambda name: Worker(name).work)
