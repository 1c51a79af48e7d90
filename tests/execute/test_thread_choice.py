"""The number of threads of a library, by runs of given lengths: no clock is read here."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from lazystep.execute.thread_choice import ThreadChoice, make_thread_choice


def run(choice: ThreadChoice, seconds: Callable[[int], float], times: int) -> list[int]:
    counts = []
    for _ in range(times):
        counts.append(choice.next())
        choice.took(seconds(choice.next()))
    return counts


def test_both_counts_are_tried_and_the_faster_one_is_kept() -> None:
    for fast in (1, 4):
        choice = make_thread_choice([4, 1])
        assert run(choice, lambda n, fast=fast: 1.0 if n == fast else 2.0, 12) == [1, 4] * 6
        assert run(choice, lambda n: 1.0, 500) == [fast] * 500


def test_single_count_is_never_in_question() -> None:
    choice = make_thread_choice([1, 1])
    assert run(choice, lambda n: 1.0, 20) == [1] * 20
    assert run(choice, lambda n: 9.0, 20) == [1] * 20


def test_a_few_slow_runs_change_nothing() -> None:
    choice = make_thread_choice([1, 2])
    run(choice, lambda n: 2.0 / n, 12)
    for _ in range(20):
        assert run(choice, lambda n: 50.0, 3) == [2] * 3
        assert run(choice, lambda n: 1.0, 5) == [2] * 5


def test_a_lucky_run_does_not_decide() -> None:
    """Beside a busy thread some runs on all threads find the processors free, and most are very slow."""
    choice = make_thread_choice([1, 2])
    run(choice, lambda n: 2.0 / n, 12)
    busy = itertools.cycle([1.0, 80.0, 90.0])
    counts = run(choice, lambda n: 2.2 if n == 1 else next(busy), 60)
    assert counts[-48:] == [1] * 48


def test_busy_neighbour_is_noticed_and_its_end_too() -> None:
    choice = make_thread_choice([1, 2])
    run(choice, lambda n: 2.0 / n, 12)
    busy = {1: 2.2, 2: 8.0}
    counts = run(choice, busy.__getitem__, 100)
    assert counts[:4] == [2] * 4
    assert counts[4:10] == [1, 2] * 3
    assert counts[10:74] == [1] * 64
    # Tried again after 64 runs, and as long as nothing has changed at growing intervals.
    assert counts[74:80] == [1, 2] * 3
    assert run(choice, busy.__getitem__, 108) == [1] * 108
    assert run(choice, lambda n: 2.0 / n, 6) == [1, 2] * 3
    assert run(choice, lambda n: 2.0 / n, 300) == [2] * 300


def test_machine_that_has_become_slow_is_asked_less_and_less() -> None:
    choice = make_thread_choice([1, 2])
    run(choice, lambda n: 2.0 / n, 12)
    counts = run(choice, lambda n: 8.0 / n, 20_000)
    assert counts.count(1) < 200
