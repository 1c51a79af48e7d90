"""`torch._lazy.extract_compiled_graph`: a function on CPU tensors that runs an FX graph on the lazy device.

The helpers that know nothing of a backend are torch's own, the only private part of torch that `compat` uses
beside the list of factory functions.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._lazy.extract_compiled_graph import GraphInputMatcher as _GraphInputMatcher
from torch._lazy.extract_compiled_graph import ReturnValueHandler as _ReturnValueHandler
from torch._lazy.extract_compiled_graph import force_lazy_device as _force_lazy_device

from ... import metrics as _metrics
from ...capture.step import step as _step
from ...debug import last_program as _last_program
from ...reads import to_cpu as _to_cpu
from .. import torch_lazy as _lazy
from ..names import Names
from . import computation as _computation
from . import debug as _lazy_debug
from . import metrics as _lazy_metrics
from .tensor_factory_functions import tensor_factory_functions as _tensor_factory_functions

_names = Names(__name__)

lazy = _names.same("lazy", _lazy, "the same module")
metrics = _names.same("metrics", _lazy_metrics, "the same module")
computation = _names.same("computation", _computation, "the same module")
lazy_debug = _names.same("lazy_debug", _lazy_debug, "the same module")
tensor_factory_functions = _names.same("tensor_factory_functions", _tensor_factory_functions, "torch's own")

GraphInputMatcher = _names.same("GraphInputMatcher", _GraphInputMatcher, "torch's own")
ReturnValueHandler = _names.same("ReturnValueHandler", _ReturnValueHandler, "torch's own")
force_lazy_device = _names.same("force_lazy_device", _force_lazy_device, "torch's own")
debug = _names.same(
    "debug",
    os.environ.get("debug_extract_compiled_graph") is not None,  # noqa: SIM112 - torch's spelling
    "the same variable: prints the program",
)


@_names.does("`lazystep.metrics.synchronizations()`", "the reasons of waits; an op on the host is one")
def get_fallback_ops() -> list[str]:
    """The waits since the counters were reset, each as `reason=count`. An op that runs on the host is one."""
    prefix = "synchronizations:"
    names = [name for name in _metrics.counter_names() if name.startswith(prefix)]
    return [f"{name.removeprefix(prefix)}={_metrics.counter_value(name)}" for name in names]


@_names.does("`@lazystep.step`", "guards its replays itself; waits for its results, which are CPU tensors")
def extract_compiled_graph(
    model: fx.GraphModule, example_inputs: Sequence[torch.Tensor]
) -> Callable[..., list[torch.Tensor]]:
    """A function that runs a copy of `model` on the lazy device, captured, and returns its results as a list.

    Takes and returns CPU tensors. Arguments that the model writes in place are written back. Each call waits
    for its results. A trial with `example_inputs` is recorded here, on copies of them and of the model. A
    model that waits for a value raises.
    """
    lazy_model = copy.deepcopy(model).to("lazy")
    force_lazy_device(lazy_model)
    lazy_args = [arg.to("lazy") for arg in example_inputs]
    before = [arg._version for arg in lazy_args]
    waits = _metrics.synchronizations()
    with torch.random.fork_rng(devices=[]):
        copy.deepcopy(lazy_model)(*lazy_args)  # neither buffers nor the generator move before the first call
    if new := [wait for wait in _metrics.synchronizations() if wait not in waits]:
        text = ", ".join(f"{reason} at {line}" for reason, line, _ in new)
        raise RuntimeError(f"the graph can't be extracted, because it waits for values: {text}")
    # The graph has no branches, so each run writes the same arguments.
    written = [number for number, arg in enumerate(lazy_args) if arg._version != before[number]]
    captured = _step(lazy_model.__call__)

    def run(*args: torch.Tensor) -> list[torch.Tensor]:
        moved = [arg.to("lazy") for arg in args]
        with torch.no_grad():  # the results are CPU tensors without a graph
            results: Any = captured(*moved)
        if debug:
            print(_last_program())
        results, new_values = _to_cpu((results, [moved[number] for number in written]))
        for number, value in zip(written, new_values, strict=True):
            args[number].copy_(value)
        return list(results) if isinstance(results, (tuple, list)) else [results]

    return run
