"""The command line: what it prints, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from lazystep import cli
from lazystep.cli import bench as bench_command
from lazystep.compile.cache import LIBRARY, LibraryCache
from tests.helpers import run_python


@pytest.fixture
def root(tmp_path: Path) -> Path:
    opened = LibraryCache.open(tmp_path / "cache")
    for key in ("aaa1", "aab2"):
        directory = opened.temporary_directory()
        (directory / LIBRARY).write_bytes(key.encode())
        opened.publish(key, directory, {"proxy_ops": [], "torch": "2.13", "program": f"def step(): {key}\n"})
    return tmp_path / "cache"


def run(root: Path, *args: str) -> Result:
    return invoke("cache", "--directory", str(root), *args)


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli.main, args)


def start(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, not in a terminal: with its exit status, and what is printed where."""
    return run_python("-W", "error", "-m", "lazystep", *args, **{"LAZYSTEP_TIER": "reference", **environ})


def test_ls_and_show(root: Path) -> None:
    listed = run(root, "ls")
    assert listed.exit_code == 0
    assert "aaa1" in listed.output
    assert "2 libraries" in listed.output
    rows = [json.loads(line) for line in run(root, "ls", "--json").output.splitlines()]
    assert {row["key"] for row in rows} == {"aaa1", "aab2"}
    shown = run(root, "show", "aab")
    assert "def step(): aab2" in shown.output
    assert "torch: 2.13" in shown.output


@pytest.mark.parametrize(
    ("key", "message"), [("aa", "2 libraries have keys"), ("zz", "no library has a key")]
)
def test_key_that_is_not_one_library(root: Path, key: str, message: str) -> None:
    shown = run(root, "show", key)
    assert shown.exit_code == 1
    assert message in shown.output


def test_verify_tells_damage_by_its_exit_status(root: Path) -> None:
    assert run(root, "verify").exit_code == 0
    (root / "libraries" / "aaa1" / LIBRARY).write_bytes(b"other")
    verified = run(root, "verify")
    assert verified.exit_code == 1
    assert "digest" in verified.output
    assert "1 damaged" in verified.output


def test_clear_removes_one_or_all(root: Path) -> None:
    assert "removed 1" in run(root, "clear", "aaa").output
    assert [e.key for e in LibraryCache(root).entries()] == ["aab2"]
    assert "removed 1" in run(root, "clear").output
    assert LibraryCache(root).entries() == []


def test_directory_that_is_not_there_or_not_ours(tmp_path: Path) -> None:
    assert "0 libraries" in run(tmp_path / "nothing", "ls").output
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    refused = run(shared, "ls")
    assert refused.exit_code == 1
    assert "chmod 700" in refused.output


# -- run -----------------------------------------------------------------------------------------------

SCRIPT = """
import sys, pathlib, torch, lazystep
assert __name__ == "__main__"
SCRIPT_LIVES = True
import beside                                     # a module next to the script
print("arguments", sys.argv[1:], pathlib.Path(__file__).name, beside.NUMBER)
w = torch.ones(3, device="lazy")
def look(x):
    print("seen", x.sum().item(), sys.modules["__main__"].SCRIPT_LIVES)
for _ in range(4):
    w.add_(1.0)
    lazystep.add_step_closure(look, (w,), run_async=True)
    lazystep.mark_step()
print(f"value {w.sum().item()}")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("NUMBER = 42\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def test_run_passes_everything_through_and_reports(script: Path, tmp_path: Path) -> None:
    done = start("run", "--report", str(tmp_path / "out"), str(script), "--lr", "3", "--report", "x")
    assert done.returncode == 0, done.stderr
    assert "arguments ['--lr', '3', '--report', 'x'] train.py 42" in done.stdout
    assert "value 15.0" in done.stdout
    assert done.stdout.count("seen") == 4
    body, _, closing = done.stdout.partition("-- lazystep: train.py ended with exit status 0 --")
    assert "value" in body
    assert "5 runs: 0 native, 5 on the reference executable" in closing, "four steps and the sum"
    assert f"1 times item at {script}:" in closing
    assert "4 off it" in closing
    assert "\x1b" not in done.stdout
    assert "train.py" in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('so long')", 1, "so long"),
        ("def f():\n    raise KeyError('mine')\nf()", 1, "KeyError: 'mine'"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("def f(:", 1, "SyntaxError"),
    ],
)
def test_run_keeps_the_status_and_the_error(tmp_path: Path, code: str, status: int, message: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(code)
    done = start("run", str(script))
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "cli/run.py" not in done.stderr, "the traceback begins in the script"
    assert f"exit status {status} --" in done.stdout
    assert "programs   0 made" in done.stdout


def test_run_does_not_lose_what_failed_in_the_background(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, lazystep\n"
        "def fail(x): raise ArithmeticError('in a closure')\n"
        "x = torch.ones(3, device='lazy')\n"
        "lazystep.add_step_closure(fail, (x,), run_async=True)\n"
        "lazystep.mark_step()\n"
    )
    done = start("run", str(script))
    assert done.returncode == 1
    assert "ArithmeticError" in done.stderr
    assert "1 failed" in done.stdout


@pytest.mark.parametrize(
    "args", [("run",), ("run", "missing.py"), ("report", "missing"), ("bench", "nothing"), ("nothing",)]
)
def test_wrong_usage_is_exit_status_2(args: tuple[str, ...]) -> None:
    assert invoke(*args).exit_code == 2


@pytest.mark.parametrize("command", ["demo", "doctor", "run", "report", "cache", "bench"])
def test_every_command_has_its_help(command: str) -> None:
    assert command in invoke("--help").output
    shown = invoke(command, "--help")
    assert shown.exit_code == 0
    assert shown.output.startswith(f"Usage: main {command}")


# -- report, bench -------------------------------------------------------------------------------------


def test_report_of_an_empty_directory_says_what_is_missing(tmp_path: Path) -> None:
    done = invoke("report", str(tmp_path))
    assert done.exit_code == 1
    assert "RunDirectory" in done.output
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    done = invoke("report", str(tmp_path), "-o", str(tmp_path / "page.html"))
    assert done.exit_code == 0, done.output
    assert done.output.strip() == str(tmp_path / "page.html")
    assert '"loss"' in (tmp_path / "page.html").read_text()


def test_bench_needs_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[bench_command.callback.__module__], "_ROOT", tmp_path)
    done = invoke("bench")
    assert done.exit_code == 1
    assert "make bench" in done.output
    package = tmp_path / "benchmarks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("raise SystemExit(4)")
    (package / "closures.py").write_text("import sys; print(sys.argv[1:])")
    (package / "steps.py").write_text("raise SystemExit(3)")
    assert invoke("bench", "--quick", "closures").exit_code == 0
    done = invoke("bench", "closures", "steps")
    assert done.exit_code == 1
    assert "failed: benchmarks.steps" in done.output
    assert "failed: benchmarks\n" in invoke("bench").output


# -- doctor --------------------------------------------------------------------------------------------


def test_doctor_finds_nothing_wrong_here(tmp_path: Path) -> None:
    done = start("doctor", LAZYSTEP_CACHE_DIR=str(tmp_path / "cache"), LAZYSTEP_MAX_IN_FLIGHT="3")
    assert done.returncode == 0, done.stdout
    for expected in (
        f"torch {torch.__version__}",
        "lazy device: a step",
        "compiler: ",
        "cache: ",
        "mode 700",
        "threads: ",
    ):
        assert expected in done.stdout
    assert done.stdout.count("good     extension: ") == 4
    assert "setting max_in_flight = 3 (LAZYSTEP_MAX_IN_FLIGHT)" in done.stdout
    assert "\x1b" not in done.stdout


def test_doctor_says_what_will_not_work(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o777)
    (tmp_path / "shared").chmod(0o777)
    done = start("doctor", LAZYSTEP_CACHE_DIR=str(tmp_path / "shared"), CXX="no-such-compiler")
    assert done.returncode == 1
    assert "problem  compiler: there is no C++ compiler 'no-such-compiler'" in done.stdout
    assert "chmod 700" in done.stdout
    assert "problems: 2." in done.stdout


def test_doctor_tries_the_compiler(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'no headers' >&2\nexit 1\n")
    broken.chmod(0o755)
    done = start("doctor", LAZYSTEP_CACHE_DIR=str(tmp_path / "cache"), CXX=str(broken))
    assert done.returncode == 1
    assert "no headers" in done.stdout
