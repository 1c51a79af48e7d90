"""When a capture is audited: after 1, 2, 4, ... replays, then steadily, for a small share of the time."""

from __future__ import annotations

import time

_EARLY_AUDITS = 32  # audits come after 1, 2, 4, ... replays up to this number, then steadily
_AUDIT_SHARE = 0.01  # of the time, at most, for steady audits
_MIN_INTERVAL = 64


class AuditSchedule:
    """The audits of one capture. `num_replays`: how often it has been replayed."""

    def __init__(self) -> None:
        self.num_since = 0  # replays since the last audit
        self._next = 1
        self._interval = 0  # between two steady audits
        self._audited_at = time.perf_counter()

    def is_due(self, num_replays: int) -> bool:
        """Whether the next call is an audit."""
        return num_replays >= self._next

    def skip_early(self) -> None:
        """The captures of its relatives have early audits, and this one does the same but for sizes."""
        self._next = max(_EARLY_AUDITS, _MIN_INTERVAL)

    def make_due(self, num_replays: int) -> None:
        """Make the next call an audit."""
        self._next = min(self._next, num_replays)

    def plan_next(self, seconds: float, num_replays: int, is_first: bool) -> None:
        """After an audit that took `seconds`. `is_first`: it has confirmed a capture from one call.

        A steady audit takes at most a share of the time that the replays since the last one took.
        """
        now = time.perf_counter()
        since, self._audited_at = now - self._audited_at, now
        num_since, self.num_since = self.num_since, 0
        if is_first:
            self.skip_early()
        elif self._next < _EARLY_AUDITS:
            self._next *= 2
        else:
            replay_seconds = max(since - seconds, 1e-6) / max(num_since, 1)
            self._interval = max(
                _MIN_INTERVAL, self._interval, round(seconds / (_AUDIT_SHARE * replay_seconds))
            )
            self._next = num_replays + self._interval
