"""lazystep: an ordinary PyTorch training loop, each step one program, run asynchronously.

    model = Net().to("lazy")
    opt = torch.optim.AdamW(model.parameters())
    for x, y in loader:
        loss = loss_fn(model(x.to("lazy")), y.to("lazy"))
        loss.backward(); opt.step(); opt.zero_grad()
        lazystep.mark_step()          # returns at once; the step runs on the executor thread
    print(loss.item())                # waits for just what it needs

On `device="lazy"` ops are recorded, not run. `mark_step` is the barrier: it looks the program of the
step up in a cache, hands it to the executor thread and returns. A program that repeats is compiled to a
native library in the background, checked against eager's kernels, and switched in between two steps.

A tour:

    step                        decorate a step function: recorded until it repeats, then replayed
    mark_step                   without the decorator: end the step
    step_closure                decorate a function that looks at values: runs after the barrier
    add_step_closure, run_step_closures, flush_step_closures      the same by hand
    save, to_cpu                checkpoints and copies; synchronize once for all tensors
    sync_multi, wait_device_ops, wait_for_compile                 wait, each for something else
    debug                       explain() says in plain words what ran where and why; last_program()
    profile, RunDirectory       a trace of what ran when; what a run leaves behind for `lazystep report`
    metrics                     counters, and the lines of yours that waited
    report                      ready-made closures: JSONL, CSV, TensorBoard, a progress bar
    config                      every setting; each is an environment variable, too
    closure                     the closure handlers alone, without the lazy device
    lazystep.checkpoint         import it for checkpoints in the background that survive a crash
    lazystep.compat             import it for the names of torch._lazy and torch_xla
    lazystep.integrations       import a module of it to train with Accelerate, Transformers or Lightning
    lazystep.distributed        DistributedDataParallel on lazy modules: also under torch's own name
    lazystep.overlap            import it for DDP: updates while gradients are still being reduced

Importing this package registers the device and patches torch: `device.install.install` lists everything that
it touches. `import lazystep.overlap` alone does neither; the first use of another name does it then.

What goes wrong raises a `LazyStepError` that names the op, your line and the way out: `StepError` for a step
that failed in the background, `CollectiveError` for a collective of it, `ClosureError` for a closure,
`CaptureError` for a step that can't be replayed, `DeviceMismatchError`, `UnsupportedError`, `ForkError`,
`ConfigError`, `QueueFullError`, `WaitTimeoutError`, `CheckpointError`, `OverlapError`. What is merely slow is
a `LazyStepWarning`.
"""

import importlib as _importlib
import sys as _sys
import typing as _typing

from ._version import __version__
from .importing import is_for_room_without_device as _is_for_room_without_device

__all__ = [
    "CaptureError",
    "CheckpointError",
    "ClosureError",
    "CollectiveError",
    "ConfigError",
    "DeviceMismatchError",
    "ForkError",
    "LazyStepError",
    "LazyStepWarning",
    "OverlapError",
    "QueueFullError",
    "RunDirectory",
    "Step",
    "StepError",
    "UnsupportedError",
    "WaitTimeoutError",
    "__version__",
    "add_step_closure",
    "closure",
    "config",
    "debug",
    "flush_step_closures",
    "get_device_context",
    "get_tensor_id",
    "mark_step",
    "metrics",
    "profile",
    "report",
    "run_step_closures",
    "save",
    "step",
    "step_closure",
    "sync_multi",
    "to_cpu",
    "wait_device_ops",
    "wait_for_compile",
]

if _typing.TYPE_CHECKING or not _is_for_room_without_device():
    from . import closure, config, debug, metrics, report
    from . import runtime as _state
    from .barrier import mark_step, run_step_closures
    from .capture.step import Step, step
    from .debug import profile
    from .device import install as _device
    from .errors import (
        CaptureError,
        CheckpointError,
        ClosureError,
        CollectiveError,
        ConfigError,
        DeviceMismatchError,
        ForkError,
        LazyStepError,
        OverlapError,
        QueueFullError,
        StepError,
        UnsupportedError,
        WaitTimeoutError,
    )
    from .notices import LazyStepWarning
    from .reads import save, sync_multi, to_cpu, wait_device_ops, wait_for_compile
    from .record.tensor import get_tensor_id
    from .runs.directory import RunDirectory
    from .step_closures import add_step_closure, flush_step_closures, get_device_context, step_closure

    _device.install(_state.runtime.recorder)
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in ("closure", "config", "metrics"):  # they know nothing of the lazy device either
            return _importlib.import_module(f".{name}", __name__)
        del globals()["__getattr__"]
        _importlib.reload(_sys.modules[__name__])  # this file again, and now all of it
        return globals()[name]
