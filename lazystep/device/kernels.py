"""Kernels for the lazy device: which ops get one, and at which dispatch key.

The fallback at `Lazy` catches every op that has no kernel for every backend. The others are caught by name:
factories, ops with an explicit composite kernel, and composites that have a kernel of their own on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from ..decide.facts import is_composite
from ..openmp import thread_setter_address
from ..ops.dispatch import COMPOSITES, OpDispatch
from ..program.own_ops import LSTM_LAYER_WITHOUT_GRAD
from ..record import _recorder
from ..record.recorder import Recorder

# Kept for the life of the process: dropping a Library removes its kernels.
_libraries: list[torch.library.Library] = []
_EXPLICIT = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


def register(recorder: Recorder) -> None:
    """Catch every op on lazy tensors in C++, and take CPU's branch in composites. Once per process."""
    _recorder.install(OpDispatch(recorder), thread_setter_address())
    _recorder.register_fallback()
    named = [f.name() for f in [*_factories(), *_half_composites(), *COMPOSITES, LSTM_LAYER_WITHOUT_GRAD]]
    for name in dict.fromkeys([*_ops_with_explicit_kernels(), *named]):
        _register(name)
    for packet in ("_sparse_compressed_tensor_unsafe", "_sparse_csr_tensor_unsafe"):
        _recorder.register_sparse_kernel(f"aten::{packet}", "")
    library = torch.library.Library("aten", "IMPL")
    for func, kernel in COMPOSITES.items():
        library.impl(func, kernel, "AutogradLazy")
    _libraries.append(library)


def watch_new_kernels() -> None:
    """A custom op gets a kernel for every backend after it is defined: ours must stand before that one."""
    original = torch.library.Library.impl

    @functools.wraps(original)
    def impl(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **kwargs: Any) -> Any:
        result = original(self, op_name, fn, dispatch_key, **kwargs)
        if dispatch_key.startswith("CompositeExplicitAutograd"):
            name = op_name if isinstance(op_name, str) else op_name.name()
            _register(name if "::" in name else f"{self.ns}::{name}")
        return result

    torch.library.Library.impl = impl  # type: ignore[method-assign]


def _register(name: str) -> None:
    """Catch an op by its name, such as `aten::add.Tensor`."""
    name, _, overload = name.partition(".")
    _recorder.register_kernel(name, overload)


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
    """Ops that are composite on most devices but have a kernel of their own on the CPU, as `silu_backward`.

    With a kernel on this device, too, torch does not take them apart.
    """
    return [func for func in _aten_ops() if is_composite(func) is None]


def _factories() -> list[Any]:
    """Every aten op that makes a tensor from no tensor.

    By name: the fallback does not catch those that have a composite kernel, and their parts would be
    recorded instead of the op.
    """
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
