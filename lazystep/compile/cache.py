"""Libraries on disk, in the user's cache directory: built once, loaded by every later process.

An entry is a directory named by its key. It holds the library, a manifest and, if needed, the node list of
the proxy executor. An entry is written under a temporary name, synced and renamed, so a process that is
killed at any moment leaves either the whole entry or none.

A process that can write to this directory can run code as the user. So a directory is not used if it belongs
to another user, is a symlink, or is writable by others. The digest of every file is compared before an entry
is loaded.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import platformdirs

from ..config import settings
from ..processes import has_ended, this_process

LIBRARY, PROXY_NODES = "step.so", "step.json"
_MANIFEST = "manifest.json"
# An empty file: the library's first run agreed with the reference. For a member of a family, the values of
# its symbols follow: `checked-12-64`.
_CHECKED = "checked"
_STALE_SECONDS = 24 * 3600.0


class CacheError(Exception):
    """The cache directory can't be used, or an entry is damaged."""


class Library(NamedTuple):
    """A library on disk that can be loaded.

    `family`: what a family's library was made for, as `Region.to_data` wrote it; None for a library of
    one program. `checked`: the members that agreed with the reference; `""` is a program of its own.
    """

    path: Path
    key: str
    checked: frozenset[str]
    proxy_ops: tuple[str, ...]
    family: Mapping[str, Any] | None = None


class Entry(NamedTuple):
    """A cache entry, as `lazystep cache` lists it."""

    key: str
    nbytes: int
    last_used: float
    manifest: Mapping[str, Any]


def cache_directory() -> Path:
    """The directory of libraries: the setting `cache_dir`, or the user's cache directory."""
    return Path(settings.cache_dir or platformdirs.user_cache_dir("lazystep")).absolute()


class LibraryCache:
    """The libraries in one directory. Any thread and any process may call every method."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._entries = root / "libraries"
        self._temporary = root / "temporary"

    @classmethod
    def open(cls, root: Path) -> LibraryCache:
        """Open the cache in `root`, or make it. Raises `CacheError` if the directory must not be used."""
        cache = cls(root)
        try:
            for directory in (root, cache._entries, cache._temporary):
                make_private(directory)
            cache._remove_stale()
        except OSError as error:
            raise CacheError(f"the cache directory {root} can't be used: {error}") from error
        return cache

    def find(self, key: str) -> Library | None:
        """The verified library of `key`, or None. Raises `CacheError` if the entry is damaged."""
        entry = self._entries / key
        if not entry.exists():
            return None
        try:
            manifest = self._verify(entry)
            with contextlib.suppress(OSError):
                os.utime(entry)  # the time of last use, for eviction
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CacheError(f"the cache entry {key} is damaged ({error})") from error
        checked = frozenset(
            path.name.removeprefix(_CHECKED).lstrip("-") for path in entry.glob(f"{_CHECKED}*")
        )
        return Library(entry / LIBRARY, key, checked, tuple(manifest["proxy_ops"]), manifest.get("family"))

    def temporary_directory(self) -> Path:
        """A new private directory on the same file system, to build in."""
        try:
            return Path(tempfile.mkdtemp(prefix=f"{this_process()}-", dir=self._temporary))
        except OSError as error:
            raise CacheError(f"the cache directory {self.root} can't be written: {error}") from error

    def publish(self, key: str, built: Path, manifest: Mapping[str, Any]) -> Library:
        """Make the files in `built` the entry `key`, atomically, and evict entries over the size limit."""
        try:
            names = [name for name in (LIBRARY, PROXY_NODES) if (built / name).exists()]
            keep = self.temporary_directory()
            for name in names:
                os.replace(built / name, keep / name)
                _sync(keep / name)
            described = {**manifest, "key": key, "created": time.time()}
            described["files"] = {name: _digest(keep / name) for name in names}
            (keep / _MANIFEST).write_text(json.dumps(described, indent=1))
            _sync(keep / _MANIFEST)
            _sync(keep)
            self.remove(key)
            try:
                os.replace(keep, self._entries / key)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                # Another process was faster, with an equal entry.
                shutil.rmtree(keep, ignore_errors=True)
            _sync(self._entries)
        except OSError as error:
            raise CacheError(f"the cache directory {self.root} can't be written: {error}") from error
        self.evict(settings.cache_size, keep=key)
        library = self.find(key)
        if library is None:
            raise CacheError(f"the cache entry {key} has disappeared from {self.root}")
        return library

    def mark_checked(self, key: str, member: str = "") -> None:
        """Note on disk that the library agreed with the reference executable on this machine."""
        with contextlib.suppress(OSError):
            (self._entries / key / f"{_CHECKED}{'-' if member else ''}{member}").touch()

    def remove(self, key: str) -> None:
        """Remove an entry atomically: it is renamed first, then deleted. Raises `CacheError` if it can't."""
        entry = self._entries / key
        if entry.is_dir() and not entry.is_symlink():
            try:
                trash = Path(tempfile.mkdtemp(prefix=f"{this_process()}-", dir=self._temporary))
                with contextlib.suppress(FileNotFoundError):  # another process removed it
                    os.replace(entry, trash / key)
            except OSError as error:
                raise CacheError(f"the cache entry {key} in {self.root} can't be removed: {error}") from error
            shutil.rmtree(trash, ignore_errors=True)

    def evict(self, limit: int, keep: str = "") -> list[str]:
        """Remove the least recently used entries until at most `limit` bytes are left. Returns their keys."""
        entries = sorted(self.entries(), key=lambda entry: entry.last_used)
        total = sum(entry.nbytes for entry in entries)
        removed = []
        for entry in entries:
            if total <= limit:
                break
            if entry.key != keep:
                self.remove(entry.key)
                removed.append(entry.key)
                total -= entry.nbytes
        return removed

    def entries(self) -> list[Entry]:
        """All entries. A damaged entry has an empty manifest."""
        found = []
        for path in sorted(self._entries.iterdir()) if self._entries.is_dir() else ():
            try:
                manifest = json.loads((path / _MANIFEST).read_text())
            except (OSError, ValueError):
                manifest = {}
            with contextlib.suppress(OSError):  # removed meanwhile
                nbytes = sum(file.stat().st_size for file in path.iterdir())
                found.append(Entry(path.name, nbytes, path.stat().st_mtime, manifest))
        return found

    def is_empty(self) -> bool:
        """Whether there is no entry."""
        return next(self._entries.iterdir(), None) is None

    @contextlib.contextmanager
    def building(self, key: str) -> Iterator[bool]:
        """Hold the right to build `key`; yields False if another process holds it."""
        # The operating system's lock, not the file's existence: no lock outlives its process.
        lock = filelock.FileLock(self._temporary / f"{key}.lock", mode=0o600)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            yield False
            return
        except OSError as error:
            raise CacheError(f"the cache directory {self.root} can't be written: {error}") from error
        try:
            yield True
        finally:
            lock.release()

    def _verify(self, entry: Path) -> Mapping[str, Any]:
        check_private(entry)
        manifest: Mapping[str, Any] = json.loads((entry / _MANIFEST).read_text())
        if manifest["key"] != entry.name:
            raise ValueError("it was made for another key")
        if LIBRARY not in manifest["files"]:
            raise ValueError("there is no library in it")
        for name, digest in manifest["files"].items():
            if os.path.basename(name) != name or _digest(entry / name) != digest:
                raise ValueError(f"the digest of {name} is wrong")
        return manifest

    def verify(self, key: str) -> str:
        """The fault of an entry, as text; empty if there is none."""
        try:
            self._verify(self._entries / key)
        except (CacheError, OSError, ValueError, KeyError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _remove_stale(self) -> None:
        """Remove temporary directories that a killed process has left behind."""
        for path in self._temporary.iterdir():
            process = path.name.partition("-")[0]
            with contextlib.suppress(OSError):
                is_old = time.time() - path.stat().st_mtime > _STALE_SECONDS
                if path.is_dir() and (is_old or has_ended(process)):
                    shutil.rmtree(path, ignore_errors=True)


def make_private(directory: Path) -> Path:
    """Make a directory unless it is there. Raises `CacheError` unless only the user can write to it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(directory)
    return directory


def check_private(directory: Path) -> None:
    """Raise `CacheError` unless only the user can write to `directory`."""
    status = os.lstat(directory)
    if stat.S_ISLNK(status.st_mode):
        raise CacheError(f"{directory} is a symlink; libraries are not loaded through one")
    if status.st_uid != os.geteuid():
        raise CacheError(f"{directory} belongs to another user (uid {status.st_uid})")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(f"{directory} can be written by others; chmod 700 {directory}")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
