"""`torch_xla.runtime`: processes and the cache. A process has one device."""

from __future__ import annotations

import os

import torch.distributed as dist

from ...config import settings as _settings
from ...runtime import runtime as _runtime
from ..names import Names

_names = Names(__name__)


@_names.does("`dist.get_world_size()`", "1 without a process group")
def world_size() -> int:
    """The number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


@_names.does("`dist.get_rank()`", "0 without a process group")
def global_ordinal() -> int:
    """The number of this process among all."""
    return dist.get_rank() if dist.is_initialized() else 0


@_names.does("torchrun's `LOCAL_RANK`", "0 without a process group")
def local_ordinal() -> int:
    """The number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", global_ordinal())) if dist.is_initialized() else 0


process_index = _names.same("process_index", global_ordinal, "`dist.get_rank()`")
process_count = _names.same("process_count", world_size, "`dist.get_world_size()`")
global_device_count = _names.same("global_device_count", world_size, "`dist.get_world_size()`")
global_runtime_device_count = _names.same(
    "global_runtime_device_count", world_size, "`dist.get_world_size()`"
)


@_names.does("torchrun's `LOCAL_WORLD_SIZE`", "1 without torchrun")
def local_process_count() -> int:
    """The number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


local_device_count = _names.same("local_device_count", local_process_count, "torchrun's `LOCAL_WORLD_SIZE`")


@_names.does("", "1")
def addressable_device_count() -> int:
    """The number of devices of this process."""
    return 1


addressable_runtime_device_count = _names.same(
    "addressable_runtime_device_count", addressable_device_count, "", "1"
)


@_names.does("", '`"CPU"`')
def device_type() -> str:
    """What the lazy device computes on."""
    return "CPU"


@_names.does("", "True, as on the CPU")
def is_bf16_supported() -> bool:
    """Whether bfloat16 can be used."""
    return True


@_names.does("", "False")
def is_spmd() -> bool:
    """Whether one program runs on several devices: never."""
    return False


@_names.does("`LAZYSTEP_CACHE_DIR`", "on by default; read-only caches are refused")
def initialize_cache(path: str, readonly: bool = False) -> None:
    """Keep libraries in this directory from now on."""
    if readonly:
        _names.refuse(
            "initialize_cache(readonly=True)", "a directory of your own, or LAZYSTEP_TIER=reference"
        )
    _settings.cache_dir = path


@_names.does("`lazystep.debug.explain()`", "counts programs, not libraries")
def get_num_cached_compilation_graph() -> int:
    """The number of programs that this process knows."""
    with _runtime.recorder.lock:
        return len(_runtime.programs)


_DDP = "`DistributedDataParallel(model)`"
use_spmd = _names.refused("use_spmd", _DDP)
set_device_type = _names.refused("set_device_type", "`device()`: the lazy device computes on the CPU")
host_index = _names.refused("host_index", "torchrun's `GROUP_RANK`")
get_master_ip = _names.refused("get_master_ip", "torchrun's `MASTER_ADDR`")
runtime_device_attributes = _names.refused(
    "runtime_device_attributes", "`torch.backends.cpu.get_cpu_capability()`"
)
global_runtime_device_attributes = _names.refused(
    "global_runtime_device_attributes", "`torch.backends.cpu.get_cpu_capability()`"
)
