"""Every row of the parity table: 8 steps in 2 or 3 real processes, difference exactly 0, or refused."""

from __future__ import annotations

import os
import re

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, quantization_hooks

from lazystep.overlap.refusals import QUANTIZATION_RUNS_ON_GLOO
from tests.helpers import ROOT
from tests.pool import Pool, World

from .hook_rows import hooked
from .pairwise import Combination, combinations, describe
from .row import HOOKS, ROWS, Row
from .table import OPTIMIZERS, TORCH_OPTIMIZERS, Table, forms_of, run_combination, run_optimizer
from .training import Outcome, Run, compare, mlp

PAGE = ROOT / "docs" / "overlap.md"
MARKED = re.compile(r"(<!-- table -->\n).*(\n<!-- end of table -->)", re.DOTALL)


@pytest.fixture(scope="module")
def table(pool: Pool) -> Table:
    return Table(pool)


def check(row: Row, outcomes: list[Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        if row.refused_at:
            assert outcome.verdict == "refused", f"rank {rank}: {outcome}"
            assert outcome.stage == row.refused_at, f"rank {rank}: {outcome}"
            assert row.words in outcome.message, f"rank {rank}: {outcome}"
        else:
            assert outcome.verdict == "equal", f"rank {rank}: {outcome}"
            assert outcome.num_tensors > 0
            assert (outcome.updated > 0) == row.overlaps, f"rank {rank}: {outcome}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ROWS)
def test_row_is_equal_to_plain_ddp_or_refused(table: Table, name: str, optimizer: str) -> None:
    check(ROWS[name], table.outcomes(ROWS[name], optimizer))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", HOOKS)
def test_hook_is_equal_to_plain_ddp_with_it_or_refused(table: Table, name: str, optimizer: str) -> None:
    check(HOOKS[name], table.outcomes(HOOKS[name], optimizer))


def run_quantized(world: World, name: str) -> Outcome:
    hook = getattr(quantization_hooks, name)
    return compare(world, lambda run: hooked(run, hook, world.group, bucket_cap_mb=None), "SGD")


@pytest.mark.parametrize("name", ["quantization_pertensor_hook", "quantization_perchannel_hook"])
def test_quantization_hook_with_one_bucket_follows_the_release_of_torch(pool: Pool, name: str) -> None:
    """The table in the docs is the same for each release, so this row is not in it."""
    for outcome in pool.run(run_quantized, name):
        if QUANTIZATION_RUNS_ON_GLOO:
            assert outcome.verdict == "equal", outcome
            assert outcome.updated > 0
        else:
            assert (outcome.verdict, outcome.stage) == ("refused", "set-up"), outcome
            assert "IndexError" in outcome.message.partition("; the baseline: ")[2], "plain DDP fails as well"


@pytest.mark.parametrize(("name", "form"), [(n, f) for n in TORCH_OPTIMIZERS for f in forms_of(n)])
def test_torch_optimizer_is_equal_to_plain_ddp(pool: Pool, name: str, form: str) -> None:
    for outcome in pool.run(run_optimizer, name, form):
        assert outcome.verdict == "equal", outcome
        assert outcome.updated > 0
        assert outcome.left == 0


@pytest.mark.parametrize("combination", combinations(), ids=describe)
def test_combination_is_equal_to_plain_ddp(pool: Pool, combination: Combination) -> None:
    for outcome in pool.run(run_combination, combination, num_ranks=int(combination["ranks"])):
        assert outcome.verdict == "equal", outcome


def test_comparison_notices_the_last_bit(pool: Pool) -> None:
    """The table could not fail if a difference of one rounding went unnoticed."""
    for outcome in pool.run(run_wrong_rounding, num_ranks=3):
        assert outcome.verdict == "different"
        assert 0 < outcome.difference < 1e-6


def run_wrong_rounding(world: World) -> Outcome:
    def script(run: Run) -> None:
        ddp = run.ddp(mlp())
        optimizer = run.optimizer(ddp.parameters())
        if not run.overlapped:  # divides, where built-in DDP multiplies
            ddp.register_comm_hook(world.group, default_hooks.allreduce_hook)
        run.overlap(ddp, optimizer)
        run.train(ddp, optimizer)

    return compare(world, script, "SGD")


def test_table_in_the_docs_is_current(table: Table) -> None:
    text = PAGE.read_text()
    expected = MARKED.sub(lambda m: m[1] + table.to_markdown() + m[2], text)
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(expected)
        text = expected
    assert text == expected, "UPDATE_DOCS=1 pytest tests/overlap/test_parity.py -k docs rewrites the table"
