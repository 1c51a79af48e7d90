"""The table of handlers: ops that Python runs in place of the recorder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..record.recorder import Recorder

# (recorder, op, args, kwargs) -> what the op returns.
Handler = Callable[[Recorder, Any, tuple[Any, ...], dict[str, Any]], Any]

HANDLERS: dict[Any, Handler] = {}


def handles(*ops: Any) -> Callable[[Handler], Handler]:
    """Register a function as the handler of some ops."""

    def register(function: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(ops, function))
        return function

    return register
