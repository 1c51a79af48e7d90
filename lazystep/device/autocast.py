"""`torch.autocast("cpu")` and `torch.autocast("lazy")`: one switch for CPU tensors and lazy tensors.

Eager on the CPU is the truth for lazy tensors, so they are cast as CPU tensors are, in the type that is set
for the CPU. The state is CPU's own. Lazy tensors need one bit more, because a thread lets ops pass to a
dispatch key or not, and theirs is `AutocastXLA` (record/src/autocast.h). Here every way to switch CPU's
autocast switches that key as well, and `"lazy"` means `"cpu"`.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ..errors import UnsupportedError
from ..record import _recorder
from ..record.source import user_line
from ..record.tensor import is_lazy
from .cast_policies import names_of_cast_ops, policy_of
from .patches import wrapping

_KEY = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutocastXLA"))
_XLA = "xla"  # torch's name of the device whose key lazy tensors use
# Reentrant: finding out the policies enters autocast.
_lock = threading.RLock()
_has_policies = False
# Kept for the life of the process: dropping a Library removes its kernels.
_libraries: list[torch.library.Library] = []

# Ops that autocast does not cast, but whose kernels call ops that it does cast. Eager casts in there. The
# kernel of a lazy op runs later, without autocast, and would give other numbers. Those with a gradient are
# taken apart below autograd (`TAKEN_APART` in ops/cpu_branch.py).
_TAKEN_APART = ("_transformer_encoder_layer_fwd",)
# These can't be taken apart: they read memory as well, or write to results of their own (`linalg_polar`,
# which torch has since 2.15).
_REFUSED = ("_scaled_mm", "_scaled_mm_v2", "linalg_polar")


def extend_autocast() -> None:
    """Let torch's functions about autocast take `"lazy"`, and switch both keys together."""
    _recorder.register_cast_fallback()
    set_enabled = torch.set_autocast_enabled
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype"):
        wrapping(torch, name)(_with_the_name_of_the_cpu)
    # `torch.autocast` asks this one; its name for other callers is `torch.amp.is_autocast_available`.
    wrapping(torch._C, "_is_autocast_available")(_with_the_name_of_the_cpu)

    # `torch.amp.custom_fwd` casts the tensors of the device that it was told.
    @wrapping(torch.amp.autocast_mode, "_cast")
    def _cast(original: Any, value: Any, device_type: str, dtype: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor) and _as_cpu(device_type) == _as_cpu(value.device.type):
            device_type = value.device.type
        return original(value, device_type, dtype)

    def switch(is_enabled: bool) -> None:
        if is_enabled:
            register_policies()
        set_enabled(_XLA, is_enabled)
        _recorder.include_casts(is_enabled)

    @wrapping(torch, "set_autocast_enabled")
    def set_autocast_enabled(original: Any, *args: Any, **kwargs: Any) -> None:
        device, rest = _as_cpu(args[0] if args else None), args[1:]
        original(*(device, *rest) if args else (), **kwargs)
        if device == "cpu":
            switch(torch.is_autocast_enabled("cpu"))

    @wrapping(torch, "set_autocast_cpu_enabled")
    def set_autocast_cpu_enabled(original: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        switch(torch.is_autocast_enabled("cpu"))

    @wrapping(torch, "clear_autocast_cache")
    def clear_autocast_cache(original: Any) -> None:
        original()
        _recorder.clear_casts()

    switch(torch.is_autocast_enabled("cpu"))  # imported inside an autocast block


def register_policies() -> None:
    """Take over what autocast does with each op on the CPU. Costs some milliseconds at the first block."""
    global _has_policies
    with _lock:
        if not _has_policies:
            _has_policies = True
            # The first block may be inside a transform or a mode, which would take the ops apart.
            with temporarily_clear_interpreter_stack(), _disable_current_modes():
                for name in names_of_cast_ops():
                    register_policy(name)
            library = torch.library.Library("aten", "IMPL")
            for name in _TAKEN_APART:
                library.impl(name, _taking_apart(name), "AutocastXLA")
            for packet in (getattr(torch.ops.aten, name, None) for name in _REFUSED):
                for overload in packet.overloads() if packet is not None else ():
                    func = getattr(packet, overload)
                    library.impl(func.name(), _refusing(func), "AutocastXLA")
            _libraries.append(library)


def register_policy(name: str) -> None:
    """Take over what autocast does with one op on the CPU."""
    name, _, overload = name.partition(".")
    namespace, _, packet = name.partition("::")
    func = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    policy = policy_of(func)
    if policy is not None:
        _recorder.register_cast(name, overload, *policy)


def _taking_apart(name: str) -> Any:
    func = getattr(torch.ops.aten, name).default

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if _casts(args, kwargs):
            # CPU's kernel calls ops only. They reach autocast and then the recorder, one by one.
            return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        with _passing():
            return func(*args, **kwargs)

    return kernel


def _refusing(func: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if _casts(args, kwargs):
            raise UnsupportedError(
                f"{func} at {user_line()}: under autocast, eager casts inside this op's kernel, which a "
                "recorded op can't do. Call it in a block of its own, on float32 tensors: "
                'with torch.autocast("lazy", enabled=False)'
            )
        with _passing():
            return func(*args, **kwargs)

    return kernel


def _casts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether autocast is on, and concerns a lazy tensor. Tensors of other devices come by, too."""
    return torch.is_autocast_enabled("cpu") and any(map(is_lazy, tree_leaves((args, kwargs))))


def _passing() -> Any:
    """Inside, an op goes past our key, to the autocast of its own device."""
    return torch._C._ExcludeDispatchKeyGuard(_KEY)


def _as_cpu(device: Any) -> Any:
    return "cpu" if device == "lazy" else device


def _with_the_name_of_the_cpu(original: Any, *args: Any, **kwargs: Any) -> Any:
    if args and args[0] == "lazy":
        return original("cpu", *args[1:], **kwargs)
    if kwargs.get("device_type") == "lazy":
        kwargs["device_type"] = "cpu"
    return original(*args, **kwargs)
