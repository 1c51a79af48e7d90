"""Operators of PyTorch's database as native libraries: forward and backward in one program.

A library takes seconds to build, so a few operators stand for all of them here; every one is run by
`make conformance-native`. (`test_lowering` compares the uncompiled graphs of all operators.)
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterator

import pytest
import torch

import lazystep
from lazystep import config, metrics
from lazystep.barrier import runtime
from lazystep.execute.compare import TOLERANCES

from .compare import tensors_in
from .conftest import Counts
from .test_lowering import NEVER_LOWERED, NOT_LOWERED
from .test_ops import OPS, UNINITIALIZED, call, pick_samples

pytestmark = pytest.mark.timeout(900)
A_FEW = [
    "addcdiv",
    "cumsum",
    "linalg.solve",
    "nn.functional.batch_norm",
    "nn.functional.conv2d",
    "scatter_add",
]
NAMES = list(OPS) if os.environ.get("LAZYSTEP_NATIVE_OPS") == "all" else A_FEW


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "_lazy", types.SimpleNamespace(mark_step=lazystep.mark_step), raising=False)
    runtime.programs.clear()
    with config.override(tier="native", max_libraries=100_000):
        yield


@pytest.mark.parametrize("name", NAMES)
def test_operator_as_a_library(name: str, counts: Counts) -> None:
    op = OPS[name]
    dtype = torch.float32 if torch.float32 in op.supported_dtypes("cpu") else torch.int64
    if dtype not in op.supported_dtypes("cpu"):
        pytest.skip("neither float32 nor int64")
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    for sample in pick_samples(op, dtype, grad, 1):
        eager = call(op.op, sample, "cpu", grad=grad)
        call(op.op, sample, "lazy", grad=grad)  # builds, and compares with the reference
        lazy = call(op.op, sample, "lazy", grad=grad)
        lazystep.wait_device_ops()
        assert type(eager.error) is type(lazy.error)
        if eager.error is not None or name in UNINITIALIZED:
            continue
        for key in ("out", "grad", "args"):
            for want, got in zip(tensors_in(eager.tree[key]), tensors_in(lazy.tree[key]), strict=True):
                assert_close(got.detach().cpu(), want.detach())
    assert metrics.counter_value("native_mismatches") == 0 or name in UNINITIALIZED
    reasons = [one.reason for one in runtime.history._programs if one.reason]
    for reason in reasons:
        counts.add("on reference")
        assert NOT_LOWERED.get(name, NEVER_LOWERED) in reason
    counts.add("native executions") if metrics.counter_value("native_executions") else None
    if name in A_FEW:
        assert metrics.counter_value("native_executions") >= 1


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if not want.dtype.is_floating_point:
        if not want.dtype.is_complex:
            assert torch.equal(got, want)
        return
    scale = float(want[want.isfinite()].abs().max()) if want.isfinite().any() else 1.0
    atol = TOLERANCES.get(want.dtype, 1e-4) * max(scale, 1e-2)  # samples are about one: less is rounding
    torch.testing.assert_close(got, want, rtol=0, atol=atol, equal_nan=True)
