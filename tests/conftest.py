"""What every test gets: checked programs, and a lazy device without leftovers of the test before."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

# The reference executable unless a test asks for more: bit for bit eager, and nothing in the background.
os.environ.setdefault("LAZYSTEP_TIER", "reference")
# Never the user's own cache.
_cache = tempfile.TemporaryDirectory(prefix="lazystep-tests-")
os.environ["LAZYSTEP_CACHE_DIR"] = _cache.name

import lazystep  # noqa: E402
from lazystep import config  # noqa: E402
from lazystep.barrier import runtime  # noqa: E402
from lazystep.history import History  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Captures and tests collect garbage: not each time through all that torch and earlier modules have made.

    Late in a session a collection took seconds, and a hundred of them a test's whole time limit.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_device() -> Iterator[None]:
    config.settings.verify_programs = True
    torch.manual_seed(0)
    lazystep.metrics.reset()
    runtime.history = History()
    runtime.tiers.num_loaded = 0  # the limit is a process's, not a test session's
    yield
    # A test that expects a background failure has to take it: none may leak into the next one.
    lazystep.mark_step(wait=True)
    lazystep.wait_device_ops()
