"""`torch._lazy.device_context`: the state of the lazy device as closures see it."""

from ...step_closures import DeviceContext as _DeviceContext
from ...step_closures import get_device_context as _get_device_context
from ..names import Names

_names = Names(__name__)

DeviceContext = _names.same(
    "DeviceContext",
    _DeviceContext,
    "the class of `lazystep.get_device_context()`",
    "also counts steps: `.step`",
)
get_device_context = _names.same(
    "get_device_context",
    _get_device_context,
    "`lazystep.get_device_context`",
    "there is one device, `lazy:0`; other names raise",
)
