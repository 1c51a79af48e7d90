"""Measure step time against model size.

    python -m benchmarks.sizes [--quick]

Trains the small GPT in several widths with eager, with `torch.compile` of the step, and with native steps by
`@lazystep.step`. The variants take turns, each in its own process. `plots` draws the result.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from .models import make_workload
from .steps import FULL, QUICK, Plan, available, prepare, started, take_turns
from .steps_report import COMPILED_STEP, EAGER, OTHERS, STEP
from .timing import Measurements, Report, Table, command, machine

WIDTHS = (32, 64, 128, 256)
VARIANTS = (EAGER, COMPILED_STEP, STEP)
# With this number a turn takes half a second for the narrowest model and a few seconds for the widest.
NUM_STEPS = 24


def measure_width(width: int, plan: Plan, directory: Path) -> Measurements:
    """Turns of all variants on a GPT of one width."""
    variants, _ = available(VARIANTS)
    num_steps = max(NUM_STEPS // plan.steps_divisor, 2)
    with started(variants, directory) as systems:
        failures = prepare(systems, f"gpt:{width}", plan, Measurements())
        return take_turns(systems, failures, plan, num_steps)


def to_table(measured: dict[str, Measurements]) -> Table:
    rows = []
    for width, m in measured.items():
        num_parameters = sum(p.numel() for p in make_workload(f"gpt:{width}").model.parameters())
        row = [width, f"{num_parameters:,}"]
        for name in VARIANTS:
            row.append(m.failures.get(name) or m.spread(name).format(1e3))
        row.append("-" if STEP in m.failures else m.speedup(STEP, EAGER).format())
        rows.append([*row, f"{m.others:.0%}"])
    columns = ["width", "parameters", *(f"{name}, ms" for name in VARIANTS), f"{STEP}, eager = 1", OTHERS]
    return Table("Step time against width", columns, rows, "GPT, 4 layers, 8 x 64 tokens, AdamW.")


def run(is_quick: bool) -> Report:
    measured = {}
    for width in WIDTHS[:2] if is_quick else WIDTHS:
        with tempfile.TemporaryDirectory(prefix="lazystep-sizes-") as directory:
            measured[str(width)] = measure_width(width, QUICK if is_quick else FULL, Path(directory))
    return Report("sizes", "python -m benchmarks.sizes", machine(), [to_table(measured)], measured)


if __name__ == "__main__":
    command(__doc__, run)
