"""Views that a step returns or keeps: a replay makes them anew, also where nothing else holds the whole."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazystep

from .scenes import NUM_BEFORE, Scene, check_replays


def space(**names: Any) -> Any:
    return types.SimpleNamespace(**names)


def call_often(step: Any) -> None:
    for _ in range(4):
        step(torch.ones(3))


@pytest.mark.parametrize(
    "use",
    [
        lambda x: (x * 2).view(1, 3),
        lambda x: (x * 2)[1:],
        lambda x: (x * torch.ones(2, 3, device=x.device)).t(),
        lambda x: ((x * 2)[:2], (x * 3)[1:]),
        lambda x: (x * 2).chunk(3),
    ],
    ids=["view", "slice", "transpose", "two", "chunks"],
)
def test_view_that_is_returned_is_replayed(use: Callable[[Any], Any]) -> None:
    check_replays(lambda device: Scene(step=use))


def test_two_views_of_one_tensor_stay_two_views_of_one() -> None:
    @lazystep.step(audit_every=0)
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        doubled = x * 2
        return doubled[:2], doubled[1:]

    for _ in range(NUM_BEFORE):
        left, right = step(torch.ones(3))
        left.add_(1)
        assert (left.tolist(), right.tolist()) == ([3.0, 3.0], [3.0, 2.0])
    assert step.num_replayed > 0, step.explain()


def test_prediction_without_gradient_is_replayed() -> None:
    def make(device: str) -> Scene:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1).to(device)

        def step(x: Any) -> Any:
            with torch.no_grad():
                return model(x).squeeze(-1)

        return Scene(step=step, arguments=lambda number: (torch.ones(4, 3) + number,))

    check_replays(make)


def test_view_of_a_view_is_refused_with_a_remedy() -> None:
    """torch keeps the view in between alive, so it might be anywhere."""

    @lazystep.step(fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).view(3, 1).view(1, 3)

    with pytest.raises(lazystep.CaptureError, match=r"it returns a view of a view.*\.detach\(\)"):
        call_often(step)
    check_replays(lambda device: Scene(step=lambda x: (x * 2).view(3, 1).view(1, 3).detach()))


def test_view_that_is_kept_is_replayed_and_may_change_outside() -> None:
    def make(device: str) -> Scene:
        held = space(last=torch.zeros(2, device=device), first=torch.zeros(2, device=device))

        def step(x: Any) -> Any:
            whole = x + held.last.sum() + held.first.sum()
            held.last, held.first = whole[1:], whole[:2]
            return x * 1

        return Scene(step=step, change=lambda: held.last.add_(5), kept=lambda: (held.last, held.first))

    check_replays(make)


def test_whole_of_a_view_that_the_step_writes_is_written() -> None:
    def make(device: str) -> Scene:
        whole = torch.zeros(3, device=device)
        held = space(part=whole[:2])

        def step(x: Any) -> Any:
            held.part.add_(1)
            return held.part[:1]

        return Scene(step=step, kept=lambda: whole)

    check_replays(make)
