"""Every operator of PyTorch's operator database under autocast: lazy equals eager bit for bit.

The forward pass runs under autocast, the backward pass after it, as torch's documentation asks for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._python_dispatch import TorchDispatchMode

import lazystep
from lazystep.ops.cpu_branch import TAKEN_APART

from .compare import copy_inputs, tree_difference
from .conftest import Counts
from .test_ops import (  # noqa: F401 - a fixture
    OPS,
    Checker,
    _barrier_of_torch_testing,
    call,
    has_values,
    pick_samples,
)

DTYPES = (torch.bfloat16, torch.float16)
# Eager casts inside the kernels of these, which a recorded op can't do. They are refused.
REFUSED = [name for name in ("torch._scaled_mm", "torch._scaled_mm_v2", "linalg.polar") if name in OPS]
EQUAL = [name for name in OPS if name not in REFUSED]
# Their kernels call `cat`, which autocast promotes. In eager it raises for a lower type that is not
# autocast's. A recorded op does not raise: docs/limits.md.
CAT_INSIDE = ("matrix_exp", "_chunk_cat", "roll", "fft.fftshift", "fft.ifftshift")
KEY = "AutocastCPU"


def cast_by(function: Callable[..., Any], device: str, dtype: torch.dtype) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype):
            return function(*args, **kwargs)

    return run


def types_of_inputs(op: OpInfo) -> list[torch.dtype]:
    """float32, which autocast casts, and the lower types, which it promotes; or one type that there is."""
    supported = op.supported_dtypes("cpu")
    usual = [dtype for dtype in (torch.float32, *DTYPES) if dtype in supported]
    return usual or [min(supported, key=str)]


@pytest.mark.parametrize("name", EQUAL)
def test_operator_under_autocast_equals_eager_bitwise(name: str, num_samples: int, counts: Counts) -> None:
    op, checker = OPS[name], Checker(name, counts)
    for given in types_of_inputs(op):
        grad = op.supports_autograd and given in op.supported_backward_dtypes("cpu")
        # A quarter of the budget: by default one sample.
        samples = pick_samples(op, given, grad, max(1, num_samples // 4))
        for device, dtype in zip(("lazy", "cpu"), DTYPES, strict=True):
            checker.label = f"{given} under autocast to {dtype}".replace("torch.", "")
            for number, sample in enumerate(samples):
                function = cast_by(op.op, device, dtype)
                if name in CAT_INSIDE and given not in (torch.float32, dtype):
                    error = call(function, sample, "cpu", grad=grad).error
                    if "at::autocast::prioritize" in str(error):
                        continue
                checker.check(function, sample, f"sample {number}", grad=grad)
    checker.finish()


@pytest.mark.parametrize("name", REFUSED)
def test_operator_that_casts_inside_is_refused(name: str) -> None:
    op = OPS[name]
    sample = pick_samples(op, types_of_inputs(op)[0], False, 1)[0]
    outcome = call(cast_by(op.op, "lazy", torch.bfloat16), sample, "lazy", grad=False)
    assert isinstance(outcome.error, lazystep.UnsupportedError)
    assert "enabled=False" in str(outcome.error)

    def off(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("lazy", enabled=False):
            return op.op(*args, **kwargs)

    want = call(op.op, sample, "cpu", grad=False)
    got = call(cast_by(off, "lazy", torch.bfloat16), sample, "lazy", grad=False)
    assert tree_difference(want.tree["out"], got.tree["out"]) is None


@pytest.mark.parametrize("name", ["torch._scaled_mm"])
def test_operator_that_casts_inside_is_refused_with_its_results_given(name: str) -> None:
    a, scale = torch.ones(16, 16).to(torch.float8_e4m3fn).to("lazy"), torch.ones(()).to("lazy")
    out = torch.zeros(16, 16).to("lazy")
    with (
        torch.autocast("lazy", torch.bfloat16),
        pytest.raises(lazystep.UnsupportedError, match="enabled=False"),
    ):
        OPS[name].op(a, a.t(), scale, scale, out_dtype=torch.float32, out=out)
    assert out.sum().item() == 0


class CastingInside(TorchDispatchMode):
    """Runs each op twice on CPU tensors, with and without autocast in its kernel, and notes what differs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # An op with a kernel of autocast's own has cast before it gets here.
        is_cast = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), KEY)
        if is_cast or func._schema.is_mutable or "empty" in func.name():
            return func(*args, **kwargs)
        state = torch.get_rng_state()
        # Here autocast is off: torch switches it off for the functions of a mode.
        torch._C._dispatch_tls_set_dispatch_key_excluded(KEY, False)
        try:
            inside = func(*args, **kwargs)
        except Exception as error:
            inside = error
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(KEY, True)
        torch.set_rng_state(state)
        plain = func(*args, **kwargs)
        # `_ctc_loss` leaves the end of its second result as the memory was.
        has_all_values = func.overloadpacket is not torch.ops.aten._ctc_loss
        if isinstance(inside, Exception) or (has_all_values and tree_difference(plain, inside)):
            self.found.add(func)
        return plain


@pytest.mark.parametrize("name", EQUAL)
def test_ops_that_cast_inside_are_taken_apart(name: str) -> None:
    op, mode = OPS[name], CastingInside()
    for sample in pick_samples(op, types_of_inputs(op)[0], False, 1):
        if has_values(name, sample):
            args, kwargs = copy_inputs(((sample.input, *sample.args), sample.kwargs), "cpu")
            # Some operators are not for the CPU, and some can't run under a mode.
            with contextlib.suppress(Exception), mode, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                op.op(*args, **kwargs)
    assert mode.found <= TAKEN_APART
    if name in ("nn.functional.bilinear", "linalg.pinv"):
        assert mode.found  # else nothing here finds anything
