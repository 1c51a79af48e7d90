"""Biases of linear layers: added where the product is read, not copied into its memory before.

`addmm` on the CPU copies the bias into every row of the result and adds the product to it. If only loops of
Inductor read the result, such as an activation or a residual sum, the bias costs them next to nothing: they
read the product anyway. So `addmm` becomes `mm`, and the bias is added behind the view that a linear layer
puts on the result. (Inductor would turn a sum right behind `mm` into `addmm` again.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
# Sums in lower precision would round twice.
_DTYPES = (torch.float32, torch.float64)


def add_biases_late(graph: GraphModule) -> None:
    """Rewrite each `addmm` with a bias whose result is read by loops alone, through one view."""
    for node in graph.graph.find_nodes(op="call_function", target=_aten.addmm.default):
        if len(node.users) == 1 and not node.kwargs and len(node.args) == 3:
            (view,) = node.users
            if _is_bias(node) and _keeps_columns(view) and all(map(_is_loop, view.users)) and view.users:
                _rewrite(graph.graph, node, view)


def _rewrite(graph: Graph, node: Node, view: Node) -> None:
    bias, first, second = node.args
    with graph.inserting_before(node):
        product = graph.call_function(_aten.mm.default, (first, second))
        product.meta = dict(node.meta)
    view.replace_input_with(node, product)
    graph.erase_node(node)
    with graph.inserting_after(view):
        total = graph.call_function(_aten.add.Tensor, (view, bias))
        total.meta = dict(view.meta)
    view.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)


def _is_bias(node: Node) -> bool:
    bias: Any = node.args[0]
    value = bias.meta["val"]
    return value.dim() == 1 and value.dtype in _DTYPES and value.dtype == node.meta["val"].dtype


def _keeps_columns(view: Node) -> bool:
    """Whether a node views a matrix with the same last dimension, so that a bias fits it, too."""
    if view.target not in _VIEWS:
        return False
    before, after = view.args[0].meta["val"], view.meta["val"]  # type: ignore[union-attr]
    sizes = before.shape[-1], after.shape[-1]
    return after.dim() > 0 and all(type(size) is int for size in sizes) and sizes[0] == sizes[1]


def _is_loop(user: Node) -> bool:
    return torch.Tag.pointwise in getattr(user.target, "tags", ())
