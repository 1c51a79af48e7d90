"""Faults of the cache on disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazystep
from lazystep import config
from lazystep.compile import builder as builder_module
from lazystep.compile import cache as cache_module
from lazystep.compile import key
from lazystep.compile.cache import LIBRARY, CacheError, LibraryCache
from lazystep.processes import place
from tests.builds import X, cache, repeat, run_square_sum
from tests.helpers import count, run_python

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("own_cache")]


def fill(key_: str, content: bytes = b"library") -> LibraryCache:
    """A cache with an entry that is whole, whatever is in it."""
    opened = cache()
    directory = opened.temporary_directory()
    (directory / LIBRARY).write_bytes(content)
    opened.publish(key_, directory, {"proxy_ops": []})
    return opened


def entry_of(opened: LibraryCache, key_: str) -> Path:
    found = opened.find(key_)
    assert found is not None
    return found.path.parent


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: (entry / LIBRARY).write_bytes(b"librarz"),
        lambda entry: (entry / LIBRARY).write_bytes(b"lib"),
        lambda entry: (entry / LIBRARY).unlink(),
        lambda entry: (entry / "manifest.json").write_text("{"),
        lambda entry: (entry / "manifest.json").unlink(),
        lambda entry: (entry / "manifest.json").write_text(json.dumps({"key": "other", "files": {}})),
        lambda entry: entry.chmod(0o777),
    ],
    ids=["changed", "truncated", "missing", "bad manifest", "no manifest", "other key", "open to others"],
)
def test_damaged_entry_is_refused(damage: Callable[[Path], Any]) -> None:
    opened = fill("k")
    damage(entry_of(opened, "k"))
    with pytest.raises(CacheError):
        opened.find("k")
    assert opened.verify("k") != ""


def test_damaged_entry_is_built_anew_with_one_warning(runtime: Any) -> None:
    run_square_sum()
    (entry,) = cache().entries()
    library = Path(config.settings.cache_dir) / "libraries" / entry.key / LIBRARY
    # Another file, as a bad disk or another process would leave it: the old one is mapped here.
    damaged = library.with_suffix(".damaged")
    damaged.write_bytes(library.read_bytes()[:-1000])
    os.replace(damaged, library)
    runtime.programs.clear()
    with pytest.warns(lazystep.LazyStepWarning, match="damaged") as caught:
        run_square_sum()
    assert len(caught) == 1
    assert count("builds_succeeded") == 2
    assert cache().verify(entry.key) == ""
    assert count("native_executions") >= 1


def test_entry_of_another_version_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = key.library_key("program", {}, 2)
    monkeypatch.setattr(key, "FORMAT", key.FORMAT + 1)
    key.environment.cache_clear()
    other_format = key.library_key("program", {}, 2)
    monkeypatch.setattr(key, "_cpu_flags", lambda: "another processor")
    key.environment.cache_clear()
    other_processor = key.library_key("program", {}, 2)
    key.environment.cache_clear()
    assert len({mine, other_format, other_processor, key.library_key("program", {}, 1)}) == 4
    assert key.library_key("program", {3: 0.0}, 2) != key.library_key("program", {3: -0.0}, 2)


@pytest.mark.parametrize("kind", ["a file", "symlink", "open to others", "another user's"])
def test_directory_that_must_not_be_used(
    kind: str, tmp_path: Path, own_builder: builder_module.Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(config.settings.cache_dir)
    if kind == "a file":
        root.write_text("")
    elif kind == "symlink":
        (tmp_path / "target").mkdir()
        root.symlink_to(tmp_path / "target")
    elif kind == "open to others":
        root.mkdir()
        root.chmod(0o777)
    else:
        root.mkdir(mode=0o700)
        owner = os.geteuid()
        monkeypatch.setattr(
            cache_module.os, "geteuid", lambda: owner + 1 if not own_builder._own_directory else owner
        )
    with pytest.raises(CacheError):
        LibraryCache.open(root)
    with pytest.warns(lazystep.LazyStepWarning, match="temporary directory") as caught:
        if kind == "symlink":  # one of them as a whole: a build takes its time
            run_square_sum()
            assert count("native_executions") >= 1
        else:
            assert own_builder._open_cache().entries() == []
        lazystep.mark_step()
    assert len(caught) == 1
    own = own_builder._own_directory
    assert own is not None
    assert own.exists()
    own_builder.close()
    assert not own.exists()


@pytest.mark.usefixtures("own_builder")
def test_directory_that_is_full_in_mid_run(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = LibraryCache.publish
    failures = []

    def full(self: LibraryCache, *args: Any) -> Any:
        if not failures:
            failures.append(1)
            with monkeypatch.context() as patch:
                patch.setattr(cache_module, "_sync", _no_space)
                return publish(self, *args)
        return publish(self, *args)

    monkeypatch.setattr(LibraryCache, "publish", full)
    with pytest.warns(lazystep.LazyStepWarning, match="No space left") as caught:
        run_square_sum()
        lazystep.mark_step()
    assert len(caught) == 1
    assert failures
    assert count("native_executions") >= 1
    assert cache().entries() == []


@pytest.mark.usefixtures("own_builder")
def test_directory_that_is_deleted_in_mid_run() -> None:
    run_square_sum()
    shutil.rmtree(config.settings.cache_dir)
    Path(config.settings.cache_dir).write_text("in the way")
    lazy = X.to("lazy")
    with pytest.warns(lazystep.LazyStepWarning, match="temporary directory") as caught:
        assert torch.allclose(repeat(lambda: lazy.sin()), X.sin())
    assert len(caught) == 1
    assert count("builds_succeeded") == 2


def _no_space(path: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_least_recently_used_entries_are_evicted() -> None:
    for number in range(4):
        opened = fill(f"k{number}", b"x" * 1000)
        os.utime(entry_of(opened, f"k{number}"), (number, number))
    # Entries differ by some bytes: their manifests hold the time of the build, in as many digits as it has.
    room_for_two = 2 * max(entry.nbytes for entry in opened.entries())
    removed = opened.evict(room_for_two, keep="k0")
    assert removed == ["k1", "k2"]
    assert [entry.key for entry in opened.entries()] == ["k0", "k3"]


def test_what_a_killed_process_left_is_removed() -> None:
    opened = cache()
    gone = run_python("-c", "import os; print(os.getpid())").stdout.strip()
    # Numbers of processes in another container, or of an earlier release, say nothing here.
    names = [f"{gone}@{place()}-abc", f"{10**20}@{place()}-abc", f"{gone}@0123456789ab-abc", f"{gone}-abc"]
    left = [opened.root / "temporary" / name for name in names]
    for path in left:
        path.mkdir()
    mine = opened.temporary_directory()
    cache()
    assert [path.exists() for path in left] == [False, False, True, True]
    assert mine.exists()
    for path in left[2:]:
        os.utime(path, (0, 0))
    cache()
    assert not any(path.exists() for path in left), "nothing in them has changed for a day"


def test_lock_of_a_dead_process_does_not_block() -> None:
    opened = cache()
    (opened.root / "temporary" / "k.lock").touch()
    with opened.building("k") as may_build:
        assert may_build
        with opened.building("k") as again:
            assert not again


def test_entry_that_another_process_published_meanwhile_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = cache()
    replace = os.replace

    def slow(source: Any, target: Any) -> None:
        if Path(target).name == "twice" and Path(source).parent.name == Path(opened._temporary).name:
            monkeypatch.undo()
            fill("twice")
        replace(source, target)

    monkeypatch.setattr(cache_module.os, "replace", slow)
    directory = opened.temporary_directory()
    (directory / LIBRARY).write_bytes(b"library")
    library = opened.publish("twice", directory, {"proxy_ops": []})
    assert library.path.read_bytes() == b"library"


def test_entry_that_cannot_be_removed_is_a_cache_error(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = fill("kept")

    def refuse(**_: Any) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(cache_module.tempfile, "mkdtemp", refuse)
    with pytest.raises(CacheError, match=r"kept .*can't be removed: .*Read-only"):
        opened.remove("kept")
