"""`torch_xla.core.xla_model`: `import lazystep.compat.torch_xla.core.xla_model as xm`.

Collectives go through `torch.distributed`, in the default process group. On lazy tensors they are recorded
as a part of the step. Without a process group there is one replica, and a collective gives back what it gets.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ....barrier import mark_step as _mark_step
from ....reads import save as _save
from ....reads import sync_multi as _sync_multi
from ....reads import to_cpu as _to_cpu
from ....reads import wait_device_ops as _wait_device_ops
from ....record.tensor import DEVICE as _DEVICE
from ....record.tensor import is_lazy as _is_lazy
from ....step_closures import DeviceContext as _DeviceContext
from ....step_closures import add_step_closure as _add_step_closure
from ....step_closures import check_device as _check_device
from ...names import Names
from .. import device as _device
from .. import sync as _sync
from ..runtime import global_ordinal as _global_ordinal
from ..runtime import local_ordinal as _local_ordinal
from ..runtime import world_size as _world_size

_names = Names(__name__)

# -- the step ----------------------------------------------------------------------------------------------


@_names.does("`lazystep.mark_step`", "no wait for the compiler; raises errors of earlier steps")
def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """End the step, as `lazystep.mark_step` does. Blocks until the step has run if `wait`."""
    _mark_step(wait=wait)


add_step_closure = _names.same(
    "add_step_closure",
    _add_step_closure,
    "`lazystep.add_step_closure`; as a decorator, `step_closure`",
    "an async closure sees the values of its own step; no error is lost",
)


@_names.does(
    "`opt.step()`, then `lazystep.mark_step()`",
    "averages gradients over the process group, if there is one",
)
def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: Mapping[str, Any] | None = None,
    groups: Any = None,
    pin_layout: bool = True,
) -> Any:
    """Average the gradients over all processes, update, and with `barrier=True` end the step.

    Returns what `optimizer.step` returns. Does not wait.
    """
    reduce_gradients(optimizer, groups, pin_layout)
    loss = optimizer.step(**(optimizer_args or {}))
    if barrier:
        _sync()
    return loss


wait_device_ops = _names.same("wait_device_ops", _wait_device_ops, "`lazystep.wait_device_ops`")


@_names.does("`lazystep.sync_multi`")
def unlazy(tensors: Sequence[torch.Tensor]) -> None:
    """Compute these tensors now, and wait for them."""
    _sync_multi(tensors)


@_names.does("`lazystep.save`", "tensors that share memory share it in the file")
def save(data: Any, file_or_path: Any, master_only: bool = True, global_master: bool = False) -> None:
    """`torch.save` of CPU tensors, on the first process. Waits for the tensors, on every process."""
    if not master_only or is_master_ordinal(local=not global_master):
        _save(data, file_or_path)
    else:  # programs end at the same place on all ranks: their collectives are compared
        _sync_multi([leaf for leaf in pytree.tree_leaves(data) if _is_lazy(leaf)])


@_names.does('`tree_map` with `.to("lazy")`', "copies are recorded; `input_sharding` is refused")
def send_cpu_data_to_device(datas: Any, device: Any, input_sharding: Any = None) -> Any:
    """The same structure with CPU tensors moved to the lazy device. One tensor comes back in a list."""
    _check_device(device)
    if input_sharding is not None:
        _names.refuse("send_cpu_data_to_device(input_sharding=...)", "one process for each part of the batch")

    def move(leaf: Any) -> Any:
        is_cpu = isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"
        return leaf.to(_DEVICE) if is_cpu else leaf

    return pytree.tree_map(move, [datas] if isinstance(datas, torch.Tensor) else datas)


# -- the device and the processes --------------------------------------------------------------------------

DeviceContext = _names.same("DeviceContext", _DeviceContext, "the class of `lazystep.get_device_context()`")


@_names.does('`"lazy"`', "one device, which computes on the CPU; `devkind` means nothing")
def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """The lazy device."""
    return _device(n)


@_names.does('`tensor.device.type == "lazy"`')
def is_xla_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the lazy device."""
    return _is_lazy(tensor)


@_names.does("", '`["lazy:0"]`')
def get_xla_supported_devices(max_devices: int | None = None) -> list[str]:
    """The names of the devices."""
    return [str(_DEVICE)]


@_names.does("", '`["CPU:0"]`')
def xla_real_devices(devices: Sequence[Any] | None = None) -> list[str]:
    """What the lazy device computes on."""
    for name in devices or ():
        _check_device(name)
    return ["CPU:0"]


@_names.does("", '`"CPU"`')
def xla_device_hw(device: Any) -> str:
    """What the lazy device computes on."""
    _check_device(device)
    return "CPU"


@_names.does("`platform.machine()`")
def xla_device_kind(device: Any = None) -> str:
    """The kind of processor."""
    _check_device(device)
    return platform.machine()


get_local_ordinal = _names.same(
    "get_local_ordinal", _local_ordinal, "torchrun's `LOCAL_RANK`", "0 without a process group"
)


@_names.does("`dist.get_rank() == 0`", "true without a process group")
def is_master_ordinal(local: bool = True) -> bool:
    """Whether this process is the first, on its machine or of all."""
    return (_local_ordinal() if local else _global_ordinal()) == 0


@_names.does("`print`", "on the first process; a lazy tensor in it waits: print in a closure")
def master_print(*args: Any, fd: TextIO | None = None, local: bool = False, flush: bool = False) -> None:
    """`print` on the first process. Waits for lazy tensors among the arguments."""
    if is_master_ordinal(local=local):
        print(*args, file=sys.stdout if fd is None else fd, flush=flush)


# -- collectives -------------------------------------------------------------------------------------------

REDUCE_SUM = _names.same("REDUCE_SUM", "sum", "`dist.ReduceOp`")
REDUCE_MUL = _names.same("REDUCE_MUL", "mul", "`dist.ReduceOp`")
REDUCE_AND = _names.same("REDUCE_AND", "and", "`dist.ReduceOp`")
REDUCE_OR = _names.same("REDUCE_OR", "or", "`dist.ReduceOp`")
REDUCE_MIN = _names.same("REDUCE_MIN", "min", "`dist.ReduceOp`")
REDUCE_MAX = _names.same("REDUCE_MAX", "max", "`dist.ReduceOp`")
_OPS = {
    REDUCE_SUM: dist.ReduceOp.SUM,
    REDUCE_MUL: dist.ReduceOp.PRODUCT,
    REDUCE_AND: dist.ReduceOp.BAND,
    REDUCE_OR: dist.ReduceOp.BOR,
    REDUCE_MIN: dist.ReduceOp.MIN,
    REDUCE_MAX: dist.ReduceOp.MAX,
}
_GROUPS = "`groups` is refused"


def _check_groups(name: str, groups: Any) -> None:
    if groups:
        _names.refuse(f"{name}(groups=...)", "dist.new_group and the collectives of torch.distributed")


@_names.does("`dist.all_reduce`", f"a new tensor for one, in place for a list; {_GROUPS}")
def all_reduce(
    reduce_type: str,
    inputs: torch.Tensor | list[torch.Tensor],
    scale: float = 1.0,
    groups: Any = None,
    pin_layout: bool = True,
) -> torch.Tensor | list[torch.Tensor]:
    """Reduce over all processes, and multiply by `scale`. Recorded: does not wait for other processes."""
    _check_groups("all_reduce", groups)
    if reduce_type not in _OPS:
        raise ValueError(f"reduce_type is {reduce_type!r}: expected one of {', '.join(map(repr, _OPS))}")
    is_one = isinstance(inputs, torch.Tensor)
    tensors = [inputs.clone()] if isinstance(inputs, torch.Tensor) else list(inputs)
    if _world_size() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor, _OPS[reduce_type])
            if scale != 1.0:
                tensor.mul_(scale)
    return tensors[0] if is_one else inputs


@_names.does("`dist.all_gather` and `torch.cat`", _GROUPS)
def all_gather(
    value: torch.Tensor,
    dim: int = 0,
    groups: Any = None,
    output: torch.Tensor | None = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """The tensors of all processes, side by side along `dim`. Recorded: does not wait for other processes."""
    _check_groups("all_gather", groups)
    parts = [value.detach()]
    if _world_size() > 1:
        parts = [torch.empty_like(value) for _ in range(_world_size())]
        dist.all_gather(parts, value.detach().contiguous())
    result = torch.cat(parts, dim)
    return result if output is None else output.copy_(result)


@_names.does("`dist.broadcast`", _GROUPS)
def collective_broadcast(
    tensors: Sequence[torch.Tensor], root_ordinal: int = 0, groups: Any = None, pin_layout: bool = True
) -> None:
    """Overwrite tensors with those of one process. Recorded: does not wait for other processes."""
    _check_groups("collective_broadcast", groups)
    if _world_size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), root_ordinal)


@_names.does("`DistributedDataParallel(model)`", "broadcasts parameters and buffers, and ends the step")
def broadcast_master_param(model: torch.nn.Module) -> None:
    """Overwrite parameters and buffers with those of the first process, and end the step."""
    collective_broadcast(list(itertools.chain(model.parameters(), model.buffers())))
    _sync()


@_names.does("`DistributedDataParallel(model)`", f"averages, one collective for each gradient; {_GROUPS}")
def reduce_gradients(optimizer: torch.optim.Optimizer, groups: Any = None, pin_layout: bool = True) -> None:
    """Average the gradients of an optimizer's parameters over all processes, in place."""
    _check_groups("reduce_gradients", groups)
    if _world_size() > 1:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        all_reduce(REDUCE_SUM, [p.grad for p in parameters if p.grad is not None], 1.0 / _world_size())


@_names.does("`dist.all_gather_object`", "ends the step; waits for the other processes")
def xla_rendezvous(
    payload: bytes = b"", ordinals: Sequence[int] | None = None, tag: str | None = None
) -> list[bytes]:
    """End the step and exchange bytes with all processes. Blocks until all have come, at most for the
    time-out of the process group.
    """
    if ordinals and len(ordinals) != _world_size():
        raise ValueError(f"ordinals are {list(ordinals)}: expected all {_world_size()} processes, or none")
    if not isinstance(payload, bytes):
        raise TypeError(f"payload is {type(payload).__name__}: expected bytes")
    _sync()
    if _world_size() == 1:
        return [payload]
    gathered: list[Any] = [None] * _world_size()
    dist.all_gather_object(gathered, payload)
    return gathered


@_names.does("`dist.all_gather_object`", "ends the step; waits for the other processes")
def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """The same as `xla_rendezvous`."""
    return xla_rendezvous(payload, replicas, tag)


@_names.does(
    "`if dist.get_rank() == 0`", "with `lazystep.to_cpu`; ends the step; waits for the other processes"
)
def do_on_ordinals(target: Callable[..., Any], data: Any = (), ordinals: Collection[int] = (0,)) -> Any:
    """Call a function with CPU tensors on some processes. Waits for the tensors and for all processes."""
    cpu_data = _to_cpu(data)
    result = target(*cpu_data) if _global_ordinal() in ordinals else None
    rendezvous("do_on_ordinals")
    return result


@_names.does("`dist.all_gather_object`", "ends the step; waits for the tensors and the other processes")
def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
    """`reduce_fn` of the data of all processes, as CPU tensors. Waits for them and for all processes."""
    file = io.BytesIO()
    _save(data, file)
    return reduce_fn([torch.load(io.BytesIO(found)) for found in rendezvous(tag, file.getvalue())])


_OTHER = "the collectives of `torch.distributed`: docs/distributed.md"
all_to_all = _names.refused("all_to_all", _OTHER)
collective_permute = _names.refused("collective_permute", _OTHER)
send = _names.refused("send", _OTHER)
recv = _names.refused("recv", _OTHER)
reduce_scatter = _names.refused("reduce_scatter", _OTHER)
_BUCKETS = "`DistributedDataParallel(model)`, which makes buckets"
all_gather_bucketized = _names.refused("all_gather_bucketized", _BUCKETS)
reduce_scatter_bucketized = _names.refused("reduce_scatter_bucketized", _BUCKETS)
all_reduce_bucketized_gradients = _names.refused("all_reduce_bucketized_gradients", _BUCKETS)
CoalescingBuckets = _names.refused("CoalescingBuckets", _BUCKETS)
set_replication = _names.refused("set_replication", "a process for each replica, started by torchrun")
xla_replication_devices = _names.refused(
    "xla_replication_devices", "a process for each replica, started by torchrun"
)

# -- random numbers ----------------------------------------------------------------------------------------


@_names.does("`torch.manual_seed`", "seeds all of torch: draws on the lazy device are eager's")
def set_rng_state(seed: int, device: Any = None) -> None:
    """Seed torch's generators, from which the lazy device draws."""
    torch.manual_seed(seed)


get_rng_state = _names.refused("get_rng_state", "`torch.get_rng_state()`, which is a tensor")


@_names.does("`torch.random.fork_rng`")
@contextlib.contextmanager
def fork_rng(device: Any = None, enabled: bool = True) -> Iterator[None]:
    """A context that leaves torch's generator as it found it."""
    with torch.random.fork_rng(devices=[], enabled=enabled):
        yield


# -- the rest ----------------------------------------------------------------------------------------------


@_names.does("`lazystep.report.ProgressBar`", "counts what you add on the host")
class RateTracker:
    """How many items a second are added: since the last call of `rate`, smoothed, and since the start."""

    def __init__(self, smooth_factor: float | None = None) -> None:
        self._keep = 0.4 if smooth_factor is None else smooth_factor
        self._start = self._last = time.time()
        self._total = self._recent = 0.0
        self._rate: float | None = None

    def add(self, count: float) -> None:
        """Count items. Does not synchronize."""
        self._total += count
        self._recent += count

    def rate(self) -> float:
        """Items a second since the last call; `smooth_factor` of it is the rate before."""
        now = time.time()
        if now <= self._last:
            return 0.0
        rate = self._recent / (now - self._last)
        if self._rate is not None:
            rate = (1 - self._keep) * rate + self._keep * self._rate
        self._last, self._recent, self._rate = now, 0.0, rate
        return rate

    def global_rate(self) -> float:
        """Items a second since the start."""
        elapsed = time.time() - self._start
        return self._total / elapsed if elapsed > 0 else 0.0


@_names.does("`untyped_storage().data_ptr()`", "compares memory")
def check_view_sharing(obj: Any) -> None:
    """Raise `RuntimeError` if two tensors in a structure share memory. Does not synchronize."""
    found: dict[int, torch.Tensor] = {}
    for leaf in pytree.tree_leaves(obj):
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            other = found.setdefault(leaf.untyped_storage().data_ptr(), leaf)
            if other is not leaf:
                shapes = f"{leaf.dtype} {list(leaf.shape)} and {other.dtype} {list(other.shape)}"
                raise RuntimeError(f"two tensors share memory: {shapes}")


@_names.does("", "does nothing: a hint for the compiler, without effect on results")
def optimization_barrier_(tensors: Sequence[torch.Tensor]) -> None:
    """Does nothing. In torch_xla a hint for the compiler, which has no effect on results."""


ToXlaTensorArena = _names.refused("ToXlaTensorArena", '`torch.utils._pytree.tree_map` with `.to("lazy")`')
get_stablehlo = _names.refused("get_stablehlo", "`lazystep.debug.pending_program(tensors)`")
get_stablehlo_bytecode = _names.refused("get_stablehlo_bytecode", "`lazystep.debug.pending_program(tensors)`")
get_memory_info = _names.refused("get_memory_info", "the memory of the process: `resource.getrusage`")
MemoryInfo = _names.refused("MemoryInfo", "the memory of the process: `resource.getrusage`")
XLA_LIB = _names.refused("XLA_LIB", '`torch.library.Library("yours", "DEF")`')
