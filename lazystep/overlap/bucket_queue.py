"""The buckets of one backward, in order: each is handed on when its reduction has succeeded.

All of backward's computation comes first, so that every reduction starts as early as it does without
overlap. Then, while the later ones are in flight, each reduced bucket is handed to `update`, on the
thread of backward, in the order of the buckets. (Updating between two hooks would delay the start of the
reductions behind it; a thread of its own would bring an OpenMP pool of its own, which on the CPU costs
more than it hides.) See [Note: before and after the finalizer].

Nothing here is raised before DDP's finalizer has run: `update` is not called again after an error, and
`finish` gets it. If the finalizer raises, as it does for a reduction that failed, `finish` does not run;
`failed` has run by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from .backward_callbacks import queue_callback
from .bucket import Bucket, Future
from .event_log import BucketEvents
from .side_stream import SideStream


class BucketQueue:
    """Collects a backward's buckets and their reductions; drains itself after the last one."""

    def __init__(
        self,
        update: Callable[[Bucket, Tensor], int],
        drained: Callable[[BaseException | None], None],
        finish: Callable[[], None],
    ) -> None:
        self._update = update
        self._drained = drained
        self._finish = finish
        self._waiting: list[tuple[Bucket, Future, BucketEvents]] = []
        self._error: BaseException | None = None
        self.side_stream: SideStream | None = None
        self.seconds_waiting = 0.0

    def add(self, bucket: Bucket, future: Future, events: BucketEvents) -> None:
        """Add the next bucket, from its hook. Returns at once; the last one queues the draining."""
        if bucket.index == 0:
            self._waiting, self._error = [], None  # what a backward that raised has left
        self._waiting.append((bucket, future, events))
        if bucket.is_last:
            queue_callback(self._drain)

    def _drain(self) -> None:
        waiting, self._waiting = self._waiting, []
        queue_callback(self._raise_or_finish)
        try:
            with torch.no_grad(), self.side_stream.updating() if self.side_stream else nullcontext():
                for bucket, future, events in waiting:
                    self._wait_and_update(bucket, future, events)
        except BaseException as error:  # raised again after the finalizer, whatever it is
            self._error = error
        if self.side_stream is not None:
            self.side_stream.join()
        self._drained(self._error)

    def _wait_and_update(self, bucket: Bucket, future: Future, events: BucketEvents) -> None:
        start = time.perf_counter()
        # The value first: it raises if the reduction failed, and then nothing may be updated from it.
        reduced = future.wait()
        events.update_start = time.perf_counter()
        self.seconds_waiting += events.update_start - start
        if not events.reduce_end:  # its callback comes after the value
            events.reduce_end = events.update_start
        if self.side_stream is not None:
            self.side_stream.keep_alive([reduced])
        events.updated = self._update(bucket, reduced)
        events.update_end = time.perf_counter()

    def _raise_or_finish(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._finish()
