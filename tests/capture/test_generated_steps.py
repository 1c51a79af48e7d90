"""Generated step functions: whatever they read, and whatever changes, a call equals eager's bit for bit.

`LAZYSTEP_TEST_EXAMPLES=5000` runs that many of them instead of a few hundred; `make nightly` runs thousands.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.helpers import nightly

from .generated import NUM_CALLS, Case, Change, Event, Inside, Outcome, cases, check, check_uncaptured
from .generated_parts import FRAMES, HOLDERS, REACHES, VALUES, Holder

NUM_EXAMPLES = int(os.environ.get("LAZYSTEP_TEST_EXAMPLES", "600"))
NUM_NIGHTLY = 20_000
SETTINGS = settings(
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow],
)


def run_examples(holder: Holder | None, num_examples: int, number: int) -> list[Outcome]:
    """Check as many cases, of a holder or of all. The same number gives the same cases."""
    outcomes = []

    @seed(zlib.crc32(f"{holder} {number}".encode()))
    @settings(SETTINGS, max_examples=max(1, num_examples))
    @given(cases(holder))
    def check_one(case: Case) -> None:
        outcome = check(case)
        if outcome.num_replayed == 0 and outcome.num_raised == 0:
            assert "\n" in outcome.explanation, f"no replay and no reason: {outcome.explanation}\n\n{case}"
        outcomes.append(outcome)

    check_one()
    return outcomes


@pytest.mark.parametrize("holder", HOLDERS, ids=repr)
def test_step_equals_eager(holder: Holder) -> None:
    run_examples(holder, NUM_EXAMPLES // len(HOLDERS), 0)


@pytest.mark.parametrize("holder", nightly(HOLDERS), ids=repr)
def test_many_steps_equal_eager(holder: Holder) -> None:
    run_examples(holder, NUM_NIGHTLY // len(HOLDERS), 1)


def test_steps_equal_eager_without_capture() -> None:
    """If this fails, the device or the generator differs from eager, and not a replay."""

    @seed(3)
    @settings(SETTINGS, max_examples=60)
    @given(cases())
    def check_one(case: Case) -> None:
        check_uncaptured(case)

    check_one()


def test_most_steps_are_replayed() -> None:
    """Also strange ones that change: recording each call is right, but not what a step is captured for."""
    outcomes = run_examples(None, 100, 2)
    assert sum(outcome.num_replayed > 0 for outcome in outcomes) >= 0.6 * len(outcomes)


# -- ordinary steps are replayed -----------------------------------------------------------------------

BY_NAME = {row.name: row for table in (HOLDERS, VALUES, REACHES, FRAMES) for row in table}
# What the docs promise to read from its place in each replay, or to compare.
ORDINARY_HOLDERS = """
variable | attribute of an object | value of a dict | element of a list | default argument
keyword-only default | default argument of the step | argument | slot | property | class attribute
inherited class attribute | nested tuple | nested list | field of a namedtuple | field of a dataclass
field of a dataclass with slots | field of a dataclass, frozen | element of a deque | array.array
NumPy array | argument of a partial | keyword of a partial | types.SimpleNamespace
attribute of a Python module | attribute of a module of torch | buffer | parameter of a module
nn.ParameterList | nn.ModuleList | nn.Sequential | nn.ParameterDict | nn.ModuleDict
value in an optimizer's group | learning rate | learning rate of an optimizer that steps
weight decay of an optimizer that steps | variable of an inner function | result of a method
"""
ORDINARY_VALUES = """
float | int | bool | str | None or a number | lazy tensor | CPU tensor | parameter | callable | dtype
list of numbers | tuple of numbers | dict of numbers | list of tensors | dict of tensors
tuple of tensors | module | object | enum member
"""
ORDINARY_WAYS = "by its name | by a helper | by a method | getattr | first of a comprehension"
ORDINARY_FRAMES = "in the step | in a module's forward | in a forward hook | in a training step"


def named(names: str) -> list[str]:
    return [name.strip() for line in names.strip().splitlines() for name in line.split("|")]


def assert_replayed(case: Case, at_least: int) -> None:
    outcome = check(case)
    assert outcome.num_replayed >= at_least, f"{outcome.explanation}\n\n{case}"


@pytest.mark.parametrize("holder", named(ORDINARY_HOLDERS))
def test_unchanged_step_is_replayed(holder: str) -> None:
    for value in map(BY_NAME.__getitem__, named(ORDINARY_VALUES)):
        if BY_NAME[holder].takes(value):
            assert_replayed(Case(BY_NAME[holder], value, value.uses[0]), NUM_CALLS // 2)


@pytest.mark.parametrize("frame", named(ORDINARY_FRAMES))
@pytest.mark.parametrize("way", named(ORDINARY_WAYS))
def test_ordinary_way_to_a_value_is_replayed(way: str, frame: str) -> None:
    reach = BY_NAME[way]
    for holder in map(BY_NAME.__getitem__, ("attribute of an object", "element of a list")):
        for value in map(BY_NAME.__getitem__, ("float", "lazy tensor", "module")):
            if reach.fits(holder):
                assert_replayed(Case(holder, value, value.uses[0], reach, BY_NAME[frame]), NUM_CALLS // 2)


# A value, and a change in each call that replays follow.
FOLLOWED = [
    ("lazy tensor", "advance", "v * 0.5"),
    ("lazy tensor", "advance", "v.detach() * 0.5 + x.to(v.device).sum()"),
    ("lazy tensor", "mutate", "v.mul_(2)"),
    ("lazy tensor", "mutate", "v.copy_(v + 1)"),
    ("parameter", "mutate", "v.data.add_(1)"),
    ("list of tensors", "mutate", "v[0] = v[0] * 0.5"),
    ("list of tensors", "mutate", "v[0].mul_(2)"),
    ("dict of tensors", "mutate", "v['a'] = v['a'] * 0.5"),
]


@pytest.mark.parametrize(
    "holder", ["variable", "attribute of an object", "value of a dict", "element of a list"]
)
@pytest.mark.parametrize(("value", "kind", "code"), FOLLOWED)
def test_state_that_the_step_updates_is_replayed(holder: str, value: str, kind: str, code: str) -> None:
    kept = BY_NAME[value]
    case = Case(BY_NAME[holder], kept, kept.uses[0], inside=Inside(Change(kind, code)))
    assert_replayed(case, NUM_CALLS // 2)


def every(calls: Iterable[int], option: int) -> tuple[Event, ...]:
    return tuple(Event(call, Change("assign", option=option + call % 2)) for call in calls)


@pytest.mark.parametrize(
    ("holder", "value"),
    [
        ("argument", "float"),
        ("argument", "lazy tensor"),
        ("learning rate", "float"),
        ("learning rate of an optimizer that steps", "float"),
        ("weight decay of an optimizer that steps", "float"),
        ("variable", "lazy tensor"),
        ("attribute of an object", "lazy tensor"),
        ("buffer", "lazy tensor"),
        ("value of a dict", "lazy tensor"),
    ],
)
@pytest.mark.parametrize("frame", ["in the step", "in a training step"])
def test_value_that_is_read_in_each_replay_may_change_before_each_call(
    holder: str, value: str, frame: str
) -> None:
    # The step's own parameters are read in the step itself only.
    where = FRAMES[0] if BY_NAME[holder].signature else BY_NAME[frame]
    case = Case(
        BY_NAME[holder], BY_NAME[value], BY_NAME[value].uses[0], frame=where, events=every(range(14), 0)
    )
    assert_replayed(case, NUM_CALLS // 2)


@pytest.mark.parametrize("value", named(ORDINARY_VALUES))
def test_step_is_replayed_again_after_a_change(value: str) -> None:
    """Back at an earlier value, an earlier capture is used, or there are enough calls for another one."""
    held = BY_NAME[value]
    for first, last in ((4, 4), (5, 10)):
        events = Event(first, Change("assign", option=1)), Event(last, Change("assign", option=0))
        case = Case(BY_NAME["attribute of an object"], held, held.uses[0], events=events)
        assert_replayed(case, 4)


def test_every_row_of_the_tables_can_be_used() -> None:
    for value in VALUES:
        assert any(holder.takes(value) for holder in HOLDERS), value
    for holder in HOLDERS:
        assert any(map(holder.takes, VALUES)), holder
        assert any(reach.fits(holder) for reach in REACHES), holder
    for reach in REACHES:
        assert any(map(reach.fits, HOLDERS)), reach
