"""`torch.lazy`: the module that `torch.utils.checkpoint` and others ask about the device."""

from __future__ import annotations

import types
from typing import Any

import torch


def register() -> None:
    """Make `torch.lazy`. Random numbers come from the CPU generator, whose state its callers save anyway."""
    module: Any = types.ModuleType("torch.lazy")
    module.__doc__ = "The lazy device of lazystep."
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.get_rng_state = lambda device=None: torch.empty(0, dtype=torch.uint8, device="cpu")
    module.set_rng_state = lambda state, device=None: None
    module.device = _DeviceGuard
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    torch._register_device_module("lazy", module)


class _DeviceGuard:
    """`with torch.lazy.device(0):` does nothing: there is one lazy device."""

    def __init__(self, device: Any) -> None:
        del device

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None
