"""What every test gets: checked programs, and a lazy device without leftovers of the test before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

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
