"""Faults while checkpoints are written: nothing committed is lost, and a broken one is never loaded.

The write of step 2 is disturbed at each of its system calls in turn, after step 1 has been committed. Each
case is a row of the table in docs/checkpoints.md; with `UPDATE_DOCS=1` the last test writes it.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

import lazystep
from lazystep import checkpoint
from lazystep.checkpoint import owner
from lazystep.checkpoint.directory import MANIFEST, STATE, TENSORS, Directory, _digest_of, committed
from lazystep.checkpoint.files import Files
from lazystep.checkpoint.ranks import Ranks
from lazystep.checkpoint.tensor_file import TensorKind, bytes_of
from lazystep.processes import place
from tests.helpers import ROOT, run_python

PAGE = ROOT / "docs" / "checkpoints.md"
CALLS = ("make_directory", "open", "write", "sync", "close", "sync_directory", "rename", "remove")
# What each test has found: fault to (how many places, what holds).
FOUND: dict[str, tuple[int, str]] = {}


def write(root: Path, step: int, files: Files, keep: int = 1) -> None:
    """Commit a checkpoint whose tensors are all `step`."""
    tensors = {"a": torch.full((1000,), float(step)), "b": torch.full((3, 5), step)}
    kinds = {name: TensorKind(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    Directory(root, keep, files).write(
        step, kinds, map(bytes_of, tensors.values()), {"dict": [["step", step]]}
    )


def newest(root: Path) -> int:
    """The step of the newest whole checkpoint, whose contents are checked."""
    found = checkpoint.latest(root)
    assert found is not None, sorted(root.iterdir())
    tensors = checkpoint.loader.read(found.read(TENSORS))
    assert all((t == found.step).all() for t in tensors.values())
    assert tensors["a"].shape == (1000,)
    return found.step


class Counting(Files):
    """Calls `disturb(number, name, path)` before each system call."""

    def __init__(self, disturb: Callable[[int, str, Any], None]) -> None:
        self.num_calls = 0
        self._disturb = disturb
        for name in CALLS:
            setattr(self, name, self._counted(name, getattr(super(), name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.num_calls += 1
            self._disturb(self.num_calls, name, args)
            return call(*args)

        return counted


def calls_of_a_write(root: Path) -> list[str]:
    names: list[str] = []
    write(root, 1, Files())
    write(root, 2, Counting(lambda number, name, args: names.append(name)))
    return names


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a child process. The number of the signal that killed it, or 0."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Journal:
    """What a process has changed on the disk, and what of it the disk keeps if the power fails."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, name: str, args: Any) -> None:
        """Called before a system call. The call is done by the time that the next one is noted."""
        paths = [str(arg) for arg in args if isinstance(arg, Path)]
        with open(self._path, "a") as log:
            log.write("\t".join([name, *paths]) + "\n")

    def cut_power(self, root: Path) -> None:
        """Undo what was not synced: contents of files, names in directories, and the last renames."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        done = [line.split("\t") for line in lines]
        directories = {paths[0] for name, *paths in done if name == "make_directory"}
        synced = {paths[0] for name, *paths in done if name == "sync"}
        listed = {paths[0] for name, *paths in done if name == "sync_directory"}
        where = {made: made for made in directories}  # its name at first, and its name now
        unsynced: list[tuple[str, str]] = []
        for name, *paths in done:
            if name == "rename":
                where = {made: paths[1] if now == paths[0] else now for made, now in where.items()}
                unsynced.append((paths[0], paths[1]))
            elif name == "sync_directory" and paths[0] == str(root):
                unsynced.clear()
        for made, now in where.items():
            for path in Path(now).glob("*"):
                if made not in listed:
                    path.unlink()
                elif f"{made}/{path.name}" not in synced:
                    path.write_bytes(b"")
        for old, new in reversed(unsynced):
            # The worst case: the disk has lost the name that was given, and has kept every removal.
            if Path(new).exists() and not Path(new).name.startswith(".removing-"):
                Path(new).rename(old)


@pytest.mark.parametrize("is_power_cut", [False, True], ids=["kill", "power-cut"])
def test_killed_at_each_call(is_power_cut: bool, tmp_path: Path) -> None:
    """A power cut is a kill after which everything that was not synced is undone: see `Journal`."""
    names = calls_of_a_write(tmp_path / "counted")
    assert {"write", "sync", "sync_directory", "rename", "remove"} <= set(names)
    steps = []
    for last in range(1, len(names) + 1):
        root = tmp_path / str(last)
        write(root, 1, Files())
        journal = Journal(tmp_path / f"{last}.log")

        def disturb(number: int, name: str, args: Any, last: int = last, journal: Journal = journal) -> None:
            if number == last:
                os.kill(os.getpid(), signal.SIGKILL)
            journal.note(name, args)

        assert (
            in_child(lambda root=root, disturb=disturb: write(root, 2, Counting(disturb))) == signal.SIGKILL
        )
        if is_power_cut:
            journal.cut_power(root)
        steps.append(newest(root))
        write(root, 3, Files())  # the next process writes on, and clears what was left
        assert newest(root) == 3
        assert {path.name for path in root.iterdir()} == {".lock", "step-00000003"}
    # The old one until the rename, the new one after it. The power must hold until the rename is synced.
    decided = names.index("rename") + 1 + is_power_cut
    assert steps == [1] * decided + [2] * (len(names) - decided)
    what, until = (
        ("killed", "") if not is_power_cut else ("power cut (all that is not synced is lost)", "sync of the ")
    )
    FOUND[f"{what} at each system call"] = (
        len(names),
        f"the old one until the {until}rename, the new one after it",
    )


def test_syncs_are_the_systems_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file, its directory, the rename: and before that, the new directories above."""
    asked: list[str] = []

    def note(descriptor: int) -> None:
        asked.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fsync", note)
    root = tmp_path / "new" / "root"
    write(root, 1, Files())
    assert asked[:2] == ["new", tmp_path.name], "a lost name above the checkpoints would lose them all"
    assert asked[2:5] == [TENSORS, STATE, MANIFEST]
    assert asked[5].startswith(".writing-")
    assert asked[6:] == ["root"]


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS], ids=errno.errorcode.get
)
def test_error_at_each_call(number: int, tmp_path: Path) -> None:
    names = calls_of_a_write(tmp_path / "counted")
    for last in range(1, len(names) + 1):
        root = tmp_path / str(last)
        write(root, 1, Files())

        def disturb(count: int, name: str, args: Any, last: int = last) -> None:
            if count == last:
                raise OSError(number, os.strerror(number))

        before = newest(root)
        with pytest.raises(checkpoint.CheckpointError, match=rf"step-00000002 .*{os.strerror(number)}"):
            write(root, 2, Counting(disturb))
        assert newest(root) >= before
        write(root, 3, Files())
        assert newest(root) == 3
        assert not list(root.glob(".writing-*"))
    title = {"ENOSPC": "disk full", "EDQUOT": "quota full", "EIO": "input/output error", "EROFS": "read-only"}
    FOUND[f"{title[errno.errorcode[number]]} at each system call"] = (
        len(names),
        "one error that names the path; earlier ones whole; the next write works",
    )


def test_file_size_limit_of_the_system(tmp_path: Path) -> None:
    """A real limit, not an injected error: the write itself comes back short, and then fails."""
    write(tmp_path, 1, Files())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        with pytest.raises(checkpoint.CheckpointError, match="step-00000002 was not written"):
            write(tmp_path, 2, Files())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert newest(tmp_path) == 1
    assert not list(tmp_path.glob(".writing-*"))
    FOUND["a limit on file sizes, by the system"] = 1, "one error that names the path; earlier ones whole"


def test_short_writes_are_continued(tmp_path: Path) -> None:
    class Short(Files):
        def write(self, descriptor: int, data: memoryview) -> int:
            return super().write(descriptor, data[:100])

    write(tmp_path, 1, Short())
    assert newest(tmp_path) == 1


def test_half_a_removal_leaves_nothing_that_looks_like_a_checkpoint(tmp_path: Path) -> None:
    class Failing(Files):
        def remove(self, path: Path) -> None:
            (path / TENSORS).unlink()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    write(tmp_path, 1, Files())
    with pytest.raises(
        checkpoint.CheckpointError, match="is committed, but an older one could not be removed"
    ):
        write(tmp_path, 2, Failing())
    assert [found.step for found in committed(tmp_path)] == [2]
    assert newest(tmp_path) == 2


def test_training_goes_on_when_the_disk_is_full(tmp_path: Path) -> None:
    full = threading.Event()

    def disturb(number: int, name: str, args: Any) -> None:
        if full.is_set() and name == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    weight = torch.zeros(4).to("lazy")
    save = checkpoint.save_every(tmp_path, {"w": weight}, every=1, keep=2, files=Counting(disturb))
    for step in range(6):
        full.set() if step in (2, 3) else full.clear()
        weight.add_(1.0)
        save(step)
        save._handler.wait_idle()
        if step in (2, 3):
            with pytest.warns(
                lazystep.LazyStepWarning, match=rf"step-0000000{step}.*No space left.*Training goes on"
            ):
                lazystep.mark_step()
        else:
            lazystep.mark_step()
    save.close()
    assert [found.step for found in committed(tmp_path)] == [4, 5]
    checkpoint.load(tmp_path / "step-00000005", {"w": weight})
    assert weight.tolist() == [6.0] * 4
    full.set()
    save = checkpoint.save_every(tmp_path, {"w": weight}, every=1, files=Counting(disturb))
    save(9)
    with pytest.raises(checkpoint.CheckpointError, match="No space left"):
        save.close()
    with pytest.warns(lazystep.LazyStepWarning):
        lazystep.mark_step()
    FOUND["disk full for some steps of a training"] = (
        2,
        "a warning at the barrier; training and later checkpoints go on",
    )


def test_directory_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(checkpoint.CheckpointError, match=r"can't be written to .*file/inside"):
        checkpoint.save_every(tmp_path / "file" / "inside", {"w": torch.ones(1)}, every=1)
    FOUND["a directory that can't be made"] = 1, "an error at set-up that names the path"


def test_flipped_byte_anywhere_is_found(tmp_path: Path) -> None:
    write(tmp_path, 1, Files(), keep=5)
    write(tmp_path, 2, Files(), keep=5)
    num_places = 0
    for name in (TENSORS, STATE, MANIFEST):
        path = tmp_path / "step-00000002" / name
        good = path.read_bytes()
        for position in {*range(0, len(good), max(1, len(good) // 40)), len(good) - 1}:
            path.write_bytes(good[:position] + bytes([good[position] ^ 4]) + good[position + 1 :])
            with pytest.raises(checkpoint.CheckpointError, match=r"is damaged.*step-00000001"):
                checkpoint.load(tmp_path / "step-00000002", {})
            num_places += 1
        assert newest(tmp_path) == 1
        path.write_bytes(good)
        assert newest(tmp_path) == 2
    with pytest.warns(lazystep.LazyStepWarning, match="An older one is used"):
        lazystep.mark_step()
    FOUND["a flipped byte"] = num_places, "refused by its digest, the one before is named and found"


def test_truncated_or_missing_files_are_found(tmp_path: Path) -> None:
    write(tmp_path, 1, Files(), keep=5)
    num_places = 0
    for name in (TENSORS, STATE, MANIFEST):
        write(tmp_path, 2, Files(), keep=5)
        path = tmp_path / "step-00000002" / name
        good = path.read_bytes()
        for size in (0, 1, len(good) // 2, len(good) - 1):
            path.write_bytes(good[:size])
            assert newest(tmp_path) == 1
            num_places += 1
        path.unlink()
        assert newest(tmp_path) == 1
        write(tmp_path, 2, Files(), keep=5)  # a damaged one gives way to a whole one
        assert newest(tmp_path) == 2
        num_places += 1
    with pytest.warns(lazystep.LazyStepWarning):
        lazystep.mark_step()
    FOUND["a truncated or missing file in the newest"] = (
        num_places,
        "the one before is found; writing the step again mends it",
    )


@pytest.mark.parametrize(
    "told", [b"[" * 200_000, b"null", {}, {"format": 1, "step": 1}, {"format": 1, "step": 1, "files": {}}]
)
def test_manifest_that_is_no_manifest_is_damage(told: bytes | dict[str, Any], tmp_path: Path) -> None:
    with checkpoint.save_every(tmp_path, {"w": torch.ones(1)}, every=1) as save:
        save(0)
        save(1)
    newest = tmp_path / "step-00000001"
    if isinstance(told, dict):
        told = json.dumps({**told, "sha256": _digest_of(told)}).encode()
    (newest / "manifest.json").write_bytes(told)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 0
    with pytest.raises(checkpoint.CheckpointError, match=r"manifest\.json is damaged.*step-00000000"):
        checkpoint.load(newest, {"w": torch.ones(1)})
    with pytest.warns(lazystep.LazyStepWarning, match="An older one is used"):
        lazystep.mark_step()


def test_checkpoint_under_the_name_of_another_step_is_not_loaded(tmp_path: Path) -> None:
    """Somebody has renamed a directory: training would go on at the wrong step."""
    write(tmp_path, 1, Files(), keep=5)
    write(tmp_path, 2, Files(), keep=5)
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000007")
    with pytest.raises(checkpoint.CheckpointError, match=r"is of step 2, format 1.*step-00000001"):
        checkpoint.load(tmp_path / "step-00000007", {})
    assert newest(tmp_path) == 1
    with pytest.warns(lazystep.LazyStepWarning, match="An older one is used"):
        lazystep.mark_step()


def test_commit_does_not_wait_for_ever_for_the_lock(tmp_path: Path) -> None:
    write(tmp_path, 1, Files())
    with (
        FileLock(tmp_path / ".lock"),
        lazystep.config.override(wait_timeout=0.1),
        pytest.raises(checkpoint.CheckpointError, match=r"is locked by another process.*wait_timeout"),
    ):
        write(tmp_path, 2, Files())
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "step-00000001"}
    write(tmp_path, 2, Files())
    assert newest(tmp_path) == 2


def test_newer_ones_of_an_earlier_run_are_not_taken_for_old_ones(tmp_path: Path) -> None:
    """A training that goes on from an older checkpoint keeps its own, and leaves the newer ones alone."""
    for step in (1, 2, 8, 9):
        write(tmp_path, step, Files(), keep=9)
    write(tmp_path, 3, Files(), keep=2)
    assert [found.step for found in committed(tmp_path)] == [2, 3, 8, 9]


def save_steps(save: checkpoint.Saver, *steps: int) -> None:
    for step in steps:
        save(step)
        save.flush()


def test_two_savers_of_different_states_keep_no_more_than_one(tmp_path: Path) -> None:
    """The rule is [Note: keep] of directory.py: by step, whoever has written them."""
    ahead, behind = (
        checkpoint.save_every(tmp_path, {"w": torch.full((2,), value)}, every=1, keep=2)
        for value in (1.0, 2.0)
    )
    save_steps(ahead, 8, 9)
    with pytest.raises(checkpoint.CheckpointError, match=r"step-00000005 was not written.*since, \[8, 9\]"):
        save_steps(behind, 5)
    with pytest.raises(checkpoint.CheckpointError, match="already there and is another state"):
        save_steps(behind, 9)
    assert [found.step for found in committed(tmp_path)] == [8, 9]
    save_steps(ahead, 20)
    save_steps(behind, 15)  # in between: one of the newest two
    assert [found.step for found in committed(tmp_path)] == [15, 20]
    save_steps(behind, 30)
    with pytest.raises(checkpoint.CheckpointError, match=r"since, \[20, 30\]"):
        save_steps(ahead, 10)
    assert [found.step for found in committed(tmp_path)] == [20, 30]
    for save in (ahead, behind):
        save.close()
    with pytest.warns(lazystep.LazyStepWarning, match="Training goes on"):
        lazystep.mark_step()
    FOUND["two savers with different states in one directory"] = (
        1,
        "the newest `keep` by step; what would not be kept, or is there already, is refused",
    )


def test_steps_that_go_back_are_refused_when_they_would_not_be_kept(tmp_path: Path) -> None:
    """A step counted within an epoch: `latest` would go on finding the last step of the first epoch."""
    weight = torch.zeros(2)
    with checkpoint.save_every(tmp_path, {"w": weight}, every=1, keep=2) as save:
        save_steps(save, 0, 5, 10)
        weight.add_(1)
        with pytest.raises(checkpoint.CheckpointError, match=r"since, \[5, 10\].*steps that only grow"):
            save_steps(save, 0)
    assert [found.step for found in committed(tmp_path)] == [5, 10]
    with pytest.warns(lazystep.LazyStepWarning, match="Training goes on"):
        lazystep.mark_step()


def test_one_removed_while_it_is_looked_for_is_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process commits a newer one and removes the old one, between the list and the first read."""
    write(tmp_path, 1, Files())
    verify = checkpoint.Checkpoint.verify

    def overtaken(found: checkpoint.Checkpoint) -> None:
        if found.step == 1:
            write(tmp_path, 2, Files(), keep=1)
        verify(found)

    monkeypatch.setattr(checkpoint.Checkpoint, "verify", overtaken)
    assert newest(tmp_path) == 2
    lazystep.mark_step()  # no warning, which would be an error here
    FOUND["the newest is removed while `latest` reads it"] = 1, "the newer one that has come is found"


def test_one_that_can_not_be_read_now_is_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rights, too many open files: an older one must not take its place, nor may it be overwritten."""
    write(tmp_path, 1, Files(), keep=5)
    write(tmp_path, 2, Files(), keep=5)
    numbers = (errno.EACCES, errno.EMFILE, errno.ENOMEM, errno.ESTALE)
    for number in numbers:

        def fail(*args: Any, number: int = number) -> Any:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr("lazystep.checkpoint.directory.open", fail, raising=False)
            with pytest.raises(checkpoint.CheckpointError, match=r"step-00000002/.* can't be read"):
                checkpoint.latest(tmp_path)
            with pytest.raises(checkpoint.CheckpointError, match=r"step-00000002/.* can't be read"):
                write(tmp_path, 2, Files(), keep=5)
        assert newest(tmp_path) == 2
    FOUND["the newest can't be read (rights, open files, memory)"] = (
        len(numbers),
        "an error, and no older one in its place; it is not overwritten",
    )


def test_two_processes_write_to_one_place(tmp_path: Path) -> None:
    """Both write the same steps; one is killed in the middle of its second."""
    ready = tmp_path / "go"

    def work(is_killed: bool) -> None:
        def disturb(number: int, name: str, args: Any) -> None:
            while not ready.exists():
                time.sleep(0.001)
            if is_killed and number == 20:
                os.kill(os.getpid(), signal.SIGKILL)

        files = Counting(disturb)
        for step in range(1, 6):
            try:
                write(tmp_path / "c", step, files, keep=3)
            except checkpoint.CheckpointError as error:
                if "later steps have been written" not in str(error):  # the other process is that far ahead
                    raise

    children = []
    for is_killed in (False, True):
        child = os.fork()
        if child == 0:
            try:
                work(is_killed)
            except BaseException:
                os._exit(3)
            os._exit(0)
        children.append(child)
    ready.touch()
    statuses = [os.waitpid(child, 0)[1] for child in children]
    assert os.WEXITSTATUS(statuses[0]) == 0
    assert os.WTERMSIG(statuses[1]) == signal.SIGKILL
    assert newest(tmp_path / "c") == 5
    steps = [found.step for found in committed(tmp_path / "c")]
    # The killed process may have committed an old step again just before, and not come to removing it.
    assert steps[-3:] == [3, 4, 5]
    for found in committed(tmp_path / "c"):
        found.verify()
    FOUND["two processes write the same steps, one is killed"] = 1, "one commit of each step; all are whole"


def test_slow_disk_holds_training_up_only_at_the_bound_of_the_queue(tmp_path: Path) -> None:
    gate = threading.Semaphore(0)

    def disturb(number: int, name: str, args: Any) -> None:
        if name == "make_directory":
            assert gate.acquire(timeout=60)

    weight = torch.zeros(4).to("lazy")
    save = checkpoint.save_every(
        tmp_path, {"w": weight}, every=1, keep=9, max_pending=2, files=Counting(disturb)
    )
    for step in range(3):  # one is being written, two wait
        weight.add_(1.0)
        save(step)
        while step == 0 and save._handler.num_waiting:
            time.sleep(0.001)
        lazystep.mark_step()
    assert lazystep.metrics.counter_value("closure_queue_waits") == 0
    threading.Timer(0.2, gate.release).start()
    weight.add_(1.0)
    save(3)  # waits for a place
    assert lazystep.metrics.counter_value("closure_queue_waits") == 1
    with lazystep.config.override(wait_timeout=0.2), pytest.raises(lazystep.WaitTimeoutError):
        save(4)  # no wait without a bound
    for _ in range(9):
        gate.release()
    save.close()
    assert [found.step for found in committed(tmp_path)] == [0, 1, 2, 3]
    for found in committed(tmp_path):
        checkpoint.load(found, {"w": weight})
        assert weight.tolist() == [found.step + 1.0] * 4
    FOUND["a slow disk"] = (
        1,
        "training waits at the bound of the queue, with a time-out; each has the values of its step",
    )


def test_checkpoint_queued_at_exit_is_written(tmp_path: Path) -> None:
    script = f"""
import torch, lazystep
from lazystep import checkpoint
w = torch.zeros(3).to("lazy")
save = checkpoint.save_every({str(tmp_path)!r}, {{"w": w}}, every=1)
w.add_(7.0)
save(4)
"""
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr
    weight = torch.zeros(3)
    assert checkpoint.load(tmp_path / "step-00000004", {"w": weight}).step == 4
    assert weight.tolist() == [7.0] * 3
    FOUND["the process ends with a checkpoint in the queue"] = (
        1,
        "it is written before the exit, within `exit_timeout`",
    )


def leave(root: Path, name: str, age: float) -> Path:
    """A temporary directory with half a file, last written `age` seconds ago."""
    path = root / name
    path.mkdir(parents=True)
    (path / TENSORS).write_bytes(b"half")
    then = time.time() - age
    for changed in (path / TENSORS, path):
        os.utime(changed, (then, then))
    return path


def test_temporary_directories_of_other_hosts_are_left_alone_until_they_are_old(tmp_path: Path) -> None:
    """Process numbers of another host say nothing here, whether a process has that number or not."""
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    alive, there, here = os.getpid(), "0123456789ab", place()
    old, new = owner.FOREIGN_AGE + 60, 0.0
    # Process, place, age, and whether it is removed. Without a place: of an earlier release.
    cases = [
        (gone, f"@{here}", new, True),
        (alive, f"@{here}", old, False),
        (gone, f"@{there}", new, False),
        (alive, f"@{there}", new, False),
        (gone, f"@{there}", old, True),
        (alive, f"@{there}", old, True),
        (gone, "", new, False),
        (alive, "", old, True),
    ]
    left = []
    for number, (process, where, age, _) in enumerate(cases):
        for kind in ("writing", "removing"):
            left.append(leave(tmp_path, f".{kind}-{process}{where}-{number:08x}", age))
    busy = leave(tmp_path, f".writing-{gone}@{there}-ffffffff", old)
    (busy / STATE).write_bytes(b"just now")  # the directory began long ago, and is being written
    os.utime(busy, (0, 0))
    write(tmp_path, 1, Files())
    assert [not path.exists() for path in left] == [is_removed for *_, is_removed in cases for _ in range(2)]
    assert busy.exists()
    assert newest(tmp_path) == 1
    FOUND["what another host is writing, or has left behind"] = (
        len(left) + 1,
        "left alone; removed when nothing in it has changed for a day",
    )


def test_names_of_temporary_directories_say_where_their_process_is(tmp_path: Path) -> None:
    names: list[str] = []

    def disturb(number: int, name: str, args: Any) -> None:
        if name == "make_directory":
            names.append(args[0].name)

    write(tmp_path, 1, Counting(disturb))
    assert len(names) == 1
    assert names[0].startswith(f".writing-{os.getpid()}@{place()}-")


class WithoutRoom(Files):
    """Of rank 0: the rename fails, and there is no room to say so either."""

    def rename(self, old: Path, new: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def make_directory(self, path: Path) -> None:
        if path.name.startswith(".removing-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().make_directory(path)


@pytest.mark.parametrize("is_there", [False, True], ids=["nothing there", "a checkpoint of an earlier run"])
def test_a_rank_looks_whether_rank_0_has_committed(is_there: bool, tmp_path: Path) -> None:
    """Rank 0 fails and can't tell. The other rank must not take the end of its wait for a commit."""
    if is_there:
        write(tmp_path, 1, Files())
    raised: dict[int, str] = {}

    def work(rank: int) -> None:
        value = torch.full((4,), float(rank))
        directory = Directory(tmp_path, 1, WithoutRoom() if rank == 0 else Files())
        try:
            directory.write(
                1,
                {"a": TensorKind(value.dtype, (4,))},
                [bytes_of(value)],
                {"dict": [["rank", rank]]},
                Ranks(rank, 2, 30.0, "1@2-3"),
            )
        except checkpoint.CheckpointError as error:
            raised[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ("is another state" if is_there else "No space left") in raised[0]
    assert "was not committed: rank 0 has given up" in raised[1]
    if is_there:
        assert newest(tmp_path) == 1


def table() -> str:
    lines = ["| fault | places | what holds |", "|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| {fault} | {places} | {held} |" for fault, (places, held) in FOUND.items())]
    )


def test_docs_have_the_table_of_faults() -> None:
    """The last test: the rows come from those before it. Skipped if only some of them have run."""
    if len(FOUND) < 18:
        pytest.skip("not all tests of this file have run")
    text = PAGE.read_text()
    before, start, rest = text.partition("<!-- faults -->\n")
    _, end, after = rest.partition("\n<!-- end of faults -->")
    expected = before + start + table() + end + after
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(expected)
        return
    assert text == expected, "UPDATE_DOCS=1 pytest tests/checkpoint/test_faults.py rewrites the table"
