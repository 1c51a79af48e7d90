"""The parameters of one optimizer that were stepped inside backward, until `step()` has closed the iteration.

`optimizer.step` itself is left alone, so that schedulers made before or after find the class's method.
A pre-hook of the step hides the gradients of what has been stepped, the ordinary step does the rest
(parameters outside the buckets, those whose gradient was not certain), and a post-hook shows the
gradients again. So the optimizer's hooks fire once, and nothing is stepped twice.

Gradients are kept until the user clears them, to be looked at. They must not be changed: the update has
been made. `step()` raises if they, the parameters or the hyperparameters were changed in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import OverlapError
from .optimizer_internals import put_innermost
from .partial_step import Item, step_only


@dataclass(slots=True)
class _Seal:
    """A parameter and its gradient as backward has left them."""

    parameter: Tensor
    version: int
    gradient: Tensor | None
    gradient_version: int

    @classmethod
    def of(cls, parameter: Tensor) -> _Seal:
        gradient = parameter.grad
        return cls(parameter, parameter._version, gradient, -1 if gradient is None else gradient._version)

    def changed(self) -> str:
        """What is not as it was; empty if nothing."""
        gradient = self.gradient
        if self.parameter.grad is not gradient:
            return "the gradient of"
        if gradient is not None and gradient._version != self.gradient_version:
            return "the gradient of"
        return "the value of" if self.parameter._version != self.version else ""


class EarlySteps:
    """Steps parameters of `optimizer` before its `step()` is called, and makes that call finish the rest.

    `check` runs first in every `step()` and raises what must be raised there; `reloaded` runs when the
    optimizer has loaded a state; `names` are those of the model's parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        check: Callable[[], None],
        reloaded: Callable[[Optimizer], None],
        names: Mapping[Tensor, str],
    ) -> None:
        self.optimizer = optimizer
        self.num_left_to_step = 0
        self._check = check
        self._names = names
        self._stepped: dict[Tensor, None] = {}
        self._seals: list[_Seal] = []
        self._hyperparameters: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._hidden: list[tuple[Tensor, Tensor | None]] = []
        # How deep in `step()` this is: a subclass that calls `super().step()` fires the hooks twice.
        self._depth = 0
        self._pre_hook = optimizer.register_step_pre_hook(self._before_step)
        self._post_hook = optimizer.register_step_post_hook(self._after_step)
        self._load_hook = optimizer.register_load_state_dict_post_hook(reloaded)

    @property
    def is_open(self) -> bool:
        """Whether parameters have been stepped that `step()` has not closed yet."""
        return bool(self._stepped)

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._stepped

    @property
    def num_stepped(self) -> int:
        """How many parameters that is."""
        return len(self._stepped)

    def step(self, items: Sequence[Item]) -> None:
        """Step these parameters now. What fails in mid-way leaves some of them updated: it is not undone."""
        if not self._stepped:
            self._hyperparameters = [(group, _snapshot(group)) for group in self.optimizer.param_groups]
        self._stepped.update(dict.fromkeys(p for p, _, _ in items))
        step_only(self.optimizer, items)

    def seal(self) -> None:
        """Remember the gradients as backward has left them."""
        self._depth = 0  # a step that raised has left it
        self._seals = [_Seal.of(p) for p in self._stepped]
        # Another's pre-hook must see the gradients (and be caught if it changes them), so ours goes last.
        put_innermost(self.optimizer, self._pre_hook, self._post_hook)

    def forget(self) -> None:
        """Close the iteration: `step()` is done, or the state that was updated has been replaced."""
        self._show()
        self._depth = 0
        self._stepped, self._seals, self._hyperparameters = {}, [], []

    def remove(self) -> None:
        """Take the hooks off the optimizer."""
        self._show()
        for hook in (self._pre_hook, self._post_hook, self._load_hook):
            hook.remove()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._depth += 1
        if self._depth > 1:
            return None
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            self._check_and_hide()
            return None

        def closure_then_hide() -> Any:
            depth = self._depth
            loss = closure()  # backward, and with it the early steps, happens in here
            self._depth = depth
            self._check_and_hide()
            return loss

        return (args[0], closure_then_hide), {key: kwargs[key] for key in kwargs if key != "closure"}

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.forget()

    def _check_and_hide(self) -> None:
        try:
            self._check()
            if self._stepped:
                self._refuse_changes()
        except BaseException:
            self._depth = 0  # the post-hook won't come
            raise
        self._hidden = [(p, p.grad) for p in self._stepped]
        for p in self._stepped:
            p.grad = None
        left = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.num_left_to_step += sum(p in self._names for p in left)

    def _show(self) -> None:
        for p, gradient in self._hidden:
            p.grad = gradient
        self._hidden = []

    def _refuse_changes(self) -> None:
        way_out = (
            "The update was made in backward() and would not see this. Pass max_norm=, clip_value= or "
            "grad_scaler= to overlap_optimizer, or change it before backward() or after step()."
        )
        if _called_by_grad_scaler():
            raise OverlapError(f"a GradScaler called step(): backward() has used scaled gradients. {way_out}")
        for seal in self._seals:
            what = seal.changed()
            if what:
                name = self._names.get(seal.parameter, "a parameter")
                raise OverlapError(
                    f"{what} {name} was changed or cleared between backward() and step(). {way_out}"
                )
        if [id(group) for group, _ in self._hyperparameters] != list(map(id, self.optimizer.param_groups)):
            raise OverlapError(f"param_groups were replaced between backward() and step(). {way_out}")
        for group, before in self._hyperparameters:
            now = _snapshot(group)
            changed = [key for key in before | now if not _same(before.get(key), now.get(key))]
            if changed:
                raise OverlapError(f"{', '.join(changed)} changed between backward() and step(). {way_out}")


def _called_by_grad_scaler() -> bool:
    """Whether `step()` was called by `GradScaler.step`.

    Its kernel for the CPU scales gradients without a new version, and a fused optimizer scales inside its
    own kernel: neither leaves a trace on the gradients.
    """
    scaler = torch.amp.GradScaler
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code in (scaler.step.__code__, scaler._maybe_opt_step.__code__):
            return True
        frame = frame.f_back
    return False


def _snapshot(group: dict[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters; the number of its parameters stands for them."""
    values = {key: value for key, value in group.items() if key != "params"}
    tensors = {key: (value, value._version) for key, value in values.items() if isinstance(value, Tensor)}
    return {**values, **tensors, "number of params": len(group["params"])}


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, tuple) and before and isinstance(before[0], Tensor):
        return isinstance(now, tuple) and before[0] is now[0] and before[1] == now[1]
    if isinstance(before, torch.Tensor) or isinstance(now, torch.Tensor):
        return before is now
    return bool(before == now)
