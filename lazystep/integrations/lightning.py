"""Lightning on the lazy device: `Trainer(strategy=LazyStrategy())`; `LazyDDPStrategy` for several processes.

The strategy moves the module to the lazy device and ends a step after each batch of training, validation,
test and prediction. Metrics go to progress bars and loggers by step closures (lightning_logging). With
`capture=True` a training step is captured (lightning_capture). The rest is Lightning's: checkpoints,
clipping, accumulation, schedules, early stopping, resuming.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerStatus

from ..barrier import mark_step
from ..capture.step import Step
from ..record.tensor import DEVICE
from ..step_closures import flush_step_closures
from . import masks
from .lightning_capture import CapturedOptimization, capture_optimization
from .lightning_logging import log_by_closures, log_directly


class LazyAccelerator(Accelerator):
    """The lazy device, as Lightning asks for it. `LazyStrategy` brings it along.

    trainer = lightning.Trainer(strategy=LazyStrategy())
    """

    def setup_device(self, device: torch.device) -> None:
        """Check that the device is the lazy one. There is nothing to set up."""
        if device.type != DEVICE.type:
            raise ValueError(f"LazyAccelerator on {device}: expected {DEVICE}. Pass strategy=LazyStrategy()")

    def teardown(self) -> None:
        """There is nothing to tear down."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """The statistics of the CPU, which runs the steps. `lazystep.metrics` has those of the steps."""
        stats: dict[str, Any] = CPUAccelerator().get_device_stats(device)
        return stats

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """One device; more of them are refused."""
        if devices not in ("auto", 1, "1", -1, "-1"):
            raise ValueError(
                f"devices={devices!r}: there is one lazy device in a process. Leave `devices` out, or use "
                "LazyDDPStrategy for several processes"
            )
        return 1

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """The lazy device."""
        return [DEVICE]

    @staticmethod
    def auto_device_count() -> int:
        """One."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """True: importing lazystep has registered the device."""
        return True

    @staticmethod
    def name() -> str:
        """The name of the device's type."""
        return DEVICE.type


class ProcessesAccelerator(LazyAccelerator):
    """The lazy devices of several processes, one in each. `LazyDDPStrategy` brings it along.

    trainer = lightning.Trainer(strategy=LazyDDPStrategy(), devices=2)
    """

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """How many processes there are on this machine."""
        num_processes = 1 if devices == "auto" else int(devices)
        if num_processes < 1:
            raise ValueError(f"devices={devices!r}: expected how many processes there are on a machine")
        return num_processes

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """The lazy device of each process."""
        return [DEVICE] * devices


class _Lazy(Strategy):
    """What a strategy of Lightning does on the lazy device. Comes first among the bases of a strategy."""

    def __init__(self, capture: bool, **options: Any) -> None:
        super().__init__(**options)
        self._is_capturing = capture
        self._optimization: CapturedOptimization | None = None

    @property
    def captured_step(self) -> Step[..., Any] | None:
        """The captured training step, after `fit` has begun with `capture=True`."""
        return None if self._optimization is None else self._optimization.captured_step

    def setup(self, trainer: Any) -> None:
        """Lightning's. Then the trainer's metrics go through closures, and steps are captured if wanted."""
        plugin = self.precision_plugin
        if isinstance(plugin, MixedPrecision):
            plugin.device = DEVICE.type  # Lightning takes any device but a few that it knows for CUDA
            if plugin.scaler is not None and not plugin.scaler.is_enabled():
                # Made for CUDA, which this machine has not, it would scale nothing.
                plugin.scaler = torch.amp.GradScaler(DEVICE.type)
        super().setup(trainer)
        masks.install_if_used()
        log_by_closures(trainer)
        if self._is_capturing and trainer.state.fn == "fit":
            self._optimization = capture_optimization(trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """A barrier, which ends the step of the batch before."""
        if self._optimization is None:  # a captured step begins and ends with a barrier
            mark_step()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, then a barrier."""
        return _then_barrier(super().validation_step(*args, **kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, then a barrier."""
        return _then_barrier(super().test_step(*args, **kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, then a barrier."""
        return _then_barrier(super().predict_step(*args, **kwargs))

    def on_exception(self, exception: BaseException) -> None:
        """Wait until everything before the failure is logged: Lightning closes the loggers after this."""
        try:
            mark_step()
            flush_step_closures()
        except Exception as error:
            exception.add_note(f"lazystep: then the end of the step failed, too: {error}")
        if self.lightning_module is not None:
            log_directly(self.lightning_module.trainer)

    def teardown(self) -> None:
        """End the step and wait until everything is logged; then Lightning's, which moves the module away.

        After a failure in training, what fails here is a note on that failure, such as that the module can't
        be moved while the traceback holds the graph.
        """
        failure = sys.exc_info()[1]
        trainer = None if self.lightning_module is None else self.lightning_module.trainer
        try:
            mark_step()
            flush_step_closures()
            if trainer is not None:
                log_directly(trainer)
            super().teardown()
        except Exception as error:
            if failure is None or trainer is None or trainer.state.status != TrainerStatus.INTERRUPTED:
                raise
            failure.add_note(f"lazystep: then the end of the training failed, too: {error}")


class LazyStrategy(_Lazy, SingleDeviceStrategy):
    """Trains on the lazy device, with a barrier after each batch. `capture=True` captures training steps.

    The barriers do not wait for values. Lightning reads values at the end of an epoch, for early stopping and
    for checkpoints. Progress bars show the newest values that have arrived.

        trainer = lightning.Trainer(strategy=LazyStrategy(capture=True), max_epochs=3)
    """

    strategy_name = "lazy"

    def __init__(self, capture: bool = False, **options: Any) -> None:
        super().__init__(capture, device=DEVICE, accelerator=LazyAccelerator(), **options)


class LazyDDPStrategy(_Lazy, DDPStrategy):
    """Trains in several processes, with gloo: Lightning's `DDPStrategy`, with its options, on lazy modules.

    trainer = lightning.Trainer(strategy=LazyDDPStrategy(capture=True), devices=2, max_epochs=3)
    """

    strategy_name = "lazy_ddp"

    def __init__(self, capture: bool = False, **options: Any) -> None:
        options.setdefault("process_group_backend", "gloo")
        super().__init__(capture, accelerator=ProcessesAccelerator(), **options)

    def setup_distributed(self) -> None:
        """Lightning's, but for the device of the process group: gloo has none."""
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        _init_dist_connection(
            self.cluster_environment, self._get_process_group_backend(), timeout=self._timeout
        )

    def determine_ddp_device_ids(self) -> None:
        """None: as on the CPU, a module is where it is."""


def _then_barrier(result: Any) -> Any:
    mark_step()
    return result
