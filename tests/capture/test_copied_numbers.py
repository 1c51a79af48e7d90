"""Numbers that are copied from container to container, added by `sum`, or looked for in a container."""

from __future__ import annotations

import collections
import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import lazystep

from .common import captured
from .scenes import NUM_AFTER, NUM_BEFORE, Scene, Scenes, check_replays, check_right

scene = Scenes()


def counting(body: Callable[[Any, torch.Tensor], Any], **names: Any) -> Callable[[str], Scene]:
    """A step whose state `h.n` counts, and that is changed from outside in the middle."""

    def make(device: str) -> Scene:
        h = SimpleNamespace(
            n=0, rate=0.5, stats={"n": 0, "rate": 0.5}, betas=(0.5, 0.9), sizes=[1.5, 2.5, 3.5]
        )
        h.__dict__.update(names)
        return Scene(
            lambda x: body(h, x),
            lambda: (setattr(h, "n", 50), h.stats.update(n=50)),
            lambda: (h.n, dict(h.stats), h.betas, list(h.sizes)),
        )

    return make


def update_by_or(h: Any, x: Any) -> Any:
    h.stats |= {"n": h.stats["n"] + 1, "rate": h.stats["rate"] * 0.9}
    return x * h.stats["rate"] + h.stats["n"]


def update_by_pairs(h: Any, x: Any) -> Any:
    h.stats.update([("n", h.stats["n"] + 1)])
    return x * h.stats["n"]


def update_by_zip(h: Any, x: Any) -> Any:
    h.stats.update(zip(["n"], [h.stats["n"] + 1], strict=True))
    return x * h.stats["n"]


def join_dicts(h: Any, x: Any) -> Any:
    made = h.stats | {"n": h.stats["n"] + 1}
    h.stats["n"] = made["n"]
    return x * made["n"] * made["rate"]


def expand_dict(h: Any, x: Any) -> Any:
    made = {**h.stats, "more": 1}
    h.stats["n"] = made["n"] + made["more"]
    return x * made["n"]


def copy_dict(h: Any, x: Any) -> Any:
    made, other = dict(h.stats, more=h.stats["n"]), h.stats.copy()
    h.stats["n"] = made["n"] + 1
    return x * made["more"] + other["n"]


def pass_dict(h: Any, x: Any) -> Any:
    def use(n: int, rate: float) -> Any:
        h.stats["n"] = n + 1
        return x * n * rate

    return use(**h.stats)


def slice_tuple(h: Any, x: Any) -> Any:
    h.betas = (h.betas[0] * 0.9, *h.betas[1:])
    return x * h.betas[0] + h.betas[1]


def pass_tuple(h: Any, x: Any) -> Any:
    h.betas = (lambda a, b: (a * 0.9, b))(*h.betas)
    return x * h.betas[0]


def take_rest(h: Any, x: Any) -> Any:
    first, *rest = h.sizes
    h.sizes[0] = first * 1.25
    return x * first + rest[-1]


def reverse_list(h: Any, x: Any) -> Any:
    h.sizes[2] = h.sizes[::-1][0] * 1.25
    return x * (list(h.sizes) + [1.0])[2]


def sum_list(h: Any, x: Any) -> Any:
    h.sizes[0] = h.sizes[0] * 1.25
    return x * sum(h.sizes), sum([h.rate] * 10 + h.sizes), sum((h.rate for _ in range(3)), h.sizes[0])


def sum_numbers_and_tensors(h: Any, x: Any) -> Any:
    h.rate = h.rate * 1.1
    return sum([h.rate, 0.1, 0.2, x, h.rate, x])


def in_tuple(h: Any, x: Any) -> Any:
    h.n += 1
    return x * (2 if h.n in (3, 53, None) else 3) + (5 if h.n not in {54, "54"} else 7)


def in_counter(h: Any, x: Any) -> Any:
    h.n += 1
    return x * (2 if h.n in h.milestones else 3)


scene.rows(
    **{
        body.__name__: counting(body)
        for body in (
            *(update_by_or, update_by_pairs, update_by_zip, join_dicts, expand_dict, copy_dict, pass_dict),
            *(slice_tuple, pass_tuple, take_rest, reverse_list, sum_list, sum_numbers_and_tensors),
        )
    }
)


@pytest.mark.parametrize("make", scene.parameters)
def test_numbers_are_followed(make: Any) -> None:
    check_replays(make)


@pytest.mark.parametrize(
    "make", [counting(in_tuple), counting(in_counter, milestones=collections.Counter([3, 53, 53]))]
)
def test_number_that_is_looked_for_may_change(make: Any) -> None:
    """A call in which it is found is recorded, the others are replayed."""
    _, replays = check_right(make)
    assert replays[NUM_BEFORE - 1] >= 2
    assert replays[-1] - replays[NUM_BEFORE - 1] >= 3


def test_element_that_is_added_is_found() -> None:
    def make(device: str) -> Scene:
        h = SimpleNamespace(n=2.0, sizes=[1.0], names={1.0: None})
        change = lambda: (h.sizes.append(2.0), h.names.update({2.0: None}))  # noqa: E731
        return Scene(lambda x: x * (2 if h.n in h.sizes else 3) * (5 if h.n in h.names else 7), change)

    check_replays(make)


def test_nan_is_found_by_its_identity() -> None:
    nan = math.nan

    def make(device: str) -> Scene:
        h = SimpleNamespace(nan=nan, numbers=[nan])
        return Scene(
            lambda x: x * (2 if h.nan in h.numbers else 3) * (5 if h.nan in [h.nan] else 7),
            lambda: setattr(h, "numbers", [float("nan")]),
        )

    check_right(make)


def test_copy_of_a_tuple_is_the_tuple() -> None:
    h = SimpleNamespace(sizes=(1.0, 2.0))
    step = captured(lambda x: x * (2 if tuple(h.sizes) is h.sizes and h.sizes[:] is h.sizes else 3))
    assert [step(torch.ones(1)).item() for _ in range(4)] == [2.0] * 4


def test_sum_adds_floats_as_python_does() -> None:
    """From Python 3.12 on, more precisely than one after the other."""
    h = SimpleNamespace(number=0.1, numbers=[0.1] * 10)
    step = captured(
        lambda x: (x * 2, sum([h.number] * 10), sum(h.numbers[:]), sum(h.number for _ in range(10)))
    )
    for _ in range(5):
        assert step(torch.ones(1))[1:] == (sum([0.1] * 10),) * 3
    assert step.num_replayed >= 2


# -- schedules that are stepped inside -----------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.95**n),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 6),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [6, 50]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=6),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=30),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=30, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 30),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 30),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=6), lr_scheduler.ExponentialLR(o, 0.9)], [6]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=30), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=30),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=60),
    "SWALR": lambda o: SWALR(o, 0.01, anneal_epochs=30),
}


def scheduled(schedule: Callable[[Any], Any], arguments: Callable[[Any], tuple[Any, ...]]) -> Any:
    def make(device: str) -> Scene:
        layer = torch.nn.Linear(3, 2).to(device)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        scheduler = schedule(optimizer)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = layer(x).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step(*arguments(loss.detach()))
            optimizer.zero_grad()
            return loss.detach()

        def kept() -> Any:
            group = optimizer.param_groups[0]
            return [p.detach() for p in layer.parameters()], group["lr"], group["betas"], scheduler._last_lr

        def change() -> None:
            optimizer.param_groups[0]["weight_decay"] = 0.1

        return Scene(step, change, kept)

    return make


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_inside_is_replayed(name: str) -> None:
    """But for the calls in which it takes another branch: at a milestone, say."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The epoch parameter")
        _, replays = check_right(scheduled(SCHEDULES[name], lambda loss: ()))
    assert replays[NUM_BEFORE - 1] >= 1
    assert replays[-1] - replays[NUM_BEFORE - 1] >= NUM_AFTER - 4


def test_every_schedule_of_torch_is_known() -> None:
    kinds = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert kinds - {"LRScheduler", "ReduceLROnPlateau"} <= set(SCHEDULES)


def test_schedule_that_reads_the_loss_is_refused() -> None:
    make = scheduled(lr_scheduler.ReduceLROnPlateau, lambda loss: (loss,))
    step, replays = check_right(make)
    assert replays[-1] == 0
    assert "it waits for a value (item)" in step.explain()
    assert isinstance(step, lazystep.capture.step.Step)
