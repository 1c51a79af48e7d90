"""Warnings about what happened in the background, given on the training thread.

A builder that fails or a cache that can't be used is noticed on a thread where nobody looks and where
a filter that turns warnings into errors would kill the wrong work. So notices wait here, each kind
at most once a process, and the next barrier warns. What is left at exit is printed.
"""

from __future__ import annotations

import sys
import threading
import warnings

_lock = threading.Lock()
_waiting: list[str] = []
_given: set[str] = set()


class LazyStepWarning(UserWarning):
    """Something is not as fast or as durable as it could be; the numbers are right.

    Each kind is given once, at a barrier, on the training thread.

        warnings.simplefilter("error", lazystep.LazyStepWarning)    # in a test: nothing may be slow
    """


def notice(kind: str, message: str) -> None:
    """Warn at the next barrier, unless this kind of notice has been given before."""
    with _lock:
        if kind not in _given:
            _given.add(kind)
            _waiting.append(message)


def give_notices(stacklevel: int) -> None:
    """Warn about everything that waits. Called by barriers."""
    if not _waiting:
        return
    with _lock:
        messages, _waiting[:] = list(_waiting), []
    for number, message in enumerate(messages):
        try:
            warnings.warn(message, LazyStepWarning, stacklevel=stacklevel + 1)
        except LazyStepWarning:
            with _lock:
                _waiting[:0] = messages[number + 1 :]  # the rest is not lost when the first one raises
            raise


def print_notices() -> None:
    """Print what waits to standard error: at exit there is no barrier to come."""
    with _lock:
        messages, _waiting[:] = list(_waiting), []
    for message in messages:
        print(f"lazystep: {message}", file=sys.stderr)


def forget() -> None:
    """Forget which notices have been given (for tests)."""
    with _lock:
        _waiting.clear()
        _given.clear()
