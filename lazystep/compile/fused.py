"""torch's fused optimizer ops, taken apart: Inductor fuses the parts with what stands around them.

Inductor calls the fused kernels as they are, where it knows them at all, and then with the learning rate as a
constant: every step of a schedule would need a library of its own. The formulas are those of the CPU
kernels; a learning rate is an input of the library, other hyperparameters are part of it.
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
    """`_fused_adam_`: decay is part of the gradient."""
    return _adam(decoupled=False, **options)


def adamw(**options: Any) -> list[Tensor]:
    """`_fused_adamw_`: decay is by itself."""
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
    _refuse_scaling(grad_scale, found_inf)
    rate = _number(lr)
    for index, (parameter, average, square) in enumerate(zip(self, exp_avgs, exp_avg_sqs, strict=True)):
        step = state_steps[index].double()
        p, m, v = _computed(parameter), _computed(average), _computed(square)
        g = _gradient(grads[index], maximize)
        if decoupled:
            p = p - p * _like(rate * weight_decay, p) if weight_decay else p
        elif weight_decay:
            g = g + p * weight_decay
        m = m + (g - m) * (1.0 - beta1)
        v = v * beta2 + g * g * (1.0 - beta2)
        average.copy_(m)
        square.copy_(v)
        if amsgrad:
            v = torch.maximum(_computed(max_exp_avg_sqs[index]), v)
            max_exp_avg_sqs[index].copy_(v)
        root = (1.0 - torch.pow(beta2, step)).sqrt()
        step_size = rate / (1.0 - torch.pow(beta1, step))
        parameter.copy_(p - _like(step_size, p) * m / (v.sqrt() / _like(root, v) + eps))
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
    _refuse_scaling(grad_scale, found_inf)
    rate = _number(lr)
    for index, parameter in enumerate(self):
        p, g = _computed(parameter), _gradient(grads[index], maximize)
        if weight_decay:
            g = g + p * weight_decay
        if momentum:
            buffer = momentum_buffer_list[index]
            b = g if is_first_step else _computed(buffer) * momentum + g * (1.0 - dampening)
            buffer.copy_(b)
            g = g + b * momentum if nesterov else b
        parameter.copy_(p - _like(rate, p) * g)
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
    _refuse_scaling(grad_scale, found_inf)
    rate = _number(lr)
    for index, (parameter, total) in enumerate(zip(self, state_sums, strict=True)):
        p, g = _computed(parameter), _gradient(grads[index], maximize)
        if weight_decay:
            g = g + p * weight_decay
        s = _computed(total) + g * g
        total.copy_(s)
        decayed = rate / (1.0 + (state_steps[index].double() - 1.0) * lr_decay)
        parameter.copy_(p - _like(decayed, p) * g / (s.sqrt() + eps))
    return []


# By the name of the op without its trailing underscore.
FUSED: dict[str, Callable[..., list[Tensor]]] = {
    "_fused_adam": adam,
    "_fused_adamw": adamw,
    "_fused_sgd": sgd,
    "_fused_adagrad": adagrad,
}


def _refuse_scaling(grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    if grad_scale is not None or found_inf is not None:
        raise NotImplementedError("a fused optimizer step with a GradScaler")


def _number(value: Number) -> Tensor:
    """In double, as the kernels compute with hyperparameters."""
    if type(value) is FreeScalar:
        return value.tensor
    return value.double() if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64)


def _computed(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _gradient(grad: Tensor, maximize: bool) -> Tensor:
    return -_computed(grad) if maximize else _computed(grad)


def _like(number: Tensor, tensor: Tensor) -> Tensor:
    return number.to(tensor.dtype)
