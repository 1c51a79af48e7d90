"""One pool of three processes for all tests of this folder: see tests/pool.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def lazy_pool() -> Iterator[Pool]:
    made = Pool(3)
    yield made
    made.close()
