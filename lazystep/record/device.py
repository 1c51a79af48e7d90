"""Makes `device="lazy"` known to torch: factories, copies from the host, the device module.

All registrations with torch that are not tensor methods stand here. torch's dispatcher sends an op
without lazy tensor arguments (a factory, a copy from the host) to the key `Lazy`; everything else
reaches the tensor class directly.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from ..config import settings
from ..errors import ForkError, LazyStepError
from . import cpu_branch
from .decide import is_composite
from .native import load as load_native
from .python import dispatch as python_front_end
from .python import patches
from .python.facade import on_facades
from .python.tensor import HAS_HOOKS, find_handle, find_handles, gradient_flags, have_handles, is_lazy, wrap
from .recorder import Recorder
from .source import user_line

__all__ = [
    "HAS_HOOKS",
    "find_handle",
    "find_handles",
    "fork_error",
    "gradient_flags",
    "have_handles",
    "is_lazy",
    "make_recorder",
    "refuse_in_forked_child",
    "register",
    "wrap",
]

# Kept for the life of the process: dropping a Library removes its kernels.
_libraries: list[torch.library.Library] = []
# The native front end, where it is in use.
_native: Any = load_native(settings.recorder)
IS_NATIVE = _native is not None


def make_recorder() -> Recorder:
    """The recorder of the front end in use."""
    recorder: Recorder = Recorder() if _native is None else _native.NativeRecorder()
    return recorder


def register(recorder: Recorder) -> None:
    """Register the lazy device. Once per process."""
    if "torch._lazy.ts_backend" in sys.modules:
        raise LazyStepError(
            "torch's own TorchScript lazy backend is loaded in this process and owns the lazy device. "
            "Use one or the other: remove `import torch._lazy.ts_backend`."
        )
    python_front_end.install(recorder)
    if _native is None:
        _register_kernels()
    else:
        named = [func.name() for func in [*_factories(), *_half_composites()]]
        _native.register(recorder, [*_ops_with_explicit_kernels(), *named])
    _register_composites()
    patches.apply()
    _register_device_module()


def refuse_in_forked_child() -> None:
    """Make every lazy op raise `ForkError`: the executor thread stayed in the parent process."""
    python_front_end.refuse(fork_error)
    if _native is not None:
        _native.refuse()


def fork_error() -> ForkError:
    """What a lazy op in a forked child raises."""
    return ForkError(
        f"a lazy tensor was used in a forked child, at {user_line(2)}: the executor thread stayed in the "
        'parent. Use CPU tensors in workers and .to("lazy") in the parent, or start workers with "spawn".'
    )


def _register_kernels() -> None:
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(_kernel, "Lazy")
    library = torch.library.Library("aten", "IMPL")
    for func in [*_factories(), *_half_composites()]:
        library.impl(func, _kernel_for(func), "Lazy")
    # torch.tensor() copies from the host with Python dispatch switched off, where the fallback
    # above is not reachable: explicit kernels are.
    for func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
        library.impl(func, _kernel_for(func), "Lazy")
    _libraries.extend([fallback, library])


def _register_composites() -> None:
    library = torch.library.Library("aten", "IMPL")
    composites = cpu_branch.kernels(python_front_end.type_of_lazy, for_subclass=_native is None)
    composites |= {func: on_facades(func) for func in cpu_branch.FACADE_OPS}
    for func, kernel in composites.items():
        library.impl(func, kernel, "AutogradLazy")
        python_front_end.add_composite(func, kernel)
        if _native is not None:
            # Under inference mode there is no autograd key: the op arrives whole, one key below.
            _native.register_kernel(func.name())
    _libraries.append(library)


_EXPLICIT = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


def _ops_with_explicit_kernels() -> list[str]:
    """Ops that a backend fallback does not catch: those with a kernel for every backend."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = torch._C._dispatch_get_all_op_names()
    return [name for name in names if any(has_kernel(name, key) for key in _EXPLICIT)]


def _aten_ops() -> Iterator[Any]:
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten" and hasattr(torch.ops.aten, packet):
            func = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            if func is not None:
                yield func


def _half_composites() -> list[Any]:
    """Ops that are composite on most devices but have a kernel of their own on the CPU, such as
    `silu_backward`. With a kernel on this device, too, torch does not take them apart."""
    return [func for func in _aten_ops() if is_composite(func) is None]


def _factories() -> list[Any]:
    """Every aten op that makes a tensor from no tensor. By name: a fallback does not catch those
    that have a composite kernel, and their parts would be recorded instead of the op."""
    found = []
    for func in _aten_ops():
        schema = func._schema
        if "sparse" in schema.name or schema.name == "aten::from_file":
            continue
        takes_tensor = any("Tensor" in str(a.type) for a in schema.arguments)
        takes_device = any(a.name == "device" for a in schema.arguments)
        if takes_device and not takes_tensor and any("Tensor" in str(r.type) for r in schema.returns):
            found.append(func)
    return found


def _kernel(func: Any, *args: Any, **kwargs: Any) -> Any:
    return python_front_end.dispatch(func, args, kwargs)


def _kernel_for(func: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return python_front_end.dispatch(func, args, kwargs)

    return kernel


def _register_device_module() -> None:
    """`torch.lazy`, which `torch.utils.checkpoint` and others ask about the device.

    Random numbers come from the CPU generator, whose state those callers save by themselves.
    """
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
