"""`torch._lazy.closure`: the handlers of closures, and the functions that add and run them."""

from ...closure import AsyncClosureHandler as _AsyncClosureHandler
from ...closure import ClosureHandler as _ClosureHandler
from ..names import Names
from . import add_step_closure as _add_step_closure
from . import run_step_closures as _run_step_closures
from .device_context import get_device_context as _get_device_context

_names = Names(__name__)

ClosureHandler = _names.same(
    "ClosureHandler",
    _ClosureHandler,
    "`lazystep.closure.ClosureHandler`",
    "runs every closure, and then raises the first error",
)
AsyncClosureHandler = _names.same(
    "AsyncClosureHandler",
    _AsyncClosureHandler,
    "`lazystep.closure.AsyncClosureHandler`",
    "the worker goes on after an error, which is raised once; `flush` and `close`; `when_full`",
)
add_step_closure = _names.same("add_step_closure", _add_step_closure, "`lazystep.add_step_closure`")
run_step_closures = _names.same("run_step_closures", _run_step_closures, "`lazystep.run_step_closures`")
get_device_context = _names.same("get_device_context", _get_device_context, "`lazystep.get_device_context`")
