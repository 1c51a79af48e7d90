"""Families of real models: found, fitted on three members, lowered once, and right for the other members.

`LAZYSTEP_TEST_EXAMPLES=1000` tries that many random programs instead of a few.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lazystep
from lazystep.compile.lower import LoweringError, lower
from lazystep.compile.symbolic import NoFamilyError
from lazystep.family.fit import NoFitError

from .members import MODELS, check, fit_members, lowered, members_of, recorded_runs


@pytest.mark.parametrize("name", MODELS)
def test_one_graph_is_right_for_every_member(name: str) -> None:
    make, sizes = MODELS[name]
    members = members_of(make, sizes)
    found = fit_members(members[:3])
    assert len(found.symbols) == len(sizes[0])
    region, call = lowered(members[:3], found, members[0])
    served = []
    for one in members:
        symbols = region.bind(one.skeleton.numbers)
        if symbols is None:
            assert name == "odd sizes", region.why_not(one.skeleton.numbers)
            assert region.why_not(one.skeleton.numbers)  # padded by a single element, say
            continue
        assert check(one, region, call, symbols) == ""
        served.append(symbols)
    assert len(set(served)) >= (2 if name == "odd sizes" else 3)


def test_size_one_and_other_layouts_are_other_families() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sum(0)

    with recorded_runs() as runs:
        for x in (
            torch.ones(4, 3),
            torch.ones(5, 3),
            torch.ones(1, 3),
            torch.ones(4, 3, 1),
            torch.ones(4, 3).int(),
        ):
            y = step(x.to("lazy"))
            lazystep.mark_step()
            del y
    keys = [one.skeleton.key for one in runs]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4


def test_a_size_that_the_program_pins_is_no_family() -> None:
    """The Python made one program for two sizes that are equal in it; torch's own guards say so."""
    weight = torch.ones(6, 6).to("lazy")

    with recorded_runs() as runs:
        for size in (6, 7, 9):
            x = torch.ones(size, 2).to("lazy")
            y = torch.ones(size, 2).to("lazy")
            z = (x + y).sum() + weight.sum()
            lazystep.mark_step()
            del z
    found = fit_members(runs)
    assert len(found.symbols) == 1, "equal sizes are one symbol"
    # As if the two sizes had been taken for independent ones: their sum makes them equal.
    other = found._replace(symbols=(*found.symbols, found.symbols[0]))
    is_size = [e == ("s", 0) for e in found.expressions]
    last = len(is_size) - 1 - is_size[::-1].index(True)
    expressions = [("s", 1) if n == last else e for n, e in enumerate(found.expressions)]
    with pytest.raises((NoFamilyError, LoweringError)):
        lowered(runs, other._replace(expressions=tuple(expressions)), runs[0])


def test_a_step_that_ends_between_an_lstm_and_its_backward_is_not_lowered() -> None:
    """The size of the workspace that it would return is not known to the compiler."""
    model = torch.nn.LSTM(3, 4).to("lazy")
    with recorded_runs() as runs:
        output, _ = model(torch.randn(5, 2, 3).to("lazy"))
        lazystep.mark_step()
        output.sum().backward()
        lazystep.mark_step()
    forward, _ = runs
    with pytest.raises(LoweringError, match="the step ends between an LSTM and its backward"):
        lower(forward.program, forward.signature, forward.fixed)


def test_the_check_finds_a_number_that_was_fitted_by_chance() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x * 1.5)[: (x.shape[0] + 1) // 2].tanh()

    with recorded_runs() as runs:
        for size in (4, 6, 8, 9):
            result = step(torch.randn(size, 3).to("lazy"))
            lazystep.mark_step()
    del result
    *even, odd = runs
    region, call = lowered(even, fit_members(even), even[0])
    assert all(check(one, region, call, region.bind(one.skeleton.numbers) or ()) == "" for one in even)
    # s//2 is right for the three. The member is refused; if it were not, its first run would be.
    assert region.bind(odd.skeleton.numbers) is None
    assert check(odd, region, call, (9,)) != ""


NUM_EXAMPLES = int(os.environ.get("LAZYSTEP_TEST_EXAMPLES", "25"))
OPS = {
    "tanh": lambda x: x.tanh(),
    "scale": lambda x: x * 0.5,
    "transpose": lambda x: x.t() @ x,
    "square": lambda x: (x @ x.t()) @ x,
    "half": lambda x: x[: (x.shape[0] + 1) // 2],
    "all but one": lambda x: x[1:] if x.shape[0] > 3 else x,
    "twice": lambda x: torch.cat([x, x]),
    "flat": lambda x: x.reshape(-1, 2),
    "mean": lambda x: x - x.mean(0),
    "positions": lambda x: x + torch.arange(x.shape[0], device=x.device)[:, None],
    "pad": lambda x: torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 4)),
    "in place": lambda x: x.clone().mul_(2).add_(1),
    "last": lambda x: x + x[-1],
    "sort": lambda x: x.sort(0).values,
    "softmax": lambda x: x.softmax(0),
    "expand": lambda x: x[:, None].expand(-1, 3, -1).sum(1),
}


@pytest.mark.filterwarnings("ignore:.*of the last 64 steps were new programs")
@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=4),
    st.lists(st.integers(4, 40), min_size=5, max_size=5, unique=True),
)
@example(["half", "tanh"], [4, 6, 8, 9, 11])  # s//2 for the first three
@example(["pad", "half"], [9, 10, 15, 21, 11])
def test_a_fit_is_right_for_other_sizes_or_refuses_them(names: list[str], sizes: list[int]) -> None:
    with recorded_runs() as runs:
        for size in sizes:
            result = torch.randn(size, 4, generator=torch.Generator().manual_seed(size)).to("lazy")
            for name in names:
                result = OPS[name](result)
            lazystep.mark_step()
    families: dict[str, list] = {}
    for one in runs:
        families.setdefault(one.skeleton.key, []).append(one)
    for members in families.values():
        try:
            found = fit_members(members[:3])
            region, call = lowered(members[:3], found, members[0])
        except (NoFitError, NoFamilyError, LoweringError):
            continue  # not a family, and said so
        for one in members:
            symbols = region.bind(one.skeleton.numbers)
            if symbols is not None:
                assert check(one, region, call, symbols) == ""
