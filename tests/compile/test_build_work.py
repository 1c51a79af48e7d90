"""How much work a build is, by counts: traces, nodes of the graph, lines of generated code."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from tests.builds import cache, steps_until_native
from tests.helpers import count, descend, run_python

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("own_cache")]


def build_of(num_layers: int) -> dict[str, Any]:
    """The manifest of the library of an MLP's training step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers))).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 8)
    for _ in steps_until_native(6):
        descend(model(x.to("lazy")).square().mean(), optimizer)
    entries = cache().entries()
    return dict(max(entries, key=lambda entry: entry.last_used).manifest)


def test_wrapper_has_no_lines_for_each_input() -> None:
    """Inductor's checks of inputs, which are off, took 45 lines or more for each input."""
    small, large = build_of(2), build_of(6)
    # 4 layers more: 8 parameters with two tensors of state each, 24 inputs.
    assert (large["wrapper_lines"] - small["wrapper_lines"]) / 24 < 20
    # Nor the 659 lines of torch's interface, which are compiled once for all libraries.
    assert small["wrapper_lines"] < 600
    assert count("headers_compiled") <= 2
    assert count("interfaces_compiled") <= 1


TRACES = """
import json, torch
from pathlib import Path
from torch.fx.experimental import proxy_tensor
from lazystep.compile import worker
from lazystep.compile.key import inductor_options
sizes = []
trace = proxy_tensor.dispatch_trace
def counted(*args, **kwargs):
    graph = trace(*args, **kwargs)
    sizes.append(len(graph.graph.nodes))
    return graph
proxy_tensor.dispatch_trace = counted
program = {program!r}
request = {{"program": program, "fixed": {{}}, "num_threads": 1, "options": inductor_options(1)}}
answer = worker._build({{**request, "directory": {directory!r}}})
print(json.dumps([answer["nodes"], sizes]))
"""


def test_graph_is_traced_once(tmp_path: Any) -> None:
    from lazystep.program.program import Instruction, Program, Ref, Storage, Value
    from lazystep.program.serialize import to_json
    from lazystep.program.types import tensor_type

    type_ = tensor_type(torch.float32, (4, 8), (8, 1))
    num_ops = 200
    program = Program(
        values={n: Value(type_, n) for n in range(num_ops + 1)},
        storages=tuple(Storage(128, n == 0) for n in range(num_ops + 1)),
        inputs=(0,),
        scalars=(),
        instructions=tuple(
            Instruction("aten.sin.default", (Ref(n),), (), (n + 1,), (), (), None) for n in range(num_ops)
        ),
        outputs=(num_ops,),
    )
    done = run_python("-c", TRACES.format(program=to_json(program), directory=str(tmp_path)))
    nodes, sizes = json.loads(done.stdout.splitlines()[-1])
    assert nodes == num_ops + 2
    # Inductor traces its patterns, too, which are small.
    assert len([size for size in sizes if size >= num_ops]) == 1
