"""Every change that a checkpoint makes on the disk goes through here, one method for one system call.

Tests replace single methods, so that a process dies or the disk is full at any one of the calls.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


class Files:
    """Writes, syncs, renames and removals. Every method raises `OSError` as the system call does."""

    def make_directory(self, path: Path) -> None:
        """Make a directory that must not be there yet."""
        path.mkdir()

    def open(self, path: Path) -> int:
        """A descriptor to write a new file with."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of `data`; returns how many bytes."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int, path: Path) -> None:
        """Have the contents of a file on the disk before anything that comes later."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Have the names in a directory on the disk before anything that comes later."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Give a directory its name, at once. `new` must not be there, or must be an empty directory."""
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        """Remove a directory and everything in it."""
        shutil.rmtree(path)
