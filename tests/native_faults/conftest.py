"""What all tests of native faults get: a cache of their own, and a builder that they may break."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import lazystep
from lazystep import config, notices
from lazystep.barrier import runtime
from lazystep.compile import builder as builder_module
from lazystep.tiers import Tiers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))


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
