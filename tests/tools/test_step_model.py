"""The model of a data-parallel step: properties that hold for every timeline and link."""

from __future__ import annotations

import functools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.step_model import (
    Bucket,
    Link,
    Timeline,
    arrivals,
    fit,
    in_backward,
    overlapped,
    plain,
    ring,
    tree,
)

SECONDS = st.floats(0, 10)
BUCKETS = st.builds(Bucket, SECONDS, st.floats(0, 1e9), SECONDS)
TIMELINES = st.builds(Timeline, st.lists(BUCKETS, max_size=6).map(tuple), SECONDS)
LINKS = st.builds(Link, st.floats(0, 0.1), st.floats(1e6, 1e11))
RANKS = st.integers(1, 1024)
ALGORITHMS = st.sampled_from([ring, tree])
STEPS = st.sampled_from([plain, overlapped, functools.partial(in_backward, num_ahead=2)])


def at_most(a: float, b: float) -> bool:
    return a <= b or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


@given(TIMELINES, LINKS, RANKS, ALGORITHMS)
def test_a_step_is_between_the_longer_part_and_the_sum_of_both(timeline, link, ranks, algorithm) -> None:  # type: ignore[no-untyped-def]
    def reduce(num_bytes: float) -> float:
        return float(algorithm(num_bytes, ranks, link))

    communicating = sum(reduce(bucket.num_bytes) for bucket in timeline.buckets)
    late, early = plain(timeline, reduce), overlapped(timeline, reduce)
    assert at_most(max(timeline.alone, communicating), early)
    assert at_most(early, late), "overlap never makes a step longer"
    assert at_most(late, timeline.alone + communicating)
    for num_ahead in range(4):
        among = in_backward(timeline, reduce, num_ahead)
        assert at_most(early, among), "a wait in backward delays what comes behind it, and nothing else"
        assert at_most(among, timeline.alone + communicating)
    assert in_backward(timeline, reduce, len(timeline.buckets)) == pytest.approx(early)


@given(TIMELINES, RANKS, STEPS, ALGORITHMS)
def test_a_perfect_link_leaves_computing_alone(timeline, ranks, step, algorithm) -> None:  # type: ignore[no-untyped-def]
    perfect = Link(0.0, math.inf)
    assert step(timeline, lambda b: algorithm(b, ranks, perfect)) == pytest.approx(timeline.alone)


@given(TIMELINES, LINKS, STEPS, ALGORITHMS)
def test_one_rank_sends_nothing(timeline, link, step, algorithm) -> None:  # type: ignore[no-untyped-def]
    assert step(timeline, lambda b: algorithm(b, 1, link)) == pytest.approx(timeline.alone)


@given(TIMELINES, LINKS, RANKS, STEPS, ALGORITHMS, st.floats(1, 8))
def test_more_bytes_more_ranks_or_more_latency_never_make_a_step_shorter(  # type: ignore[no-untyped-def]
    timeline, link, ranks, step, algorithm, factor
) -> None:
    now = step(timeline, lambda b: algorithm(b, ranks, link))
    slower = Link(link.latency * factor, link.bandwidth)
    assert at_most(now, step(timeline, lambda b: algorithm(b * factor, ranks, link)))
    assert at_most(now, step(timeline, lambda b: algorithm(b, ranks * 2, link)))
    assert at_most(now, step(timeline, lambda b: algorithm(b, ranks, slower)))


@given(TIMELINES, LINKS)
def test_reductions_end_in_order(timeline, link) -> None:  # type: ignore[no-untyped-def]
    found = arrivals(timeline, lambda b: ring(b, 4, link))
    assert found == sorted(found)


@given(st.floats(1e-6, 0.01), st.floats(1e7, 1e10), st.integers(2, 8))
def test_a_fitted_link_is_the_link_that_was_measured(latency: float, bandwidth: float, ranks: int) -> None:
    link = Link(latency, bandwidth)
    small, large = (1e3, ring(1e3, ranks, link)), (1e8, ring(1e8, ranks, link))
    found = fit(small, large, ranks)
    assert found.bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert ring(2e7, ranks, found) == pytest.approx(ring(2e7, ranks, link), rel=1e-3)


def test_a_step_by_hand() -> None:
    timeline = Timeline((Bucket(1.0, 8.0, 0.5), Bucket(1.0, 8.0, 0.5)), rest=0.25)
    assert arrivals(timeline, lambda b: b / 2) == [5.0, 9.0]
    assert plain(timeline, lambda b: b / 2) == 10.0
    assert overlapped(timeline, lambda b: b / 2) == 9.5
    assert in_backward(timeline, lambda b: b / 2, 1) == 9.5
    # Waits for each bucket before the next is computed: 1 + 4 + 0.5, then 1.25 + 4 + 0.5 less the rest.
    assert in_backward(timeline, lambda b: b / 2, 0) == 11.0
    assert ring(8.0, 4, Link(1.0, 2.0)) == 6 + 6.0
    assert tree(8.0, 4, Link(1.0, 2.0)) == 4 + 8.0
