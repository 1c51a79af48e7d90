"""The parameters of one optimizer that backward has stepped early, until `step()` closes the iteration.

`optimizer.step` is not replaced, so a scheduler still finds the class's own method. Instead, a pre-hook of
the step hides the gradients of parameters that were stepped early. The ordinary step then updates the rest:
parameters outside the buckets, and parameters whose gradient was not certain. A post-hook restores the
gradients. So the optimizer's hooks fire once, and no parameter is stepped twice.

The gradients stay readable until the user clears them. They must not be changed, because the update has
already used them: `step()` raises if gradients, parameters or hyperparameters were changed after backward.
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
    """A parameter and its gradient, with their versions at the end of backward."""

    parameter: Tensor
    version: int
    gradient: Tensor | None
    gradient_version: int

    @classmethod
    def of(cls, parameter: Tensor) -> _Seal:
        gradient = parameter.grad
        return cls(parameter, parameter._version, gradient, -1 if gradient is None else gradient._version)

    def changed(self) -> str:
        """Which of the two has changed since; empty if neither has."""
        gradient = self.gradient
        if self.parameter.grad is not gradient:
            return "the gradient of"
        if gradient is not None and gradient._version != self.gradient_version:
            return "the gradient of"
        return "the value of" if self.parameter._version != self.version else ""


class EarlySteps:
    """Steps parameters of `optimizer` early, and makes `optimizer.step()` update only the rest.

    `check` runs first in every `step()` and raises an error if training must not go on. `reloaded` runs after
    the optimizer has loaded a state, `stepped` after each `step()`. `names` are the names of the model's
    parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        check: Callable[[], None],
        reloaded: Callable[[Optimizer], None],
        names: Mapping[Tensor, str],
        stepped: Callable[[], None] = lambda: None,
    ) -> None:
        self.optimizer = optimizer
        self._on_step = stepped
        self.num_left_to_step = 0
        self._check = check
        self._names = names
        self._stepped: dict[Tensor, None] = {}
        self._seals: list[_Seal] = []
        self._hyperparameters: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._hidden: list[tuple[Tensor, Tensor | None]] = []
        # The nesting depth of `step()`: a subclass that calls `super().step()` fires the hooks twice.
        self._depth = 0
        self._pre_hook = optimizer.register_step_pre_hook(self._before_step)
        self._post_hook = optimizer.register_step_post_hook(self._after_step)
        self._load_hook = optimizer.register_load_state_dict_post_hook(reloaded)

    @property
    def is_open(self) -> bool:
        """Whether parameters were stepped early and `step()` has not been called since."""
        return bool(self._stepped)

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._stepped

    @property
    def num_stepped(self) -> int:
        """How many parameters were stepped early since the last `step()`."""
        return len(self._stepped)

    def step(self, items: Sequence[Item]) -> None:
        """Step these parameters now. An error can leave some of them updated; they are not restored."""
        if not self._stepped:
            self._hyperparameters = [(group, _snapshot(group)) for group in self.optimizer.param_groups]
        self._stepped.update(dict.fromkeys(p for p, _, _ in items))
        step_only(self.optimizer, items)

    def seal(self) -> None:
        """Remember parameters and gradients as they are at the end of backward."""
        self._depth = 0  # it is not 0 after a step() that raised
        self._seals = [_Seal.of(p) for p in self._stepped]
        # Other pre-hooks must see the gradients, and we must notice if they change them: ours runs last.
        put_innermost(self.optimizer, self._pre_hook, self._post_hook)

    def forget(self) -> None:
        """Close the iteration, after `step()`, or after the updated state was replaced by a reload."""
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
            loss = closure()  # runs backward, and with it the early steps
            self._depth = depth
            self._check_and_hide()
            return loss

        return (args[0], closure_then_hide), {key: kwargs[key] for key in kwargs if key != "closure"}

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.forget()
            self._on_step()

    def _check_and_hide(self) -> None:
        try:
            self._check()
            if self._stepped:
                self._refuse_changes()
        except BaseException:
            self._depth = 0  # the post-hook won't run
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

    The call stack is searched because the gradients don't show it: the scaler's CPU kernel changes gradients
    without a new version, and a fused optimizer unscales inside its own kernel.
    """
    scaler = torch.amp.GradScaler
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code in (scaler.step.__code__, scaler._maybe_opt_step.__code__):
            return True
        frame = frame.f_back
    return False


def _snapshot(group: dict[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters, and the number of its parameters in place of the parameters."""
    values = {key: value for key, value in group.items() if key != "params"}
    tensors = {key: (value, value._version) for key, value in values.items() if isinstance(value, Tensor)}
    return {**values, **tensors, "number of params": len(group["params"])}


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, tuple) and before and isinstance(before[0], Tensor):
        return isinstance(now, tuple) and before[0] is now[0] and before[1] == now[1]
    if isinstance(before, torch.Tensor) or isinstance(now, torch.Tensor):
        return before is now
    return bool(before == now)
