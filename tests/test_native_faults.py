"""What must hold when building, caching, loading or running natively goes wrong: the reference goes on."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lazystep
from lazystep import config, metrics, notices
from lazystep import tiers as tiers_module
from lazystep.barrier import runtime
from lazystep.compile import builder as builder_module
from lazystep.compile import cache as cache_module
from lazystep.compile import key
from lazystep.compile.cache import LIBRARY, CacheError, LibraryCache
from lazystep.execute.native import UnfitError
from lazystep.tiers import State, TieredExecutable, Tiers

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def auto(tmp_path: Path) -> Iterator[None]:
    """A cache of the test's own; the builder process stays warm."""
    runtime.programs.clear()
    notices.forget()
    with config.override(tier="auto", build_after=2, cache_dir=str(tmp_path / "cache")):
        yield
        lazystep.wait_for_compile(300)
    notices.forget()


@pytest.fixture
def own_builder(auto: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[builder_module.Builder]:
    """A builder that the test may break."""
    tiers = Tiers()
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "tiers", tiers)
        yield tiers.builder
        lazystep.wait_device_ops()
        runtime.programs.clear()
        tiers.close()


def count(name: str) -> int:
    return int(metrics.counter_value(name))


def cache() -> LibraryCache:
    return LibraryCache.open(Path(config.settings.cache_dir))


def repeat(function: Callable[[], torch.Tensor], times: int = 5) -> torch.Tensor:
    for number in range(times):
        result = function()
        lazystep.mark_step()
        if number == 2:
            lazystep.wait_for_compile(300)
    return result.cpu()


def square_sum(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum(1) + 1


X = torch.arange(12.0).reshape(3, 4)


def run_square_sum() -> None:
    """The step that most tests here build; right whatever happens."""
    lazy = X.to("lazy")
    assert repeat(lambda: square_sum(lazy)).tolist() == square_sum(X).tolist()


# -- the compiler ----------------------------------------------------------------------------------


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def use(path: str) -> None:
        monkeypatch.setenv("CXX", path)
        key.find_compiler.cache_clear()
        key.environment.cache_clear()

    yield use
    key.find_compiler.cache_clear()
    key.environment.cache_clear()


def test_no_compiler_is_one_warning(compiler: Callable[[str], None]) -> None:
    compiler("no-such-compiler")
    with pytest.warns(lazystep.LazyStepWarning, match="no-such-compiler") as caught:
        run_square_sum()
        lazy = X.to("lazy")
        repeat(lambda: lazy.sin())
    assert len(caught) == 1
    assert count("builds_failed:no_compiler") == 2
    assert count("native_executions") == 0
    assert cache().entries() == []


def test_failing_compiler_poisons_nothing(compiler: Callable[[str], None], tmp_path: Path) -> None:
    script = tmp_path / "broken-c++"
    script.write_text('#!/bin/sh\necho broken 1.0\n[ "$1" = --version ]\n')
    script.chmod(0o755)
    compiler(str(script))
    with pytest.warns(lazystep.LazyStepWarning, match="a step can't be made native") as caught:
        run_square_sum()
        lazy = X.to("lazy")
        repeat(lambda: square_sum(lazy), 8)
    assert len(caught) == 1
    assert count("builds_failed") == 1
    # Not tried again.
    assert count("builds_requested") == 1
    assert cache().entries() == []
    assert "stays on the reference executable" in lazystep.debug.explain()


@pytest.mark.usefixtures("own_builder")
def test_crashed_builder_is_restarted_and_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = (sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(7)")
    monkeypatch.setattr(builder_module, "COMMAND", crash)
    lazy = X.to("lazy")
    warns_of_one = pytest.warns(lazystep.LazyStepWarning, match="can't be made native .* process died")
    with pytest.warns(lazystep.LazyStepWarning, match="died 3 times"), warns_of_one:
        for n in range(5):
            assert torch.equal(repeat(lambda n=n: lazy.reshape(-1)[n:] * 2), X.reshape(-1)[n:] * 2)
        lazystep.mark_step()
    assert count("builder_starts") == 3
    assert count("builds_failed:crash") >= 4
    assert count("native_executions") == 0


def test_killed_builder_does_not_disturb_the_loop(own_builder: builder_module.Builder) -> None:
    lazy = X.to("lazy")
    results = []
    for number in range(60):
        results.append(square_sum(lazy))
        lazystep.mark_step()
        process = own_builder._process
        if process is not None and number > 20:
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.05)
    else:
        pytest.fail("the builder was never started")
    with pytest.warns(lazystep.LazyStepWarning, match="process died"):
        assert lazystep.wait_for_compile(60)
    assert all(r.cpu().tolist() == square_sum(X).tolist() for r in results)
    assert count("builds_failed:crash") == 1
    # The next program gets a new one.
    assert repeat(lambda: lazy * 3).tolist() == (X * 3).tolist()
    assert count("native_executions") >= 1


@pytest.mark.usefixtures("own_builder")
def test_build_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder_module, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    with config.override(build_timeout=0.5), pytest.warns(lazystep.LazyStepWarning, match="build_timeout"):
        run_square_sum()
        lazystep.mark_step()
    assert count("builds_failed:timeout") == 1


# -- the cache -------------------------------------------------------------------------------------


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


def test_damaged_entry_is_built_anew_with_one_warning() -> None:
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
        lazy = X.to("lazy")
        for _ in range(2):
            result = square_sum(lazy)
            lazystep.mark_step(wait=True)
        assert lazystep.wait_for_compile(300)
        for _ in range(2):
            result = square_sum(lazy)
            lazystep.mark_step(wait=True)
    assert len(caught) == 1
    assert result.cpu().tolist() == square_sum(X).tolist()
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
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    stale = opened.root / "temporary" / f"{gone.stdout.decode().strip()}-abc"
    stale.mkdir()
    mine = opened.temporary_directory()
    cache()
    assert not stale.exists()
    assert mine.exists()


def test_lock_of_a_dead_process_does_not_block() -> None:
    opened = cache()
    (opened.root / "temporary" / "k.lock").touch()
    with opened.building("k") as may_build:
        assert may_build
        with opened.building("k") as again:
            assert not again


SCRIPT = """
import json, os, sys, time, torch, lazystep
from lazystep import metrics
x = torch.arange(12.0).reshape(3, 4)
lazy = x.to("lazy")
def step():
    out = (lazy * lazy).sum(1) + 1
    lazystep.mark_step()
    return out
{body}
"""
TRAIN = """
for n in range(6):
    out = step()
    if n == 2:
        lazystep.wait_for_compile(300)
assert out.cpu().tolist() == ((x * x).sum(1) + 1).tolist()
names = ("builds_started", "builds_succeeded", "native_executions", "disk_hits")
print(json.dumps({n: metrics.counter_value(n) for n in names}))
"""
SPAWN = """
for n in range(600):
    step()
    process = lazystep.barrier.runtime.tiers.builder._process
    if process is not None:
        break
    time.sleep(0.05)
print(process.pid, flush=True)
"""


def start(body: str, **environ: str) -> subprocess.Popen[str]:
    settings = {"LAZYSTEP_TIER": "auto", "LAZYSTEP_BUILD_AFTER": "2"}
    settings["LAZYSTEP_CACHE_DIR"] = config.settings.cache_dir
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(body=body)],
        env={**os.environ, **settings, "PYTHONPATH": str(ROOT), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, int]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    result: dict[str, int] = json.loads(out.splitlines()[-1])
    return result


def test_processes_that_build_the_same_program_share_one_entry() -> None:
    counts = [finish(process) for process in [start(TRAIN) for _ in range(3)]]
    assert sum(c["builds_started"] for c in counts) == 1
    assert all(c["native_executions"] >= 1 for c in counts)
    (entry,) = cache().entries()
    assert cache().verify(entry.key) == ""


def test_kill_at_any_point_leaves_a_usable_cache() -> None:
    for delay in (0.0, 1.0, 3.0, 6.0):
        process = start(SPAWN + "\nfor n in range(100000): step(); time.sleep(0.01)\n")
        assert process.stdout is not None
        builder = int(process.stdout.readline())
        time.sleep(delay)
        process.kill()
        process.communicate(timeout=60)
        assert _ends(builder), "the builder outlived its parent"
        for entry in cache().entries():
            assert cache().verify(entry.key) == ""
    counts = finish(start(TRAIN))
    assert counts["native_executions"] >= 1


def test_exit_does_not_wait_for_a_build() -> None:
    process = start(SPAWN)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert _ends(int(out.splitlines()[-1]))
    assert cache().entries() == []


def _ends(pid: int) -> bool:
    for _ in range(200):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


# -- running ---------------------------------------------------------------------------------------


def test_library_that_disagrees_is_never_used() -> None:
    """The library of another program under this program's key: whole, loadable, and wrong."""
    lazy = X.to("lazy")
    repeat(lambda: (lazy * lazy).sum(1) + 2)
    (wrong,) = cache().entries()
    captured: list[str] = []
    original = builder_module.library_key

    def redirect(*args: Any) -> str:
        captured.append(original(*args))
        return wrong.key

    runtime.programs.clear()
    (Path(config.settings.cache_dir) / "libraries" / wrong.key / "checked").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder_module, "library_key", redirect)
        with pytest.warns(
            lazystep.LazyStepWarning, match=r"aten\.add\.Tensor at .*test_native_faults"
        ) as caught:
            got = repeat(lambda: (lazy * lazy).mean(1) + 2)
            lazystep.mark_step()
    assert captured
    assert len(caught) == 1
    assert got.tolist() == ((X * X).mean(1) + 2).tolist()
    assert count("native_mismatches") == 1
    assert "disagreed with the reference" in lazystep.debug.explain()


def test_library_that_fails_at_its_first_run_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(flat: list[torch.Tensor]) -> list[torch.Tensor]:
        raise RuntimeError("a kernel is missing")

    monkeypatch.setattr(tiers_module, "load", lambda path: fail)
    total = torch.zeros(3).to("lazy")
    for number in range(6):
        total.add_(2.0)
        lazystep.mark_step()
        if number == 3:
            assert lazystep.wait_for_compile(300)
    assert total.tolist() == [12.0] * 3
    assert count("programs_on_reference:failed") == 1
    assert "a kernel is missing" in lazystep.debug.explain()


def test_rounding_that_an_optimizer_blows_up_is_no_disagreement() -> None:
    """A gradient that is zero but for rounding, divided by its own size: both results are as good."""
    x = torch.randn(64, 8).to("lazy")

    def step() -> torch.Tensor:
        centred = x - x.mean(0)
        noise = centred.sum(0)
        return noise / (noise.abs() + 1e-12)

    repeat(step, 6)
    assert count("native_mismatches") == 0
    assert count("native_executions") >= 1


def test_inputs_that_do_not_fit_run_on_the_reference() -> None:
    run_square_sum()
    executable = runtime.history._programs[-1]
    assert executable.state is State.NATIVE
    native = executable._loaded[0].native
    good = [X.clone()]
    with pytest.raises(UnfitError):
        native.run([X.double()], [])
    with pytest.raises(UnfitError):
        native.run([X[:2]], [])
    with pytest.raises(UnfitError):
        native.run([X.t().contiguous().t()], [])
    # The program itself goes on, on the reference, with what the inputs really are.
    transposed = X.t().contiguous().t()
    scalars = [1] * len(executable.program.scalars)
    got = executable.run([transposed], scalars)
    assert torch.equal(got[0], square_sum(X))
    assert executable.state is State.STAYS
    assert "do not fit" in executable.reason
    assert good[0].equal(X)


def test_two_inputs_in_one_memory_are_refused() -> None:
    a, b = torch.ones(4).to("lazy"), torch.ones(4).to("lazy")
    repeat(lambda: a * 2 + b)
    executable = runtime.history._programs[-1]
    shared = torch.ones(8)
    with pytest.raises(UnfitError, match="share their memory"):
        executable._loaded[0].native.run([shared[:4], shared[:4]], [2] * len(executable.program.scalars))


def test_out_of_memory_names_the_op_and_the_step() -> None:
    x = torch.ones(1).to("lazy")
    with config.override(tier="native", check_native="off"):
        huge = x.expand(1 << 46).clone()
        with pytest.raises(lazystep.StepError, match=r"step \d+ \(native\) failed in aten\.clone"):
            huge.sum().item()
        del huge
        with contextlib.suppress(lazystep.StepError):
            lazystep.mark_step(wait=True)
        # A smaller step works.
        assert x.expand(4).clone().sum().item() == 4


def test_interrupt_while_waiting_for_a_build_leaves_everything_usable() -> None:
    lazy = X.to("lazy")
    for _ in range(3):
        result = square_sum(lazy)
        lazystep.mark_step()
    lazystep.wait_device_ops()
    timer = threading.Timer(0.5, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        lazystep.wait_for_compile(300)
    timer.join()
    assert result.cpu().tolist() == square_sum(X).tolist()
    run_square_sum()
    assert count("builds_started") == 1
    assert count("native_executions") >= 1


def test_number_of_libraries_is_bounded() -> None:
    lazy = X.to("lazy")
    with config.override(max_libraries=runtime.tiers.num_loaded + 1):
        repeat(lambda: lazy * 2)
        repeat(lambda: lazy.sin())
    assert count("libraries_loaded") == 1
    assert count("programs_on_reference:too_many_libraries") == 1


def test_storm_of_programs_is_reported_once() -> None:
    lazy = torch.ones(200).to("lazy")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in range(1, 120):
            result = lazy[:size] * 2
            lazystep.mark_step()
        lazystep.mark_step()
    messages = [str(w.message) for w in caught if issubclass(w.category, lazystep.LazyStepWarning)]
    assert len(messages) == 1
    assert "aten.slice" in messages[0]
    assert "test_native_faults.py" in messages[0]
    assert result.cpu().shape == (119,)
    assert count("builds_requested") == 0


def test_tiered_executable_forgotten_while_building_is_not_loaded() -> None:
    lazy = X.to("lazy")
    for _ in range(2):
        result = square_sum(lazy)
        lazystep.mark_step()
    lazystep.wait_device_ops()
    assert isinstance(runtime.history._programs[-1], TieredExecutable)
    runtime.programs.clear()
    runtime.history._programs.clear()
    runtime.last_program = None
    del result
    assert lazystep.wait_for_compile(300)
    assert count("builds_succeeded") == 1
