"""Random sequences of ops, views, updates, barriers, reads and deletions: equal to eager at every read."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

import lazystep
from lazystep import config

# Random programs are mostly new ones, which a loop is warned of.
pytestmark = pytest.mark.filterwarnings("ignore:.*were new programs:lazystep.LazyStepWarning")


@pytest.fixture(autouse=True)
def give_the_runtime(runtime: Any) -> None:
    Programs.runtime = runtime


class Pair:
    """One tensor on both devices."""

    def __init__(self, lazy: torch.Tensor, host: torch.Tensor) -> None:
        self.lazy = lazy
        self.host = host


UNARY = [torch.neg, torch.sin, torch.relu, torch.sigmoid]
UNARY += [lambda x: x.clone(), lambda x: x * 2.0, lambda x: x + 1, lambda x: x.sum()]
UNARY += [lambda x: x.mean(0, keepdim=True) if x.dim() else x * 1, lambda x: x.contiguous()]
UNARY += [lambda x: x.to(torch.float64).to(torch.float32), lambda x: torch.nn.functional.dropout(x, 0.5)]
BINARY = [torch.add, torch.mul, torch.maximum, lambda a, b: a - 0.5 * b]
IN_PLACE = [lambda x: x.mul_(0.5), lambda x: x.add_(1), lambda x: x.zero_(), lambda x: x.tanh_()]
IN_PLACE += [lambda x: x.normal_(), lambda x: x.clamp_(-1, 1), lambda x: x.fill_(0.25)]
VIEWS = [
    lambda x: x[0] if x.dim() and x.size(0) else x.view(x.shape),
    lambda x: x[1:] if x.dim() else x.detach(),
    lambda x: x[..., ::2] if x.dim() else x.expand(2),
    lambda x: x.t() if x.dim() == 2 else x.unsqueeze(0),
    lambda x: x.reshape(-1),
    lambda x: x.detach(),
    lambda x: x.unsqueeze(0).squeeze(0),
    lambda x: x.as_strided((1,), (1,)) if x.numel() else x.detach(),
]
METADATA = [lambda x: x.unsqueeze_(0), lambda x: x.squeeze_(), lambda x: x.t_() if x.dim() <= 2 else x]


def equal(lazy: torch.Tensor, host: torch.Tensor) -> None:
    assert (lazy.dtype, lazy.shape, lazy.stride()) == (host.dtype, host.shape, host.stride())
    got = lazy.cpu()
    assert torch.equal(got, host) or torch.equal(got.nan_to_num(7), host.nan_to_num(7))


class Programs(RuleBasedStateMachine):
    """The same rules act on a lazy tensor and on its CPU twin."""

    tensors = Bundle("tensors")
    runtime: Any

    def both(self, function: object, *pairs: Pair) -> object:
        """Apply to both devices from one random state; no pair where eager refuses: then lazy must too."""
        assert callable(function)
        state = torch.get_rng_state()
        try:
            host = function(*(p.host for p in pairs))
        except (RuntimeError, IndexError) as error:
            torch.set_rng_state(state)
            try:
                lazy = function(*(p.lazy for p in pairs))
                lazystep.sync_multi([lazy], [])
            except (RuntimeError, IndexError):
                return multiple()
            raise AssertionError(f"eager refused with {error!r}, lazy did not") from error
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        lazy = function(*(p.lazy for p in pairs))
        assert torch.equal(torch.get_rng_state(), after)
        return Pair(lazy, host)

    @initialize(target=tensors)
    def begin(self) -> Pair:
        config.settings.verify_programs = True
        torch.manual_seed(0)
        host = torch.arange(12.0).reshape(3, 4)
        return Pair(host.to("lazy"), host)

    @rule(target=tensors, rows=st.integers(0, 3), columns=st.integers(1, 4))
    def make(self, rows: int, columns: int) -> Pair:
        host = torch.randn(rows, columns)
        return Pair(host.to("lazy"), host)

    @rule(target=tensors, x=tensors, op=st.sampled_from(UNARY))
    def unary(self, x: Pair, op: object) -> object:
        return self.both(op, x)

    @rule(target=tensors, x=tensors, y=tensors, op=st.sampled_from(BINARY))
    def binary(self, x: Pair, y: Pair, op: object) -> object:
        return self.both(op, x, y)

    @rule(target=tensors, x=tensors, view=st.sampled_from(VIEWS))
    def view(self, x: Pair, view: object) -> object:
        return self.both(view, x)

    @rule(x=tensors, op=st.sampled_from(IN_PLACE))
    def update(self, x: Pair, op: object) -> None:
        self.both(op, x)

    @rule(x=tensors, y=tensors)
    def copy(self, x: Pair, y: Pair) -> None:
        self.both(lambda a, b: a.copy_(b), x, y)

    @rule(x=tensors, op=st.sampled_from(METADATA))
    def change_metadata(self, x: Pair, op: object) -> None:
        self.both(op, x)

    @rule(x=tensors)
    def read(self, x: Pair) -> None:
        equal(x.lazy, x.host)

    @rule(x=tensors)
    def read_one_number(self, x: Pair) -> None:
        assert x.lazy.nan_to_num(3).sum().item() == x.host.nan_to_num(3).sum().item()

    @rule(wait=st.booleans())
    def mark_step(self, wait: bool) -> None:
        lazystep.mark_step(wait=wait)

    @rule(x=consumes(tensors))
    def forget(self, x: Pair) -> None:
        del x.lazy, x.host

    @rule()
    def collect_garbage(self) -> None:
        gc.collect()

    @invariant()
    def no_failure_is_pending(self) -> None:
        self.runtime.raise_failures()

    def teardown(self) -> None:
        lazystep.mark_step(wait=True)


Programs.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRandomPrograms = Programs.TestCase


def test_leaving_no_reference_to_a_view_keeps_the_base_right() -> None:
    base = torch.zeros(4, device="lazy")
    for _ in range(3):
        base[1:].add_(1)
        gc.collect()
        lazystep.mark_step()
    assert base.tolist() == [0.0, 3.0, 3.0, 3.0]
