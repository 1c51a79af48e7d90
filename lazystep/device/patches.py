"""The places where torch decides by device in Python, outside the dispatcher's reach.

Each patch leaves tensors of other devices exactly as they were, and says why it is needed. All of them stand
in this file, so that a new torch release means reading one page.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorConverter
from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions
from torch.nn.parameter import UninitializedParameter, UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.nn.utils.weight_norm import WeightNorm

from ..errors import UnsupportedError
from ..ops.dispatch import stale_view
from ..record._recorder import is_stale_view
from ..record.recorder import Recorder
from ..record.tensor import DEVICE, is_lazy


def wrapping(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace `owner.name` by a function that gets the original as its first argument."""
    original = getattr(owner, name)

    def replace(function: Callable[..., Any]) -> None:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, wrapper)

    return replace


def refuse_torch_compile() -> None:
    """`torch.compile` would trace lazy tensors, give up at each op and run the rest uncompiled."""

    @wrapping(FakeTensorConverter, "from_real_tensor")
    def from_real_tensor(original: Any, self: Any, fake_mode: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
        if is_lazy(t):
            raise UnsupportedError(
                "torch.compile does not take lazy tensors: a lazy step is compiled as a whole by lazystep. "
                "Call the plain function or module, or compile it on CPU tensors."
            )
        return original(self, fake_mode, t, *args, **kwargs)


def keep_identity_in_module_conversions() -> None:
    """`module.to("lazy")` and back keep every Parameter object.

    So tied parameters stay tied, and an optimizer that was made before keeps its parameters. To the lazy
    device torch swaps parameters in place if it takes them for wrapper subclasses; nothing else in
    `torch.nn.modules.module` asks that question. On the way back, and between data types, torch must be told
    to swap. It can't swap a parameter that a graph holds, as that of the old `nn.utils.weight_norm` does.
    """
    module: Any = torch.nn.modules.module
    is_wrapper = module.is_traceable_wrapper_subclass
    module.is_traceable_wrapper_subclass = lambda tensor: is_lazy(tensor) or is_wrapper(tensor)

    # torch does not swap a tensor that has weak references. Between other devices it sets `data`, and they
    # stay: they are of the Python object, which a swap keeps as well. A recurrent layer has some of its
    # weights, and a captured step holds them. This is torch's function with its other checks, blind to them.
    swap: Any = torch.utils.swap_tensors
    sees_none = types.SimpleNamespace(getweakrefs=lambda tensor: [])
    swap_despite_references = types.FunctionType(swap.__code__, {**swap.__globals__, "weakref": sees_none})

    @wrapping(torch.utils, "swap_tensors")
    def swap_tensors(original: Any, t1: torch.Tensor, t2: torch.Tensor) -> None:
        (swap_despite_references if is_lazy(t1) or is_lazy(t2) else original)(t1, t2)

    @wrapping(torch.nn.Module, "_apply")
    def _apply(original: Any, module: Any, fn: Any, recurse: bool = True) -> Any:
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm) and isinstance(getattr(module, hook.name, None), torch.Tensor):
                # A result that the next forward computes again: its graph holds the parameters.
                setattr(module, hook.name, getattr(module, hook.name).detach())
        has_lazy = any(is_lazy(p) for p in module._parameters.values())
        moving = {
            name: parameter
            for name, parameter in module._parameters.items()
            if isinstance(parameter, UninitializedParameter)
            and fn(torch.empty(0, dtype=parameter.dtype)).device.type == "lazy"
        }
        if not has_lazy and not moving:
            return original(module, fn, recurse)
        if recurse:
            for child in module.children():
                child._apply(fn)
        for name, parameter in moving.items():
            # It has no shape yet and can't be lazy: remember where it goes once it has.
            parameter.__dict__["_lazystep_moves"] = True
            module._parameters[name] = None
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(swaps or has_lazy)
        try:
            return original(module, fn, recurse=False)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
            module._parameters.update(moving)


def materialize_on_the_lazy_device() -> None:
    """`nn.LazyLinear` and other lazy modules make their parameters on the device that they were moved to."""

    @wrapping(UninitializedParameter, "__new__")
    def make(
        original: Any, cls: Any, requires_grad: bool = True, device: Any = None, dtype: Any = None
    ) -> Any:
        for_lazy = device is not None and torch.device(device).type == "lazy"
        parameter = original(cls, requires_grad, "cpu" if for_lazy else device, dtype)
        if for_lazy:
            parameter.__dict__["_lazystep_moves"] = True
        return parameter

    @wrapping(UninitializedTensorMixin, "materialize")
    def materialize(original: Any, parameter: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        moves = parameter.__dict__.pop("_lazystep_moves", False) and device is None
        to_lazy = moves or (device is not None and torch.device(device).type == "lazy")
        original(parameter, shape, "cpu" if to_lazy else device, dtype)
        if to_lazy:
            moved = torch.nn.Parameter(parameter.detach().to(DEVICE), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, moved)


def refuse_backward_from_stale_views() -> None:
    """The root of a backward pass is asked for its gradient function without an op that could be refused."""

    @wrapping(torch.autograd, "_engine_run_backward")
    def _engine_run_backward(original: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if any(is_lazy(output) and is_stale_view(output) for output in outputs):
            raise stale_view("backward()", "a tensor to start from")
        return original(outputs, *args, **kwargs)


def take_fast_paths() -> None:
    """Attention layers and `torch.norm` take their better path on the devices of a list.

    CPU is on the list. Eager on the CPU is the truth for lazy tensors, so they must be on it, too.
    """

    @wrapping(torch.nn.modules.activation, "_check_arg_device")
    def _check_arg_device(original: Any, x: Any) -> Any:
        return is_lazy(x) or original(x)

    registration = torch.utils.backend_registration

    def on_the_list(original: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(is_lazy(arg) for arg in (*args[:2], *kwargs.values())):
            return original(*args, **kwargs)
        # The list's last member is this name; nothing else reads it during the call.
        saved, registration._privateuse1_backend_name = registration._privateuse1_backend_name, "lazy"
        try:
            return original(*args, **kwargs)
        finally:
            registration._privateuse1_backend_name = saved

    @wrapping(LinearCrossEntropyOptions, "_adjust")
    def _adjust(original: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        is_lazy = device is not None and device.type == "lazy"
        return original(*args, device=torch.device("cpu") if is_lazy else device, **kwargs)

    wrapping(torch.nn.TransformerEncoderLayer, "forward")(on_the_list)
    wrapping(torch.nn.TransformerEncoder, "forward")(on_the_list)
    wrapping(torch.functional, "norm")(on_the_list)
    torch.norm = torch.functional.norm


def allow_fused_optimizers() -> None:
    """`fused=True` records one instruction per parameter group, which CPU's fused kernel runs."""

    @wrapping(sys.modules[torch.optim.Optimizer.__module__], "_get_fused_kernels_supported_devices")
    def _get_fused_kernels_supported_devices(original: Any) -> list[str]:
        return [*original(), "lazy"]


def prefer_lists_of_tensors() -> None:
    """Optimizers and `clip_grad_norm_` record few instructions on lists instead of many on single tensors.

    `clip_grad_norm_` takes lists on the devices of a list; CPU is on it. Optimizers default to a loop on the
    CPU. For those below, both forms compute the same bits, so lazy parameters take lists. ASGD, NAdam and
    RAdam compute other bits with lists, and so do all optimizers in low precision or on complex numbers.
    Rprop and SGD with Nesterov's momentum change the gradients with lists, which the loop does not.
    """

    @wrapping(torch.utils._foreach_utils, "_get_foreach_kernels_supported_devices")
    def _get_foreach_kernels_supported_devices(original: Any) -> list[str]:
        return [*original(), "lazy"]

    def default(original: Any, params: Any, differentiable: bool, use_fused: bool = False) -> Any:
        # Dynamo can't trace `is_lazy`, and never gets lazy tensors. SGD does not say here whether it is
        # differentiable; then its gradients are enabled.
        if torch.compiler.is_compiling() or not params:
            return original(params, differentiable, use_fused)
        if not is_lazy(params[0]) or differentiable or use_fused or torch.is_grad_enabled():
            return original(params, differentiable, use_fused)
        are_alike = all(
            type(p) in (torch.nn.Parameter, torch.Tensor)
            and p.dtype in (torch.float32, torch.float64)
            and is_lazy(p)
            for p in params
        )
        return False, are_alike

    for name in ("adadelta", "adagrad", "adam", "adamax", "rmsprop", "sgd"):
        wrapping(sys.modules[f"torch.optim.{name}"], "_default_to_fused_or_foreach")(default)

    @wrapping(sys.modules["torch.optim.sgd"], "sgd")
    def sgd(original: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        is_default = kwargs.get("foreach") is None and not kwargs.get("fused")
        if kwargs["nesterov"] and is_default and not torch.compiler.is_compiling() and params:
            kwargs["foreach"] = False if is_lazy(params[0]) else None
        original(params, *args, **kwargs)

    @wrapping(torch.optim.Optimizer, "zero_grad")
    def zero_grad(original: Any, self: Any, set_to_none: bool = True) -> None:
        if set_to_none or torch.compiler.is_compiling():
            original(self, set_to_none)
            return
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not grads or any(not is_lazy(grad) or grad.is_sparse for grad in grads):
            original(self, set_to_none)
            return
        for grad in grads:
            if grad.grad_fn is not None:
                grad.detach_()
            else:
                grad.requires_grad_(False)
        torch._foreach_zero_(grads)


def keep_step_counts_on_the_host() -> None:
    """A state dict that was loaded with `map_location="lazy"` has step counts on the lazy device.

    Optimizers read the counts in each step, which would wait for a value. So they go back to the CPU. NAdam
    reads the product of its momenta as well, which torch sends to the device of the parameter.
    """

    def wrap(original: Any, param: Any, value: Any, param_id: int, param_groups: Any, key: Any = None) -> Any:
        made = original(param, value, param_id, param_groups, key)
        if key not in ("step", "mu_product") or not is_lazy(made):
            return made
        group: Any = next((group for group in param_groups if param_id in group["params"]), {})
        is_on_device = group.get("capturable") or group.get("fused")
        return made if is_on_device else value.to("cpu", made.dtype, copy=True)

    name = "_process_value_according_to_param_policy"
    wrapping(torch.optim.Optimizer, name)(wrap)
    setattr(torch.optim.Optimizer, name, staticmethod(getattr(torch.optim.Optimizer, name)))


def record_distributed_data_parallel() -> None:
    """`DistributedDataParallel(lazy_module)` is lazystep's class: torch's reducer reads gradients' memory."""
    torch_class: Any = torch.nn.parallel.DistributedDataParallel

    def make(cls: Any, module: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_module = isinstance(module, torch.nn.Module)
        if is_module and any(map(is_lazy, [*module.parameters(), *module.buffers()])):
            from ..distributed import (
                DistributedDataParallel,
            )  # not at the top: it imports torch's distributed

            if cls is torch_class:
                cls = DistributedDataParallel
            elif not issubclass(cls, DistributedDataParallel):
                raise UnsupportedError(
                    f"{cls.__name__} is a subclass of torch's DistributedDataParallel, which does not take a "
                    "module on the lazy device. Derive it from lazystep.distributed.DistributedDataParallel."
                )
        return object.__new__(cls)

    torch_class.__new__ = staticmethod(make)


class _LazyBoundStorage(torch.UntypedStorage):
    """A CPU storage on its way to the lazy device: `torch.load` asks it where tensors shall be made."""

    @property
    def device(self) -> Any:  # type: ignore[override]
        """Where the tensors shall be made."""
        return DEVICE


def end_steps_before_global_settings_change(recorder: Recorder) -> None:
    """Kernels read torch's global settings when they run, and queued ops run later than eager would run them.

    So the recording is queued and the queue is waited for before a setting changes.
    """

    def wait_before(name: str) -> None:
        @wrapping(torch, name)
        def change(original: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.is_forked:
                recorder.barrier.drain()
            return original(*args, **kwargs)

    @wrapping(torch, "set_default_dtype")
    def change_default_dtype(original: Any, d: Any, /) -> Any:
        # Libraries set it around each forward pass, often to what it is.
        if not recorder.is_forked and d is not torch.get_default_dtype():
            recorder.barrier.drain()
        return original(d)

    wait_before("set_default_tensor_type")
    wait_before("use_deterministic_algorithms")
    wait_before("set_deterministic_debug_mode")
    wait_before("set_float32_matmul_precision")


def load_to_the_lazy_device() -> None:
    """`torch.load(..., map_location="lazy")`."""

    def restore(storage: Any, location: str) -> Any:
        if not location.startswith("lazy"):
            return None
        bound = _LazyBoundStorage(storage.nbytes())
        bound.copy_(storage)
        return bound

    torch.serialization.register_package(15, lambda storage: None, restore)
