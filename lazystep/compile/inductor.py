"""A mend of Inductor's scheduler, in the builder process alone: torch 2.13 fuses loops that must stay apart.

A loop that reads a buffer may be fused with one that overwrites it only if both touch the same element in
the same turn. `Scheduler.fusable_weak_dep` looks for reads under the buffer's first name. Once the buffer
has been written in place, later reads have the name of that write: they are overlooked, and the fused loop
reads elements that it has already overwritten. `x.diagonal().mul_(2)` followed by
`x.diagonal()[1:].add_(x.diagonal()[:-1])` gives wrong numbers under `torch.compile`; here two overlapping
tensors that a step both updates would.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.dependencies import MemoryDep
from torch._inductor.scheduler import Scheduler

_fusable_weak_dep = Scheduler.fusable_weak_dep


def mend_scheduler() -> None:
    """Refuse the wrong fusions from now on."""
    Scheduler.fusable_weak_dep = _fusable_in_place  # type: ignore[method-assign, assignment]


def _fusable_in_place(scheduler: Scheduler, weak_dep: Any, node1: Any, node2: Any) -> bool:
    if not _fusable_weak_dep(scheduler, weak_dep, node1, node2):
        return False
    names = scheduler.mutation_real_name
    buffer = names[weak_dep.mutating_buf]
    # The one write to the buffer, in plain indices: the original has seen to that.
    (write,) = (w for w in node2.read_writes.writes if w.name == weak_dep.mutating_buf)
    return all(
        isinstance(read, MemoryDep) and read.index == write.index and read.size == write.size
        for read in node1.read_writes.reads
        if names.get(read.name, read.name) == buffer
    )
