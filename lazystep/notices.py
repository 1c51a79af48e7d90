"""Warnings about events on background threads, given on the training thread.

A background thread notices, for example, that a build failed or that the cache can't be used. A warning there
could go unseen, and a filter that turns warnings into errors would kill the background thread's work. So
the notice waits here, and the next barrier warns. Each kind is given at most once per process. Notices that
still wait at exit are printed.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings

_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_lock = threading.Lock()
waiting: list[str] = []  # notices that no barrier has given yet
_given: set[str] = set()


class LazyStepWarning(UserWarning):
    """Training is slower or less durable than it could be. The computed numbers are right.

    Each kind of warning is given once, at a barrier, on the training thread.

        warnings.simplefilter("error", lazystep.LazyStepWarning)    # in a test: nothing may be slow
    """


def notice(kind: str, message: str) -> None:
    """Warn at the next barrier, unless this kind of notice has been given before."""
    with _lock:
        if kind not in _given:
            _given.add(kind)
            waiting.append(message)


def user_level() -> int:
    """The `stacklevel` with which a warning of the calling function names the first line outside lazystep."""
    level, frame = 1, sys._getframe(1)
    while frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level


def give_notices() -> None:
    """Warn about all waiting notices, at the user's line. Called by barriers."""
    if not waiting:
        return
    with _lock:
        messages, waiting[:] = list(waiting), []
    for number, message in enumerate(messages):
        try:
            warnings.warn(message, LazyStepWarning, stacklevel=user_level())
        except LazyStepWarning:
            with _lock:
                waiting[:0] = messages[number + 1 :]  # keep the rest when a filter makes this warning raise
            raise


def print_notices() -> None:
    """Print all waiting notices to standard error. Called at exit, when no barrier follows."""
    with _lock:
        messages, waiting[:] = list(waiting), []
    for message in messages:
        print(f"lazystep: {message}", file=sys.stderr)


def forget() -> None:
    """Forget which notices have been given (for tests)."""
    with _lock:
        waiting.clear()
        _given.clear()
