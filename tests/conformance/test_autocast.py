"""Every operator of PyTorch's operator database under autocast: lazy equals eager bit for bit.

The forward pass runs under autocast, the backward pass after it, as torch's documentation asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazystep

from .conftest import Counts
from .test_ops import (  # noqa: F401 - a fixture
    OPS,
    Checker,
    _barrier_of_torch_testing,
    call,
    pick_samples,
)

DTYPES = (torch.bfloat16, torch.float16)
# Eager casts inside the kernels of these, which a recorded op can't do. They are refused.
REFUSED = ("nn.functional.bilinear", "linalg.pinv", "linalg.pinv.hermitian", "linalg.pinv.singular")
ON_FLOATS = [
    name for name, op in OPS.items() if torch.float32 in op.supported_dtypes("cpu") and name not in REFUSED
]


def cast_by(function: Callable[..., Any], device: str, dtype: torch.dtype) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype):
            return function(*args, **kwargs)

    return run


@pytest.mark.parametrize("name", ON_FLOATS)
def test_operator_under_autocast_equals_eager_bitwise(name: str, num_samples: int, counts: Counts) -> None:
    op, checker = OPS[name], Checker(name, counts)
    grad = op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
    # A quarter of the budget: by default one sample.
    samples = pick_samples(op, torch.float32, grad, max(1, num_samples // 4))
    for device, dtype in zip(("lazy", "cpu"), DTYPES, strict=True):
        checker.label = f"autocast to {str(dtype).removeprefix('torch.')}"
        for number, sample in enumerate(samples):
            checker.check(cast_by(op.op, device, dtype), sample, f"sample {number}", grad=grad)
    checker.finish()


@pytest.mark.parametrize("name", REFUSED)
def test_operator_that_casts_inside_is_refused(name: str) -> None:
    op = OPS[name]
    sample = pick_samples(op, torch.float32, False, 1)[0]
    outcome = call(cast_by(op.op, "lazy", torch.bfloat16), sample, "lazy", grad=False)
    assert isinstance(outcome.error, lazystep.UnsupportedError)
