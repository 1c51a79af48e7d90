"""The stream that updates run on, on an accelerator. The CPU has no streams: its updates run at once.

On an accelerator, an update must wait for backward's kernels and for its own bucket's reduction, but not for
later reductions. So updates run on a side stream, which is joined to the current stream before `backward()`
returns.

This module has not run on hardware: the tests use a stand-in that records the calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class SideStream:
    """A stream of the device's module (such as `torch.cuda`), made at first use."""

    def __init__(self, device_module: Any) -> None:
        self._module = device_module
        self._stream: Any = None

    @classmethod
    def for_device(cls, device: torch.device) -> SideStream | None:
        """The side stream of an accelerator; None for the CPU."""
        return None if device.type == "cpu" else cls(torch.get_device_module(device))

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Issue the block's work on the side stream, after all work already issued on the current stream."""
        if self._stream is None:
            self._stream = self._module.Stream()
        # Parameters and optimizer state may have been written on the current stream.
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            yield

    def keep_alive(self, tensors: Iterable[Tensor]) -> None:
        """Tell the allocator that the side stream reads these tensors, so it won't reuse them too early."""
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def join(self) -> None:
        """Make the current stream wait for the side stream. Does not block the host."""
        if self._stream is not None:
            self._module.current_stream().wait_stream(self._stream)
