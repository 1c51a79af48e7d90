"""Modes and settings around an op: a decision is made without them, and holds after them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lazystep
from tests.helpers import count


@pytest.fixture(autouse=True)
def default_settings() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


def test_decision_under_autocast_is_made_without_it_and_holds_after_it() -> None:
    x, w = torch.randn(17, 19), torch.randn(19, 23)
    lazy_x, lazy_w = x.to("lazy"), w.to("lazy")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = lazy_x @ lazy_w
        lazystep.mark_step(wait=True)
    after = lazy_x @ lazy_w
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = x @ w
    assert torch.equal(inside.cpu(), want)
    assert torch.equal(after.cpu(), x @ w)


def test_torch_modes_see_the_users_calls_only() -> None:
    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.rand(29, 31).to("lazy")
    for mode in (Functions(), Ops()):
        with mode:
            y = nn.functional.elu(x).logsumexp(1)
        assert y.shape == (29,)
    assert seen == ["elu", "logsumexp", "aten.elu.default", "aten.logsumexp.default"]
    weight = torch.rand(29, 31).to("lazy").requires_grad_()
    loss = nn.functional.gelu(weight).square().sum()
    seen.clear()
    with Functions():
        torch.autograd.backward([loss])
    assert seen == ["backward"]


def results(d: str) -> list[torch.Tensor]:
    whole = torch.arange(1, 6).to(d)
    return [whole / 3, whole.sin(), torch.ones(3, device=d), torch.full((2,), 1.5, device=d), whole + 0.5]


def test_default_dtype_belongs_to_the_line_that_records() -> None:
    got, want = [], []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float64):
        torch.set_default_dtype(dtype)  # before the ops of the last round have run
        want += results("cpu")
        got += results("lazy")
    for g, w in zip(got, want, strict=True):
        assert g.dtype is w.dtype
        assert torch.equal(g.cpu(), w)


def test_default_dtype_that_is_set_to_what_it_is_does_not_end_the_step() -> None:
    torch.set_default_dtype(torch.float64)
    lazystep.mark_step(wait=True)
    lazystep.metrics.reset()
    whole = torch.arange(1, 6).to("lazy")
    third = whole / 3
    torch.set_default_dtype(torch.float64)
    total = third + torch.ones(5, device="lazy")
    lazystep.mark_step(wait=True)
    assert count("programs_executed") == 1
    assert total.dtype is torch.float64
    assert torch.equal(total.cpu(), torch.arange(1, 6) / 3 + torch.ones(5))


def test_settings_that_kernels_read_change_after_the_recorded_ops_have_run(value_of: Any) -> None:
    x = torch.ones(3).to("lazy") + 1
    torch.use_deterministic_algorithms(True)
    assert value_of(x) is not None
    y = x + 1
    torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())
    assert value_of(y) is not None
