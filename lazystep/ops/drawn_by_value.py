"""Random ops that take probabilities or parameters from tensors, as draws that take none, and plain ops.

Whether a coin falls on heads depends on its probability, but the random number behind it does not. So the
numbers are drawn now, in eager's place in the generator's stream, and what they mean for these values is
recorded. Eager looks at the values first and raises for some; a recorded op does that when it runs.

Ops that draw more numbers for some values than for others, such as `poisson`, run on the host instead, and so
does `multinomial` with replacement, whose kernel draws as it searches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..eager import eager_dispatch
from ..program.own_ops import CHECKED
from ..record.recorder import Recorder
from ..record.tensor import is_lazy
from .handlers import handles
from .host import run_on_host

_aten = torch.ops.aten
_ON_HOST = "random op that reads values"


@handles(_aten.bernoulli.default, _aten.bernoulli_.Tensor)
def _bernoulli(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out, probability = args[0], args[-1]
    if not all(map(is_lazy, args)) or not probability.is_floating_point():
        return run_on_host(recorder, func, args, kwargs, _ON_HOST)
    # The kernel goes through memory in its order, so the strides decide which number goes where.
    stride = _row_major(out.shape) if func is _aten.bernoulli.default else out.stride()
    dtype = torch.float64 if probability.dtype is torch.float64 else torch.float32
    noise = _aten.empty_strided.default(out.shape, stride, dtype=dtype, device=out.device)
    _aten.uniform_.default(noise, generator=kwargs.get("generator"))
    is_right = _aten.all.default(
        _aten.logical_and.default(_aten.ge.Scalar(probability, 0), _aten.le.Scalar(probability, 1))
    )
    text = f"{func}: Expected p_in >= 0 && p_in <= 1 to be true, but got false."
    thrown = _aten.lt.Tensor(noise, CHECKED(probability, is_right, text))
    if func is _aten.bernoulli.default:
        return _aten._to_copy.default(thrown, dtype=out.dtype)
    return _aten.copy_.default(out, thrown)


@handles(_aten.multinomial.default)
def _multinomial(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weights, num_samples = args[:2]
    has_replacement = kwargs.get("replacement", args[2] if len(args) > 2 else False)
    with eager_dispatch():  # raises what eager raises for these types and numbers
        stand_in = torch.ones(weights.shape, dtype=weights.dtype)
        func(stand_in, num_samples, has_replacement, generator=torch.Generator())
    if (has_replacement and num_samples != 1) or not weights.numel():
        return run_on_host(recorder, func, args, kwargs, _ON_HOST)
    noise = _aten.empty_like.default(weights)
    _aten.exponential_.default(noise, 1.0, generator=kwargs.get("generator"))
    is_right = _aten.logical_and.default(
        _aten.lt.Scalar(_aten.max.default(weights), math.inf), _aten.ge.Scalar(_aten.min.default(weights), 0)
    )
    text = f"{func}: probability tensor contains either `inf`, `nan` or element < 0"
    weights = CHECKED(weights, is_right, text)
    is_right = _aten.all.default(_aten.ne.Scalar(_aten.sum.dim_IntList(weights, [-1]), 0))
    text = f"{func}: invalid multinomial distribution (sum of probabilities <= 0)"
    scores = _aten.div.Tensor(CHECKED(weights, is_right, text), noise)
    if num_samples == 1:
        return _aten.argmax.default(scores, -1, True)
    return _aten.topk.default(scores, num_samples)[1]


@handles(_aten.normal.Tensor_float, _aten.normal.float_Tensor, _aten.normal.Tensor_Tensor)
def _normal(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mean, std = args[0], args[1] if len(args) > 1 else kwargs.get("std", 1.0)
    tensors = [tensor for tensor in (mean, std) if isinstance(tensor, torch.Tensor)]
    is_one_type = len({tensor.dtype for tensor in tensors}) == 1 and tensors[0].is_floating_point()
    if not is_one_type or not all(map(is_lazy, tensors)):
        return run_on_host(recorder, func, args, kwargs, _ON_HOST)
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    # The kernel draws into new memory of the mean's type, or else of the deviation's.
    dtype, device, generator = tensors[0].dtype, tensors[0].device, kwargs.get("generator")
    noise = _aten.empty_strided.default(shape, _row_major(shape), dtype=dtype, device=device)
    if not isinstance(std, torch.Tensor):
        _aten.normal_.default(noise, 0.0, std, generator=generator)
        return _aten.add_.Tensor(noise, mean)
    _aten.normal_.default(noise, 0.0, 1.0, generator=generator)
    if std.numel():
        is_right = _aten.ge.Scalar(_aten.min.default(std), 0)
        std = CHECKED(std, is_right, f"{func}: normal expects all elements of std >= 0.0")
    if not isinstance(mean, torch.Tensor):  # rounded, as the kernel does
        mean = _aten.full.default([], mean, dtype=dtype, device=device)
    return _aten.add.Tensor(_aten.mul.Tensor(noise, std), mean)


def _row_major(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[number + 1 :]) or 1 for number in range(len(shape))]
