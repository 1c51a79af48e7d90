"""The command line: what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lazystep import cli
from lazystep.compile.cache import LIBRARY, LibraryCache


@pytest.fixture
def root(tmp_path: Path) -> Path:
    opened = LibraryCache.open(tmp_path / "cache")
    for key in ("aaa1", "aab2"):
        directory = opened.temporary_directory()
        (directory / LIBRARY).write_bytes(key.encode())
        opened.publish(key, directory, {"proxy_ops": [], "torch": "2.13", "program": f"def step(): {key}\n"})
    return tmp_path / "cache"


def run(root: Path, *args: str) -> Result:
    return CliRunner().invoke(cli.main, ["cache", "--directory", str(root), *args])


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
