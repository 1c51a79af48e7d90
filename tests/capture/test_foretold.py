"""A new size whose numbers follow from the sizes is replayed from its second call on, and any other is not.

The steps of the table make a number in some way, and use it in some way. No audit corrects them: each call
must equal eager, whatever the number depends on.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch

import lazystep

from ..helpers import count, nightly
from .common import captured
from .test_sizes import both, square, trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*(is recorded in each call|has more than)")


class Scene:
    """What a step can read: state that it counts up itself, and state that changes between calls."""

    def __init__(self) -> None:
        self.num_calls = 0  # changed by the step
        self.epoch = 1  # changed between calls, now and then
        self.by_size = {size: size * 3 % 5 for size in range(2, 40)}
        self.times = dict.fromkeys(range(2, 40), 0)
        self.hidden = torch.ones(20_000, dtype=torch.int64)  # too large to compare in each call
        self._memory = self.hidden.numpy()  # torch does not notice what NumPy writes

    def between_calls(self, number: int, size: int) -> None:
        self._memory[0] = number + 1
        if number % 9 == 0:
            self.epoch += 1
        if number % 11 == 0:
            self.by_size[size] += 1

    def call(self) -> int:
        self.num_calls += 1
        return self.num_calls

    def time_of(self, size: int) -> int:
        self.times[size] += 1
        return self.times[size]


Source = Callable[[Scene, int], int]
Use = Callable[[torch.Tensor, int], torch.Tensor]

# How a step comes by a number: from the size alone, or not.
OF_SIZE: dict[str, Source] = {
    "the size": lambda scene, n: n,
    "a multiple": lambda scene, n: 3 * n - 1,
    "a square": lambda scene, n: n * n,
    "half": lambda scene, n: n // 2 + 1,
    "parity": lambda scene, n: n % 2 + 1,
    "a threshold": lambda scene, n: 1 if n > 8 else 3,
    "one size apart": lambda scene, n: 2 if n == 9 else 1,
    "bits": lambda scene, n: n.bit_length(),
    "a root": lambda scene, n: math.isqrt(n) + 1,
    "the same": lambda scene, n: 2,
}
OF_MORE: dict[str, Source] = {
    "a table": lambda scene, n: scene.by_size[n] + 1,
    "the call": lambda scene, n: scene.call() % 3 + 1,
    "the call and the size": lambda scene, n: (scene.call() + n) % 4 + 1,
    "the epoch": lambda scene, n: scene.epoch,
    "the size in odd epochs": lambda scene, n: n if scene.epoch % 2 else 1,
    "how often the size came": lambda scene, n: scene.time_of(n),
    "a hidden number": lambda scene, n: int(scene.hidden[0].item()),
    "a hidden number and the size": lambda scene, n: n + int(scene.hidden[0].item()),
}
USES: dict[str, Use] = {
    "an integer": lambda x, k: x.roll(k, 0) * x,
    "a slice": lambda x, k: x[: max(1, len(x) - k)] * 2,
    "a shape": lambda x, k: x.new_ones(k, 2).sum() * x,
    "a repetition": lambda x, k: x.repeat(k, 1).sum(0),
    "a scalar": lambda x, k: x * (k * 0.5),
    "a scalar of C": lambda x, k: x * math.sqrt(k),
    "a tensor from the host": lambda x, k: x * torch.full((len(x), 1), float(k)).to(x.device),
    "a small tensor from the host": lambda x, k: x * torch.tensor([float(k)]).to(x.device),
    "a random draw": lambda x, k: x * torch.rand(k + 1, device=x.device).sum(),
    "a branch": lambda x, k: x * 2 if k % 2 else x + 1,
    "a loop": lambda x, k: sum((x * i for i in range(k % 4 + 1)), x),
}
PAIRS = list(itertools.product([*OF_SIZE, *OF_MORE], USES))
# Calls with different hidden numbers do the same now and then. Then two calls agree by chance.
CHANCE = set(itertools.product([name for name in OF_MORE if "hidden" in name], ["a branch", "a loop"]))
SIZES = (5, 6, 9, 12, 13, 20)
# One after the other, in turns, and in any order.
ORDERS = {
    "many each": [size for size in SIZES for _ in range(4)],
    "in turns": SIZES * 5,
    "twice each": [size for size in SIZES for _ in range(2)] * 3,
    "any": random.Random(1).choices(SIZES, k=36),
}


def run(number_of: Source, use: Use, sizes: Sequence[int]) -> lazystep.Step[..., torch.Tensor]:
    """Call the step with these sizes and compare each call with eager."""
    scenes = {"lazy": Scene(), "cpu": Scene()}

    def step_on(device: str) -> Callable[[torch.Tensor], torch.Tensor]:
        scene = scenes[device]
        return lambda x: use(x, number_of(scene, len(x)))

    eager = step_on("cpu")
    step = captured(step_on("lazy"))
    for number, size in enumerate(sizes):
        for scene in scenes.values():
            scene.between_calls(number, size)
        x = torch.randn(size, 2)
        torch.manual_seed(number)
        got = step(x).cpu()
        torch.manual_seed(number)
        assert torch.equal(got, eager(x)), f"call {number} of size {size}\n{step.explain()}"
    return step


@pytest.mark.parametrize("order", ["many each", *nightly(list(ORDERS)[1:])])
@pytest.mark.parametrize(("source", "use"), [row for row in PAIRS if row not in CHANCE])
def test_step_of_many_sizes_equals_eager(source: str, use: str, order: str) -> None:
    run((OF_SIZE | OF_MORE)[source], USES[use], ORDERS[order])


# How many of the last four sizes the first two have foretold. A number that does not follow from the size as
# sizes do is confirmed by a second call, and so is every tensor from the host.
FORETOLD = [
    ("the size", "an integer", 4),
    ("the size", "a shape", 4),
    ("the size", "a random draw", 4),
    ("the size", "a scalar", 0),
    ("the size", "a tensor from the host", 0),
    ("a multiple", "a slice", 4),
    ("a square", "a repetition", 4),
    ("half", "an integer", 2),
    ("parity", "an integer", 0),
    ("one size apart", "an integer", 0),
    ("the same", "a scalar of C", 4),
    ("the same", "a small tensor from the host", 0),
]


@pytest.mark.parametrize(("source", "use", "num_foretold"), FORETOLD)
def test_size_is_replayed_from_its_second_call_if_its_numbers_follow_from_sizes(
    source: str, use: str, num_foretold: int
) -> None:
    step = run(OF_SIZE[source], USES[use], ORDERS["many each"])
    assert (count("captures_foretold"), count("captures_from_one_call")) == (num_foretold, 5)
    # Two calls of the first size, one or two of each other size.
    assert step.num_recorded == 2 + 2 * 5 - num_foretold


def test_division_by_the_size_is_foretold() -> None:
    run(lambda scene, n: n, lambda x, k: (x / k + x * k).sum() - k, ORDERS["many each"])
    assert count("captures_foretold") == 4


def test_training_of_a_new_size_is_recorded_once() -> None:
    step = lazystep.step(trainer("lazy", square))
    eager = trainer("cpu", square)
    both(step, eager, 5, 5, 5, 5, 7, 7)  # the first one makes the optimizer's state
    lazystep.metrics.reset()
    recorded = step.num_recorded
    for size in (12, 9, 30, 4):
        both(step, eager, size)
        assert step.num_recorded == (recorded := recorded + 1)
        both(step, eager, *[size] * 8)
        assert step.num_recorded == recorded
    assert (count("captures_foretold"), count("captures_audited"), count("captures_outdated")) == (4, 0, 0)


def test_size_one_is_confirmed_by_its_second_call() -> None:
    """Ops treat it in ways of their own."""
    step = run(lambda scene, n: n, USES["a shape"], [5, 5, 6, 6, 7, 7, 1, 1, 1, 8, 8])
    assert count("captures_foretold") == 2  # 7 and 8
    assert step.num_recorded == 4 + 1 + 2 + 1


def test_what_nobody_sees_is_found_by_an_audit_of_a_relative_and_then_of_all() -> None:
    """A hidden number stays the same for long, and changes when most sizes have been foretold."""
    table = torch.ones(20_000)  # too large to compare in each call
    memory = table.numpy()

    @lazystep.step
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * table[0].item()

    for size in (5, 5, 6, 6, 7, 7, 8, 8):
        x = torch.randn(size, 2)
        assert torch.equal(step(x).cpu(), x)
    assert count("captures_foretold") == 2
    memory[0] = 2.0
    with pytest.warns(lazystep.LazyStepWarning, match="does something else than when it was captured"):
        for _ in range(4):
            step(torch.randn(5, 2))  # a relative with early audits
    for size in (7, 8):
        x = torch.randn(size, 2)
        with pytest.warns(lazystep.LazyStepWarning, match="does something else"):
            assert torch.equal(step(x).cpu(), x * 2)
        assert torch.equal(step(x).cpu(), x * 2)
