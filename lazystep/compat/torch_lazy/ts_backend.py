"""`torch._lazy.ts_backend`: the start of the device, which `import lazystep` has done already."""

from __future__ import annotations

import sys

from ...errors import LazyStepError
from ..names import Names

_names = Names(__name__)


@_names.does("`import lazystep`", "nothing is left to do")
def init() -> None:
    """Does nothing: importing lazystep registers the device. Raises if torch's own backend came later."""
    if "torch._lazy.ts_backend" in sys.modules:
        raise LazyStepError(
            "torch._lazy.ts_backend was imported beside lazystep, and both want the lazy device. "
            "Remove `import torch._lazy.ts_backend`."
        )
