"""`torch_xla.debug.metrics`: counters. They are lazystep's own, under lazystep's names.

A counter is a number of events. A metric is a number of seconds, whose samples are not kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from .... import metrics as _metrics
from ...names import Names
from ...torch_lazy.metrics import counter_value as _counter_value

_names = Names(__name__)

_SECONDS = "seconds_"


@_names.does("`lazystep.metrics.counter_names`", "other counters")
def counter_names() -> list[str]:
    """The names of the counters of events."""
    return [name for name in _metrics.counter_names() if not name.startswith(_SECONDS)]


@_names.does("`lazystep.metrics.counter_names`", "other metrics: names that begin with `seconds_`")
def metric_names() -> list[str]:
    """The names of the counters of seconds."""
    return [name for name in _metrics.counter_names() if name.startswith(_SECONDS)]


counter_value = _names.same(
    "counter_value", _counter_value, "`lazystep.metrics.counter_value`", "None for an unknown counter"
)
metric_data = _names.refused(
    "metric_data", "`counter_value(name)` for the sum, `lazystep.profile` for single spans"
)
_BOTH = "resets counters and metrics"
clear_counters = _names.same("clear_counters", _metrics.reset, "`lazystep.metrics.reset`", _BOTH)
clear_metrics = _names.same("clear_metrics", _metrics.reset, "`lazystep.metrics.reset`", _BOTH)
clear_all = _names.same("clear_all", _metrics.reset, "`lazystep.metrics.reset`", _BOTH)
metrics_report = _names.same(
    "metrics_report", _metrics.report, "`lazystep.metrics.report`", "also lists the lines that waited"
)


@_names.does("`lazystep.metrics.report`", "by default programs, cache and waits")
def short_metrics_report(
    counter_names: Sequence[str] | None = None, metric_names: Sequence[str] | None = None
) -> str:
    """The report's lines for these names; for a few names of lazystep's if there are none given."""
    wanted = [
        *(counter_names or ("programs_executed", "cache_hits", "cache_misses", "synchronizations")),
        *(metric_names or ("seconds_recording", "seconds_executing", "seconds_waiting")),
    ]
    return "\n".join(line for line in _metrics.report().splitlines() if line.split(" ", 1)[0] in wanted)


@_names.does("`lazystep.metrics.synchronizations()`", "the reasons of waits; an op on the host is one")
def executed_fallback_ops() -> list[str]:
    """The reasons for which the training thread has waited; an op that ran on the host is one of them."""
    return sorted({reason for reason, _, _ in _metrics.synchronizations()})
