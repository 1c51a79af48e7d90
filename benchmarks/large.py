"""Measure training steps of larger transformers: rate, peak memory and time until native.

    python -m benchmarks.large [--quick]

Two GPTs with 50 and 120 million parameters, trained by eager, fused eager, both forms of `torch.compile`, and
lazystep's plain loop and captured step. The variants take turns, each in its own process. Peak memory is that
of the process, from its start to the end of its turns: builds and checks of libraries are included.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .goals import Goal
from .goals import to_table as goals_table
from .models import LARGE
from .steps import QUICK, Plan, prepare, started, take_turns
from .steps_report import COMPILED_MODEL, COMPILED_STEP, EAGER, FUSED, LOOP, OTHERS, STEP, UNTIL_NATIVE
from .timing import Measurements, PeerError, Report, Table, command, machine

VARIANTS = (EAGER, FUSED, COMPILED_MODEL, COMPILED_STEP, LOOP, STEP)
# A step of the larger one takes about a second.
NUM_STEPS = 3
# Few of them, so that both models take ten minutes on a quiet machine.
FULL = Plan(5, 0, 5, 0, 60.0, 1, num_ready_steps=10)
# What a smoke run trains instead.
SMALL = "gpt:32"


class Outcome(NamedTuple):
    """The measurements of one model: seconds a step in rounds, starts, and peak bytes by variant."""

    steps: Measurements
    once: Measurements
    peaks: Mapping[str, float]

    def rate(self, variant: str) -> float | None:
        """The rate of a variant, eager = 1."""
        is_missing = variant in self.steps.failures or variant not in self.steps.samples
        return None if is_missing else self.steps.speedup(variant, EAGER).median


Outcomes = Mapping[str, Outcome]


def _rates(variant: str, outcomes: Outcomes) -> dict[str, float | None]:
    return {model: outcome.rate(variant) for model, outcome in outcomes.items()}


def _memory(outcomes: Outcomes) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for model, outcome in outcomes.items():
        peaks = outcome.peaks
        found[model] = peaks[LOOP] / peaks[EAGER] if LOOP in peaks and EAGER in peaks else None
    return found


def _until_native(outcomes: Outcomes) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for model, outcome in outcomes.items():
        names = (UNTIL_NATIVE, f"first step, {COMPILED_MODEL}")
        until, compiled = (outcome.once.samples.get(name) for name in names)
        found[model] = until[0] - compiled[0] if until and compiled else None
    return found


GOALS: tuple[Goal[Outcomes], ...] = (
    Goal("no model slower than eager, captured step", functools.partial(_rates, STEP), at_least=1.0),
    Goal("no model slower than eager, plain loop", functools.partial(_rates, LOOP), at_least=1.0),
    Goal(
        "until native: not later than the first step of torch.compile of the model alone",
        _until_native,
        at_most=0.0,
        unit=" s",
    ),
    Goal("peak memory of the process that builds, eager = 1", _memory, at_most=1.15),
)


def measure_model(model: str, plan: Plan, directory: Path) -> Outcome:
    """Turns of all variants on one model, and what their processes took."""
    once = Measurements()
    peaks = {}
    with started(VARIANTS, directory) as systems:
        failures = prepare(systems, model, plan, once)
        steps = take_turns(systems, failures, plan, NUM_STEPS)
        for name in [name for name in systems if name not in failures]:
            try:
                peaks[name] = systems[name].ask(task="peak_memory")["peak"]
            except PeerError as error:
                steps.failures.setdefault(name, str(error))
    return Outcome(steps, once, peaks)


def to_table(outcomes: Outcomes) -> Table:
    """A row for each model and variant."""
    rows = []
    for model, (steps, once, peaks) in outcomes.items():
        for name in VARIANTS:
            if name in steps.failures:
                rows.append([model, name, steps.failures[name][:80], "-", "-", "-", "-"])
                continue
            first = once.samples.get(f"first step, {name}")
            until = once.samples.get(UNTIL_NATIVE) if name == LOOP else None
            rows.append(
                [
                    model,
                    name,
                    steps.spread(name).format(1e3),
                    steps.speedup(name, EAGER).format(),
                    f"{peaks[name] / 2**30:.2f}" if name in peaks else "-",
                    f"{first[0]:.1f}" if first else "-",
                    f"{until[0]:.0f}" if until else "-",
                ]
            )
        rows.append([model, OTHERS, f"{steps.others:.0%}", "", "", "", ""])
    columns = ["model", "variant", "ms a step", "eager = 1", "peak, GB", "first step, s", "until native, s"]
    return Table("Larger models", columns, rows, "8 x 64 tokens, AdamW. Every start is cold.")


def run(is_quick: bool) -> Report:
    outcomes = {}
    for model in (SMALL,) if is_quick else LARGE:
        with tempfile.TemporaryDirectory(prefix="lazystep-large-") as directory:
            outcomes[model] = measure_model(model, QUICK if is_quick else FULL, Path(directory))
    others = max(outcome.steps.others for outcome in outcomes.values())
    tables = [to_table(outcomes), goals_table(GOALS, outcomes, others)]
    measured = {model: outcome.steps for model, outcome in outcomes.items()}
    return Report("large", "python -m benchmarks.large", machine(), tables, measured)


if __name__ == "__main__":
    command(__doc__, run)
