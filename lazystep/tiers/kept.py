"""Copies of memory that a check needs for a moment: in memory if they are small, otherwise in a file.

A check keeps the state from before the step and the library's results. In memory that would double a large
model. The file has no name, so it ends with the process at the latest, and its bytes are not part of the
process: the system writes them to the disk if memory is short. All of its space is reserved at the start, so
that a full disk is noticed before anything has run.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Hashable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

from .. import metrics
from ..execute.malloc import available_memory

# Copies of this size altogether are made in memory.
_SMALL = 1 << 23
# Without a file, copies may take this share of the memory that is free: the step needs memory, too.
_SHARE_OF_MEMORY = 0.5


class NoRoomError(Exception):
    """There is neither disk space nor memory for the copies. Nothing has been copied."""


class KeptMemory:
    """Copies of storages by key, `num_bytes` altogether. The end of the `with` block drops them."""

    def __init__(self, num_bytes: int, directory: Path | None) -> None:
        """`directory`: where the file may be; None for copies in memory. Raises `NoRoomError`."""
        self._in_memory: dict[Hashable, torch.UntypedStorage] = {}
        self._offsets: dict[Hashable, tuple[int, int]] = {}
        self._end = 0
        self._file: IO[bytes] | None = None
        if num_bytes <= _SMALL:
            return
        obstacle = "it has no directory for a file"
        if directory is not None:
            try:
                self._file = _reserved_file(num_bytes, directory)
                return
            except OSError as error:
                obstacle = f"{directory} can't hold it ({error.strerror or error})"
        available = available_memory()
        if available is not None and num_bytes > _SHARE_OF_MEMORY * available:
            raise NoRoomError(
                f"its check needs {num_bytes >> 20} MB for a moment: {obstacle}, and "
                f"{available >> 20} MB of memory are free"
            )

    def __enter__(self) -> KeptMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._in_memory.clear()
        if self._file is not None:
            with contextlib.suppress(OSError):  # nothing that was written is needed any more
                self._file.close()

    def keep(self, key: Hashable, storage: torch.UntypedStorage) -> None:
        """Copy a storage. An earlier copy with this key, which has the same size, is overwritten."""
        num_bytes = storage.nbytes()
        if self._file is None:
            self._in_memory[key] = storage.clone()
            metrics.count("check_bytes_in_memory", num_bytes)
            return
        if key not in self._offsets:
            self._offsets[key] = self._end, num_bytes
            self._end += num_bytes
        offset, _ = self._offsets[key]
        rest = _bytes_of(storage)
        while rest:
            written = os.pwrite(self._file.fileno(), rest, offset)
            rest, offset = rest[written:], offset + written
        metrics.count("check_bytes_on_disk", num_bytes)

    def restore(self, key: Hashable, storage: torch.UntypedStorage) -> None:
        """Write the copy into a storage of its size."""
        if self._file is None:
            storage.copy_(self._in_memory[key])
            return
        offset, _ = self._offsets[key]
        rest = _bytes_of(storage)
        while rest:
            read = os.preadv(self._file.fileno(), [rest], offset)
            if read == 0:
                raise OSError("the file with the state from before the step is shorter than it was")
            rest, offset = rest[read:], offset + read

    def load(self, key: Hashable) -> torch.UntypedStorage:
        """The copy as a storage of its own, which may be changed."""
        if self._file is None:
            copy: torch.UntypedStorage = self._in_memory[key].clone()
            return copy
        storage: torch.UntypedStorage = torch.UntypedStorage(self._offsets[key][1])
        self.restore(key, storage)
        return storage


def _reserved_file(num_bytes: int, directory: Path) -> IO[bytes]:
    file: IO[bytes] = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115  (KeptMemory ends it)
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except BaseException:
        file.close()
        raise
    return file


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    if storage.nbytes() == 0:
        return memoryview(b"")
    row = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    array: Any = row.numpy()
    return memoryview(array)
