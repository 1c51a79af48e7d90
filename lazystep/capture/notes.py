"""What a step says of its calls: why they were recorded, captured or refused, as notes and warnings."""

from __future__ import annotations

import re
import warnings
from collections import deque

from ..notices import LazyStepWarning, user_level

# Captures and refusals of all steps in the process, also of deleted ones: for the report of a run.
reasons: deque[str] = deque(maxlen=64)


class Notes:
    """The notes of one step: the last one of each kind."""

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self._texts: dict[str, str] = {}

    def add(self, name: str, text: str) -> None:
        """A note for `explain`. The first of its kind is also one of the process's `reasons`."""
        kind = _without_numbers(text)
        if kind not in self._texts:
            reasons.append(f"{name}: {text}")
        self._texts[kind] = text

    def warn_once(self, kind: str, message: str) -> None:
        """Warn at the line that called the step, once for each kind."""
        kind = _without_numbers(kind)
        if kind not in self._warned:
            self._warned.add(kind)
            warn(message)

    def texts(self) -> list[str]:
        """All notes, in the order in which their kinds came up."""
        return list(self._texts.values())


def warn(message: str) -> None:
    """Warn at the line that called the step."""
    warnings.warn(message, LazyStepWarning, stacklevel=user_level())


def _without_numbers(text: str) -> str:
    """The text with numbers masked, since the numbers in a reason differ from call to call."""
    return re.sub(r"-?\d[\d.e+-]*", "#", text)
