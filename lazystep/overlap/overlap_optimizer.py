"""`overlap_optimizer`: step an ordinary optimizer bucket by bucket, while DDP still reduces later buckets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..errors import OverlapError, UnsupportedError
from . import refusals
from .bucket import Hook
from .choice import Choice, Decision
from .engine import Attached, Clipping, Engine, Statistics
from .event_log import BucketEvents
from .partial_step import check_steppable
from .peers import Peers


class OverlapHandle:
    """The handle that `overlap_optimizer` returns: it shows the overlap of one optimizer, and can end it.

    Only `wait()` blocks, until the other ranks are done. The other methods do not synchronize.

        handle = overlap_optimizer(ddp, optimizer)
        print(handle.statistics.parameters_updated)
        handle.remove()
    """

    def __init__(self, engine: Engine, attached: Attached) -> None:
        self._engine = engine
        self._attached = attached

    def wait(self) -> None:
        """Block until every rank has finished the updates of the last backward; raise if an update failed.

        This rank's updates are finished when `backward()` returns. The next forward waits for the other ranks
        by itself.
        """
        self._engine.check(wait=True)

    def remove(self) -> None:
        """End the overlap of this optimizer: from now on `step()` updates all parameters.

        Call it on all ranks. DDP can't unregister a hook, so ours stays; it reduces exactly like built-in
        DDP, or like `hook`. Raises `OverlapError` between a backward and its `step()`.
        """
        self._engine.detach(self._attached)

    @property
    def total_norm(self) -> Tensor | None:
        """The norm of all gradients of the last backward, before clipping; None without `max_norm`."""
        return self._engine.total_norm

    @property
    def statistics(self) -> Statistics:
        """The counts so far, for all optimizers of the model."""
        left = self._engine.num_left_to_step()
        return replace(self._engine.statistics, parameters_left=left)

    @property
    def decision(self) -> Decision | None:
        """Whether overlap pays, as measured; None before the measurement, and if `overlap=` was given."""
        return self._engine.choice.decision

    def events(self) -> list[BucketEvents]:
        """The times of each bucket in the last 64 backward passes."""
        return self._engine.log.list()

    def timeline(self) -> dict[str, Any]:
        """The same times as a Chrome trace: `json.dump` it to a file and open the file in ui.perfetto.dev."""
        return self._engine.log.to_chrome_trace(self._engine.peers.rank)


def overlap_optimizer(
    ddp_model: DistributedDataParallel,
    optimizer: Optimizer,
    hook: Hook | None = None,
    hook_state: Any = None,
    params: Iterable[Tensor] | None = None,
    *,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    clip_value: float | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    per_parameter: bool = False,
    overlap: bool | None = None,
) -> OverlapHandle:
    """Update parameters inside `backward()`, each bucket as soon as it is reduced, equal to plain DDP.

        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(ddp.parameters(), fused=True)
        overlap_optimizer(ddp, optimizer)
        for x, y in loader:                      # the loop stays as it is
            loss_fn(ddp(x), y).backward()        # reduces and updates
            optimizer.step()                     # updates the rest, fires hooks
            optimizer.zero_grad()

    The optimizer still owns `param_groups` and `state`: schedulers, `state_dict` and `add_param_group` work
    as usual. Call `step()` once after each synchronized backward. Between the two you can read gradients, but
    not change them: `step()` raises `OverlapError` if they were changed.

    - `hook`, `hook_state`: a DDP communication hook to reduce with; the result equals plain DDP with this
      hook. None reduces as built-in DDP does, bit for bit.
    - `params`: the parameters to update early; by default all parameters of the optimizer.
    - `max_norm`, `norm_type`, `clip_value`: clip at the end of backward, as `clip_grad_value_` and then
      `clip_grad_norm_` over `ddp_model.parameters()` do. A norm needs every gradient first, so with
      `max_norm` or `grad_scaler` all updates happen in `step()` and nothing overlaps.
    - `per_parameter`: set it to True for a third-party optimizer that updates each parameter independently.
    - `overlap`: True always updates in backward, False leaves all updates to `step()`. By default it is
      measured in the first 26 to 74 backward passes, and all ranks decide alike. The bits are the same.

    Several optimizers with disjoint parameters can share a model: call this once for each, with the same
    hook and clipping. This is a collective call, and it blocks: the ranks compare their settings, and if one
    rank refuses, all ranks raise. `UnsupportedError` says what is refused and what to do instead.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise UnsupportedError(
            f"expected a DistributedDataParallel, got {type(ddp_model).__name__}. FSDP shards its parameters "
            "and has no such buckets; for a model without DDP there is optimizer_in_backward()."
        )
    clipping = Clipping(max_norm, norm_type, clip_value, grad_scaler)
    chosen = None if params is None else list(params)
    peers = Peers(ddp_model)
    refusal, settings = None, {}
    try:
        _check(ddp_model, optimizer, hook, hook_state, chosen, clipping, per_parameter, overlap)
        settings = _describe(ddp_model, optimizer, hook, chosen, clipping) | {"overlap": str(overlap)}
    except (UnsupportedError, OverlapError, TypeError, ValueError) as error:
        refusal = error
    peers.agree(settings, refusal)
    engine = Engine.of(ddp_model)
    if engine is None:
        engine = Engine(ddp_model, peers, hook, hook_state, clipping, Choice(overlap))
    elif engine.is_idle and (engine.choice.forced, engine.clipping) != (overlap, clipping):
        engine.clipping, engine.choice = clipping, Choice(overlap)
    engine.register()
    return OverlapHandle(engine, engine.attach(optimizer, chosen))


def _check(
    ddp: DistributedDataParallel,
    optimizer: Optimizer,
    hook: Any,
    hook_state: Any,
    chosen: list[Tensor] | None,
    clipping: Clipping,
    per_parameter: bool,
    overlap: bool | None,
) -> None:
    refusals.check_model(ddp)
    check_steppable(optimizer, per_parameter)
    refusals.check_scaler(clipping.grad_scaler)
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    if chosen is not None and not owned.issuperset(chosen):
        raise ValueError("params: some of them are not in the optimizer's param_groups")
    engine = Engine.of(ddp)
    if engine is None:
        refusals.check_slot_is_free(ddp)
        refusals.check_hook(ddp, hook, hook_state)
        return
    if engine.has(optimizer):
        raise ValueError("this optimizer overlaps with this model already: call overlap_optimizer once")
    if not engine.owned().isdisjoint(owned):
        raise ValueError("another optimizer of this model has some of these parameters already")
    if engine.hook is not hook or engine.hook_state is not hook_state:
        raise UnsupportedError("the model has another hook: DDP takes only one, and it stays after remove()")
    if not engine.is_idle and engine.clipping != clipping:
        raise ValueError(f"all optimizers of a model share its clipping, which is {engine.clipping}")
    if not engine.is_idle and engine.choice.forced != overlap:
        raise ValueError(f"all optimizers of a model share overlap=, which is {engine.choice.forced}")


def _describe(
    ddp: DistributedDataParallel,
    optimizer: Optimizer,
    hook: Any,
    chosen: list[Tensor] | None,
    clipping: Clipping,
) -> dict[str, str]:
    """The settings that all ranks must share, as text."""
    number = {p: str(i) for i, p in enumerate(ddp.module.parameters())}

    def numbers(parameters: Iterable[Tensor]) -> str:
        return " ".join(number.get(p, "-") for p in parameters)

    settings = {
        "the optimizer": type(optimizer).__qualname__,
        "hook": "None" if hook is None else getattr(hook, "__qualname__", type(hook).__qualname__),
        "params": "all" if chosen is None else numbers(chosen),
        "max_norm": f"{clipping.max_norm}, norm_type {clipping.norm_type}",
        "clip_value": str(clipping.clip_value),
        "grad_scaler": "None" if clipping.grad_scaler is None else "given",
        "find_unused_parameters": str(ddp.find_unused_parameters),
        "static_graph": str(ddp.static_graph),
        "gradient_as_bucket_view": str(ddp.gradient_as_bucket_view),
        "batched_grad_copy": str(ddp.batched_grad_copy),
        "the number of parameter groups": str(len(optimizer.param_groups)),
    }
    for index, group in enumerate(optimizer.param_groups):
        settings[f"the parameters of group {index}"] = numbers(group["params"])
        for key, value in group.items():
            if key != "params":
                # The repr of a function contains its address, which differs between ranks.
                settings[f"{key} of group {index}"] = getattr(value, "__qualname__", None) or repr(value)
    return settings
