"""`load`: a checkpoint back into the objects of the user."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from ..errors import CheckpointError
from .directory import Checkpoint, latest
from .ranks import names_of, put_parts_together
from .restore import check_random, restore, restore_random
from .tensor_file import read
from .tree import put_together


class Loaded(NamedTuple):
    """What `load` has restored: the step, and what was passed to the call that saved it.

    first = lazystep.checkpoint.load(found, state).step + 1
    """

    step: int
    extra: dict[str, Any]


def load(
    checkpoint: Checkpoint | str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    generators: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Restore every object of `state`, and the random generators unless `generators=False`.

    Reads and verifies all files, and compares them with `state`, before it changes anything. Raises
    `CheckpointError` for a file that is damaged, for names that are in `state` or in the checkpoint only, and
    for an object that does not fit: other keys, shapes or parameter groups. Then no object is changed.
    Objects with a `load_state_dict` of their own are restored first, and get back a copy of what they had if
    one of them raises. Tensors go to the device of their object, and take its data type, as in torch's
    `load_state_dict`; that records copies and does not synchronize.

    A checkpoint of several ranks is loaded by each rank for itself, also by another number of ranks: state
    that was sharded is put together and, if the object is sharded, cut anew. `process_group`: whose rank says
    which generators and `extra` are this process's; a rank that the checkpoint does not have gets the
    `extra` of rank 0, and keeps its generators.

        found = lazystep.checkpoint.latest("checkpoints")
        loaded = lazystep.checkpoint.load(found, {"model": model, "opt": opt})
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint.at(checkpoint)
    try:
        parts = [_read(checkpoint, rank) for rank in range(checkpoint.num_ranks)]
    except CheckpointError as error:
        older = latest(checkpoint.path.parent)
        instead = f"The newest whole one is {older.path}." if older else "There is no whole one beside it."
        raise CheckpointError(f"{error} {instead}") from error
    whole = parts[0]
    saved = whole["state"]
    for name in whole.get("sharded", ()):
        saved[name] = put_parts_together([part["state"][name] for part in parts])
    if saved.keys() != state.keys():
        raise CheckpointError(
            f"{checkpoint.path} has {sorted(saved)}, but the state to restore has {sorted(state)}"
        )
    rank = dist.get_rank(process_group) if process_group is not None else 0
    has_generators = generators and rank < len(parts)
    if has_generators:
        check_random(checkpoint.path, parts[rank]["random"])
    restore(checkpoint.path, state, saved, whole.get("shapes", {}))
    if has_generators:
        restore_random(parts[rank]["random"])
    return Loaded(checkpoint.step, parts[rank if rank < len(parts) else 0]["extra"])


def _read(checkpoint: Checkpoint, rank: int) -> Any:
    tensors, state = names_of(rank)
    return put_together(json.loads(checkpoint.read(state)), read(checkpoint.read(tensors)))
