"""What the README says about speed, written from the reports on disk. This file measures nothing.

    python -m benchmarks.readme

`make bench` and `benchmarks.steps` do this at their end. A test compares the README with the reports, because
a number or a date that is copied by hand is sooner or later that of another run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .neighbours import alternating_rate, idle_rate
from .steps_report import (
    COMPILED_MODEL,
    COMPILED_STEP,
    EAGER,
    FUSED,
    JAX,
    LOOP,
    REPLAY_CALL,
    STEP,
    UNTIL_NATIVE,
    Outcome,
    Outcomes,
    geometric_mean,
    rate_until_native,
)
from .timing import RESULTS, Measurements, markdown_table

README = RESULTS.parent.parent / "README.md"
BEGIN, END = "<!-- written by benchmarks.readme: -->", "<!-- until here -->"
_TITLES = {
    "mlp": "MLP, 6x256, batch 64",
    "gpt": "GPT, 4 layers, 128 wide, 8x64 tokens",
    "conv": "conv net, 5 layers with batch norm, 16x3x32x32",
    "lstm": "LSTM cell, 24 steps, 64 wide, batch 16",
}
_COLUMNS = (EAGER, FUSED, COMPILED_MODEL, COMPILED_STEP, JAX, LOOP, STEP)
_SHORT = {"mlp": "MLP", "gpt": "GPT", "conv": "conv net", "lstm": "LSTM"}

Reports = Mapping[str, Mapping[str, Any]]


def load_reports(directory: Path = RESULTS) -> Reports:
    """The reports that the README quotes, by name."""
    names = ("steps", "neighbours", "recording")
    return {name: json.loads((directory / f"{name}.json").read_text()) for name in names}


def measured_part(reports: Reports) -> str:
    """The lines between the two marks: where the numbers come from, and two tables."""
    facts = reports["steps"]["machine"]
    source = (
        f"`python -m benchmarks.steps` on {facts['processor']}, torch {facts['torch']}, {facts['date']}. "
        "Each variant runs in its own process,\nand the variants take turns. Cells are medians and include "
        "the sampling of batches on the host."
    )
    outcomes = _outcomes(reports["steps"])
    return "\n\n".join([source, _steps_table(outcomes), _quantities_table(outcomes, reports)])


def with_measured_part(readme: str, reports: Reports) -> str:
    """The README's text with these reports' numbers between the two marks."""
    text, num_found = re.subn(
        rf"{re.escape(BEGIN)}.*?{re.escape(END)}",
        lambda _: f"{BEGIN}\n\n{measured_part(reports)}\n\n{END}",
        readme,
        flags=re.DOTALL,
    )
    if num_found != 1:
        raise ValueError(f"expected {BEGIN!r} … {END!r} once in the README, found {num_found} times")
    return text


def update() -> None:
    """Write the numbers of the reports on disk into the README."""
    README.write_text(with_measured_part(README.read_text(), load_reports()))


def _outcomes(report: Mapping[str, Any]) -> Outcomes:
    measured = {name: Measurements(**numbers) for name, numbers in report["measurements"].items()}
    return {
        model: Outcome(*(measured[f"{model}{part}"] for part in ("", ", once", ", busy")))
        for model in _TITLES
    }


def _steps_table(outcomes: Outcomes) -> str:
    """Median ms a step of each variant, and the rate of `@lazystep.step`."""
    rows = []
    for model, outcome in outcomes.items():
        # Only of these turns: beside a spinning thread the same variant may have run.
        turns = Outcome(outcome.steps, Measurements(), Measurements())
        cells = [_cell(turns.median(name), "{:.1f}", 1e3) for name in _COLUMNS]
        rows.append([_TITLES[model], *cells, _cell(outcome.rate(STEP), "{:.2f}x")])
    return markdown_table(["ms a training step", *_COLUMNS, "step against eager"], rows)


def _quantities_table(outcomes: Outcomes, reports: Reports) -> str:
    def each(name: str, form: str = "{:.0f}", scale: float = 1.0) -> str:
        return _by_model({model: outcome.median(name) for model, outcome in outcomes.items()}, form, scale)

    def kept(variant: str) -> str:
        shares = {model: outcome.kept(variant) for model, outcome in outcomes.items()}
        medians = {model: None if share is None else share.median for model, share in shares.items()}
        return _by_model(medians, "{:.0f}", 100)

    means = [
        f"{name} {_mean_rate(outcomes, name)}" for name in (STEP, COMPILED_STEP, COMPILED_MODEL, LOOP, JAX)
    ]
    neighbours = [Measurements(**m) for m in reports["neighbours"]["measurements"].values()]
    idle = _range(idle_rate(m).median for m in neighbours)
    alternating = _range(alternating_rate(m).median for m in neighbours)
    recording = reports["recording"]["measurements"]
    recorded = [Measurements(**recording[model]) for model in _TITLES]
    rows = [
        ["rate, eager = 1, geometric mean of the four models", ", ".join(means)],
        ["first step, s: eager", each(f"first step, {EAGER}", "{:.2f}")],
        [f"first step, s: {COMPILED_MODEL}", each(f"first step, {COMPILED_MODEL}")],
        [f"first step, s: {LOOP}", each(f"first step, {LOOP}", "{:.2f}")],
        ["native library ready while training, s, from a cold cache", each(UNTIL_NATIVE)],
        ["the same in a second process, s", each("warm start", "{:.2f}")],
        ["rate until then, eager = 1", _by_model(rate_until_native(outcomes), "{:.2f}")],
        ["replay call, µs of the training thread", each(REPLAY_CALL, scale=1e6)],
        [f"rate kept beside a spinning Python thread, %: {STEP}", kept(STEP)],
        [f"rate kept beside a spinning Python thread, %: {JAX}", kept(JAX)],
        ["rate kept beside a spinning Python thread, %: eager", kept(EAGER)],
        [
            f"eager work in the same process, alone = 1 ({reports['neighbours']['machine']['date']})",
            f"{idle} while lazystep idles, {alternating} in turns with steps",
        ],
        [
            f"reference executable, eager = 1 ({reports['recording']['machine']['date']})",
            _range(m.speedup("lazystep program", "eager step").median for m in recorded),
        ],
    ]
    return markdown_table(["quantity", "measured"], rows)


def _mean_rate(outcomes: Outcomes, variant: str) -> str:
    rates = [outcome.rate(variant) for outcome in outcomes.values()]
    found = [rate for rate in rates if rate is not None]
    return f"{geometric_mean(found):.2f}" if len(found) == len(rates) else "fails on some"


def _by_model(numbers: Mapping[str, float | None], form: str, scale: float = 1.0) -> str:
    return ", ".join(f"{_SHORT[model]} {_cell(number, form, scale)}" for model, number in numbers.items())


def _cell(number: float | None, form: str, scale: float = 1.0) -> str:
    return "fails" if number is None else form.format(number * scale)


def _range(numbers: Iterable[float]) -> str:
    found = list(numbers)
    return f"{min(found):.2f} to {max(found):.2f}"


if __name__ == "__main__":
    update()
