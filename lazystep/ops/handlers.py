"""The table of handlers: ops that Python runs in place of the recorder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..record.recorder import Recorder

# (recorder, op, args, kwargs) -> what the op returns.
Handler = Callable[[Recorder, Any, tuple[Any, ...], dict[str, Any]], Any]

HANDLERS: dict[Any, Handler] = {}
# For ops that are not there before some module of torch is imported.
_BY_NAME: dict[str, Handler] = {}


def handler_of(op: Any) -> Handler | None:
    """The handler of an op; None if it is recorded."""
    return HANDLERS.get(op) or _BY_NAME.get(op.name())


def handles_later(name: str) -> Callable[[Handler], Handler]:
    """Register a function as the handler of an op with this name, which may not be declared yet."""

    def register(function: Handler) -> Handler:
        _BY_NAME[name] = function
        return function

    return register


def handles(*ops: Any) -> Callable[[Handler], Handler]:
    """Register a function as the handler of some ops."""

    def register(function: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(ops, function))
        return function

    return register
