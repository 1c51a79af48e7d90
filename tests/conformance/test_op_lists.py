"""Modules record on the lazy device the list of aten ops that eager runs on the CPU.

Some of torch's composite ops and modules choose their parts by device. Numbers may agree by luck on
another branch, and its cost does not: this suite compares the ops themselves, in order, forward and
backward. Composites that need help are taken down CPU's branch in `lazystep.record.cpu_branch`.

The lists come from a dispatch mode, so both sides run torch's code for tensor subclasses; where that
differs from plain eager (`add` for `add_` when gradients accumulate), it does so on both.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .compare import seed, tensors_in
from .conftest import Counts
from .modules import MODULES, cases

NUM_INPUTS = 4

# Nothing is computed: another tensor for the same value.
IGNORED = {"aten.detach.default", "aten.alias.default"}


class ListException(NamedTuple):
    """Modules whose lists differ for a reason, in these ops only."""

    modules: str  # a pattern of their names
    ops: frozenset[str]
    reason: str


EXCEPTIONS = [
    ListException(
        "nn.Lazy*",
        frozenset({"aten.empty.memory_format", "aten._to_copy.default"}),
        "parameters without a shape are materialized on the host and then moved",
    ),
    ListException(
        "nn.CTCLoss",
        frozenset({"aten.empty.memory_format", "aten._to_copy.default"}),
        "torch makes a tensor of the lengths on the host and copies it to devices that are not CPU",
    ),
    ListException(
        "nn.LSTM",
        frozenset({"aten.zeros.default"}),
        "torch's composite makes the biases that a layer does not have on the host: they enter as inputs",
    ),
    ListException(
        "nn.CircularPad*",
        frozenset({"aten.slice.Tensor", "aten.as_strided.default"}),
        "torch does not use as_strided for views written in place on devices of type lazy: it slices again",
    ),
]


class OpList(TorchDispatchMode):
    """Lists the ops that reach the backends, with overloads, in order."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # In the lazy run, what touches plain CPU tensors only is no part of the recording: it is how
        # lazystep asks torch which branch the CPU would take.
        is_listed = self.device == "cpu" or any(
            t.device.type == "lazy" or type(t) not in (torch.Tensor, nn.Parameter)  # a facade's device is CPU
            for t in tensors_in((args, kwargs, out))
        )
        if is_listed and str(func) not in IGNORED:
            self.ops.append(str(func))
        return out


def ops_of(run: Callable[[], Any], device: str) -> list[str]:
    seed()
    with OpList(device) as listed:
        run()
    return listed.ops


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_lazy_records_the_ops_of_eager(name: str, mode: str, counts: Counts) -> None:
    exceptions = [e for e in EXCEPTIONS if fnmatch(name, e.modules)]
    excepted = frozenset().union(*(e.ops for e in exceptions))
    differs_without = False
    for index, case in enumerate(cases(MODULES[name], torch.float32, mode == "train", NUM_INPUTS)):
        expected, actual = ops_of(case.prepare("cpu"), "cpu"), ops_of(case.prepare("lazy"), "lazy")
        differs_without |= expected != actual
        expected, actual = ([op for op in ops if op not in excepted] for ops in (expected, actual))
        counts.add(mode if not exceptions else f"{mode}, with an exception")
        difference = "\n".join(difflib.unified_diff(expected, actual, "eager", "lazy", n=1, lineterm=""))
        assert not difference, f"input {index}:\n{difference}"
    assert differs_without or not exceptions, f"no exception is needed any more: {exceptions}"
