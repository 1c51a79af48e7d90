"""Waiting and reading: every function here blocks, each for something else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import metrics
from .config import settings
from .notices import give_notices
from .record.source import user_line
from .record.tensor import handle_of, is_lazy
from .runtime import runtime
from .step_closures import check_device


def wait_device_ops(devices: Any = None) -> None:
    """Block until every queued step has run. Does not end the current step. Raises what failed.

        lazystep.mark_step()
        lazystep.wait_device_ops()          # now the clock shows what the steps took

    Materializes nothing that a barrier has not queued.
    """
    for name in [devices] if isinstance(devices, (str, torch.device)) else devices or ():
        check_device(name)
    runtime.executor.wait_idle()
    runtime.raise_failures()


def wait_for_compile(timeout: float | None = None) -> bool:
    """Block until every build that has been asked for is ready: from then on those steps run natively.

    For benchmarks and short jobs; a training loop has no need to call it. Waits for queued steps first,
    since they ask for builds. False if `timeout` seconds were not enough (setting `build_timeout` if
    it is None); a build that fails ends the wait too. Raises what failed in queued steps.

        for _ in range(5): train_step()
        lazystep.wait_for_compile()
    """
    runtime.executor.wait_idle()
    runtime.raise_failures()
    is_idle = runtime.tiers.wait_for_builds(settings.build_timeout if timeout is None else timeout)
    give_notices()
    return is_idle


def sync_multi(tensors: Sequence[torch.Tensor], devices: Sequence[Any] = ()) -> None:
    """Compute these tensors now: run what they need, in recorded order, and wait for it.

    The recording is cut here: everything recorded so far runs, as one program that is looked up in
    the cache like a step's. Tensors that have their values already cost nothing. Not a barrier: closures
    still wait for theirs.

        lazystep.sync_multi([loss, accuracy])       # one wait for both
    """
    for name in devices:
        check_device(name)
    handles = [handle_of(t) for t in tensors]
    metrics.count_synchronization("sync_multi", user_line())
    runtime.synchronize(handles)


def to_cpu(tensors: Any, devices: Any = None) -> Any:
    """The same structure with every lazy tensor as a CPU tensor of its own. Synchronizes once.

    Takes any nesting of lists, tuples and dicts; what is not a lazy tensor passes through. Cuts the
    recording if it makes one of them.

        numbers = lazystep.to_cpu({"loss": loss, "norms": norms, "step": 3})
    """
    for name in devices or ():
        check_device(name)
    lazy = [t for t in pytree.tree_leaves(tensors) if is_lazy(t)]
    if lazy:
        metrics.count_synchronization("to_cpu", user_line())
        runtime.synchronize([handle_of(t) for t in lazy])

    def move(leaf: Any) -> Any:
        return leaf.detach().cpu() if is_lazy(leaf) else leaf

    return pytree.tree_map(move, tensors)


def save(tensors: Any, *args: Any, **kwargs: Any) -> None:
    """`torch.save` of CPU tensors: the file loads anywhere, without lazystep.

    Takes what `torch.save` takes. Tensors that share memory still share it in the file. Synchronizes
    once, for all tensors together.

        lazystep.save({"model": model.state_dict(), "opt": opt.state_dict()}, "checkpoint.pt")
        model.load_state_dict(torch.load("checkpoint.pt")["model"])
    """
    lazy = [t for t in pytree.tree_leaves(tensors) if is_lazy(t)]
    if lazy:
        metrics.count_synchronization("save", user_line())
        runtime.synchronize([handle_of(t) for t in lazy])
    torch.save(tensors, *args, **kwargs)
