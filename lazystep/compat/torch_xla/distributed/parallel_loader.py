"""`torch_xla.distributed.parallel_loader`: batches on the device, and the barrier between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from ....step_closures import check_device as _check_device
from ...names import Names
from .. import sync as _sync
from ..core.xla_model import send_cpu_data_to_device as _send

_names = Names(__name__)

ParallelLoader = _names.refused("ParallelLoader", "`pl.MpDeviceLoader(loader, device)`")
PerDeviceLoader = _names.refused("PerDeviceLoader", "`pl.MpDeviceLoader(loader, device)`")
PerDeviceQueue = _names.refused("PerDeviceQueue", "`pl.MpDeviceLoader(loader, device)`")


@_names.does(
    'the loader, `.to("lazy")` and `lazystep.mark_step`', "no threads: copies to the device are recorded"
)
class MpDeviceLoader:
    """Batches of a loader on the lazy device, with a barrier before each batch and after the last.

    `batches_per_execution=N` puts N batches between two barriers. Other options are for threads that do not
    exist here, and are ignored; `input_sharding` is refused.
    """

    def __init__(self, loader: Iterable[Any], device: Any, **kwargs: Any) -> None:
        _check_device(device)
        if kwargs.get("input_sharding") is not None:
            _names.refuse(
                "MpDeviceLoader(input_sharding=...)", "DistributedSampler: each process has one device"
            )
        self._loader = loader
        self._device = device
        self._every = int(kwargs.get("batches_per_execution", 1))

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._loader):
            if number % self._every == 0:
                _sync()
            yield _send([batch], self._device)[0]
        _sync()

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"{type(self._loader).__name__} has no length")
        return len(self._loader)
