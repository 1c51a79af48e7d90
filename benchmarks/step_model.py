"""A model of a data-parallel step: its time, from what a rank computes and what a link takes.

A rank computes the gradients of its buckets one after the other. A bucket's reduction begins when its last
gradient is there and the reduction before it has ended: reductions share one link, so two at once are not
faster. Then the parameters are updated: all of them behind the last reduction (`plain`), each bucket
behind its own when backward has ended (`overlapped`), or each bucket behind its own in the middle of
backward, when so many more have been launched (`in_backward`). The model has no noise and no slow rank, and
its network takes no processor time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

# The seconds that a reduction of so many bytes takes.
Reduce = Callable[[float], float]


class Link(NamedTuple):
    """What a message costs: seconds until it arrives, and bytes that each rank sends in a second."""

    latency: float
    bandwidth: float


class Bucket(NamedTuple):
    """One bucket: seconds from the bucket before to its last gradient, bytes, seconds of its update."""

    compute: float
    num_bytes: float
    update: float


class Timeline(NamedTuple):
    """The buckets of a step in order, and the seconds between the last gradient and the first wait."""

    buckets: Sequence[Bucket]
    rest: float = 0.0

    @property
    def compute(self) -> float:
        """The seconds until the first wait."""
        return sum(bucket.compute for bucket in self.buckets) + self.rest

    @property
    def alone(self) -> float:
        """The seconds of the step if nothing had to be sent."""
        return self.compute + sum(bucket.update for bucket in self.buckets)


def ring(num_bytes: float, num_ranks: int, link: Link) -> float:
    """All-reduce around a ring: each of 2 (n - 1) rounds sends an n-th part. Gloo's algorithm."""
    rounds = 2 * (num_ranks - 1)
    return rounds * link.latency + rounds / num_ranks * num_bytes / link.bandwidth


def tree(num_bytes: float, num_ranks: int, link: Link) -> float:
    """All-reduce up and down a binary tree, in pieces: few rounds, but each rank sends all bytes twice."""
    if num_ranks == 1:
        return 0.0
    return 2 * math.ceil(math.log2(num_ranks)) * link.latency + 2 * num_bytes / link.bandwidth


def arrivals(timeline: Timeline, reduce: Reduce) -> list[float]:
    """When the reduction of each bucket ends, in seconds since the start of the step."""
    found = []
    ready = free = 0.0
    for bucket in timeline.buckets:
        ready += bucket.compute
        free = max(free, ready) + reduce(bucket.num_bytes)
        found.append(free)
    return found


def plain(timeline: Timeline, reduce: Reduce) -> float:
    """The seconds of a step that waits for all reductions and then updates all parameters."""
    last = max(arrivals(timeline, reduce), default=0.0)
    return max(timeline.compute, last) + sum(bucket.update for bucket in timeline.buckets)


def overlapped(timeline: Timeline, reduce: Reduce) -> float:
    """The seconds of a step that updates each bucket as soon as it is there, in order."""
    now = timeline.compute
    for bucket, arrival in zip(timeline.buckets, arrivals(timeline, reduce), strict=True):
        now = max(now, arrival) + bucket.update
    return now


def in_backward(timeline: Timeline, reduce: Reduce, num_ahead: int) -> float:
    """The seconds of a step that waits for a bucket, and updates it, when `num_ahead` more are launched."""
    if not timeline.buckets:
        return timeline.rest
    now = free = 0.0
    found: list[float] = []
    for number, bucket in enumerate(timeline.buckets):
        now += bucket.compute
        free = max(free, now) + reduce(bucket.num_bytes)
        found.append(free)
        if number == len(timeline.buckets) - 1:
            now += timeline.rest
        if number >= num_ahead:
            now = max(now, found[number - num_ahead]) + timeline.buckets[number - num_ahead].update
    for number in range(max(len(found) - num_ahead, 0), len(found)):
        now = max(now, found[number]) + timeline.buckets[number].update
    return now


def fit(small: tuple[float, float], large: tuple[float, float], num_ranks: int) -> Link:
    """The link on which a ring takes these (bytes, seconds) for a small and a large reduction."""
    rounds = 2 * (num_ranks - 1)
    per_byte = max((large[1] - small[1]) / (large[0] - small[0]), 1e-15)
    latency = max(small[1] - small[0] * per_byte, 0.0) / rounds
    return Link(latency, rounds / num_ranks / per_byte)
