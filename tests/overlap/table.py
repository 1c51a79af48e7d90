"""The parity table: running its rows on the pool, once each, and printing it for the docs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.pool import Pool, World

from . import hook_rows, refused_rows, rows  # noqa: F401  # they fill the tables
from .pairwise import Combination, train
from .row import HOOKS, ROWS, Row, simple
from .training import Outcome, Run, compare, mlp

OPTIMIZERS = ["SGD", "AdamW"]
# Every optimizer of torch.optim that steps dense parameters, with arguments that make it move.
TORCH_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adadelta": {"lr": 0.5},
    "Adafactor": {"lr": 0.05},
    "Adagrad": {"lr": 0.05},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "ASGD": {"lr": 0.05, "t0": 2},
    "Muon": {"lr": 0.02},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.01},
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
}
FUSED = {"Adagrad", "Adam", "AdamW", "SGD"}
NO_FOREACH = {"Muon"}


def forms_of(name: str) -> list[str]:
    """The forms that this optimizer has on the CPU."""
    return ["default"] + ["foreach"] * (name not in NO_FOREACH) + ["fused"] * (name in FUSED)


def run_row(world: World, name: str, optimizer: str) -> Outcome:
    """One row with one optimizer, on this rank."""
    return compare(world, (ROWS.get(name) or HOOKS[name]).script, optimizer)


def run_optimizer(world: World, name: str, form: str) -> Outcome:
    """The plain row with one of torch's optimizers."""
    options = {**TORCH_OPTIMIZERS[name], **({} if form == "default" else {form: True})}

    def script(run: Run) -> None:
        model = mlp()
        if name == "Muon":  # for matrices only
            model = torch.nn.Sequential(*(torch.nn.Linear(6, 6, bias=False) for _ in range(4)))
        simple(run, model)

    return compare(world, script, lambda params: getattr(torch.optim, name)(params, **options))


def run_combination(world: World, combination: Combination) -> Outcome:
    """One of the pairwise combinations."""
    return compare(world, partial(train, combination=combination), combination["optimizer"])


class Table:
    """Runs each row once and remembers what came of it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._outcomes: dict[tuple[str, str], list[Outcome]] = {}

    def outcomes(self, row: Row, optimizer: str) -> list[Outcome]:
        """What came of a row, by rank."""
        key = row.name, optimizer
        if key not in self._outcomes:
            self._outcomes[key] = self._pool.run(run_row, *key, num_ranks=row.num_ranks)
        return self._outcomes[key]

    def to_markdown(self) -> str:
        """The whole table, as it stands in the docs."""
        parts = []
        for title, table in (("Rows", ROWS), ("Hooks", HOOKS)):
            lines = [
                f"### {title}",
                "",
                "| | ranks | SGD | AdamW | updated in backward |",
                "|---|---|---|---|---|",
            ]
            for row in sorted(table.values(), key=lambda row: bool(row.refused_at)):
                cells = [self._cell(row, optimizer) for optimizer in OPTIMIZERS]
                first = self.outcomes(row, "SGD")[0]
                total = first.updated + first.left
                share = f"{first.updated} of {total}" if total else "-"
                lines.append(f"| {row.name} | {row.num_ranks} | {' | '.join(cells)} | {share} |")
            parts.append("\n".join(lines))
        return "\n\n".join(parts)

    def _cell(self, row: Row, optimizer: str) -> str:
        outcomes = self.outcomes(row, optimizer)
        verdicts = {outcome.verdict for outcome in outcomes}
        if verdicts == {"refused"}:
            return f"refused at {outcomes[0].stage}" + (f", {row.note}" if row.note else "")
        return " / ".join(sorted(verdicts))
