"""What every test gets: checked programs, and a lazy device without leftovers of the test before."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# The reference executable unless a test asks for more: bit for bit eager, and nothing in the background.
os.environ.setdefault("LAZYSTEP_TIER", "reference")

import lazystep
from lazystep import config


@pytest.fixture(autouse=True)
def clean_device() -> Iterator[None]:
    config.settings.verify_programs = True
    torch.manual_seed(0)
    lazystep.metrics.reset()
    yield
    # A test that expects a background failure has to take it: none may leak into the next one.
    lazystep.mark_step(wait=True)
    lazystep.wait_device_ops()
