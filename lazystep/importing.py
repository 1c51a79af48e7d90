"""Which submodule an import of the package is for.

`import lazystep` registers a device and patches torch. `import lazystep.overlap`, and the process that builds
libraries, need neither. But Python runs a package's `__init__` before any of its submodules, and does not
tell it for which one. A frame of the import system does.
"""

from __future__ import annotations

import sys
from types import FrameType

# Rooms that know nothing of the lazy device.
ROOMS_WITHOUT_DEVICE = ("lazystep.compile", "lazystep.overlap")


def is_for_room_without_device() -> bool:
    """Whether `lazystep` is being imported only because one of those rooms is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load_unlocked":
            name = str(frame.f_locals.get("name", ""))
            if name.startswith("lazystep."):
                return name.startswith(ROOMS_WITHOUT_DEVICE)
        frame = frame.f_back
    return False
