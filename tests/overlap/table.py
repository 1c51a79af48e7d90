"""Running rows of the table on the pool."""

from __future__ import annotations

from .pool import World
from .rows import HOOKS, ROWS
from .training import Outcome, compare


def run_row(world: World, name: str, optimizer: str) -> Outcome:
    """One row with one optimizer, on this rank."""
    row = ROWS.get(name) or HOOKS[name]
    return compare(world, row.script, optimizer)
