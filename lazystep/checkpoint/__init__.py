"""Checkpoints that are written off the training thread and survive a crash.

    state = {"model": model, "opt": opt, "schedule": schedule}
    found = checkpoint.latest("checkpoints")
    first = checkpoint.load(found, state).step + 1 if found else 0
    with checkpoint.save_every("checkpoints", state, every=50, keep=3) as save:
        for step in range(first, 1000):
            train_step(*batch(step))
            save(step)                      # in every 50th step; returns while the file is written

A checkpoint is a directory: the tensors in the format of safetensors, the rest as JSON, and a manifest with a
digest of each file. It is written under another name, synced, and gets its name by one rename. So a name that
can be seen is a checkpoint that is whole, unless the disk has changed it since, which the digests show.
There is no pickle in it: loading a checkpoint runs no code.

Not built on `torch.distributed.checkpoint`: its `async_save` copies the state on the training thread before
it returns, which waits for the running steps; its metadata is a pickle; it has neither digests nor a
directory that appears whole.

Reading order: files, owner, tree, tensor_file, ranks, directory, saver, restore, loader.
"""

from ..errors import CheckpointError
from .directory import Checkpoint, latest
from .loader import Loaded, load
from .saver import Saver, save_every

__all__ = ["Checkpoint", "CheckpointError", "Loaded", "Saver", "latest", "load", "save_every"]
