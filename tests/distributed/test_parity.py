"""Lazy data-parallel steps equal torch's DDP on the CPU bit for bit, plain and captured, on 2 and 3 ranks."""

from __future__ import annotations

import os
import re

import pytest

from tests.helpers import ROOT, nightly
from tests.pool import Pool

from .cases import CASES, NUM_STEPS, OPTIMIZERS, compare

PAGE = ROOT / "docs" / "distributed.md"
MARKED = re.compile(r"(<!-- table -->\n).*(<!-- end of table -->)", re.DOTALL)


def check(pool: Pool, name: str, optimizer: str, num_ranks: int) -> None:
    case = CASES[name]
    for rank, found in enumerate(pool.run(compare, name, optimizer, num_ranks=num_ranks, timeout=240)):
        assert found["num_tensors"] > NUM_STEPS
        assert found["plain"] == [], f"rank {rank}: these tensors differ"
        assert found["captured"] == [], f"rank {rank}: these tensors differ"
        if case.not_replayed:
            assert found["num_replayed"] == 0
            assert case.not_replayed in found["explanation"]
        else:
            assert found["num_replayed"] >= 2, found["explanation"]


# Sums of three ranks differ in their last bits by the order of the ranks, sums of two do not.
@pytest.mark.parametrize("name", CASES)
def test_case_equals_torchs_ddp_on_three_ranks(lazy_pool: Pool, name: str) -> None:
    check(lazy_pool, name, "AdamW, fused", 3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_equals_torchs_ddp_on_two_ranks(lazy_pool: Pool, optimizer: str) -> None:
    check(lazy_pool, "plain", optimizer, 2)


@pytest.mark.parametrize("num_ranks", nightly([2, 3]))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", CASES)
def test_every_case_with_every_optimizer(lazy_pool: Pool, name: str, optimizer: str, num_ranks: int) -> None:
    check(lazy_pool, name, optimizer, num_ranks)


def test_page_has_the_table_of_cases() -> None:
    rows = ["| loop | plain | captured |", "|---|---|---|"]
    for name, case in CASES.items():
        captured = f"recorded: {case.not_replayed}" if case.not_replayed else "equal, replayed"
        rows.append(f"| {name} | equal | {captured} |")
    page = PAGE.read_text()
    wanted, num_tables = MARKED.subn(lambda found: found[1] + "\n".join([*rows, found[2]]), page)
    assert num_tables == 1
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(wanted)
    assert page == wanted, "UPDATE_DOCS=1 rewrites the table"
