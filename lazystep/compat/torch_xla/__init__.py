"""PyTorch/XLA's step API on lazystep: `import lazystep.compat.torch_xla as torch_xla`.

Names and parameters are those of torch_xla 2.9. The device is `lazy:0`, which computes on the CPU; a string
such as `"xla"` stays unknown to torch, so take the device from `device()`. Reading order: this module,
runtime, core.xla_model, debug.metrics, distributed.parallel_loader.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, overload

import torch

from ...barrier import mark_step as _mark_step
from ...capture.step import Step as _Step
from ...capture.step import step as _step
from ...record.tensor import DEVICE as _DEVICE
from ..names import Names

_names = Names(__name__)


@_names.does('`"lazy"`', "one device, which computes on the CPU")
def device(index: int | None = None) -> torch.device:
    """The lazy device. `IndexError` for another index than 0."""
    if index not in (None, 0):
        raise IndexError(f"there is no device {index} here: there is one device, number 0")
    return _DEVICE


@_names.does('`"lazy"`', "one device, which computes on the CPU")
def devices() -> list[torch.device]:
    """The lazy device, in a list."""
    return [_DEVICE]


@_names.does("", '`["CPU:0"]`')
def real_devices() -> list[str]:
    """What the lazy device computes on."""
    return ["CPU:0"]


@_names.does("", "1")
def device_count() -> int:
    """The number of devices of this process."""
    return 1


@_names.does(
    "`lazystep.mark_step`",
    "no wait for the compiler; raises errors of earlier steps; `reset_scope` means nothing",
)
def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """End the step, as `lazystep.mark_step` does. Blocks until the step has run if `wait`."""
    _mark_step(wait=wait)


class CompiledRegion:
    """What `step()` and `compile()` return: a context with a barrier before and after it, or a decorator."""

    def __init__(self, full_graph: bool) -> None:
        self._full_graph = full_graph

    def __enter__(self) -> None:
        if self._full_graph:
            _names.refuse(
                "compile(full_graph=True) as a context",
                "it as a decorator: a block can't be captured",
            )
        sync()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sync()  # also after an error: eager would have run what came before it

    def __call__(self, function: Callable[..., Any]) -> _Step[..., Any]:
        """Decorate a function: the same as `@lazystep.step`."""
        return _step(fullgraph=self._full_graph)(function)


@_names.does(
    "`@lazystep.step`", "as a decorator it also captures and replays; as a context it is two barriers"
)
def step() -> CompiledRegion:
    """A context, or a decorator, with a barrier before and after. Neither waits for the step to run.

    For example:

        with torch_xla.step():
            loss = loss_fn(model(x), y)
            loss.backward(); opt.step(); opt.zero_grad()
    """
    return CompiledRegion(full_graph=False)


@overload
def compile(
    f: Callable[..., Any],
    full_graph: bool | None = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
    custom_compile_options: Mapping[str, Any] | None = None,
) -> _Step[..., Any]: ...


@overload
def compile(
    f: None = None,
    full_graph: bool | None = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
    custom_compile_options: Mapping[str, Any] | None = None,
) -> CompiledRegion: ...


@_names.does(
    "`@lazystep.step`",
    "`full_graph=True` is `fullgraph=True`, for functions; `name` is ignored; limits and options are refused",
)
def compile(
    f: Callable[..., Any] | None = None,
    full_graph: bool | None = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
    custom_compile_options: Mapping[str, Any] | None = None,
) -> _Step[..., Any] | CompiledRegion:
    """Make a function a captured step, or return a context or decorator as `step()` does."""
    if max_different_graphs is not None:
        _names.refuse(
            "compile(max_different_graphs=...)",
            "lazystep.step(max_captures=...), which drops old captures and warns",
        )
    if custom_compile_options:
        set_custom_compile_options(custom_compile_options)
    region = CompiledRegion(bool(full_graph))
    return region if f is None else region(f)


@_names.does("`torch.manual_seed`", "seeds all of torch: draws on the lazy device are eager's")
def manual_seed(seed: int, device: Any = None) -> None:
    """Seed torch's generators, from which the lazy device draws."""
    torch.manual_seed(seed)


@_names.does("torchrun, and [DDP](distributed.md)", "calls `fn` here, with `LOCAL_RANK`: there is one device")
def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    start_method: str = "spawn",
    debug_single_process: bool = False,
) -> None:
    """Call `fn(index, *args)` in this process. The index is torchrun's `LOCAL_RANK`; 0 without torchrun."""
    fn(int(os.environ.get("LOCAL_RANK", 0)), *args)


@_names.does("", "takes no options: libraries are built by AOTInductor")
def set_custom_compile_options(options: Mapping[str, Any]) -> None:
    """Accepts no options: an empty mapping."""
    if options:
        _names.refuse(
            "set_custom_compile_options", "torch._inductor.config: AOTInductor builds the libraries"
        )
