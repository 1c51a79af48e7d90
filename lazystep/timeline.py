"""Timelines: spans of time on threads, and the Chrome trace made from them.

`active` is the timeline of a running `profile`, or None. Hot paths check only `active`, once per barrier,
run, closure or bucket, never once per op. Times are those of `time.perf_counter`. A trace uses the clock,
process numbers and thread numbers of the trace that `torch.profiler` exports, so the `traceEvents` of both
can be joined into one file.

Categories: `recording` (also of a replay), `barrier`, `waiting`, `execution`, `build`, `closure`,
`overlap`, `collective`, and `mark` for the user's own spans.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

# Kineto's base time is the start of a quarter of a year, so that a float holds microseconds exactly enough.
_BASE_PERIOD = 7_889_238 * 10**9
# Numbers of rows that are not threads, above every thread number of Linux.
_FIRST_ROW = 10_000_000


class Span(NamedTuple):
    """An event with a start and an end. `row` is a thread number or a row's name; no end means an instant."""

    name: str
    category: str
    start: float
    end: float | None
    row: int | str
    args: Mapping[str, Any]


class Timeline:
    """Collects spans from all threads. Keeps the last `max_spans`."""

    def __init__(self, max_spans: int = 1_000_000) -> None:
        if max_spans < 1:
            raise ValueError(f"max_spans = {max_spans}: expected at least 1")
        self.start = time.perf_counter()
        self.num_added = 0
        self.thread_names: dict[int | str, str] = {}
        # Appending to a deque and storing in a dict are atomic, so the executor needs no lock here.
        self._spans: deque[Span | Callable[[], Iterable[Span]]] = deque(maxlen=max_spans)
        self._clock = UnixClock()

    def add(self, name: str, category: str, start: float, end: float | None = None, **args: Any) -> None:
        """Add a span of the calling thread from `start` to `end`; without an end, an instant."""
        self._append(Span(name, category, start, end, self._this_thread(), args))

    def add_to_row(self, row: str, name: str, category: str, start: float, end: float, **args: Any) -> None:
        """Add a span to a row of its own, for spans that overlap with others of their thread."""
        self._append(Span(name, category, start, end, row, args))

    def add_later(self, spans: Callable[[], Iterable[Span]]) -> None:
        """Add a function that returns spans when the trace is written, for spans that have not ended yet."""
        self._append(spans)

    def span(self, name: str, **args: Any) -> Any:
        """Mark a part of your own program: `with timeline.span("evaluation"): ...`."""
        return span(name, "mark", **args)

    def spans(self) -> list[Span]:
        """All spans so far, sorted by start. A span that is still open ends now, marked `unfinished`."""
        found: list[Span] = []
        for entry in list(self._spans):
            found.extend([entry] if isinstance(entry, Span) else entry())
        now = time.perf_counter()
        for one, thread_name in list(_open.values()):
            self.thread_names.setdefault(one.row, thread_name)
            found.append(one._replace(end=now, args={**one.args, "unfinished": True}))
        # Spans that began before the timeline are cut off at its start.
        seen = [s for s in found if (s.start if s.end is None else s.end) >= self.start]
        return sorted((s._replace(start=max(s.start, self.start)) for s in seen), key=lambda s: s.start)

    def to_chrome_trace(self) -> dict[str, Any]:
        """All spans in Chrome's trace event format, in the clock of `torch.profiler`'s export."""
        trace = chrome_trace(self.spans(), os.getpid(), "python", self.thread_names, self._clock)
        return trace | {"lazystep": {"spans_dropped": self.num_added - len(self._spans)}}

    def _append(self, entry: Span | Callable[[], Iterable[Span]]) -> None:
        self.num_added += 1
        self._spans.append(entry)

    def _this_thread(self) -> int:
        thread = threading.current_thread()
        number = thread.native_id or 0
        self.thread_names[number] = thread.name
        return number


active: Timeline | None = None

# The open spans of `span`, with the names of their threads.
_open: dict[int, tuple[Span, str]] = {}


@contextmanager
def span(name: str, category: str, **args: Any) -> Iterator[None]:
    """Record the block as a span. A timeline that begins or ends inside the block also gets the span.

    For rare and long events: this costs more than `Timeline.add`.
    """
    thread = threading.current_thread()
    started = Span(name, category, time.perf_counter(), None, thread.native_id or 0, args)
    _open[id(started)] = started, thread.name
    try:
        yield
    finally:
        del _open[id(started)]
        if active is not None:
            active.add(name, category, started.start, time.perf_counter(), **args)


class UnixClock:
    """Converts `time.perf_counter` to Unix time. Measured twice, because the two drift apart over hours."""

    def __init__(self) -> None:
        self._first = self._measure()

    def to_nanoseconds(self) -> Callable[[float], int]:
        """The function from `time.perf_counter` to Unix nanoseconds, from measurements at both ends."""
        (then, then_unix), (now, now_unix) = self._first, self._measure()
        elapsed = now - then
        drift = (now_unix - then_unix - elapsed * 1e9) / elapsed if elapsed > 1.0 else 0.0
        return lambda t: then_unix + round((t - then) * (1e9 + drift))

    @staticmethod
    def _measure() -> tuple[float, int]:
        # The fastest of five: a thread may lose the processor between two readings.
        pairs = []
        for _ in range(5):
            before, unix, after = time.perf_counter(), time.time_ns(), time.perf_counter()
            pairs.append((after - before, (before + after) / 2, unix))
        _, middle, unix = min(pairs)
        return middle, unix


def chrome_trace(
    spans: Iterable[Span],
    process: int,
    process_name: str,
    thread_names: Mapping[int | str, str] | None = None,
    clock: UnixClock | None = None,
) -> dict[str, Any]:
    """Spans in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing read.

    `ts` is in microseconds since `baseTimeNanoseconds`. An arrow leads from each barrier to the
    execution of its step.
    """
    to_unix = (clock or UnixClock()).to_nanoseconds()
    base = time.time_ns() // _BASE_PERIOD * _BASE_PERIOD
    threads: dict[int | str, int] = {}
    events: list[dict[str, Any]] = []
    for one in spans:
        if one.row not in threads:
            threads[one.row] = one.row if isinstance(one.row, int) else _FIRST_ROW + len(threads)
        event: dict[str, Any] = {"name": one.name, "cat": one.category, "pid": process}
        event |= {"tid": threads[one.row], "ts": (to_unix(one.start) - base) / 1000}
        if one.end is None:
            event |= {"ph": "i", "s": "t"}
        else:
            event |= {"ph": "X", "dur": (to_unix(one.end) - to_unix(one.start)) / 1000}
        events.append({**event, "args": dict(one.args)} if one.args else event)
        arrow = {"barrier": {"ph": "s"}, "execution": {"ph": "f", "bp": "e"}}.get(one.category)
        if arrow is not None and "step" in one.args:
            place = {key: event[key] for key in ("pid", "tid", "ts")}
            events.append({"name": "step", "cat": "step", "id": one.args["step"], **place, **arrow})
    rows: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": process_name}}
    ]
    for row, number in threads.items():
        name = row if isinstance(row, str) else (thread_names or {}).get(row, f"thread {row}")
        rows.append({"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": name}})
    return {"traceEvents": rows + events, "displayTimeUnit": "ms", "baseTimeNanoseconds": base}
