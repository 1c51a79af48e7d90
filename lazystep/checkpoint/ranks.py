"""One checkpoint of several ranks: each rank writes its part, rank 0 commits.

    .writing-…/                     one directory for all ranks, named by rank 0
        tensors.safetensors         of rank 0, with everything that is the same on all ranks
        state.json
        rank-1.safetensors          of rank 1: its part of what is sharded
        rank-1.json
        rank-1.done                 rank 1 has synced its files: their sizes and digests

Rank 0 waits for the last file of each rank, writes the manifest over all files, and renames the directory.
The others wait until it has its name. Each wait ends with an error at the time-out of the process group: if a
rank dies, nothing is committed and nobody hangs. Ranks tell each other by files alone: the store of the
process group has one lock, and a wait there would stop the training thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CheckpointError
from ..process_groups import timeout_of
from .owner import new_token

_PAUSE = 0.02  # seconds between two looks at the directory


class Ranks(NamedTuple):
    """Who writes a checkpoint together."""

    rank: int
    size: int
    timeout: float  # in seconds
    token: str  # of this saver, the same on all ranks and in no other run

    def wait(self, is_there: Callable[[], bool], what: str) -> None:
        """Block until `is_there()`. Raises `CheckpointError` at the time-out."""
        deadline = time.monotonic() + self.timeout
        while not is_there():
            if time.monotonic() > deadline:
                raise CheckpointError(f"{what} within {self.timeout:g} s, the time-out of the process group")
            time.sleep(_PAUSE)


def names_of(rank: int) -> tuple[str, str]:
    """The files of a rank: tensors, and the rest."""
    return (
        (f"rank-{rank}.safetensors", f"rank-{rank}.json") if rank else ("tensors.safetensors", "state.json")
    )


def done_name(rank: int) -> str:
    """The file by which a rank says that it has written its part: the sizes and digests of its files."""
    return f"rank-{rank}.done"


def failed_name(rank: int) -> str:
    """The directory by which a rank says that it could not: on a full disk there is no room for a file."""
    return f"rank-{rank}.failed"


def read_done(path: Path) -> dict[str, Any] | None:
    """What a rank says; None if it has not said it yet."""
    try:
        told: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None  # not there, or in the middle of being written
    return told


def put_parts_together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole state of a sharded optimizer, from what each rank has saved, in the order of the ranks."""
    state: dict[int, dict[str, Any]] = {}
    for rank, part in enumerate(parts):
        for n, values in part["state"].items():
            cut = part["cuts"].get(n)
            for name, value in values.items():
                whole = state.setdefault(n, {})
                if cut is None or not isinstance(value, Tensor) or value.dim() != 1 or not cut["shape"]:
                    whole.setdefault(name, value)
                    continue
                if name not in whole:
                    whole[name] = torch.empty_strided(cut["shape"], cut["strides"], dtype=value.dtype)
                row = whole[name].as_strided((whole[name].numel(),), (1,))
                row[cut["cuts"][rank] : cut["cuts"][rank + 1]] = value
    return {"state": dict(sorted(state.items())), "param_groups": parts[0]["param_groups"]}


def ranks_of(group: dist.ProcessGroup) -> Ranks:
    """The ranks of a group, with rank 0's token. Blocks for rank 0."""
    store = group.get_group_store()
    number = _num_savers.setdefault(group.group_name, 0)
    _num_savers[group.group_name] += 1
    key = f"lazystep/checkpoint/{number}"
    if group.rank() == 0:
        store.set(key, new_token())
    timeout = timeout_of(group)
    store.wait([key], timeout)
    return Ranks(group.rank(), group.size(), timeout.total_seconds(), store.get(key).decode())


_num_savers: dict[str, int] = {}  # by group: ranks make their savers in the same order
