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

from . import config, debug, metrics
from ._version import __version__
from .barrier import (
    get_device_context,
    mark_step,
    save,
    sync_multi,
    to_cpu,
    wait_device_ops,
)
from .errors import (
    ConfigError,
    DeviceMismatchError,
    ForkError,
    LazyStepError,
    StepError,
    UnsupportedError,
    WaitTimeoutError,
)
from .record.python.tensor import get_tensor_id

__all__ = [
    "ConfigError",
    "DeviceMismatchError",
    "ForkError",
    "LazyStepError",
    "StepError",
    "UnsupportedError",
    "WaitTimeoutError",
    "__version__",
    "config",
    "debug",
    "get_device_context",
    "get_tensor_id",
    "mark_step",
    "metrics",
    "save",
    "sync_multi",
    "to_cpu",
    "wait_device_ops",
]
