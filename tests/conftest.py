"""What every test gets: checked programs, and a lazy device without leftovers of the test before.

Internals that several tests look at come from the fixtures here, so that a module that moves is named in one
place.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

# The reference executable unless a test asks for more: bit for bit eager, and nothing in the background.
os.environ.setdefault("LAZYSTEP_TIER", "reference")
# Never the user's own cache.
_cache = tempfile.TemporaryDirectory(prefix="lazystep-tests-")
os.environ["LAZYSTEP_CACHE_DIR"] = _cache.name

import lazystep  # noqa: E402
from lazystep import config, notices  # noqa: E402
from lazystep.ops import dispatch as dispatch_module  # noqa: E402
from lazystep.record import _recorder  # noqa: E402
from lazystep.record.tensor import handle_of  # noqa: E402
from lazystep.runtime import Runtime  # noqa: E402
from lazystep.runtime import runtime as the_runtime  # noqa: E402
from lazystep.tiers import tiered  # noqa: E402
from lazystep.tiers.history import History  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Captures and tests collect garbage: not each time through all that torch and earlier modules have made.

    Late in a session a collection took seconds, and a hundred of them a test's whole time limit.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_device(runtime: Runtime) -> Iterator[None]:
    config.settings.verify_programs = True
    torch.manual_seed(0)
    lazystep.metrics.reset()
    runtime.history = History()
    runtime.tiers.num_loaded = 0  # the limit is a process's, not a test session's
    yield
    # A test that expects a background failure has to take it: none may leak into the next one.
    lazystep.mark_step(wait=True)
    lazystep.wait_device_ops()


# -- internals -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def runtime() -> Runtime:
    """The lazy device's state: recorder, programs, executor, tiers, history."""
    return the_runtime


@pytest.fixture(scope="session")
def runtime_module(runtime: Runtime) -> ModuleType:
    """The module that cuts and queues programs, to replace what it calls."""
    return sys.modules[type(runtime).__module__]


@pytest.fixture(scope="session")
def value_of() -> Callable[[torch.Tensor], torch.Tensor | None]:
    """The CPU tensor behind a lazy one; None as long as it has not been computed."""
    return lambda tensor: handle_of(tensor).tensor


@pytest.fixture(scope="session")
def extension() -> ModuleType:
    """The recorder in C++, for what it counts."""
    return _recorder


@pytest.fixture(scope="session")
def dispatch() -> ModuleType:
    """The module that C++ asks about a new call (`decide`), a draw (`draw`) and a line (`user_source`)."""
    return dispatch_module


# -- native libraries ------------------------------------------------------------------------------


@pytest.fixture
def auto_tier(runtime: Runtime, tmp_path: Path) -> Iterator[None]:
    """Libraries are built from the second run on, in a cache of the test's own. The builder stays warm."""
    runtime.programs.clear()
    notices.forget()
    with config.override(tier="auto", build_after=2, cache_dir=str(tmp_path / "cache")):
        yield
        lazystep.wait_for_compile(300)
    notices.forget()


@pytest.fixture
def own_builder(auto_tier: None, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A builder that the test may break."""
    own = tiered.Tiers()
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "tiers", own)
        yield own.builder
        lazystep.wait_device_ops()
        runtime.programs.clear()
        own.close()


@pytest.fixture
def wrap_libraries(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Any]], None]:
    """Have every library that is loaded from now on wrapped by a function."""
    load = tiered.load

    def wrap(wrapper: Callable[[Any], Any]) -> None:
        monkeypatch.setattr(tiered, "load", lambda path: wrapper(load(path)))

    return wrap
