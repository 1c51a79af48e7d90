"""`torch._lazy.metrics`: counters. They are lazystep's own, under lazystep's names."""

from __future__ import annotations

from ... import metrics as _metrics
from ..names import Names

_names = Names(__name__)

reset = _names.same("reset", _metrics.reset, "`lazystep.metrics.reset`")
counter_names = _names.same(
    "counter_names", _metrics.counter_names, "`lazystep.metrics.counter_names`", "other counters"
)
metrics_report = _names.same(
    "metrics_report", _metrics.report, "`lazystep.metrics.report`", "also lists the lines that waited"
)


@_names.does("`lazystep.metrics.counter_value`", "None for an unknown counter, where lazystep's own gives 0")
def counter_value(name: str) -> int | float | None:
    """The value of a counter; None if nothing was counted under this name. Does not synchronize."""
    return _metrics.counter_value(name) if name in _metrics.counter_names() else None
