"""Ops that lazystep adds because code for accelerators calls them."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_histc_of_integers_counts_as_with_floats_and_keeps_the_data_type(dtype: torch.dtype) -> None:
    x = torch.randint(0, 8, (50,), dtype=dtype)
    for bins, low, high in ((8, 0, 7), (4, 0, 3), (5, 2, 6), (8, 0, 0)):
        got = torch.histc(x.to("lazy"), bins=bins, min=low, max=high)
        assert got.dtype is dtype
        assert torch.equal(got.cpu(), torch.histc(x.float(), bins=bins, min=low, max=high).to(dtype))


def test_histc_of_floats_is_the_op_of_eager() -> None:
    x = torch.rand(50)
    assert torch.equal(torch.histc(x.to("lazy"), 7, 0, 1).cpu(), torch.histc(x, 7, 0, 1))
    with pytest.raises(RuntimeError, match="Bool"):
        torch.histc((x > 0.5).to("lazy"), 2, 0, 1)
