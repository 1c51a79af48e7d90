"""lazystep: an ordinary PyTorch training loop, each step one program, run asynchronously.

    model = Net().to("lazy")
    opt = torch.optim.AdamW(model.parameters())
    for x, y in loader:
        loss = loss_fn(model(x.to("lazy")), y.to("lazy"))
        loss.backward(); opt.step(); opt.zero_grad()
        lazystep.mark_step()          # returns at once; the step runs on the executor thread
    print(loss.item())                # waits for just what it needs

On `device="lazy"` ops are recorded, not run. `mark_step` is the barrier: it looks the program of the
step up in a cache, hands it to the executor thread and returns.
"""

from . import closure, config, debug, metrics, report
from ._version import __version__
from .barrier import (
    mark_step,
    run_step_closures,
    save,
    sync_multi,
    to_cpu,
    wait_device_ops,
    wait_for_compile,
)
from .capture.step import CaptureError, Step, step
from .debug import profile
from .errors import (
    ClosureError,
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
from .record.python.tensor import get_tensor_id
from .runs.directory import RunDirectory
from .step_closures import add_step_closure, flush_step_closures, get_device_context, step_closure

__all__ = [
    "CaptureError",
    "ClosureError",
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
