"""Random ops whose parameters are tensors: eager's numbers, from eager's stream, without a wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lazystep
from tests.helpers import count, descend

CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bernoulli": torch.bernoulli,
    "bernoulli, transposed": lambda p: torch.bernoulli(p.t()),
    "bernoulli, every second column": lambda p: torch.bernoulli(p[:, ::2]),
    "bernoulli, expanded": lambda p: torch.bernoulli(p[:1].expand(4, -1)),
    "bernoulli, one": lambda p: torch.bernoulli(p[0, 0]),
    "bernoulli, none": lambda p: torch.bernoulli(p[:0]),
    "bernoulli_ into integers": lambda p: torch.zeros(5, 70, dtype=torch.int64, device=p.device).bernoulli_(
        p
    ),
    "bernoulli_ across memory": lambda p: torch.zeros(70, 5, device=p.device).t().bernoulli_(p),
    "bernoulli_ of fewer": lambda p: torch.zeros(3, 5, 70, device=p.device).bernoulli_(p),
    "bernoulli_ into a part": lambda p: torch.zeros(5, 140, device=p.device)[:, ::2].bernoulli_(p),
    "multinomial, one": lambda p: torch.multinomial(p, 1),
    "multinomial, one with replacement": lambda p: torch.multinomial(p, 1, True),
    "multinomial, three": lambda p: torch.multinomial(p, 3),
    "multinomial, transposed": lambda p: torch.multinomial(p.t(), 1),
    "multinomial, a vector": lambda p: torch.multinomial(p[0], 2),
    "normal, mean": lambda p: torch.normal(p, 2.0),
    "normal, deviation": lambda p: torch.normal(0.3, p),
    "normal, both": lambda p: torch.normal(p, p),
    "normal, broadcast": lambda p: torch.normal(p[:, :1], p[0]),
    "normal, transposed": lambda p: torch.normal(p.t(), p.t()),
    "normal, none": lambda p: torch.normal(p[:0], p[:0]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_numbers_and_stream_are_eagers_and_nothing_waits(name: str, dtype: torch.dtype) -> None:
    values = torch.rand(5, 70).to(dtype)
    results = []
    for device in ("cpu", "lazy"):
        torch.manual_seed(3)
        drawn = CASES[name](values.to(device))
        lazystep.mark_step()
        results.append((drawn, torch.rand(3)))
    assert count("synchronizations") == 0
    (expected, stream), (drawn, own_stream) = results
    assert drawn.stride() == expected.stride()
    torch.testing.assert_close(drawn.cpu(), expected, rtol=0, atol=0)
    assert torch.equal(own_stream, stream)


def test_generator_of_the_users_is_the_one_that_is_drawn_from() -> None:
    def draw(device: str) -> list[torch.Tensor]:
        own = torch.Generator().manual_seed(5)
        p = torch.full((4, 8), 0.5, device=device)
        return [
            torch.bernoulli(p, generator=own).cpu(),
            torch.multinomial(p, 2, generator=own).cpu(),
            torch.normal(p, p, generator=own).cpu(),
            torch.rand(2, generator=own),
        ]

    for drawn, expected in zip(draw("lazy"), draw("cpu"), strict=True):
        assert torch.equal(drawn, expected)


WRONG: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "probability above one": (lambda x: torch.bernoulli(x + 1), "aten.bernoulli.default: Expected p_in >= 0"),
    "negative weight": (
        lambda x: torch.multinomial(x - 1, 1),
        "aten.multinomial.default: probability tensor",
    ),
    "weight that is no number": (
        lambda x: torch.multinomial(x * float("nan"), 1),
        "contains either `inf`, `nan`",
    ),
    "weights of zero": (lambda x: torch.multinomial(x * 0, 1), "invalid multinomial distribution"),
    "negative deviation": (lambda x: torch.normal(x, -x), "normal expects all elements of std >= 0.0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_values_that_eager_refuses_fail_the_step_with_the_line(name: str) -> None:
    function, text = WRONG[name]
    with pytest.raises(RuntimeError):
        function(torch.full((2, 3), 0.5))
    drawn = function(torch.full((2, 3), 0.5, device="lazy"))
    with pytest.raises(lazystep.StepError) as caught:
        drawn.cpu()
    assert text in str(caught.value)
    assert "test_drawn_by_value.py" in str(caught.value)


@pytest.mark.parametrize("function", [lambda x: torch.multinomial(x, 9), lambda x: torch.multinomial(x, 0)])
def test_numbers_that_eager_refuses_raise_at_the_line(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(RuntimeError) as eager:
        function(torch.ones(2, 3))
    with pytest.raises(RuntimeError) as own:
        function(torch.ones(2, 3, device="lazy"))
    assert str(own.value) == str(eager.value)


def test_draws_that_depend_on_values_still_wait() -> None:
    p = torch.rand(2, 8)
    torch.manual_seed(1)
    expected = torch.multinomial(p, 4, True), torch.poisson(p)
    torch.manual_seed(1)
    on_lazy = p.to("lazy")
    drawn = torch.multinomial(on_lazy, 4, True), torch.poisson(on_lazy)
    assert count("synchronizations") == 2
    assert all(torch.equal(a.cpu(), b) for a, b in zip(drawn, expected, strict=True))


def train(device: str, num_steps: int, capture: bool) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    policy = nn.Linear(8, 4).to(device)
    optimizer = torch.optim.SGD(policy.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        chosen = torch.distributions.Categorical(logits=policy(x), validate_args=False)
        action = chosen.sample()
        noise = torch.normal(x, x.abs())
        kept = torch.bernoulli(chosen.probs)
        loss = (kept * noise[:, :4]).mean() - chosen.log_prob(action).mean()
        descend(loss, optimizer)
        return loss.detach()

    function = lazystep.step(step) if capture else step
    losses = []
    for number in range(num_steps):
        losses.append(function(torch.randn(6, 8).to(device)))
        if not capture:
            lazystep.mark_step()
        if number == num_steps // 2:
            lazystep.wait_for_compile()
    return [loss.item() for loss in losses], function


@pytest.mark.parametrize("capture", [False, True])
def test_policy_that_samples_equals_eager_without_a_wait(capture: bool) -> None:
    expected, _ = train("cpu", 16, capture=False)
    with lazystep.config.override(tier="reference"):
        losses, step = train("lazy", 16, capture)
    assert losses == expected
    assert count("synchronizations") == 16  # the losses, at the end
    if capture:
        assert step.num_replayed >= 8


def test_policy_that_samples_runs_natively(auto_tier: None) -> None:
    expected, _ = train("cpu", 12, capture=False)
    losses, _ = train("lazy", 12, capture=True)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    assert count("native_executions") >= 4


def test_wait_of_a_distribution_names_the_way_out() -> None:
    ones = torch.ones(2, device="lazy")
    torch.distributions.Normal(ones, ones, validate_args=True)
    reasons = {reason for reason, _, _ in lazystep.metrics.synchronizations()}
    assert len(reasons) == 1
    assert "validate_args=False" in reasons.pop()
