"""Indices out of range in native steps: eager's error of the step, and never the end of the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazystep
from tests.helpers import count

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("auto_tier")]
ROWS, COLUMNS, NUM = 6, 5, 16
IGNORED = -100


def _scores(table: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(table.t()[:1].expand(NUM, ROWS), 1)


def _wide(index: torch.Tensor) -> torch.Tensor:
    return index[:, None].expand(NUM, COLUMNS)


Op = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# By the name of the op: a call of it on a table, new rows and indices; the lowest index that eager takes; the
# first one that is too high.
OPS: dict[str, tuple[Op, int, int]] = {
    "embedding": (lambda table, rows, i: F.embedding(i, table), 0, ROWS),
    "index": (lambda table, rows, i: table[i], -ROWS, ROWS),
    "gather": (lambda table, rows, i: table.gather(0, _wide(i)), 0, ROWS),
    "index_select": (lambda table, rows, i: table.index_select(0, i), 0, ROWS),
    "take": (lambda table, rows, i: table.take(i), -ROWS * COLUMNS, ROWS * COLUMNS),
    "nll_loss_forward": (lambda table, rows, i: F.nll_loss(_scores(table), i), 0, ROWS),
    "index_put_": (lambda table, rows, i: table.clone().index_put_((i,), rows[0]), -ROWS, ROWS),
    "index_add_": (lambda table, rows, i: table.clone().index_add_(0, i, rows), 0, ROWS),
    "index_copy_": (lambda table, rows, i: table.clone().index_copy_(0, i, rows * 0), 0, ROWS),
    "index_fill_": (lambda table, rows, i: table.clone().index_fill_(0, i, 2.0), -ROWS, ROWS),
    "scatter_": (lambda table, rows, i: table.clone().scatter_(0, _wide(i), rows * 0), 0, ROWS),
    "scatter_add_": (lambda table, rows, i: table.clone().scatter_add_(0, _wide(i), rows), 0, ROWS),
    "scatter_reduce_": (
        lambda table, rows, i: table.clone().scatter_reduce_(0, _wide(i), rows, "amax"),
        0,
        ROWS,
    ),
    "max_unpool2d": (lambda table, rows, i: F.max_unpool2d(_image(rows), _image(i), 2), 0, NUM * 4),
}


def _image(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(NUM, -1)[:, 0].reshape(1, 1, 4, NUM // 4)


def _inputs() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    table, rows = (
        torch.randn(ROWS, COLUMNS, generator=generator),
        torch.randn(NUM, COLUMNS, generator=generator),
    )
    indices = {name: torch.arange(NUM) % ROWS for name in OPS}
    for name, (_, low, _) in OPS.items():
        indices[name][0] = low  # the first that is right
    indices["nll_loss_forward"][1] = IGNORED
    indices["max_unpool2d"] = torch.arange(NUM) * 2
    return table, rows, indices


def _run(indices: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """All ops in one step, on the lazy device."""
    table, rows, _ = _inputs()
    lazy_table, lazy_rows = table.to("lazy"), rows.to("lazy")
    lazy = {name: index.to("lazy") for name, index in indices.items()}
    results = [op(lazy_table, lazy_rows, lazy[name]) for name, (op, _, _) in OPS.items()]
    lazystep.mark_step()
    return [result.cpu() for result in results]


def test_index_out_of_range_is_eagers_error() -> None:
    """In one library with all ops, because a build takes long. Steps behind a failure are right."""
    table, rows, indices = _inputs()
    expected = [op(table, rows, indices[name]) for name, (op, _, _) in OPS.items()]
    for number in range(4):
        torch.testing.assert_close(_run(indices), expected)
        if number == 1:
            assert lazystep.wait_for_compile(300)
    num_native = count("native_executions")
    assert num_native >= 1
    for name, (op, low, high) in OPS.items():
        for out_of_range in (low - 1, high):
            bad = indices[name].clone()
            bad[NUM // 2] = out_of_range
            with pytest.raises((IndexError, RuntimeError)) as eager:
                op(table, rows, bad)
            with pytest.raises(lazystep.StepError, match=rf"native\) failed in aten\.{name}\.") as caught:
                _run(indices | {name: bad})
            assert "test_bounds.py" in str(caught.value)
            assert type(caught.value.__cause__) is type(eager.value)
            assert str(caught.value.__cause__) == str(eager.value)
    torch.testing.assert_close(_run(indices), expected)
    assert count("native_executions") == num_native + 1, "failed runs do not count, the one behind them does"


def _trained() -> tuple[nn.Embedding, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, COLUMNS).to("lazy")
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

    @lazystep.step(audit_every=0)
    def train(index: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(table(index), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return table, optimizer, train


@pytest.mark.parametrize("where", ["index", "target"])
def test_training_goes_on_after_a_bad_batch(where: str) -> None:
    """A failed native step leaves its parameters half updated, until they are loaded again."""
    table, _, train = _trained()
    good = {"index": torch.arange(NUM) % ROWS, "target": torch.arange(NUM) % COLUMNS}
    for _ in range(6):
        train(**good)
        lazystep.wait_device_ops()
        lazystep.wait_for_compile(300)
    assert count("native_executions") >= 1
    saved = {name: tensor.cpu() for name, tensor in table.state_dict().items()}
    expected = train(**good).item()
    op = {"index": r"aten\.embedding", "target": r"aten\.nll_loss_forward"}[where]

    def fail() -> None:
        train(**good | {where: good[where] + 1})
        for _ in range(3):
            train(**good)
        lazystep.wait_device_ops()

    with pytest.raises(
        lazystep.StepError, match=rf"native\) failed in {op}.*test_bounds.*IndexError: .*out of "
    ):
        fail()
    with pytest.raises(lazystep.StepError, match="half updated"):
        table.weight.tolist()
    table.load_state_dict(saved)
    before = count("native_executions")
    assert train(**good).item() == pytest.approx(expected)
    assert count("native_executions") == before + 1
