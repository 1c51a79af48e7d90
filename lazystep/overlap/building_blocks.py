"""Building blocks for code that registers its own DDP communication hook.

    optimizer = as_functional(torch.optim.AdamW, lr=1e-3)
    ddp.register_comm_hook(None, hook_then_optimizer(allreduce_hook, OptimizerHookState(optimizer)))

A hook never sees the DDP model. If a parameter has no gradient, the hook can't know whether the parameter is
unused on all ranks (then it must not be updated) or only on this rank, so the hook raises an error.
`overlap_optimizer` knows, and handles both cases. Errors are raised from `backward()`, after DDP's finalizer,
and again from every later backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..errors import OverlapError
from .average import scale, sum_over_ranks
from .backward_callbacks import in_backward
from .bucket import Bucket, Future, GradBucket, Hook, comm_hook
from .bucket_queue import BucketQueue
from .event_log import EventLog
from .partial_step import check_steppable, step_only


class FunctionalOptimizer(Protocol):
    """An optimizer that updates one parameter at a time, with a given gradient."""

    def step_param(self, param: Tensor, grad: Tensor | None) -> None:
        """Update `param` in place."""


class OptimizerHookState:
    """A functional optimizer, and the parameters to update: by default every parameter that DDP reduces.

        state = OptimizerHookState(as_functional(torch.optim.SGD, lr=0.1))
        ddp.register_comm_hook(None, hook_then_optimizer(allreduce_hook, state))

    Raises `ValueError` if the optimizer has no method `step_param`.
    """

    def __init__(self, functional_optim: FunctionalOptimizer, params: Iterable[Tensor] | None = None) -> None:
        if not callable(getattr(functional_optim, "step_param", None)):
            raise ValueError(
                f"{type(functional_optim).__qualname__} must have a method step_param(param, grad); "
                "as_functional(optimizer_class, ...) makes one of any torch optimizer"
            )
        self.functional_optimizer = functional_optim
        self.params_to_optimize = None if params is None else set(params)

    def __contains__(self, parameter: Tensor) -> bool:
        return self.params_to_optimize is None or parameter in self.params_to_optimize


def as_functional(
    optimizer_class: type[Optimizer], *args: Any, per_parameter: bool = False, **kwargs: Any
) -> AnyOptimizer:
    """Make a functional optimizer, with a method `step_param`, from a torch optimizer class.

        functional = as_functional(torch.optim.SGD, lr=0.1, momentum=0.9)
        functional.step_param(parameter, gradient)

    Pass the arguments of the class, without the parameters. Set `per_parameter=True` for a third-party
    optimizer that updates each parameter independently.
    """
    return AnyOptimizer(lambda params: optimizer_class(params, *args, **kwargs), per_parameter)


class AnyOptimizer:
    """An ordinary optimizer that adds each parameter to its group when the parameter is first stepped."""

    def __init__(self, make: Callable[[list[Tensor]], Optimizer], per_parameter: bool) -> None:
        self._make = make
        self._per_parameter = per_parameter
        self._known: set[Tensor] = set()
        # Refuse an unsupported class here, not in the first backward.
        check_steppable(make([torch.nn.Parameter(torch.zeros(1, 1))]), per_parameter)
        self.optimizer: Optimizer | None = None

    def step_param(self, param: Tensor, grad: Tensor | None) -> None:
        """Update `param` in place. If `grad` is None, do nothing, as `Optimizer.step` does."""
        if grad is None:
            return
        if self.optimizer is None:
            self.optimizer = self._make([param])
            self._known.add(param)
        elif param not in self._known:
            self.optimizer.param_groups[0]["params"].append(param)
            self._known.add(param)
        step_only(self.optimizer, [(param, grad, self.optimizer.param_groups[0])])


class _UpdatingHook:
    """Reduces each bucket; at the end of backward, passes parameters and gradients to `update` in order."""

    def __init__(
        self,
        covers: Callable[[Tensor], bool],
        update: Callable[[Bucket, list[Tensor]], None],
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._covers = covers
        self._update = update
        self._log = EventLog()
        self._missing: list[Tensor] = []
        self._failed: BaseException | None = None
        self._queue = BucketQueue(self._on_reduced, self._drained, finish)

    def __call__(self, grad_bucket: GradBucket, reduce: Callable[[], Future]) -> Future:
        bucket = Bucket.of(grad_bucket)
        if bucket.index == 0:
            self._missing = []
        self._missing += [p for p in bucket.parameters if p.grad is None and self._covers(p)]
        events = self._log.bucket_ready(bucket.index, bucket.buffer)
        future = reduce()
        if in_backward():  # a rank that has joined only takes part in the reduction
            self._queue.add(bucket, future, events)
        return future

    def _on_reduced(self, bucket: Bucket, reduced: Tensor) -> int:
        if self._failed is not None:
            raise OverlapError(f"an earlier update failed: {self._failed}") from self._failed
        if self._missing:
            shape = tuple(self._missing[0].shape)
            raise OverlapError(
                f"a parameter of shape {shape} has no gradient on this rank, and a hook can't know whether "
                "another has one. Use overlap_optimizer(), which does."
            )
        gradients = bucket.gradients(reduced)
        if gradients is None:
            raise OverlapError(
                f"the hook returned a tensor of type {reduced.dtype} and shape {tuple(reduced.shape)} for a "
                f"bucket of {bucket.buffer.dtype} and {tuple(bucket.buffer.shape)}"
            )
        self._update(bucket, gradients)
        return sum(self._covers(p) for p in bucket.parameters)

    def _drained(self, error: BaseException | None) -> None:
        if self._failed is None:
            self._failed = error


def hook_then_optimizer(hook: Hook, optimizer_state: OptimizerHookState) -> Hook:
    """Wrap a DDP communication hook so that it updates each parameter once its bucket has been reduced.

        state = OptimizerHookState(as_functional(torch.optim.SGD, lr=0.1))
        ddp.register_comm_hook(None, hook_then_optimizer(allreduce_hook, state))

    All updates are finished before `backward()` returns: don't call `step()`. The gradients stay as DDP
    leaves them.
    """

    def update(bucket: Bucket, gradients: list[Tensor]) -> None:
        for p, gradient in zip(bucket.parameters, gradients, strict=True):
            if p in optimizer_state:
                optimizer_state.functional_optimizer.step_param(p, gradient)
                torch.autograd.graph.increment_version(p)

    updating = _UpdatingHook(optimizer_state.__contains__, update)

    @comm_hook
    def hook_then_optimizer_wrapper(hook_state: Any, bucket: GradBucket) -> Future:
        return updating(bucket, lambda: hook(hook_state, bucket))

    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    hook_then_optimizer_wrapper.__qualname__ = f"hook_then_optimizer({name})"  # shown in DDP's log
    return hook_then_optimizer_wrapper


@dataclass
class OptimInBackwardHookState:
    """The state of `apply_optim_in_backward_hook`: an optimizer, and the process group to average over.

    For example:

        state = OptimInBackwardHookState(torch.optim.SGD(ddp.parameters(), lr=0.1))
    """

    optimizer: Optimizer
    process_group: dist.ProcessGroup | None = None
    per_parameter: bool = False
    in_buckets: set[Tensor] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        check_steppable(self.optimizer, self.per_parameter)

    def groups(self) -> dict[Tensor, dict[str, Any]]:
        """Each parameter's current group."""
        return {p: group for group in self.optimizer.param_groups for p in group["params"]}


def apply_optim_in_backward_hook(gradient_is_bucket_view: bool) -> Hook:
    """Make a hook that averages like built-in DDP, updates the parameters, and frees the gradients.

        state = OptimInBackwardHookState(torch.optim.SGD(ddp.parameters(), lr=0.1))
        ddp.register_comm_hook(state, apply_optim_in_backward_hook(gradient_is_bucket_view=False))

    `gradient_is_bucket_view` must equal the model's `gradient_as_bucket_view`: if True, gradients are used
    in place. Parameters of the optimizer that DDP ignores are updated from their local gradients.
    """
    running: OptimInBackwardHookState | None = None

    def covers(parameter: Tensor) -> bool:
        return running is not None and parameter in running.groups()

    def update(bucket: Bucket, gradients: list[Tensor]) -> None:
        assert running is not None
        groups = running.groups()
        running.in_buckets.update(bucket.parameters)
        items = []
        for p, gradient in zip(bucket.parameters, gradients, strict=True):
            if gradient_is_bucket_view and not gradient.is_sparse:
                assert p.grad is not None
                if p.grad.data_ptr() != gradient.data_ptr():
                    raise ValueError("gradient_is_bucket_view=True, but the gradients are not views")
                gradient = p.grad
            if p in groups:
                items.append((p, gradient, groups[p]))
        step_only(running.optimizer, items)

    def finish() -> None:
        assert running is not None
        groups = running.groups()
        outside = [(p, p.grad, group) for p, group in groups.items() if p not in running.in_buckets]
        step_only(running.optimizer, [(p, g, group) for p, g, group in outside if g is not None])
        for p in groups:
            p.grad = None

    updating = _UpdatingHook(covers, update, finish)

    @comm_hook
    def apply_optim_in_backward_hook(hook_state: OptimInBackwardHookState, bucket: GradBucket) -> Future:
        nonlocal running
        running = hook_state
        group = hook_state.process_group or dist.group.WORLD
        assert group is not None

        def reduce() -> Future:
            with torch.no_grad():
                scale(Bucket.of(bucket), group.size())
            return sum_over_ranks(bucket.buffer(), group)

        return updating(bucket, reduce)

    return apply_optim_in_backward_hook
