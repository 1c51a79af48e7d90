"""Runs an example in this process, because importing torch and the packages takes longer than the example."""

from __future__ import annotations

import re
import runpy
import sys
from typing import Any

import pytest

from tests.helpers import ROOT


def run_example(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> Any:
    """The exit status of a quick run, or None if the example ends without one."""
    path = str(ROOT / "examples" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [path, "--quick", *map(str, arguments)])
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        return end.code
    return None


def counts_in(printed: str) -> tuple[int, int, int]:
    """How often the example has recorded and replayed its step, and its number of captures, as printed."""
    found = re.search(r"recorded (\d+) times, replayed (\d+) times, (\d+) capture", printed)
    assert found is not None, printed
    return int(found[1]), int(found[2]), int(found[3])
