"""The numbers of a run's charts: read from the run's files, and reduced to the resolution of a screen."""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_MAX_POINTS = 800
_NUM_BINS = 300
_MAX_ZOOM = 600
# The names of the trace's threads on the page; other threads keep their names.
_LANES = {
    "MainThread": "training thread",
    "lazystep-executor": "executor",
    "lazystep-builder": "builder",
    "lazystep-closures": "closures",
}


class PageError(Exception):
    """The directory holds no run, or a file in it can't be read. The message says which."""


class Segment(NamedTuple):
    """The activity of a thread from `start` to `end`, in seconds since the run began."""

    start: float
    end: float
    kind: str
    title: str


# -- reading ---------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one if there is no file. Raises `PageError`."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PageError(f"{path} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise PageError(f"{path} can't be read: expected a JSON object, got {type(content).__name__}")
    return content


def read_series(directory: Path) -> dict[str, list[tuple[float, float]]]:
    """The numbers of all logs in the directory: name to pairs (step, value). The loss comes first."""
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for path in sorted([*directory.glob("*.jsonl"), *directory.glob("*.csv")]):
        try:
            rows = list(_rows(path))
        except (OSError, ValueError) as error:
            raise PageError(f"{path} can't be read: {error}") from error
        for row in rows:
            step = _number(row.pop("step", None))
            for name, value in row.items():
                number = _number(value)
                if step is not None and number is not None:
                    series[name].append((step, number))
    return dict(sorted(series.items(), key=lambda item: ("loss" not in item[0], item[0])))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            yield from csv.DictReader(file)
            return
        lines = file.read().splitlines()
    for number, line in enumerate(lines):
        try:
            row = json.loads(line)
        except ValueError:
            if number == len(lines) - 1:
                return  # the run was killed while it wrote this line
            raise
        if isinstance(row, dict):
            yield row


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def read_lanes(events: Sequence[Mapping[str, Any]]) -> dict[str, list[Segment]]:
    """The activity of each thread, without overlaps: the innermost span at each moment."""
    spans = [e for e in events if e.get("ph") == "X"]
    if not spans:
        return {}
    origin = min(e["ts"] for e in spans)
    names = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    threads: dict[str, list[tuple[float, float, str, str]]] = defaultdict(list)
    for e in spans:
        start = (e["ts"] - origin) / 1e6
        name = names.get(e["tid"], str(e["tid"]))
        threads[name].append((start, start + e["dur"] / 1e6, _kind(e), _title(e)))
    order = [*_LANES, *sorted(set(threads) - set(_LANES))]
    return {_LANES.get(n, n): list(_innermost(threads[n])) for n in order if n in threads}


def _kind(event: Mapping[str, Any]) -> str:
    category = str(event.get("cat", ""))
    return str(event.get("args", {}).get("tier", category)) if category == "execution" else category


def _title(event: Mapping[str, Any]) -> str:
    details = ", ".join(f"{name} {value}" for name, value in event.get("args", {}).items())
    return f"{event['name']}" + (f" ({details})" if details else "") + f": {duration(event['dur'] / 1e6)}"


def _innermost(spans: list[tuple[float, float, str, str]]) -> Iterator[Segment]:
    """Cut nested spans into consecutive segments, each of the innermost span."""
    spans.sort(key=lambda span: (span[0], -span[1]))
    stack: list[tuple[float, float, str, str]] = []
    now = 0.0

    def until(moment: float) -> Iterator[Segment]:
        nonlocal now
        while stack and now < moment:
            _, end, kind, title = stack[-1]
            stop = min(end, moment)
            if stop > now:
                yield Segment(now, stop, kind, title)
                now = stop
            if end <= moment:
                stack.pop()

    for span in spans:
        yield from until(span[0])
        now = max(now, span[0])
        stack.append(span)
    yield from until(math.inf)


# -- reducing --------------------------------------------------------------------------------------


def thin(points: Sequence[Any], limit: int = _MAX_POINTS) -> list[Any]:
    """At most `limit` of the points, evenly chosen, including the first and the last."""
    if len(points) <= limit:
        return list(points)
    return [points[round(i * (len(points) - 1) / (limit - 1))] for i in range(limit)]


def timeline_data(
    events: Sequence[Mapping[str, Any]], lanes: Mapping[str, Sequence[Segment]]
) -> dict[str, Any]:
    """The numbers of the time charts: step times, use of each thread, and a zoom on the first native step."""
    if not lanes:
        return {}
    origin = min(e["ts"] for e in events if e.get("ph") == "X")
    total = max(lane[-1].end for lane in lanes.values())
    executions = sorted(
        ((e["ts"] - origin) / 1e6, e["dur"] / 1e3, _kind(e), e.get("args", {}).get("step", 0))
        for e in events
        if e.get("cat") == "execution" and e.get("ph") == "X"
    )
    native = next((start for start, _, kind, _ in executions if kind == "native"), None)
    marks = [((e["ts"] - origin) / 1e6, e["dur"] / 1e6, e["name"]) for e in events if e.get("cat") == "mark"]
    builds = [((e["ts"] - origin) / 1e6, e["dur"] / 1e6) for e in events if e.get("cat") == "build"]
    first, last = _zoom_window(executions, native)
    zoom = {
        name: [s for s in lane if s.end >= first and s.start <= last][:_MAX_ZOOM]
        for name, lane in lanes.items()
    }
    return {
        "total": total,
        "native": None if native is None else _short(native),
        "executions": [[*map(_short, e[:2]), *e[2:]] for e in thin(executions)],
        "num_executions": len(executions),
        "marks": marks,
        "builds": builds,
        "bins": {name: _bins(lane, total) for name, lane in lanes.items()},
        "zoom": {"start": first, "end": last, "lanes": {name: lane for name, lane in zoom.items() if lane}},
    }


def _zoom_window(
    executions: Sequence[tuple[float, float, str, int]], native: float | None
) -> tuple[float, float]:
    """The time around the first native step; around the first steps if there is no native one."""
    if not executions:
        return 0.0, 0.0
    position = next((i for i, e in enumerate(executions) if e[0] == native), 0)
    first, last = executions[max(position - 3, 0)], executions[min(position + 8, len(executions) - 1)]
    margin = 0.03 * (last[0] + last[1] / 1e3 - first[0])
    return max(first[0] - margin, 0.0), last[0] + last[1] / 1e3 + margin


def _bins(lane: Sequence[Segment], total: float) -> dict[str, list[float]]:
    """For each kind of activity, the share of each interval that the thread spent on it."""
    width = total / _NUM_BINS or 1.0
    bins: dict[str, list[float]] = defaultdict(lambda: [0.0] * _NUM_BINS)
    for start, end, kind, _ in lane:
        for i in range(int(start / width), min(int(end / width), _NUM_BINS - 1) + 1):
            bins[kind][min(i, _NUM_BINS - 1)] += max(min(end, (i + 1) * width) - max(start, i * width), 0.0)
    return {kind: [round(min(seconds / width, 1.0), 3) for seconds in row] for kind, row in bins.items()}


def _short(number: float) -> float:
    return float(f"{number:.6g}")


def duration(seconds: float) -> str:
    """A duration as text, such as `1.2 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"
