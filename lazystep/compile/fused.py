"""torch's fused optimizer ops, decomposed into plain ops that Inductor can fuse with the surrounding ones.

Inductor does not know all fused kernels. It calls those that it knows with the learning rate as a constant,
so each new learning rate of a schedule would need another library. Here the learning rate is an input of the
library, and the other hyperparameters are constants in it. The formulas are those of torch's CPU kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .scalars import FreeScalar

Number = Any  # a float, a 0-d tensor, or a `FreeScalar`
Tensors = Sequence[Tensor]


def adam(**options: Any) -> list[Tensor]:
    """`_fused_adam_`: weight decay is added to the gradient."""
    return _adam(decoupled=False, **options)


def adamw(**options: Any) -> list[Tensor]:
    """`_fused_adamw_`: weight decay is applied to the parameter."""
    return _adam(decoupled=True, **options)


def _adam(
    self: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    state_steps: Tensors,
    *,
    decoupled: bool,
    lr: Number,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> list[Tensor]:
    rate = _rate(lr)
    store = _Store(found_inf)
    for index, (parameter, average, square) in enumerate(zip(self, exp_avgs, exp_avg_sqs, strict=True)):
        step = state_steps[index].double()
        p, m, v = _computed(parameter), _computed(average), _computed(square)
        g = _gradient(grads[index], p, maximize, 0.0 if decoupled else weight_decay, grad_scale, store)
        if decoupled and weight_decay:
            p = p - p * _like(rate * weight_decay, p)
        m = m + (g - m) * (1.0 - beta1)
        v = v * beta2 + g * g * (1.0 - beta2)
        store(average, m)
        store(square, v)
        if amsgrad:
            v = torch.maximum(_computed(max_exp_avg_sqs[index]), v)
            store(max_exp_avg_sqs[index], v)
        root = (1.0 - torch.pow(beta2, step)).sqrt()
        step_size = rate / (1.0 - torch.pow(beta1, step))
        store(parameter, p - _like(step_size, p) * m / (v.sqrt() / _like(root, v) + eps))
    return []


def sgd(
    self: Tensors,
    grads: Tensors,
    momentum_buffer_list: Tensors,
    *,
    weight_decay: float,
    momentum: float,
    lr: Number,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> list[Tensor]:
    """`_fused_sgd_`."""
    rate = _rate(lr)
    store = _Store(found_inf)
    for index, parameter in enumerate(self):
        p = _computed(parameter)
        g = _gradient(grads[index], p, maximize, weight_decay, grad_scale, store)
        if momentum:
            buffer = momentum_buffer_list[index]
            b = g if is_first_step else _computed(buffer) * momentum + g * (1.0 - dampening)
            store(buffer, b)
            g = g + b * momentum if nesterov else b
        store(parameter, p - _like(rate, p) * g)
    return []


def adagrad(
    self: Tensors,
    grads: Tensors,
    state_sums: Tensors,
    state_steps: Tensors,
    *,
    lr: Number,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> list[Tensor]:
    """`_fused_adagrad_`."""
    rate = _rate(lr)
    store = _Store(found_inf)
    for index, (parameter, total) in enumerate(zip(self, state_sums, strict=True)):
        p = _computed(parameter)
        g = _gradient(grads[index], p, maximize, weight_decay, grad_scale, store)
        s = _computed(total) + g * g
        store(total, s)
        decayed = rate / (1.0 + (state_steps[index].double() - 1.0) * lr_decay)
        store(parameter, p - _like(decayed, p) * g / (s.sqrt() + eps))
    return []


# Decompositions by the name of the op, without its trailing underscore.
FUSED: dict[str, Callable[..., list[Tensor]]] = {
    "_fused_adam": adam,
    "_fused_adamw": adamw,
    "_fused_sgd": sgd,
    "_fused_adagrad": adagrad,
}


class _Store:
    """Writes results, unless a `GradScaler` has found that a gradient has overflowed."""

    def __init__(self, found_inf: Tensor | None) -> None:
        self._is_skipped = None if found_inf is None else found_inf == 1.0

    def __call__(self, target: Tensor, value: Tensor) -> None:
        value = value.to(target.dtype)
        target.copy_(value if self._is_skipped is None else torch.where(self._is_skipped, target, value))


def _rate(lr: Number) -> Tensor:
    """The learning rate in double precision, which the kernels use too."""
    if type(lr) is FreeScalar:
        return lr.tensor
    return lr.double() if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float64)


def _computed(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _gradient(
    grad: Tensor,
    parameter: Tensor,
    maximize: bool,
    weight_decay: float,
    grad_scale: Tensor | None,
    store: _Store,
) -> Tensor:
    gradient = _computed(grad)
    if grad_scale is not None:
        gradient = gradient / grad_scale
        store(grad, gradient)  # the kernels leave gradients unscaled behind
    gradient = -gradient if maximize else gradient
    return gradient + parameter * weight_decay if weight_decay else gradient


def _like(number: Tensor, tensor: Tensor) -> Tensor:
    return number.to(tensor.dtype)
