"""`torch._lazy.debug`: the recorded program as text or as a graph. Nothing here runs a program."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import debug as _debug
from ..names import Names

_names = Names(__name__)

render_ir_graph = _names.same(
    "render_ir_graph", _debug.render_ir_graph, "`lazystep.debug.render_ir_graph`", "a node per instruction"
)


@_names.does("`lazystep.debug.dump_ir`", '`"text"`; `"backend"` is refused')
def dump_ir(tensors: Sequence[torch.Tensor], ir_format: str) -> str:
    """The pending program of these tensors, with `ir_format="text"`. Runs nothing.

    `"backend"` raises: which executable will run a program is not known before it is queued.
    """
    if ir_format == "text":
        return _debug.dump_ir(tensors, "text")
    if ir_format == "backend":
        _names.refuse(
            'dump_ir(..., "backend")',
            'dump_ir(..., "text") for the program, and after the step lazystep.debug.explain()',
        )
    raise RuntimeError(f'ir_format is {ir_format!r}: expected "text" or "backend"')
