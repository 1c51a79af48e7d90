"""What happened to each bucket and when: ready, reduced, updated; as a list and as a Chrome trace."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# Backward passes whose buckets are kept.
CAPACITY = 64


@dataclass
class BucketEvents:
    """The life of one bucket in one backward; times in seconds of `time.perf_counter`, 0 if not (yet).

    A bucket is ready when its last gradient is. `updated` counts the parameters that were updated before
    `backward()` returned; the others of the bucket are left to `optimizer.step()`.

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
        """Note the end of the reduction; runs on the thread that ended it."""
        if not self.reduce_end:
            self.reduce_end = time.perf_counter()


class EventLog:
    """The buckets of the last backward passes, oldest first. Costs five clock readings per bucket."""

    def __init__(self) -> None:
        self.num_backwards = 0
        self._events: deque[BucketEvents] = deque()

    def bucket_ready(self, index: int, buffer: Tensor) -> BucketEvents:
        """Begin the entry of a bucket; bucket 0 begins a backward."""
        now = time.perf_counter()
        if index == 0:
            self.num_backwards += 1
            while self._events and self._events[0].backward <= self.num_backwards - CAPACITY:
                self._events.popleft()
        num_bytes = 0 if buffer.is_sparse else buffer.numel() * buffer.element_size()
        events = BucketEvents(self.num_backwards, index, num_bytes, ready=now, reduce_start=now)
        self._events.append(events)
        return events

    def list(self) -> list[BucketEvents]:
        """All entries that are kept."""
        return list(self._events)

    def to_chrome_trace(self, rank: int) -> dict[str, Any]:
        """The log in the trace event format: one process per rank, one row per bucket and one for updates."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "updates"}},
        ]
        for index in sorted({entry.bucket for entry in self._events}):
            row = {"name": f"reduction of bucket {index}"}
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": index + 1, "args": row})
        for entry in self._events:
            arguments = {"backward": entry.backward, "bytes": entry.num_bytes, "updated": entry.updated}
            spans = [
                ("reduce", entry.reduce_start, entry.reduce_end, entry.bucket + 1),
                ("update", entry.update_start, entry.update_end, 0),
            ]
            for name, start, end, row_number in spans:
                if end:
                    span: dict[str, Any] = {
                        "ph": "X",
                        "name": f"{name} {entry.bucket}",
                        "cat": "overlap",
                        "args": arguments,
                    }
                    span |= {"pid": rank, "tid": row_number, "ts": start * 1e6, "dur": (end - start) * 1e6}
                    events.append(span)
        return {"traceEvents": events, "displayTimeUnit": "ms"}
