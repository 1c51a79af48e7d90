"""A row of the parity table: a training script, and what is to come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .training import Run, Script, mlp


@dataclass(frozen=True)
class Row:
    """A script and its outcome: equal, or refused at some stage with some words."""

    name: str
    script: Script
    num_ranks: int = 2
    refused_at: str = ""
    words: str = ""
    # Whether updates are made inside backward; if not, all are left to step().
    overlaps: bool = True
    note: str = ""


ROWS: dict[str, Row] = {}
HOOKS: dict[str, Row] = {}


def row(
    name: str, table: dict[str, Row] = ROWS, num_ranks: int = 2, **facts: Any
) -> Callable[[Script], Script]:
    """Add a script to a table. The number of ranks is part of the row's name where it is not 2."""
    name += f", {num_ranks} ranks" if num_ranks != 2 else ""

    def add(script: Script) -> Script:
        table[name] = Row(name, script, num_ranks, **facts)
        return script

    return add


def start(run: Run, model: nn.Module | None = None, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    ddp = run.ddp(model or mlp(), **options)
    optimizer = run.optimizer(ddp.parameters())
    run.overlap(ddp, optimizer)
    return ddp, optimizer


def simple(
    run: Run,
    model: nn.Module | None = None,
    prepare: Callable[[Tensor], Tensor] = lambda batch: batch,
    **options: Any,
) -> None:
    ddp, optimizer = start(run, model, **options)
    run.train(lambda batch: ddp(prepare(batch)), optimizer)
