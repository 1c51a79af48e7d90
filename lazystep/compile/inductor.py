"""A fix for Inductor's scheduler, in the builder process only: torch 2.13 fuses loops that must stay apart.

A loop that reads a buffer may be fused with a loop that overwrites the buffer only if both touch the same
element in the same iteration. `Scheduler.fusable_weak_dep` looks for reads under the buffer's first name.
After an in-place write, later reads carry the name of that write. So they are overlooked, and the fused loop
reads elements that it has already overwritten.

For example, `x.diagonal().mul_(2)` followed by `x.diagonal()[1:].add_(x.diagonal()[:-1])` gives wrong numbers
under `torch.compile`. In lazystep, a step that updates two overlapping tensors would.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.dependencies import MemoryDep
from torch._inductor.scheduler import Scheduler

_fusable_weak_dep = Scheduler.fusable_weak_dep


def mend_scheduler() -> None:
    """Refuse the wrong fusions from now on, in this process."""
    Scheduler.fusable_weak_dep = _fusable_in_place  # type: ignore[method-assign, assignment]


def _fusable_in_place(scheduler: Scheduler, weak_dep: Any, node1: Any, node2: Any) -> bool:
    if not _fusable_weak_dep(scheduler, weak_dep, node1, node2):
        return False
    names = scheduler.mutation_real_name
    buffer = names[weak_dep.mutating_buf]
    # The original function has checked that there is one write to the buffer, with plain indices.
    (write,) = (w for w in node2.read_writes.writes if w.name == weak_dep.mutating_buf)
    return all(
        isinstance(read, MemoryDep) and read.index == write.index and read.size == write.size
        for read in node1.read_writes.reads
        if names.get(read.name, read.name) == buffer
    )
