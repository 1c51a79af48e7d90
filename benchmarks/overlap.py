"""Measure the memory of gradients with `optimizer_in_backward`. The time of overlap: benchmarks/links.py.

    python -m benchmarks.overlap [--quick]

The peak memory of a step is compared with the plain loop's, by the profiler's allocation events. The
model's activations and its largest gradient are each below 5 % of all gradients. Goal: at least 90 % of the
gradients' memory is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.goals import Goal, to_table
from benchmarks.timing import Report, Table, command, machine
from lazystep.overlap import optimizer_in_backward


def peak_of_a_step(in_backward: bool, make: Callable[[Any], torch.optim.Optimizer]) -> tuple[int, int, int]:
    """Bytes: the peak of a step above its start, all gradients, the largest gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(*(module for _ in range(40) for module in (nn.Linear(256, 256), nn.Tanh())))
    optimizer = make(model.parameters())
    if in_backward:
        optimizer_in_backward(model, optimizer)

    def step() -> None:
        model(torch.ones(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the optimizer's state
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    results: Any = profile.profiler.kineto_results  # type: ignore[union-attr]
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    total = peak = 0
    for _, change in sorted(changes, key=lambda entry: entry[0]):
        total += change
        peak = max(peak, total)
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    return peak, sum(sizes), max(sizes)


def memory_rows() -> dict[str, tuple[list[str], float]]:
    """For each optimizer: the cells of its row, and the saved share of the gradients' memory."""
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "AdamW": lambda p: torch.optim.AdamW(p),
        "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    }
    rows = {}
    for name, make in kinds.items():
        plain, gradients, largest = peak_of_a_step(False, make)
        ours, _, _ = peak_of_a_step(True, make)
        saved = (plain - ours) / gradients
        cells = [f"{number / 2**20:.2f}" for number in (gradients, largest, plain, ours)]
        rows[name] = [name, *cells, f"{saved:.1%}"], saved
    return rows


def memory_table(rows: Mapping[str, tuple[list[str], float]]) -> Table:
    columns = ["optimizer", "all gradients, MiB", "largest one, MiB", "peak, plain", "peak, in backward"]
    note = "40 linear layers of 256, batch 4. Peak: above what is allocated at the start of a step."
    cells = [row for row, _ in rows.values()]
    return Table("Memory of gradients", [*columns, "saved, of all gradients"], cells, note)


GOALS: list[Goal[Mapping[str, float]]] = [
    Goal("optimizer in backward: 90 % of the gradients' memory saved", lambda saved: saved, at_least=0.9),
]


def run() -> Report:
    rows = memory_rows()
    saved = {name: share for name, (_, share) in rows.items()}
    tables = [to_table(GOALS, saved, 0.0), memory_table(rows)]
    return Report("overlap", "python -m benchmarks.overlap", machine(), tables, {})


if __name__ == "__main__":
    command(__doc__, lambda is_quick: run())
