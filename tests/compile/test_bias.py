"""Biases are added by the loops that read a product, where there are such loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import lazystep
from tests.compile.test_update import Lowered, lowered  # noqa: F401 - runs and compares lowered graphs
from tests.helpers import descend

aten = torch.ops.aten


class Block(nn.Module):
    """A third of a transformer's: a residual, an activation, and a product that no loop reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.heads = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.outer(nn.functional.gelu(self.inner(x)))
        return x @ self.heads(x).transpose(1, 2)


def num_calls(graph: torch.fx.GraphModule, op: Any) -> int:
    return len(graph.graph.find_nodes(op="call_function", target=op))


def test_biases_before_loops_are_not_copied_into_results(lowered: type[Lowered]) -> None:  # noqa: F811
    torch.manual_seed(0)
    model = Block().to("lazy")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(4, 3, 8)
    for _ in range(3):
        descend(model(x.to("lazy")).square().mean(), optimizer)
        lazystep.mark_step()
    lazystep.wait_device_ops()
    graph = lowered.graphs[-1]
    # The activation and the residual add two biases. The third product is read by another product.
    assert num_calls(graph, aten.addmm.default) == 1


def test_low_precision_and_plain_products_keep_addmm(lowered: type[Lowered]) -> None:  # noqa: F811
    layer = nn.Linear(8, 8)
    for dtype, shape in ((torch.bfloat16, (4, 3, 8)), (torch.float32, (4, 8))):
        lazy = layer.to(dtype).to("lazy")
        y = lazy(torch.randn(shape, dtype=dtype).to("lazy")).relu()
        lazystep.mark_step(wait=True)
        assert num_calls(lowered.graphs[-1], aten.addmm.default) == 1
        assert y.shape == shape
        layer = nn.Linear(8, 8)
