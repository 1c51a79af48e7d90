"""The two ops of `torch.amp.GradScaler`, decomposed into plain ops that Inductor knows.

The formulas are those of torch's CPU kernels. `FreeScalar`: the factors are inputs of the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .scalars import FreeScalar


def check_and_unscale(self: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> list[Tensor]:
    """`_amp_foreach_non_finite_check_and_unscale_`: sets the flag, and multiplies each gradient."""
    for grad in self:
        has_overflowed = torch.logical_not(torch.isfinite(grad)).any()
        found_inf.copy_(torch.where(has_overflowed, torch.ones_like(found_inf), found_inf))
        grad.copy_(grad.float() * inv_scale if grad.dtype != torch.float64 else grad * inv_scale)
    return []


def update_scale(
    self: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    scale_growth_factor: Any,
    scale_backoff_factor: Any,
    growth_interval: int,
) -> Tensor:
    """`_amp_update_scale_`: a smaller scale after an overflow, a larger one after a number of good steps."""
    has_overflowed = found_inf != 0
    successes = growth_tracker + 1
    grows = successes == growth_interval
    grown = (self.double() * _number(scale_growth_factor)).to(self.dtype)
    # A scale that would become infinite stays.
    larger = torch.where(torch.logical_and(grows, torch.isfinite(grown)), grown, self)
    smaller = (self.double() * _number(scale_backoff_factor)).to(self.dtype)
    self.copy_(torch.where(has_overflowed, smaller, larger))
    is_reset = torch.logical_or(has_overflowed, grows)
    growth_tracker.copy_(torch.where(is_reset, torch.zeros_like(growth_tracker), successes))
    return self


def _number(value: Any) -> Any:
    return value.tensor if type(value) is FreeScalar else value


# Decompositions by the name of the op, without its trailing underscore.
GRAD_SCALING: dict[str, Callable[..., Any]] = {
    "_amp_foreach_non_finite_check_and_unscale": check_and_unscale,
    "_amp_update_scale": update_scale,
}
