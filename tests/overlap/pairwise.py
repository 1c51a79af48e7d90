"""Settings that meet each other: a list of combinations in which every pair of values occurs."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from .hook_rows import half_of_the_sum
from .models import Branches, Tied
from .training import NUM_STEPS, Run, mlp

FACTORS: dict[str, list[str]] = {
    "ranks": ["2", "3"],
    "optimizer": ["SGD", "AdamW", "AdamW fused"],
    "model": ["mlp", "tied", "unused parameters"],
    "graph": ["dynamic", "find_unused", "static"],
    "gradients": ["own memory", "bucket views", "batched copies"],
    "hook": ["none", "allreduce", "fp16", "own"],
    "clearing": ["set_to_none", "to zero", "never"],
    "accumulation": ["none", "no_sync"],
    "clipping": ["none", "value", "norm"],
    "parameters": ["all", "groups and a scheduler", "two optimizers", "every other one early"],
}
Combination = dict[str, str]


def is_possible(combination: Combination) -> bool:
    """Plain DDP itself needs find_unused or a static graph for a model with unused parameters."""
    unused = combination["model"] == "unused parameters"
    if unused and combination["graph"] == "dynamic":
        return False
    # Under a static graph the first iteration must not be a no_sync one, and usage must not change.
    return not (combination["graph"] == "static" and combination["accumulation"] == "no_sync")


def combinations() -> list[Combination]:
    """Greedily: each next combination covers the most pairs that are still missing."""
    names = list(FACTORS)
    possible = [c for c in map(dict, _sample(names)) if is_possible(c)]
    pairs_of = [{((a, c[a]), (b, c[b])) for a, b in itertools.combinations(names, 2)} for c in possible]
    missing, chosen = set().union(*pairs_of), []
    while missing:
        best = max(range(len(possible)), key=lambda i: len(pairs_of[i] & missing))
        chosen.append(possible[best])
        missing -= pairs_of[best]
    return chosen


def _sample(names: list[str]) -> list[list[tuple[str, str]]]:
    """A fixed sample of all combinations, large enough to hold every possible pair many times."""
    generator = torch.Generator().manual_seed(0)
    sample = []
    for _ in range(3000):
        picks = [int(torch.randint(len(FACTORS[name]), (), generator=generator)) for name in names]
        sample.append([(name, FACTORS[name][pick]) for name, pick in zip(names, picks, strict=True)])
    return sample


def describe(combination: Combination) -> str:
    return ", ".join(f"{name} {value}" for name, value in combination.items())


def train(run: Run, combination: Combination) -> None:
    models = {"mlp": mlp, "tied": Tied, "unused parameters": Branches}
    ddp = run.ddp(
        models[combination["model"]](),
        find_unused_parameters=combination["graph"] == "find_unused",
        static_graph=combination["graph"] == "static",
        gradient_as_bucket_view=combination["gradients"] == "bucket views",
        batched_grad_copy=combination["gradients"] == "batched copies",
    )
    parameters = list(ddp.parameters())
    two = combination["parameters"] == "two optimizers"
    if combination["parameters"] == "groups and a scheduler":
        optimizers = [run.optimizer([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}])]
    else:
        optimizers = [
            run.optimizer(part) for part in ([parameters[::2], parameters[1::2]] if two else [parameters])
        ]
    _set_up(run, combination, ddp, optimizers)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]
    for step in range(NUM_STEPS):
        for part in range(2 if combination["accumulation"] == "no_sync" else 1):
            is_last = part == 1 or combination["accumulation"] == "none"
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                x = run.batch(10 * step + part)
                use = combination["graph"] == "find_unused" and (step + run.world.rank) % 3 == 0
                out = ddp(x, use) if combination["model"] == "unused parameters" else ddp(x)
                run.backward(out.square().mean())
        if not run.overlapped and combination["clipping"] == "value":
            nn.utils.clip_grad_value_(parameters, 0.02)
        if not run.overlapped and combination["clipping"] == "norm":
            nn.utils.clip_grad_norm_(parameters, 0.1)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            run.stage = "step"
            optimizer.step()
            scheduler.step()
            if combination["clearing"] != "never":
                optimizer.zero_grad(set_to_none=combination["clearing"] == "set_to_none")


def _set_up(run: Run, combination: Combination, ddp: Any, optimizers: list[Any]) -> None:
    hook, state = {
        "none": (None, None),
        "allreduce": (default_hooks.allreduce_hook, run.world.group),
        "fp16": (default_hooks.fp16_compress_hook, run.world.group),
        "own": (half_of_the_sum, run.world.group),
    }[combination["hook"]]
    options: dict[str, Any] = {"hook": hook, "hook_state": state}
    if combination["clipping"] == "value":
        options["clip_value"] = 0.02
    if combination["clipping"] == "norm":
        options["max_norm"] = 0.1
    if not run.overlapped and hook is not None:
        ddp.register_comm_hook(state, hook)
    for optimizer in optimizers:
        if combination["parameters"] == "every other one early":
            options["params"] = optimizer.param_groups[0]["params"][::2]
        run.overlap(ddp, optimizer, **options)
