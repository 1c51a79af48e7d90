"""`torch._lazy.computation`: the identity of a recorded program.

torch._lazy runs a graph again by its hash and a list of inputs, which the caller has to match with tensors by
their numbers. Numbers of the program and random draws are frozen then. `@lazystep.step` does that work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from ... import debug as _debug
from ...program.serialize import to_json as _to_json
from ..names import Names

_names = Names(__name__)

_STEP = "`@lazystep.step`"
_WHY = "each replay uses the current numbers and state, and draws new random numbers"
get_tensors_ts_device_data_node = _names.refused("get_tensors_ts_device_data_node", _STEP, _WHY)
run_cached_graph = _names.refused("run_cached_graph", _STEP, _WHY)


@_names.does(
    "a digest of `lazystep.debug.pending_program`", "numbers such as learning rates are no part of it"
)
def get_graph_hash(tensors: Sequence[torch.Tensor]) -> str:
    """A digest of the program that would compute these tensors. Runs nothing.

    Equal for equal programs, also in another process. A tensor that already has its value adds nothing.
    """
    return hashlib.sha256(_to_json(_debug.pending_program(tensors)).encode()).hexdigest()
