"""torch's fused optimizer ops: one node of the graph each, which calls torch's own kernel.

Inductor does not know all fused kernels. It calls those that it knows with the learning rate as a constant,
so each new learning rate of a schedule would need another library. So `whole_call` writes the call as text
for the op `lazystep::update` (`execute/fused.h`), with the learning rate as an input of the library.

A call whose tensors are parts of a larger memory or have other types than their parameters, or that leaves
unscaled gradients behind for somebody, is decomposed into plain ops that Inductor knows. The formulas are
those of torch's CPU kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..program.program import Arg, Program, Ref, resolve_op
from ..program.signature import Signature
from .scalars import FreeScalar, base_name, bind
from .update import Lanes, Place, is_whole, layout_of, number_text, place_of

Number = Any  # a float, a 0-d tensor, or a `FreeScalar`
Tensors = Sequence[Tensor]
FUSED_CALL = "fused"  # the first word of the text


def whole_call(
    program: Program, position: int, signature: Signature, fixed: Mapping[int, Any]
) -> Lanes | None:
    """The fused optimizer at this position as a call of `lazystep::update`; None if it must be decomposed."""
    instruction = program.instructions[position]
    if base_name(instruction.op) not in FUSED:
        return None
    bound = bind(instruction.op, instruction.args, dict(instruction.kwargs))
    parameters, gradients = bound["self"], bound["grads"]
    lists = {name: arg for name, arg in bound.items() if type(arg) is tuple}
    is_scaled = bound.get("grad_scale") is not None
    if is_scaled and _are_used_after(program, position, gradients):
        return None
    whole = {argument.storage for argument in signature.arguments if not argument.is_flat}
    written: dict[Place, int] = {}
    for name, values in lists.items():
        if name == "state_steps":
            continue  # no kernel writes them
        for ref, parameter in zip(values, parameters, strict=False):  # a list may be empty
            if layout_of(program.values[ref.value].type) != layout_of(program.values[parameter.value].type):
                return None
            if name != "grads":
                is_real = program.values[ref.value].type.dtype.is_floating_point
                if not is_real or not is_whole(program, ref.value, whole):
                    return None
                written[place_of(program, ref.value)] = ref.value
    read = {
        place: value
        for arg in bound.values()
        for value in _values_in(arg)
        if (place := place_of(program, value)) not in written
    }
    index_of = {place: index for index, place in enumerate((*written, *read))}

    def index(ref: Ref) -> str:
        return str(index_of[place_of(program, ref.value)])

    def text(name: str, arg: Arg) -> str:
        if type(arg) is tuple:
            # The kernel stores unscaled gradients. Here nobody reads them, so it gets copies.
            kind = "C" if name == "grads" and is_scaled else "L"
            return " ".join([kind, str(len(arg)), *map(index, arg)])
        if arg is None or type(arg) is Ref:
            return "N" if arg is None else f"T {index(arg)}"
        if type(arg) is bool:
            return f"B {int(arg)}"
        return f"F {number_text(program, arg, signature, fixed, index_of)}"

    _, packet, overload = instruction.op.split(".")
    arguments = [argument.name for argument in resolve_op(instruction.op)._schema.arguments]  # type: ignore[attr-defined]
    texts = [text(name, bound.get(name)) for name in arguments]
    head = f"{FUSED_CALL} {packet} {overload.replace('default', '-')} {len(texts)}"
    return Lanes(tuple(written.values()), tuple(read.values()), "\n".join([head, *texts]))


def _values_in(arg: Arg) -> list[int]:
    refs = arg if type(arg) is tuple else (arg,)
    return [ref.value for ref in refs if type(ref) is Ref]


def _are_used_after(program: Program, position: int, tensors: Sequence[Ref]) -> bool:
    """Whether somebody reads the memory of these tensors after the instruction at this position."""
    storages = {program.values[ref.value].storage for ref in tensors}
    later = (value for i in program.instructions[position + 1 :] for value in i.reads())
    return any(program.values[value].storage in storages for value in (*later, *program.outputs))


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
