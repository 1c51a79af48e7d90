"""Messages between ranks beside gradients: their settings at set-up, and whether an update failed.

The messages use a separate process group on the CPU, so they never mix with DDP's collectives. Every wait
ends after the time-out of the model's process group.
"""

from __future__ import annotations

import json
import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from ..errors import OverlapError, UnsupportedError
from ..process_groups import timeout_of


class Peers:
    """The ranks of a DDP model. Making the first instance for a process group is a collective call."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        group = _groups.get(ddp.process_group)
        if group is None:
            group = _groups[ddp.process_group] = _own_group(ddp.process_group)
        self._group = group
        self.rank = group.rank()
        self.size = group.size()
        self._announced: list[tuple[Tensor, dist.Work]] = []
        self.heard: list[tuple[float, float]] = []  # the numbers of announcements, summed over all ranks

    def agree(self, settings: dict[str, str], refusal: Exception | None) -> None:
        """Raise on every rank if one rank refuses, or if settings differ. Collective, blocks."""
        told = "" if refusal is None else f"{type(refusal).__name__}: {refusal}"
        everyone = self._gather(json.dumps([settings, told]))
        if refusal is not None:
            raise refusal
        for rank, (theirs, their_refusal) in enumerate(map(json.loads, everyone)):
            if their_refusal:
                raise UnsupportedError(f"rank {rank} refused: {their_refusal}")
            for name in settings:
                if theirs.get(name) != settings[name]:
                    raise UnsupportedError(
                        f"{name} differs between ranks: {settings[name]} on rank {self.rank}, "
                        f"{theirs.get(name)} on rank {rank}. Set all ranks up alike."
                    )

    def _sum(self, tensor: Tensor) -> dist.Work:
        work: dist.Work = self._group.allreduce([tensor])  # type: ignore[attr-defined]  # of its C++ base
        return work

    def _gather(self, text: str) -> list[str]:
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(mine)
        self._sum(lengths).wait()
        texts = torch.zeros(self.size, int(lengths.max()), dtype=torch.uint8)
        texts[self.rank, : len(mine)] = mine
        self._sum(texts).wait()  # each byte is nonzero on one rank only
        return [
            bytes(row[:length].tolist()).decode() for row, length in zip(texts, lengths.tolist(), strict=True)
        ]

    def count(self, active: bool) -> int:
        """How many ranks are active (have not joined). All ranks call this in the same hook; blocks."""
        total = torch.tensor([float(active)])
        self._sum(total).wait()
        return int(total.item())

    def announce(self, failed: bool, numbers: tuple[float, float] = (0.0, 0.0)) -> None:
        """Begin to tell the other ranks whether this rank's updates failed, and two numbers that are summed.

        Collective, does not block.
        """
        flags = torch.zeros(self.size + 2)
        flags[self.rank] = float(failed)
        flags[-2], flags[-1] = numbers
        self._announced.append((flags, self._sum(flags)))

    def check(self, wait: bool) -> None:
        """Raise if another rank has announced a failed update. With `wait`, block for all announcements."""
        failed = set()
        while self._announced and (wait or self._announced[0][1].is_completed()):
            flags, work = self._announced.pop(0)
            work.wait()
            first, second = flags[-2:].tolist()
            self.heard.append((first, second))
            others = flags[:-2].nonzero().flatten().tolist()
            failed |= {str(rank) for rank in others if rank != self.rank}
        if failed:
            raise OverlapError(
                f"an update failed on rank {', '.join(sorted(failed))}: its parameters are no longer those "
                f"of rank {self.rank}. Reload model and optimizer on all ranks."
            )


# Models with the same process group share one group for messages, which lives as long as the process group.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroupGloo] = weakref.WeakKeyDictionary()


def _own_group(group: dist.ProcessGroup) -> dist.ProcessGroupGloo:
    """Make a gloo group of the same ranks.

    It is made directly, because `dist.new_group` has to be called on all ranks of the world. Its local
    variant derives the name from the number of groups that a rank is in, and hangs if ranks differ in that.
    """
    store = PrefixStore(f"lazystep.overlap/{group.group_name}/", group.get_group_store())
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=timeout_of(group))
