"""Facades: lazy tensors that claim to be on the CPU, for composites that ask.

A composite of `_OPS` runs its own C++ code on facades. Autograd records the composite's parts as on CPU
tensors. Below autograd each part is unwrapped and recorded like any other op. Two autograd functions are the
doors between lazy tensors and facades.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..decide.facts import is_composite
from ..program.own_ops import LSTM_LAYER_WITHOUT_GRAD
from ..record._recorder import cast_to_lower
from ..record.tensor import DEVICE, handle_of, is_lazy
from .cpu_branch import run_composite
from .host import from_host
from .sparse import set_metadata

_aten = torch.ops.aten

# Recurrent layers: on the CPU alone they batch the input's products and use oneDNN's LSTM.
_OPS = (
    _aten.lstm.input,
    _aten.lstm.data,
    _aten.gru.input,
    _aten.gru.data,
    _aten.rnn_tanh.input,
    _aten.rnn_tanh.data,
    _aten.rnn_relu.input,
    _aten.rnn_relu.data,
)


class CpuFacade(torch.Tensor):
    """A lazy tensor under another device's name. Lives only while a composite runs, and in its backward."""

    _lazy: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.is_inference_mode_enabled() and is_composite(func):
            # Its parts may ask, too. In here torch would not note which part is a view, and only a view of an
            # ordinary tensor requires gradients as its base does.
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                return run_composite(func, args, kwargs or {})
        facades: dict[int, CpuFacade] = {}

        def unwrap(arg: Any) -> Any:
            if type(arg) is CpuFacade:
                facades[id(arg._lazy)] = arg
                return arg._lazy
            if type(arg) is torch.Tensor and arg.device.type == "cpu":
                return from_host(arg)  # the composite made it on "its" device
            return DEVICE if type(arg) is torch.device else arg

        def wrap(out: Any) -> Any:
            if not is_lazy(out):
                return out
            if id(out) in facades:
                return facades[id(out)]
            return _facade(out)

        lazy_args, lazy_kwargs = tree_map(unwrap, (args, kwargs or {}))
        if func is _aten.mkldnn_rnn_layer.default and not torch.is_grad_enabled():
            # The kernel reads the grad mode, and without gradients it returns no workspace.
            return *map(wrap, LSTM_LAYER_WITHOUT_GRAD(*lazy_args)), None
        out = func(*lazy_args, **lazy_kwargs)
        if func._schema.is_mutable:
            for facade in facades.values():
                set_metadata(facade, _facade(facade._lazy))  # the op may have been `transpose_`
        return tree_map(wrap, out)


def _facade(tensor: torch.Tensor) -> CpuFacade:
    # Under inference mode, ordinary tensors and their views stay ordinary tensors.
    with torch.inference_mode() if tensor.is_inference() else torch.inference_mode(False):
        facade: CpuFacade = torch.Tensor._make_wrapper_subclass(
            CpuFacade,
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            dtype=tensor.dtype,
            device=torch.device("cpu"),
        )
    facade._lazy = tensor
    return facade


class _Enter(torch.autograd.Function):
    """Lazy to facade; the gradient comes back out."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        return _facade(tensor.detach())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _Leave.apply(grad)


class _Leave(torch.autograd.Function):
    """Facade to lazy; the gradient goes back in. `kept` lives until then, or as long as the graph."""

    @staticmethod
    def forward(ctx: Any, facade: Any, kept: object = None) -> Any:
        ctx.kept = kept
        # A composite may return a tensor that it made on the CPU itself.
        return facade._lazy.detach() if type(facade) is CpuFacade else from_host(facade)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        ctx.kept = None  # a loss that is kept must not keep more than its value
        return _Enter.apply(grad), None


def _enter(tensor: torch.Tensor) -> Any:
    if torch.is_grad_enabled():
        return _Enter.apply(tensor)
    # No gradient flows, but composites ask `requires_grad` without asking for the grad mode: `matmul` does.
    return _facade(tensor.detach()).requires_grad_(tensor.requires_grad)


# By thread and weight: the weight, and its facade in a graph that still lives.
_Known = tuple[weakref.ref[torch.Tensor], weakref.ref[Any]]
_weights: dict[tuple[int, int], _Known] = {}


def _enter_argument(weight: torch.Tensor, weights: list[Any]) -> Any:
    """The facade of an argument. For a weight it is the same one in a graph, and is added to `weights`.

    Eager adds the gradients of all uses of a weight in the order in which they arrive. With a facade for each
    call of a layer, they would be added call by call, and the sum would differ in its last bits.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf):
        return _enter(weight)
    key = threading.get_ident(), id(weight)
    known = _weights.get(key)
    facade = known[1]() if known is not None and known[0]() is weight else None
    if facade is None or not _is_same(facade._lazy, weight):
        facade = _enter(weight)
        forget = functools.partial(_forget, key)
        _weights[key] = weakref.ref(weight, forget), weakref.ref(facade, forget)
    weights.append(facade)
    return facade


def _forget(key: tuple[int, int], dead: weakref.ref[Any]) -> None:
    if dead in _weights.get(key, ()):
        del _weights[key]


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same elements. `weight.data = ...` gives a weight others."""
    own, other = handle_of(a), handle_of(b)
    return own.memory is other.memory and own.type is other.type


def _on_facades(func: Any) -> Callable[..., Any]:
    """A kernel for the composite `func` that takes the branch of CPU tensors."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # Without the cache, eager casts a weight in each time step and adds gradients in its own type.
        if torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled():
            args = _with_kept_casts(func, args)
        weights: list[Any] = []
        args, kwargs = tree_map(
            lambda arg: _enter_argument(arg, weights) if is_lazy(arg) else arg, (args, kwargs)
        )
        out = run_composite(func, args, kwargs)
        return tree_map(lambda t: _Leave.apply(t, weights) if isinstance(t, torch.Tensor) else t, out)

    return kernel


def _enter_kept(cast: torch.Tensor) -> Any:
    """The one facade of a kept cast: all uses of a weight add their gradients in eager's order."""
    if not torch.is_grad_enabled():
        return cast
    if not hasattr(cast, "_lazystep_facade"):
        cast._lazystep_facade = _enter(cast)  # type: ignore[attr-defined]
    return cast._lazystep_facade  # type: ignore[attr-defined]


def _with_kept_casts(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with the weights in autocast's type, if eager would keep the casts of the weights.

    Autocast takes a facade for a CPU tensor and casts it, but a facade is no leaf and its cast is not kept.
    In eager, two uses of a layer share the cast of a weight and add their gradients in autocast's type.
    """
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
    params: list[Any] = given["params"]
    num_directions = 2 if given["bidirectional"] else 1
    num_of_layer = len(params) // max(1, given["num_layers"] * num_directions)
    # Eager transposes the projection of an LSTM before it casts it, and keeps no cast of a view.
    has_projection = num_of_layer == (5 if given["has_biases"] else 3)
    cast = [
        param
        if not is_lazy(param)
        or not (param.requires_grad and param.is_leaf)
        or (has_projection and number % num_of_layer == num_of_layer - 1)
        else _enter_kept(cast_to_lower(param))
        for number, param in enumerate(params)
    ]
    return tuple(cast if name == "params" else arg for name, arg in given.items())


FACADE_KERNELS = {func: _on_facades(func) for func in _OPS}
