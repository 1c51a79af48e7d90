"""Measure what bfloat16 and float16 cost and save: step time and peak memory, against float32 and eager.

    python -m benchmarks.precision [--quick]

Trains the benchmark models in float32 and under autocast to bfloat16 and float16, in eager and by
`@lazystep.step`. Every variant has its own process, which gives its peak memory. The variants take turns.
The processor's features decide most of it: without instructions for a type, its kernels convert every number
to float32 and back.
"""

from __future__ import annotations

import contextlib
import functools
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .goals import Goal, to_table
from .models import make_optimizer, make_workload
from .timing import Measurements, Neighbours, Report, Table, command, interleave, machine, peers

DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
SYSTEMS = ("eager", "lazystep")
VARIANTS = [f"{system} {dtype}" for system in SYSTEMS for dtype in DTYPES]
# Names in /proc/cpuinfo of instructions for the two types; f16c only converts.
FEATURES = ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16", "avx_ne_convert", "f16c")


class Plan(NamedTuple):
    """How much to measure."""

    models: tuple[str, ...]
    num_steps: int
    num_repeats: int
    max_seconds: float
    waits_for_builds: bool


# The wide model has the memory of weights and activations, which the types decide. Each model has three
# builds, so there are few of them. Convolutions in float16 take seconds without instructions for it.
FULL = Plan(("gpt", "lstm", "mlp:1024"), 10, 8, 40.0, True)
QUICK = Plan(("mlp:16",), 2, 2, 10.0, False)


class Trainer:
    """One variant: a model that is trained in its process."""

    def __init__(self, variant: str) -> None:
        system, _, dtype = variant.partition(" ")
        self._device = "lazy" if system == "lazystep" else "cpu"
        self._dtype = DTYPES[dtype]
        self._step: Any = None
        self._make_batch: Any = None

    def start(self, model: str) -> None:
        """Make the model and its step function."""
        torch.manual_seed(0)
        module, self._make_batch, loss_fn = make_workload(model)
        module.to(self._device)
        optimizer = make_optimizer(module, fused=True)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            block = torch.autocast("cpu", self._dtype) if self._dtype else contextlib.nullcontext()
            with block:
                loss = loss_fn(module(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        if self._device == "lazy":
            import lazystep

            step = lazystep.step(step)
        self._step = step

    def run(self, num_steps: int) -> float:
        """Seconds per step."""
        start = time.perf_counter()
        for _ in range(num_steps):
            self._step(*self._make_batch())
        self._wait()
        return (time.perf_counter() - start) / num_steps

    def _wait(self) -> None:
        if self._device == "lazy":
            import lazystep

            lazystep.wait_device_ops()

    def wait_for_build(self) -> None:
        """Until the step runs natively, if it will."""
        if self._device == "lazy":
            import lazystep

            lazystep.wait_for_compile()


def work(variant: str) -> Any:
    """What a peer does for one request."""
    if variant.startswith("lazystep"):
        import lazystep  # noqa: F401 - its device, before a model is made
    trainer = Trainer(variant)

    def answer(task: str, model: str = "", num_steps: int = 0, waits: bool = False) -> Mapping[str, float]:
        if task == "prepare":
            trainer.start(model)
            trainer.run(max(num_steps, 6))
            if waits:
                trainer.wait_for_build()
            trainer.run(2)
            return {}
        seconds = trainer.run(num_steps)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {variant: seconds, f"{variant} peak": peak}

    return answer


def measure(model: str, plan: Plan) -> Measurements:
    """Turns of all variants on one model."""
    with peers(__spec__.name, VARIANTS, 900.0) as systems:
        for peer in systems.values():
            peer.ask(task="prepare", model=model, num_steps=plan.num_steps, waits=plan.waits_for_builds)
        turns = {
            name: functools.partial(peer.ask, task="turn", num_steps=plan.num_steps)
            for name, peer in systems.items()
        }
        neighbours = Neighbours(systems.values())
        measured = interleave(turns, 1, plan.num_repeats, plan.max_seconds)
        measured.others = neighbours.share()
    return measured


def features() -> str:
    """The processor's features for the two types, or that it has none."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                found = set(line.split()).intersection(FEATURES)
                break
    computing = found - {"f16c"}
    text = ", ".join(sorted(found)) or "none"
    if not computing:
        text += " (no arithmetic in either type: kernels convert to float32 and back)"
    return text


def to_tables(measured: Mapping[str, Measurements]) -> list[Table]:
    """Step times, and peak memory."""
    times, peaks = [], []
    for model, m in measured.items():
        times.append(
            [
                model,
                *(m.spread(name).format(1e3) for name in VARIANTS),
                m.speedup("lazystep bfloat16", "lazystep float32").format(),
                m.speedup("lazystep bfloat16", "eager bfloat16").format(),
                f"{m.others:.0%}",
            ]
        )
        peaks.append([model, *(f"{max(m.samples[f'{name} peak']) / 2**20:.0f}" for name in VARIANTS)])
    note = f"AdamW, fused. The processor's features for bfloat16 and float16: {features()}."
    return [
        Table(
            "Step time in three types",
            [
                "model",
                *(f"{name}, ms" for name in VARIANTS),
                "lazystep bfloat16, lazystep float32 = 1",
                "lazystep bfloat16, eager bfloat16 = 1",
                "processor time of others",
            ],
            times,
            note,
        ),
        Table(
            "Peak memory",
            ["model", *(f"{name}, MB" for name in VARIANTS)],
            peaks,
            "Of the whole process, with Python and torch. Master weights and optimizer state are float32.",
        ),
    ]


Models = Mapping[str, Measurements]


def _rates(baseline: str, variant: str) -> Any:
    return lambda models: {name: m.speedup(variant, baseline).median for name, m in models.items()}


def _memory(variant: str, base: str) -> Any:
    def ratios(models: Models) -> dict[str, float | None]:
        peaks = {n: [max(m.samples[f"{v} peak"]) for v in (variant, base)] for n, m in models.items()}
        return {name: mine / other for name, (mine, other) in peaks.items()}

    return ratios


GOALS: list[Goal[Models]] = [
    Goal(
        "bfloat16: a step at the rate of eager's autocast or more, on each",
        _rates("eager bfloat16", "lazystep bfloat16"),
        at_least=1.0,
    ),
    Goal(
        "float16: a step at the rate of eager's autocast or more, on each",
        _rates("eager float16", "lazystep float16"),
        at_least=1.0,
    ),
    Goal(
        "bfloat16: 1.25 times the peak memory of eager's autocast or less, on each",
        _memory("lazystep bfloat16", "eager bfloat16"),
        at_most=1.25,
    ),
    Goal(
        "bfloat16: the peak memory of float32 or less, on each",
        _memory("lazystep bfloat16", "lazystep float32"),
        at_most=1.0,
    ),
]


def run(is_quick: bool) -> Report:
    plan = QUICK if is_quick else FULL
    measured = {model: measure(model, plan) for model in plan.models}
    others = max(m.others for m in measured.values())
    tables = [to_table(GOALS, measured, others), *to_tables(measured)]
    return Report("precision", "python -m benchmarks.precision", machine(), tables, measured)


if __name__ == "__main__":
    command(__doc__, run, work)
