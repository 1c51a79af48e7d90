"""A directory of checkpoints: how one is written and committed, found, verified and removed.

    step-00000050/      a checkpoint: it got this name when all of it was on the disk
        tensors.safetensors
        state.json
        manifest.json   sizes and SHA-256 digests of all, and of the manifest itself
        rank-1.…        the parts of other ranks, if several ranks have written it: see ranks.py
    .writing-…/         one that is being written, or that a dead process has left: see owner.py
    .removing-…/        one that is being removed

[Note: order] The files are synced before the manifest is written, everything before the rename, and the
rename before an older checkpoint is removed. A process that dies between any two calls leaves the older ones
as they were.

[Note: keep] A commit leaves the newest `keep` by step, whoever has written them. Checkpoints of later steps
that were there when the saver was made do not count and stay: an earlier run has written them, and this one
went on from an older step. Checkpoints of later steps that have come since count: they are this saver's,
whose steps have gone back, or those of another saver in the same directory, which is ahead. If there are
`keep` of them, the commit is refused, because the new one would be removed at once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from ..config import settings
from ..errors import CheckpointError
from ..notices import notice
from .files import Files
from .owner import clock_of, is_left_behind, new_token
from .ranks import Ranks, done_name, failed_name, names_of, read_done
from .tensor_file import TensorKind, header_of, joined

TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d+)")
_CHUNK = 1 << 24
# What reading a file of a checkpoint fails with if the file is not there, is none, or lies on a bad sector.
_OF_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not what was written."""


class Checkpoint(NamedTuple):
    """A committed checkpoint: its directory and its step. `latest` finds one, `load` restores it.

    checkpoint.load(lazystep.checkpoint.Checkpoint.at("checkpoints/step-00000050"), state)
    """

    path: Path
    step: int

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """The checkpoint in a directory, by the directory's name."""
        found = _NAME.fullmatch(Path(path).name)
        if found is None:
            raise CheckpointError(f"{path} is not the name of a checkpoint: expected …/step-<number>")
        return cls(Path(path), int(found[1]))

    def verify(self) -> None:
        """Read all files and compare their digests. Raises `CheckpointError` for the first that differs."""
        for name in self._manifest()["files"]:
            self.read(name)

    @property
    def num_ranks(self) -> int:
        """How many ranks have written it."""
        return int(self._manifest().get("ranks", 1))

    def read(self, name: str) -> bytearray:
        """The bytes of a file, if they are those that were written."""
        expected = self._manifest()["files"][name]
        data = self._read_file(name)
        if len(data) != expected["size"]:
            raise self._damaged(name, f"it has {len(data)} bytes, expected {expected['size']}")
        if hashlib.sha256(data).hexdigest() != expected["sha256"]:
            raise self._damaged(name, "its digest is not that of the manifest")
        return data

    def _read_file(self, name: str) -> bytearray:
        try:
            with open(self.path / name, "rb") as file:
                data = bytearray(os.fstat(file.fileno()).st_size)
                size = file.readinto(data)
        except OSError as error:
            if error.errno in _OF_DAMAGE:
                raise self._damaged(name, str(error)) from error
            # The file may be whole: no rights, too many open files. An older one must not take its place.
            raise CheckpointError(f"{self.path / name} can't be read: {error}.") from error
        return data[:size] if size < len(data) else data

    def _manifest(self) -> dict[str, Any]:
        try:
            manifest = json.loads(self._read_file(MANIFEST))
            digest = manifest.pop("sha256")
            if digest != _digest_of(manifest):
                raise ValueError("its digest is another")
            if manifest["format"] != FORMAT or manifest["step"] != self.step:
                raise ValueError(f"it is of step {manifest['step']}, format {manifest['format']}")
            if not {TENSORS, STATE} <= manifest["files"].keys():
                raise ValueError("it does not name all files")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._damaged(MANIFEST, str(error)) from error
        return dict(manifest)

    def _damaged(self, name: str, why: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self.path / name} is damaged: {why}. The checkpoint is not loaded.")


def latest(path: str | os.PathLike[str]) -> Checkpoint | None:
    """The newest whole checkpoint in a directory, or None. Reads its files; does not synchronize.

    Warns of a newer one that is damaged, at the next barrier. Raises `CheckpointError` for one that can't be
    read now, and may be whole: for example without the right to read it.

        found = lazystep.checkpoint.latest("checkpoints")
    """
    rest = committed(Path(path))
    while rest:
        found = rest.pop()
        try:
            found.verify()
        except DamagedCheckpointError as error:
            if not found.path.exists():  # another process has removed it, after it had committed a newer one
                rest = committed(Path(path))
                continue
            notice(f"damaged checkpoint {found.path}", f"{error} An older one is used.")
            continue
        return found
    return None


def committed(root: Path) -> list[Checkpoint]:
    """The checkpoints that have their names, oldest first. Says nothing of their contents."""
    names = [entry.name for entry in root.iterdir()] if root.is_dir() else []
    return sorted((Checkpoint.at(root / n) for n in names if _NAME.fullmatch(n)), key=lambda c: c.step)


class Directory:
    """Writes checkpoints into one directory."""

    def __init__(self, root: Path, keep: int, files: Files) -> None:
        self.root = root
        self.keep = keep
        self._files = files
        try:
            self._make_root()
            self._remove_left_behind()
            # Those of later steps than this training writes are of an earlier run: see [Note: keep].
            self._known = {found.step for found in committed(root)}
        except OSError as error:
            raise CheckpointError(f"checkpoints can't be written to {root}: {error}") from error

    def _make_root(self) -> None:
        # A directory whose name is lost in a power cut takes every checkpoint with it.
        above = [parent for parent in self.root.absolute().parents if not parent.exists()]
        is_new = not self.root.exists()
        self.root.mkdir(parents=True, exist_ok=True)
        if is_new:
            for made in [self.root.absolute(), *above]:
                self._files.sync_directory(made.parent)

    def write(
        self,
        step: int,
        kinds: Mapping[str, TensorKind],
        values: Iterable[memoryview],
        state: Any,
        ranks: Ranks | None = None,
        number: int = 0,
    ) -> Checkpoint:
        """Write and commit a checkpoint, then remove those that are not kept. See [Note: order].

        `ranks`: all of them call this, for their `number`-th checkpoint, and rank 0 commits: see ranks.py.
        Raises `CheckpointError` that names the path; then nothing is committed, and nothing is left behind.
        """
        token = f"{ranks.token}_{number}" if ranks else new_token()
        temporary = self.root / f".writing-{token}"
        target = Checkpoint(self.root / f"step-{step:08d}", step)
        # How the other ranks learn that rank 0 has given up. Removed by the next run, as what is left behind.
        given_up = self.root / f".removing-{token}_given_up"
        if ranks is not None and ranks.rank:
            self._write_part(temporary, given_up, target, kinds, values, state, ranks)
            return target
        is_committed = False
        try:
            self._files.make_directory(temporary)
            entries = self._write_files(temporary, names_of(0), kinds, values, state)
            manifest: dict[str, Any] = {"format": FORMAT, "step": step, "files": entries}
            if ranks is not None:
                manifest["ranks"] = ranks.size
                for rank in range(1, ranks.size):
                    entries |= self._entries_of(temporary, ranks, rank)
            manifest["sha256"] = _digest_of(manifest)
            self._write_file(temporary / MANIFEST, [json.dumps(manifest, indent=1).encode()])
            self._files.sync_directory(temporary)
            with self._locked():
                self._commit(temporary, target, entries)
                is_committed = True
                try:
                    self._remove_old(target)
                except OSError as error:
                    raise CheckpointError(
                        f"{target.path} is committed, but an older one could not be removed: {error}"
                    ) from error
        except OSError as error:
            raise CheckpointError(
                f"{target.path} was not written: {error}. Earlier ones are whole."
            ) from error
        finally:
            if ranks is not None and not is_committed:
                with contextlib.suppress(OSError):
                    self._files.make_directory(given_up)
            if temporary.exists():
                with contextlib.suppress(OSError):
                    self._files.remove(temporary)
        return target

    def _entries_of(self, temporary: Path, ranks: Ranks, rank: int) -> dict[str, Any]:
        """Wait for the part of another rank. Its files, with sizes and digests."""
        path, failed = temporary / done_name(rank), temporary / failed_name(rank)
        ranks.wait(
            lambda: read_done(path) is not None or failed.exists(),
            f"{path}: rank {rank} has not written its part of the checkpoint",
        )
        told = read_done(path)
        if told is None:
            raise CheckpointError(
                f"{temporary}: rank {rank} could not write its part, and its error says why. "
                "Nothing is committed."
            )
        return told

    def _write_part(
        self,
        temporary: Path,
        given_up: Path,
        target: Checkpoint,
        kinds: Mapping[str, TensorKind],
        values: Iterable[memoryview],
        state: Any,
        ranks: Ranks,
    ) -> None:
        """Write the part of a rank that is not 0, and wait until rank 0 has committed it."""
        ranks.wait(
            lambda: temporary.exists() or given_up.exists(),
            f"{target.path}: rank 0 has not begun to write the checkpoint",
        )
        try:
            told = self._write_files(temporary, names_of(ranks.rank), kinds, values, state)
            self._write_file(temporary / done_name(ranks.rank), [json.dumps(told).encode()])
        except Exception as error:
            if given_up.exists():  # and has removed the directory meanwhile
                raise _given_up(target) from error
            with contextlib.suppress(OSError):  # else rank 0 finds out by its time-out
                self._files.make_directory(temporary / failed_name(ranks.rank))
            raise CheckpointError(
                f"{target.path}: rank {ranks.rank} has not written its part: {error}. Nothing is committed."
            ) from error
        ranks.wait(
            lambda: not temporary.exists() or given_up.exists(),
            f"{target.path}: rank 0 has not committed the checkpoint",
        )
        # Rank 0 may have died, or found no room to say that it has given up. A checkpoint of this step may be
        # there from an earlier run.
        is_committed = target.path.exists() and told.items() <= target._manifest()["files"].items()
        if given_up.exists() or not is_committed:
            raise _given_up(target)

    def _write_files(
        self,
        temporary: Path,
        names: tuple[str, str],
        kinds: Mapping[str, TensorKind],
        values: Iterable[memoryview],
        state: Any,
    ) -> dict[str, Any]:
        content = joined(itertools.chain([memoryview(header_of(kinds))], values))
        return {
            names[0]: self._write_file(temporary / names[0], content),
            names[1]: self._write_file(temporary / names[1], [json.dumps(state).encode()]),
        }

    def _write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
        digest, size = hashlib.sha256(), 0
        descriptor = self._files.open(path)
        try:
            for chunk in chunks:
                rest = memoryview(chunk)
                digest.update(rest)
                size += len(rest)
                while len(rest):
                    rest = rest[self._files.write(descriptor, rest[:_CHUNK]) :]
            self._files.sync(descriptor, path)
        finally:
            self._files.close(descriptor)
        return {"size": size, "sha256": digest.hexdigest()}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time commits and removes. The lock goes with its process."""
        try:
            with FileLock(self.root / ".lock", timeout=settings.wait_timeout):
                yield
        except Timeout as error:
            raise CheckpointError(
                f"{self.root} is locked by another process for more than {settings.wait_timeout:g} s "
                "(wait_timeout)"
            ) from error

    def _commit(self, temporary: Path, target: Checkpoint, entries: dict[str, Any]) -> None:
        if target.path.exists():
            try:
                known = target._manifest()["files"]
                target.verify()
            except DamagedCheckpointError:
                self._set_aside(target.path)  # gives way
            else:
                if known == entries:
                    return  # another saver has committed the same
                raise CheckpointError(
                    f"{target.path} is already there and is another state: a committed checkpoint is not "
                    "overwritten. "
                    "Choose another directory, or remove this one."
                )
        later = [found.step for found in self._counted(target.step) if found.step > target.step]
        if len(later) >= self.keep:
            raise CheckpointError(
                f"{target.path} was not written: later steps have been written there since, {later}, and "
                f"the newest {self.keep} are kept (keep). Give each training a directory of its own, and "
                "steps that only grow."
            )
        self._files.rename(temporary, target.path)
        self._files.sync_directory(self.root)

    def _counted(self, step: int) -> list[Checkpoint]:
        """What there is at a commit of this step, without the later ones of an earlier run: [Note: keep]."""
        self._known = {known for known in self._known if known > step}
        return [found for found in committed(self.root) if found.step not in self._known]

    def _remove_old(self, newest: Checkpoint) -> None:
        for found in self._counted(newest.step)[: -self.keep]:
            self._set_aside(found.path)

    def _set_aside(self, path: Path) -> None:
        # By a rename first: half a removal leaves nothing that looks like a checkpoint.
        aside = self.root / f".removing-{new_token()}"
        self._files.rename(path, aside)
        self._files.remove(aside)

    def _remove_left_behind(self) -> None:
        temporary = [
            entry for entry in self.root.iterdir() if entry.name.startswith((".writing-", ".removing-"))
        ]
        now = clock_of(self.root, self._files) if temporary else 0.0
        for entry in temporary:
            with contextlib.suppress(OSError):  # another process may remove it as well
                if is_left_behind(entry, now):
                    self._files.remove(entry)


def _given_up(target: Checkpoint) -> CheckpointError:
    return CheckpointError(f"{target.path} was not committed: rank 0 has given up. Its error says why.")


def _digest_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
