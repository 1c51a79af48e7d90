"""`optimizer_in_backward`: without DDP, update a parameter when its gradient is ready, and free the gradient.

This saves memory because all gradients never exist at the same time. Parameters can be gathered up to a given
size, for optimizers that are faster on several parameters at once (foreach, fused).
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .. import metrics
from ..errors import OverlapError, UnsupportedError
from .backward_callbacks import queue_callback
from .early_steps import EarlySteps
from .health import Health
from .partial_step import check_steppable


class InBackwardHandle:
    """The handle that `optimizer_in_backward` returns: it counts the updates, and can end them.

    For example:

        handle = optimizer_in_backward(model, optimizer)
        print(handle.num_updated)
        handle.remove()
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, gather_bytes: int) -> None:
        self.num_updated = 0
        self._gather_bytes = gather_bytes
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self._early = EarlySteps(optimizer, self._check, lambda o: self._health.reloaded(o), self._names)
        self._health = Health(model, self._early.forget)
        self._health.add(optimizer)
        self._ready: list[Tensor] = []
        self._groups: dict[Tensor, dict[str, Any]] = {}
        self._in_pass = False
        self._hooks: list[Any] = [model.register_forward_pre_hook(self._before_forward)]
        for p in {p: None for group in optimizer.param_groups for p in group["params"]}:
            if p.requires_grad:
                # A weak reference: a tensor keeps its hooks where the garbage collector can't see them. The
                # model's hook above keeps this object alive.
                hook = partial(_pass_on, weakref.ref(self))
                self._hooks.append(p.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        """Stop updating in backward: from now on `step()` updates all parameters.

        Raises `OverlapError` between a backward and its `step()`.
        """
        if self._early.is_open:
            raise OverlapError("parameters were updated in backward(): call optimizer.step() before remove()")
        self._early.remove()
        self._health.remove()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _name_of(self, parameter: Tensor) -> str:
        return self._names.get(parameter, f"a parameter of shape {tuple(parameter.shape)}")

    def _check(self) -> None:
        self._health.check()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._health.check()
        self._in_pass = False  # it is still True after a backward that raised

    def _gradient_ready(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        if not self._in_pass:
            self._begin()
        if parameter in self._early or any(p is parameter for p in self._ready):
            error = OverlapError(
                f"a second gradient for {self._name_of(parameter)} before optimizer.step(): it was updated "
                "from the first one already. Call step() after each backward(); accumulation, and reentrant "
                "checkpointing of a layer that is used twice, can't be done in backward."
            )
            self._health.poison(error)
            raise error
        if parameter.grad.requires_grad:
            raise OverlapError("backward(create_graph=True): an update would break the gradients' graph")
        self._ready.append(parameter)
        if sum(p.numel() * p.element_size() for p in self._ready) >= self._gather_bytes:
            self._update()

    def _begin(self) -> None:
        self._in_pass = True
        self._ready = []
        self._groups = {p: group for group in self._early.optimizer.param_groups for p in group["params"]}
        self._health.updating()
        queue_callback(self._end)

    def _update(self) -> None:
        ready, self._ready = self._ready, []
        # A parameter that the user removed from the groups keeps its gradient, as in a plain loop.
        items = [(p, p.grad, self._groups[p]) for p in ready if p.grad is not None and p in self._groups]
        try:
            self._early.step(items)
        except Exception as error:
            error.add_note(f"raised in backward(), updating {', '.join(map(self._name_of, ready[:4]))}")
            self._health.poison(error)
            raise
        for p, _, _ in items:
            p.grad = None
        self.num_updated += len(items)
        metrics.count("overlap_parameters_updated", len(items))

    def _end(self) -> None:
        self._in_pass = False
        if self._ready:
            self._update()
        self._early.seal()


def _pass_on(handle: weakref.ref[InBackwardHandle], parameter: Tensor) -> None:
    found = handle()
    if found is not None:
        found._gradient_ready(parameter)


def optimizer_in_backward(
    model: nn.Module, optimizer: Optimizer, *, gather_bytes: int = 0, per_parameter: bool = False
) -> InBackwardHandle:
    """Update each parameter inside `backward()`, when its gradient is ready, and free the gradient at once.

        optimizer = torch.optim.AdamW(model.parameters())
        optimizer_in_backward(model, optimizer)
        for x, y in loader:
            loss_fn(model(x), y).backward()      # updates
            optimizer.step()                     # closes the iteration, fires hooks
            optimizer.zero_grad()

    The results equal those of the same loop without this call. After `backward()` the gradients are gone:
    `clip_grad_norm_` finds none and returns 0. Call `step()` to close each iteration; a second backward
    before `step()` raises `OverlapError`. Schedulers, `state_dict` and step hooks work as usual. Nothing here
    blocks or synchronizes.

    - `gather_bytes`: wait until this many bytes of gradients are ready, then update their parameters
      together; the rest is updated at the end of backward. 0 updates each parameter at once.
    - `per_parameter`: set it to True for a third-party optimizer that updates each parameter independently.
    """
    if isinstance(model, DistributedDataParallel):
        raise UnsupportedError(
            "a DistributedDataParallel model: its gradients are not reduced yet when they are ready. Use "
            "overlap_optimizer()."
        )
    check_steppable(optimizer, per_parameter)
    return InBackwardHandle(model, optimizer, gather_bytes)
