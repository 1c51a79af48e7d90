"""Counters of the runtime's events, and the user's lines that made the training thread wait.

Counters change at barriers and reads, never once per op, so recording an op does not pay for them.
Names are stable: `programs_recorded`, `programs_executed`, `cache_hits`, `cache_misses`,
`instructions_recorded`, `instructions_executed`, `synchronizations`, `synchronizations:<reason>`,
`automatic_barriers`, `random_draws`, `layout_repairs`, `steps_failed`, `steps_run_while_waiting`,
`pools_given_back`, `overlap_backwards`,
`overlap_parameters_updated`, `overlap_decisions`, and the seconds
`seconds_recording`, `seconds_waiting`, `seconds_executing`.

Nothing here synchronizes with the device. For counters that include every queued step, call
`lazystep.wait_device_ops()` first.
"""

from __future__ import annotations

import threading
import time
from collections import Counter

from . import timeline

__all__ = [
    "add_seconds",
    "count",
    "count_synchronization",
    "counter_names",
    "counter_value",
    "report",
    "reset",
    "synchronizations",
]

# The reason of a wait in backward that anomaly mode asks for.
LOOKS_FOR_NAN = "anomaly mode looks for NaN"
_lock = threading.Lock()
_counts: Counter[str] = Counter()
_seconds: Counter[str] = Counter()
_sync_lines: Counter[tuple[str, str]] = Counter()


def count(name: str, amount: int = 1) -> None:
    """Add to a counter; the name may be your own. Takes a lock: call it once per step, not once per op.

    For example:

        lazystep.metrics.count("batches_skipped")
    """
    with _lock:
        _counts[name] += amount


def add_seconds(name: str, seconds: float) -> None:
    """Add seconds to the counter `seconds_<name>`.

    For example:

        lazystep.metrics.add_seconds("loading", time.perf_counter() - start)
    """
    with _lock:
        _seconds["seconds_" + name] += seconds  # type: ignore[assignment]


def count_synchronization(reason: str, line: str) -> None:
    """Count one wait of the training thread for values, with the user's line that caused the wait.

    For libraries that read lazy tensors for their callers:

        lazystep.metrics.count_synchronization("my_reader", "train.py:12")
    """
    with _lock:
        _counts["synchronizations"] += 1
        _counts["synchronizations:" + reason] += 1
        _sync_lines[reason, line] += 1
    if timeline.active is not None:
        timeline.active.add(f"synchronization: {reason}", "waiting", time.perf_counter(), line=line)


def counter_names() -> list[str]:
    """The names of all counters that are not zero, sorted.

    For example:

        for name in lazystep.metrics.counter_names():
            print(name, lazystep.metrics.counter_value(name))
    """
    with _lock:
        return sorted([*_counts, *_seconds])


def counter_value(name: str) -> int | float:
    """The value of a counter; 0 if nothing was counted under this name.

    For example:

        lazystep.wait_device_ops()      # for a count that includes every queued step
        assert lazystep.metrics.counter_value("synchronizations") == 0
    """
    with _lock:
        return _seconds[name] if name in _seconds else _counts[name]


def synchronizations() -> list[tuple[str, str, int]]:
    """The waits of the training thread: (reason, `file:line`, how often), most frequent first.

    For example:

        for reason, line, count in lazystep.metrics.synchronizations():
            print(f"{count} x {reason} at {line}")
    """
    with _lock:
        return [(reason, line, n) for (reason, line), n in _sync_lines.most_common()]


def reset() -> None:
    """Set every counter to zero, and forget the lines that waited.

    For example:

        lazystep.metrics.reset()        # after warm-up, before the measurement
    """
    with _lock:
        _counts.clear()
        _seconds.clear()
        _sync_lines.clear()


def report() -> str:
    """All counters, and the lines that synchronized, as text.

    For example:

        print(lazystep.metrics.report())
    """
    with _lock:
        rows = [f"{name:<44} {value}" for name, value in sorted(_counts.items())]
        rows += [f"{name:<44} {value:.3f}" for name, value in sorted(_seconds.items())]
    rows += [f"  {n:>6} x {reason} at {line}" for reason, line, n in synchronizations()]
    return "\n".join(rows) if rows else "nothing counted yet"
