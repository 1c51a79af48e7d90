"""When each bucket became ready, was reduced and was updated; as a list and as a Chrome trace."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .. import timeline

# The number of backward passes whose buckets are kept.
CAPACITY = 64


@dataclass
class BucketEvents:
    """The times of one bucket in one backward: seconds of `time.perf_counter`, 0 if not (yet) reached.

    A bucket is ready when its last gradient is ready. `updated` counts the parameters that were updated
    before `backward()` returned; `optimizer.step()` updates the bucket's other parameters.

        for event in handle.events():
            print(event.bucket, event.reduce_end - event.reduce_start)
    """

    backward: int
    bucket: int
    num_bytes: int
    ready: float = 0.0
    reduce_start: float = 0.0
    reduce_end: float = 0.0
    update_start: float = 0.0
    update_end: float = 0.0
    updated: int = 0

    def reduced(self) -> None:
        """Note the end of the reduction. Called on the thread that ended it."""
        if not self.reduce_end:
            self.reduce_end = time.perf_counter()

    def spans(self) -> Iterator[timeline.Span]:
        """The spans that have ended so far: one row for updates, and one row per bucket for reductions."""
        args = {"backward": self.backward, "bytes": self.num_bytes, "updated": self.updated}
        rows = [
            ("update", self.update_start, self.update_end, "updates"),
            ("reduce", self.reduce_start, self.reduce_end, f"reduction of bucket {self.bucket}"),
        ]
        for name, start, end, row in rows:
            if end:
                yield timeline.Span(f"{name} {self.bucket}", "overlap", start, end, row, args)


class EventLog:
    """The buckets of the last backward passes, oldest first. Reads the clock five times per bucket."""

    def __init__(self) -> None:
        self.num_backwards = 0
        self._events: deque[BucketEvents] = deque()

    def bucket_ready(self, index: int, buffer: Tensor) -> BucketEvents:
        """Begin the entry of a bucket. Bucket 0 also begins a new backward."""
        now = time.perf_counter()
        if index == 0:
            self.num_backwards += 1
            while self._events and self._events[0].backward <= self.num_backwards - CAPACITY:
                self._events.popleft()
        num_bytes = 0 if buffer.is_sparse else buffer.numel() * buffer.element_size()
        events = BucketEvents(self.num_backwards, index, num_bytes, ready=now, reduce_start=now)
        self._events.append(events)
        if timeline.active is not None:
            timeline.active.add_later(events.spans)
        return events

    def list(self) -> list[BucketEvents]:
        """All kept entries, oldest first."""
        return list(self._events)

    def to_chrome_trace(self, rank: int) -> dict[str, Any]:
        """The log in Chrome's trace format: one process per rank, one row per bucket, one row for updates."""
        return timeline.chrome_trace((span for e in self._events for span in e.spans()), rank, f"rank {rank}")
