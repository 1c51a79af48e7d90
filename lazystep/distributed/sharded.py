"""Sharded optimizer state: each rank keeps, and updates, its part of each parameter, as in ZeRO 1.

    ddp = DistributedDataParallel(Net().to("lazy"), shard_optimizer_state=True)
    optimizer = torch.optim.AdamW(ddp.parameters())     # sharded in its first step

The gradients are reduced as ever, so clipping, scaling and whatever else looks at them work as ever. During
`optimizer.step()` the optimizer has this rank's parts of the parameters, as views, with the same parts of the
gradients. Then the parts of each bucket are gathered: one more collective per bucket, launched where the
bucket is updated. Outside of `step()` the optimizer has the whole parameters, and `optimizer.state` has, by
parameter, the state of this rank's part: tensors of one dimension.

[Note: all_reduce] Gradients are all-reduced, not reduce-scattered. Gloo's reduce-scatter is an all-reduce of
a copy, so it would send as much. Its parts would lie elsewhere in the bucket, where gloo sums in another
order. And this way the numbers are those of an optimizer that is not sharded, to the bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import optimizer as optimizers

from .shards import Shards, refuse

# The optimizers of torch that compute each element of a parameter from that element's gradient and state.
ELEMENT_BY_ELEMENT: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)
_MARK = "_lazystep_shards"
_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)


def shard_optimizer(ddp: Any, optimizer: _Optimizer, *, element_by_element: bool = False) -> _Optimizer:
    """Shard the state of an optimizer over the ranks of `ddp`, a model on the lazy device. Returns it.

    Losses and parameters stay those of the optimizer as it was, bit for bit on the reference executable.
    State that is there already is cut. `element_by_element=True` vouches for an optimizer that is not
    torch's: it must compute each element of a parameter from that element's gradient and state alone.

        optimizer = lazystep.distributed.shard_optimizer(ddp, torch.optim.AdamW(ddp.parameters()))

    `optimizer.state_dict()` is then collective: all ranks call it, and each gets the whole state, as if it
    were not sharded. `load_state_dict` takes a whole state, from any number of ranks, and keeps this rank's
    part. Does not synchronize.
    """
    if _MARK in optimizer.__dict__:
        return optimizer
    _refuse_unsupported(ddp, optimizer, element_by_element)
    setattr(optimizer, _MARK, _Swap(Shards(ddp, optimizer), optimizer))
    return optimizer


def shard_in_first_step(ddp: Any, parameters: Iterable[Tensor]) -> None:
    """Shard each optimizer that has one of these parameters when it makes its first step."""
    for parameter in parameters:
        setattr(parameter, _MARK, weakref.ref(ddp))
    if not _registered:
        _shard_if_asked.records_only = True  # type: ignore[attr-defined]
        _registered.append(optimizers.register_optimizer_step_pre_hook(_shard_if_asked))


_registered: list[Any] = []  # the hook of all optimizers of the process, once a model asks for it


def _shard_if_asked(optimizer: Any, args: Any, kwargs: Any) -> None:
    if _MARK in optimizer.__dict__:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            model = getattr(parameter, _MARK, None)
            if model is not None:
                shard_optimizer(model(), optimizer)
                return


class _Swap:
    """Gives the optimizer its parts before a step, and its parameters back after it.

    [Note: seen] Captured steps follow the code of this file as they follow torch's: from the parts they find
    the state. What the rest of the package does is hidden from them.
    """

    def __init__(self, shards: Shards, optimizer: Any) -> None:
        self.shards = shards
        self.whole_state: Any = optimizer.state
        self.has_parts = False
        optimizer.register_step_pre_hook(_Recording(self._before_step))
        optimizer.register_step_post_hook(_Recording(self._after_step))
        optimizer.register_state_dict_post_hook(shards.gather_state)
        optimizer.register_load_state_dict_pre_hook(self._before_load)

    def has_part(self, parameter: Tensor) -> bool:
        """Whether this rank updates a part of the parameter: an empty part has no state."""
        return parameter in self.shards.parts

    def local_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of this rank's parts, and where they are cut: for `lazystep.checkpoint`."""
        return self.shards.local_state(optimizer)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            refuse("step(closure)", "call the closure first, then step()")
        if self.has_parts:
            raise RuntimeError(
                "the last step() of this sharded optimizer has raised, and may have updated some parameters. "
                "Load a checkpoint: load_state_dict makes the optimizer usable again."
            )
        self.shards.prepare(optimizer)
        self.has_parts = True
        whole = self.whole_state = optimizer.state
        state = self.shards.state
        for parameter, part in self.shards.parts.items():
            if parameter in whole:
                if part not in state or state[part] is not whole[parameter]:
                    state[part] = whole[parameter]
            elif part in state:
                del state[part]
        optimizer.state = state
        for group, parts in zip(optimizer.param_groups, self.shards.part_lists, strict=True):
            group["params"] = parts

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._give_back(optimizer)
        self.shards.exchange()

    def _give_back(self, optimizer: Any) -> None:
        for group, parameters in zip(optimizer.param_groups, self.shards.whole_lists, strict=True):
            group["params"] = parameters
        whole, state = self.whole_state, self.shards.state
        for parameter, part in self.shards.parts.items():
            if part in state and (parameter not in whole or whole[parameter] is not state[part]):
                whole[parameter] = state[part]
        optimizer.state = whole
        self.has_parts = False

    def _before_load(self, optimizer: Any, packed: dict[str, Any]) -> dict[str, Any]:
        if self.has_parts:  # a step has raised
            self._give_back(optimizer)
        return self.shards.cut_state(optimizer, packed)


class _Recording:
    """A hook that records ops and changes nothing but lazy tensors: `GradScaler` may take its step back."""

    records_only = True

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._hook(optimizer, args, kwargs)


def _refuse_unsupported(ddp: Any, optimizer: Any, is_vouched_for: bool) -> None:
    from .data_parallel import DistributedDataParallel

    if not isinstance(ddp, DistributedDataParallel):
        refuse(
            f"a {type(ddp).__name__}",
            "pass a DistributedDataParallel of a module on the lazy device; on the CPU torch has "
            "ZeroRedundancyOptimizer",
        )
    if type(optimizer) not in ELEMENT_BY_ELEMENT and not is_vouched_for:
        refuse(
            f"{type(optimizer).__name__}, which may not work element by element",
            "use one of torch's "
            + ", ".join(kind.__name__ for kind in ELEMENT_BY_ELEMENT)
            + "; or vouch for it with shard_optimizer(..., element_by_element=True)",
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        refuse("differentiable=True", "leave it out")
