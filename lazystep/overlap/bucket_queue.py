"""The buckets of one backward, in order: each is passed to `update` once its reduction has succeeded.

The queue receives buckets and futures from the communication hook. It lets backward finish its computation
first, so every reduction starts as early as it does without overlap. Then it waits for the buckets in order
and calls `update` for each on backward's thread, while later reductions are in flight. See
[Note: before and after the finalizer].

An update between two hooks would delay the reductions behind it. An update on a separate thread would need
a second OpenMP pool, which costs more on the CPU than the overlap saves.

Nothing is raised before DDP's finalizer has run. After an error, `update` is not called again, `drained`
gets the error, and the callback behind the finalizer raises it instead of calling `finish`. If the finalizer
itself raises, as it does for a failed reduction, `finish` does not run; `drained` has already run.
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
    """Collects the buckets and reductions of one backward, and drains itself after the last bucket."""

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
        """Add the next bucket, from its hook. Returns at once; the last bucket queues the draining."""
        if bucket.index == 0:
            self._waiting, self._error = [], None  # leftovers of a backward that raised
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
        except BaseException as error:  # raised again after the finalizer
            self._error = error
        if self.side_stream is not None:
            self.side_stream.join()
        self._drained(self._error)

    def _wait_and_update(self, bucket: Bucket, future: Future, events: BucketEvents) -> None:
        start = time.perf_counter()
        # Wait first: this raises if the reduction failed, and then the bucket must not be used.
        reduced = future.wait()
        events.update_start = time.perf_counter()
        self.seconds_waiting += events.update_start - start
        if not events.reduce_end:  # the callback that sets it may run after wait()
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
