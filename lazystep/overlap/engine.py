"""Overlap for one DDP model: the hook in the model's only slot, and the optimizers that share the hook.

The engine receives buckets from DDP. It updates a parameter inside backward only if this backward has
produced the parameter's gradient and the reduction has succeeded. The ordinary `optimizer.step()` updates
all other parameters, from gradients exactly as plain DDP leaves them:

- parameters outside the buckets;
- parameters that this rank did not use in this backward (only DDP's finalizer knows whether another rank
  used them);
- all parameters in the first iteration of a static graph;
- all parameters if clipping by norm or a GradScaler needs every gradient first;
- all parameters if overlap does not pay: see `choice`. The hook is then given back where plain DDP is faster.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .. import metrics
from ..errors import OverlapError
from .average import scale, sum_over_ranks
from .backward_callbacks import in_backward
from .bucket import Bucket, Future, GradBucket, Hook, comm_hook
from .bucket_queue import BucketQueue
from .choice import Choice
from .ddp_internals import can_give_slot_back, divides_by_active_ranks, give_slot_back
from .early_steps import EarlySteps
from .event_log import BucketEvents, EventLog
from .health import Health
from .partial_step import Item
from .peers import Peers
from .side_stream import SideStream


@dataclass(frozen=True)
class Clipping:
    """How gradients are scaled and clipped between the reduction and the update."""

    max_norm: float | None = None
    norm_type: float = 2.0
    clip_value: float | None = None
    grad_scaler: torch.amp.GradScaler | None = None

    @property
    def clips(self) -> bool:
        """Whether gradients are changed at all."""
        return self.needs_all_gradients or self.clip_value is not None

    @property
    def needs_all_gradients(self) -> bool:
        """Whether no parameter can be updated before the last gradient is known."""
        return self.max_norm is not None or self.grad_scaler is not None


@dataclass(eq=False)
class Attached:
    """One optimizer of the model: its early steps, and the parameters to step early (None: all)."""

    early: EarlySteps
    parameters: set[Tensor] | None


@dataclass
class Statistics:
    """Counts of what overlap has done so far.

    `parameters_updated` counts updates inside backward, `parameters_left` those of model parameters that
    `optimizer.step()` made instead.

        print(handle.statistics.parameters_updated, handle.statistics.seconds_waiting)
    """

    backwards: int = 0
    buckets: int = 0
    parameters_updated: int = 0
    parameters_left: int = 0
    seconds_waiting: float = 0.0


@dataclass
class _Pass:
    """The state of the backward that is running."""

    # Parameters whose gradient this rank has produced, with the address of the gradient's memory.
    produced: dict[Tensor, int] = field(default_factory=dict)
    owners: dict[Tensor, tuple[Attached, dict[str, Any]]] = field(default_factory=dict)
    buckets: list[Sequence[Tensor]] = field(default_factory=list)
    divisor: int = 0
    refusal: Exception | None = None


def _note_produced(produced: dict[Tensor, int], parameter: Tensor) -> None:
    """Remember that this parameter's gradient was accumulated, and the address of the gradient's memory."""
    gradient = parameter.grad
    in_memory = gradient is not None and not gradient.is_sparse
    produced[parameter] = gradient.untyped_storage().data_ptr() if in_memory else 0  # type: ignore[union-attr]


class Engine:
    """Overlap for one DDP model. The first `overlap_optimizer` makes it; it lives as long as the model."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        peers: Peers,
        hook: Hook | None,
        hook_state: Any,
        clipping: Clipping,
        choice: Choice,
    ) -> None:
        self.ddp = ddp
        self.hook = hook
        self.hook_state = hook_state
        self.clipping = clipping
        self.choice = choice
        self.peers = peers
        self.log = EventLog()
        self.statistics = Statistics()
        self.total_norm: Tensor | None = None
        self._is_hooked = False
        self._attached: list[Attached] = []
        self._names: dict[Tensor, str] = {p: name for name, p in ddp.module.named_parameters()}
        self._health = Health(ddp.module, self._forget)
        self._pass = _Pass()
        self._queue = BucketQueue(self._update, self._drained, self._finish)
        self._queue.side_stream = SideStream.for_device(ddp.device)
        ddp.register_forward_pre_hook(self._before_forward)
        if ddp.find_unused_parameters or ddp.static_graph or self._rounding_depends_on_views():
            produced = self._pass.produced
            for p in ddp.module.parameters():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(partial(_note_produced, produced))

    # -- set-up ------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no optimizer is attached, so that the hook only reduces."""
        return not self._attached

    @staticmethod
    def of(ddp: DistributedDataParallel) -> Engine | None:
        """The engine of a model; None if there is none. The model owns it, by the hook before forward."""
        owners = (getattr(hook, "__self__", None) for hook in ddp._forward_pre_hooks.values())
        return next((owner for owner in owners if isinstance(owner, Engine)), None)

    def register(self) -> None:
        """Take the model's only hook slot, unless we have it or do not need it."""
        if self._is_hooked or not self._needs_hook:
            return
        self._is_hooked = True
        inner = "built-in" if self.hook is None else getattr(self.hook, "__qualname__", repr(self.hook))

        @comm_hook
        def overlap_hook(state: weakref.ref[Engine], bucket: GradBucket) -> Future:
            engine = state()
            assert engine is not None  # the model owns it
            return engine._on_bucket(bucket)

        overlap_hook.__qualname__ = f"overlap_optimizer({inner})"  # shown in DDP's log
        # A weak reference: DDP's C++ side keeps the state where the garbage collector can't see it.
        self.ddp.register_comm_hook(weakref.ref(self), overlap_hook)

    def attach(self, optimizer: Optimizer, parameters: Iterable[Tensor] | None) -> Attached:
        """From now on, update this optimizer's parameters in backward."""
        self._health.add(optimizer)
        stepped = self.choice.stepped
        early = EarlySteps(optimizer, self.check, self._health.reloaded, self._names, stepped)
        attached = Attached(early, None if parameters is None else set(parameters))
        self._attached.append(attached)
        return attached

    def detach(self, attached: Attached) -> None:
        """Stop updating this optimizer's parameters in backward. The hook stays and still reduces."""
        if attached.early.is_open:
            raise OverlapError("parameters were updated in backward(): call optimizer.step() before remove()")
        if attached in self._attached:
            self._attached.remove(attached)
            attached.early.remove()
            self._health.discard(attached.early.optimizer)

    def has(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer is attached."""
        return any(attached.early.optimizer is optimizer for attached in self._attached)

    def num_left_to_step(self) -> int:
        """How many updates of model parameters `step()` has made since the optimizers were attached."""
        return sum(attached.early.num_left_to_step for attached in self._attached)

    def owned(self) -> set[Tensor]:
        """The parameters of all attached optimizers."""
        groups = (group for attached in self._attached for group in attached.early.optimizer.param_groups)
        return {p for group in groups for p in group["params"]}

    def name_of(self, parameter: Tensor) -> str:
        """The parameter's name in the model."""
        return self._names.get(parameter, f"a parameter of shape {tuple(parameter.shape)}")

    # -- health ------------------------------------------------------------------------------------

    def check(self, wait: bool = False) -> None:
        """Raise if training must not go on. With `wait`, block until every rank has finished its updates."""
        self._health.check()
        try:
            self.peers.check(wait)
        except Exception as error:
            self._health.poison(error)
            raise
        heard, self.peers.heard = self.peers.heard, []
        for numbers in heard:
            if self.choice.hear(*numbers):
                metrics.count("overlap_decisions")

    def _forget(self) -> None:
        for attached in self._attached:
            attached.early.forget()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._attached:
            # Before DDP's next collective, which a failed rank would not join. Plain DDP does not wait here.
            is_plain = not self.choice.overlaps and self._leaves()
            with nullcontext() if is_plain else self.choice.adding():
                self.check(wait=True)
        self._pass.produced.clear()
        # Only before a step: all ranks have heard the decision by then, so all of them leave together.
        is_step = torch.is_grad_enabled() and self.ddp.require_backward_grad_sync
        if self._is_hooked and not self._needs_hook and is_step and self._leaves():
            self._is_hooked = not give_slot_back(self.ddp, self._pass.buckets)
            metrics.count("overlap_hooks_given_back", int(not self._is_hooked))

    @property
    def _needs_hook(self) -> bool:
        may_overlap = self.choice.overlaps or not self.choice.is_settled
        return may_overlap or self.hook is not None or self.clipping.clips

    def _leaves(self) -> bool:
        """Whether the hook is given back if overlap does not pay: plain DDP is then faster without it."""
        return self.hook is None and not self.clipping.clips and can_give_slot_back(self.ddp)

    # -- in backward -------------------------------------------------------------------------------

    def _on_bucket(self, grad_bucket: GradBucket) -> Future:
        bucket = Bucket.of(grad_bucket)
        updates = in_backward()  # a rank that has joined only takes part in the reduction
        if bucket.index == 0:
            self._begin(bucket, updates)
        self._pass.buckets.append(bucket.parameters)
        events = self.log.bucket_ready(bucket.index, bucket.buffer)
        future = self._reduce(bucket, grad_bucket, events)
        if not self._attached:
            return future
        if updates:
            self._queue.add(bucket, future, events)
        elif bucket.is_last:
            self.peers.announce(False, (math.nan, math.nan))  # a rank that has joined measures nothing
        return future

    def _begin(self, bucket: Bucket, updates: bool) -> None:
        """Decide what applies to all buckets of this backward: the divisor, and whether to refuse."""
        # Under join, DDP does not tell the divisor. Joined ranks call the hook too, so we count active ranks.
        shrinks = self.hook is None and divides_by_active_ranks(self.ddp)
        self._pass.divisor = self.peers.count(updates) if shrinks else self.ddp.process_group.size()
        self._pass.refusal = None
        self._pass.owners = {}
        self._pass.buckets = []
        if not self.clipping.needs_all_gradients:
            self.choice.begin()
        if any(attached.early.is_open for attached in self._attached):
            self._pass.refusal = OverlapError(
                "a second synchronized backward() before optimizer.step(): the first one has updated the "
                "parameters already. Accumulate under ddp.no_sync(), or call step() after each. (If it was a "
                "GradScaler that left step() out: pass it as grad_scaler=.)"
            )

    def _reduce(self, bucket: Bucket, grad_bucket: GradBucket, events: BucketEvents) -> Future:
        if self.hook is not None:
            try:
                future = self.hook(self.hook_state, grad_bucket)
            except BaseException as error:  # it breaks the reducer, as in plain DDP
                self._health.poison(error)
                raise
            future.add_done_callback(lambda _: events.reduced())
            return future
        # Built-in DDP scales while it copies a gradient into the bucket.
        leaving_out = self.choice.leaving_out() if self._leaves() else nullcontext()
        with torch.no_grad(), leaving_out:
            was_view = self._was_view(bucket) if self._rounding_depends_on_views() else None
            scale(bucket, self._pass.divisor, was_view, divide=self.ddp.batched_grad_copy)
        return sum_over_ranks(bucket.buffer, self.ddp.process_group, events.reduced)

    def _rounding_depends_on_views(self) -> bool:
        return self.ddp.gradient_as_bucket_view and self.hook is None and self.ddp.process_group.size() > 2

    def _was_view(self, bucket: Bucket) -> Callable[[Tensor], bool]:
        memory = 0 if bucket.buffer.is_sparse else bucket.buffer.untyped_storage().data_ptr()
        produced = self._pass.produced

        def was_view(parameter: Tensor) -> bool:
            if parameter not in produced and parameter.grad is not None and parameter.grad.count_nonzero():
                self._pass.refusal = OverlapError(
                    f"{self.name_of(parameter)} was not used in this pass and has a gradient from an earlier "
                    "one: how built-in DDP rounds it is not known here. Use zero_grad(set_to_none=True), or "
                    "gradient_as_bucket_view=False."
                )
            return produced.get(parameter) == memory

        return was_view

    def _is_certain(self, parameter: Tensor) -> bool:
        """Whether plain DDP would surely give this parameter the reduced gradient."""
        if self.ddp.static_graph and self.log.num_backwards == 1:
            return False  # the finalizer has already run, and may not have written this gradient
        if self.ddp.find_unused_parameters or self.ddp.static_graph:
            return parameter in self._pass.produced
        return True

    def _update(self, bucket: Bucket, reduced: Tensor) -> int:
        """Update the bucket's parameters whose gradient is certain. Returns how many were updated."""
        if self._pass.refusal is not None:
            raise self._pass.refusal
        self.statistics.buckets += 1
        if bucket.index == 0:
            self._pass.owners = self._find_owners()
            self._health.updating()
        waits = self.clipping.needs_all_gradients or not self.choice.overlaps
        gradients = None if waits else bucket.gradients(reduced)
        if gradients is None:
            return 0
        by_optimizer: dict[int, tuple[EarlySteps, list[Item]]] = {}
        for p, gradient in zip(bucket.parameters, gradients, strict=True):
            owner = self._pass.owners.get(p)
            if owner is not None and self._is_certain(p):
                attached, group = owner
                items = by_optimizer.setdefault(id(attached), (attached.early, []))[1]
                items.append((p, gradient, group))
        for early, items in by_optimizer.values():
            if self.clipping.clip_value is not None:
                bound = self.clipping.clip_value
                for _, gradient, _ in items:
                    gradient.clamp_(-bound, bound)
            try:
                early.step(items)
            except Exception as error:
                names = [self.name_of(p) for p, _, _ in items]
                shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
                error.add_note(f"raised by {type(early.optimizer).__name__} in backward(), updating {shown}")
                raise
        return sum(len(items) for _, items in by_optimizer.values())

    def _find_owners(self) -> dict[Tensor, tuple[Attached, dict[str, Any]]]:
        """Each parameter's optimizer and group, found anew in every backward: loading replaces groups."""
        owners: dict[Tensor, tuple[Attached, dict[str, Any]]] = {}
        for attached in self._attached:
            for group in attached.early.optimizer.param_groups:
                for p in group["params"]:
                    if p in owners:
                        raise OverlapError(f"{self.name_of(p)} is in two optimizers, or twice in one")
                    if attached.parameters is None or p in attached.parameters:
                        owners[p] = attached, group
        return owners

    def _drained(self, error: BaseException | None) -> None:
        """Tell the other ranks whether the updates of this backward failed. DDP's finalizer runs next."""
        if error is not None:
            self._health.poison(error)
        try:
            self.peers.announce(error is not None, self.choice.report())
        except Exception as cause:  # a broken connection: the reduction's own error matters more
            self._health.poison(error or cause)

    def _finish(self) -> None:
        """Clip and count, after DDP's finalizer: gradients are now as plain DDP leaves them."""
        self._pass.produced.clear()
        self._clip()
        stepped = sum(attached.early.num_stepped for attached in self._attached)
        for attached in self._attached:
            attached.early.seal()
        self.statistics.backwards += 1
        self.statistics.parameters_updated += stepped
        self.statistics.seconds_waiting = self._queue.seconds_waiting
        metrics.count("overlap_backwards")
        metrics.count("overlap_parameters_updated", stepped)

    def _clip(self) -> None:
        clipping = self.clipping
        if clipping.max_norm is None and clipping.clip_value is None:
            return
        scaler = clipping.grad_scaler
        if scaler is not None:
            for attached in self._attached:
                scaler.unscale_(attached.early.optimizer)
        if clipping.clip_value is not None:
            nn.utils.clip_grad_value_(self.ddp.parameters(), clipping.clip_value)
        if clipping.max_norm is not None:
            parameters = list(self.ddp.parameters())  # the norm depends on the order of addition
            self.total_norm = nn.utils.clip_grad_norm_(parameters, clipping.max_norm, clipping.norm_type)
