"""Handles: the runtime side of a program's values.

A handle is what a lazy tensor stands for. It is made while recording, and gets its real CPU tensor when the
step that computes it has run. A value is wanted as long as its handle lives. The life of the tensor object
does not tell, because tensor objects can be swapped (`torch.utils.swap_tensors`) and revived by autograd.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..errors import LazyStepError
from ..program.types import type_of
from ._recorder import Handle, Handles, Memory

__all__ = ["Handle", "Handles", "HostWrite", "Memory", "PendingRun", "adopt_host_tensor"]


class PendingRun(Protocol):
    """A queued step, as far as the recorder needs to know it."""

    def wait(self) -> None:
        """Block until the step has run or failed; raise after the setting `wait_timeout`."""

    @property
    def is_finished(self) -> bool:
        """Whether the step has run or failed."""

    @property
    def error(self) -> LazyStepError | None:
        """Why the step failed, once it has run."""


class HostWrite:
    """In the place of a step: the host has written the memory, on the training thread. See `PendingRun`."""

    is_finished = True
    error = None

    def wait(self) -> None:
        """Return at once."""


def adopt_host_tensor(tensor: torch.Tensor, memory: Memory | None = None) -> Handle:
    """A handle whose value is known already. Takes over `tensor`, which nothing else may write."""
    type_ = type_of(tensor)
    if memory is None:
        memory = Memory(tensor.untyped_storage().nbytes() if type_.layout is torch.strided else 0)
    handle = Handle(type_, memory)
    handle.tensor = tensor
    return handle
