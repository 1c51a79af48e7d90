"""Measure training on shapes that vary: a small GPT whose batches have one of 32 lengths.

    python -m benchmarks.shapes [--quick]

Every variant runs in its own process with empty caches. First it trains from a cold start: the total time and
the slowest step. Then all variants take turns: the time of a step once they are warm. `reference` is lazystep
before any library is there. JAX pads the lengths to buckets (`jax_shapes`). A variant that takes long does
not run all steps of the cold start: the table says how many it ran, and the rest is extrapolated.
"""

from __future__ import annotations

import contextlib
import functools
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import goals
from .goals import Goal
from .models import gpt, make_optimizer
from .timing import (
    Measurements,
    Neighbours,
    Peer,
    PeerError,
    Report,
    Table,
    command,
    interleave,
    machine,
)
from .training_time import TrainingTime

EAGER, AUTOMATIC, DYNAMIC = "eager", "torch.compile", "torch.compile(dynamic=True)"
REFERENCE, LOOP, STEP = "lazystep, reference", "lazystep loop", "lazystep step"
JAX = "JAX jit, padded to buckets"
VARIANTS = (EAGER, AUTOMATIC, DYNAMIC, JAX, REFERENCE, LOOP, STEP)
LAZY = (REFERENCE, LOOP, STEP)
TOTAL, SLOWEST, RUN, NATIVE, BUILDS = "total", "slowest", "steps run", "native", "builds"
JAX_PYTHON = Path(__file__).parent.parent / ".venv-jax" / "bin" / "python"
PEER_TIMEOUT = 1800.0


class Plan(NamedTuple):
    """The size of a run."""

    num_lengths: int
    num_cold_steps: int
    num_steps: int
    num_repeats: int
    max_seconds: float
    num_layers: int
    max_cold_seconds: float  # of each variant


FULL = Plan(32, 2000, 64, 5, 90.0, 4, 75.0)
QUICK = Plan(4, 24, 4, 2, 20.0, 1, 20.0)


# -- in the peer's process -------------------------------------------------------------------------------


class Worker:
    """Trains one variant."""

    def __init__(self, variant: str) -> None:
        self.name = variant
        if variant in LAZY:
            import lazystep  # noqa: F401 - registers the device

    def work(
        self, task: str, num_lengths: int, num_layers: int, num_steps: int, max_seconds: float
    ) -> Mapping[str, float]:
        """Do the named task: `cold`, once, or `turn`."""
        if task == "turn":
            return {self.name: self.train(num_steps, max_seconds).seconds / num_steps}
        self.make(num_lengths, num_layers)
        numbers = self.train(num_steps, max_seconds).numbers(self.name)
        if self.name in (LOOP, STEP):
            numbers |= self.be_warm(num_lengths)
        return numbers

    def make(self, num_lengths: int, num_layers: int) -> None:
        """Make the model and its step."""
        torch.manual_seed(0)
        self.device = "lazy" if self.name in LAZY else "cpu"
        self.lengths = random.Random(0)
        self.choices = [24 + 2 * number for number in range(num_lengths)]
        model, _, loss_fn = gpt(num_layers=num_layers, num_tokens=max(self.choices))
        model.to(self.device)
        optimizer = make_optimizer(model)
        forward: Callable[[Tensor], Tensor] = model
        if self.name in (AUTOMATIC, DYNAMIC):
            forward = torch.compile(model, dynamic=True if self.name == DYNAMIC else None)

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = loss_fn(forward(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        self.step = step
        if self.name == STEP:
            import lazystep

            self.step = lazystep.step(step)

    def train(self, num_steps: int, max_seconds: float = PEER_TIMEOUT) -> TrainingTime:
        """Time these steps."""
        times = TrainingTime(num_steps, max_seconds)
        while times.goes_on():
            before = time.perf_counter()
            tokens = torch.randint(256, (8, self.lengths.choice(self.choices) + 1))
            loss = self.step(
                tokens[:, :-1].contiguous().to(self.device), tokens[:, 1:].contiguous().to(self.device)
            )
            if self.name in (REFERENCE, LOOP):
                import lazystep

                lazystep.mark_step()
            times.add(time.perf_counter() - before)
        loss.item()
        return times.end()

    def be_warm(self, num_lengths: int) -> dict[str, float]:
        """Wait for the builds, meet every length, and count."""
        import lazystep

        lazystep.wait_for_compile(PEER_TIMEOUT / 2)
        self.train(8 * num_lengths)  # most lengths several times: checked, and captured
        lazystep.wait_device_ops()
        before = lazystep.metrics.counter_value("native_executions")
        self.train(num_lengths)
        lazystep.wait_device_ops()
        native = lazystep.metrics.counter_value("native_executions") - before
        return {
            f"{NATIVE}, {self.name}": native / num_lengths,
            f"{BUILDS}, {self.name}": lazystep.metrics.counter_value("builds_started"),
        }


# -- the benchmark ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(directory: Path) -> Iterator[dict[str, Peer]]:
    """One process per variant, each with empty caches."""
    threads = str(torch.get_num_threads())
    with contextlib.ExitStack() as stack:
        systems = {}
        for number, name in enumerate(VARIANTS):
            if name == JAX:
                if JAX_PYTHON.exists():
                    environ = {"NPROC": threads, "PJRT_NPROC": threads}
                    python = str(JAX_PYTHON)
                    systems[name] = Peer("benchmarks.jax_shapes", name, PEER_TIMEOUT, (), python, environ)
                    stack.callback(systems[name].close)
                continue
            own = str(directory / str(number))
            environ = {
                "TORCHINDUCTOR_CACHE_DIR": own,
                "LAZYSTEP_CACHE_DIR": own,
                "LAZYSTEP_TIER": "reference" if name == REFERENCE else "auto",
            }
            systems[name] = Peer("benchmarks.shapes", name, PEER_TIMEOUT, environ=environ)
            stack.callback(systems[name].close)
        yield systems


def measure(plan: Plan, directory: Path) -> Measurements:
    """Cold starts one after the other, then turns."""
    once = Measurements()
    sizes: dict[str, Any] = {
        "num_lengths": plan.num_lengths,
        "num_layers": plan.num_layers,
        "max_seconds": plan.max_cold_seconds,
    }
    with started(directory) as systems:
        neighbours = Neighbours(systems.values())
        if JAX not in systems:
            once.failures[JAX] = "skipped: no .venv-jax (make bench-peers)"
        for name, peer in systems.items():
            try:
                numbers = peer.ask(task="cold", num_steps=plan.num_cold_steps, **sizes)
            except PeerError as error:
                once.failures[name] = str(error)
                continue
            for quantity, value in numbers.items():
                once.samples[quantity] = [value]
        turns = {
            name: functools.partial(peer.ask, task="turn", num_steps=plan.num_steps, **sizes)
            for name, peer in systems.items()
            if name not in once.failures
        }
        measured = interleave(turns, 1, plan.num_repeats, plan.max_seconds, [n for n in turns if n != EAGER])
        measured.others = neighbours.share()
    measured.samples |= once.samples
    measured.failures |= once.failures
    return measured


def number(measured: Measurements, name: str) -> float | None:
    return measured.spread(name).median if name in measured.samples else None


def ratio(of: str, to: str) -> Callable[[Measurements], goals.Numbers]:
    """The time of the second over the time of the first: above 1, the first is faster."""

    def take(measured: Measurements) -> goals.Numbers:
        a, b = number(measured, of), number(measured, to)
        return {of: None if a is None or b is None else b / a}

    return take


def ahead(quantity: str, name: str) -> Callable[[Measurements], goals.Numbers]:
    """How much less time a variant takes than the better torch.compile."""

    def take(measured: Measurements) -> goals.Numbers:
        own = number(measured, f"{quantity}, {name}")
        others = [number(measured, f"{quantity}, {other}") for other in (AUTOMATIC, DYNAMIC)]
        found = [other for other in others if other is not None]
        return {name: None if own is None or not found else min(found) / own}

    return take


GOALS: tuple[Goal[Measurements], ...] = (
    *(Goal(f"{name}: 1.2 times eager's rate once warm", ratio(name, EAGER), 1.2) for name in (LOOP, STEP)),
    *(
        Goal(f"{name}: total time less than torch.compile's", ahead(TOTAL, name), 1.0)
        for name in (LOOP, STEP)
    ),
    *(
        Goal(f"{name}: slowest step less than torch.compile's", ahead(SLOWEST, name), 1.0)
        for name in (LOOP, STEP)
    ),
    Goal("before any library, at least 0.9 times eager's rate", ratio(REFERENCE, EAGER), 0.9),
    # With the first step of each length, which is the slowest.
    Goal(
        "before any library, at least 0.9 times eager's rate from a cold start",
        ratio(f"{TOTAL}, {REFERENCE}", f"{TOTAL}, {EAGER}"),
        0.9,
    ),
    *(
        Goal(
            f"{name}: at most 3 builds", lambda m, name=name: {name: number(m, f"{BUILDS}, {name}")}, None, 3
        )
        for name in (LOOP, STEP)
    ),
)


def to_table(measured: Measurements, plan: Plan) -> Table:
    rows = []
    for name in VARIANTS:
        if name in measured.failures:
            rows.append([name, measured.failures[name], "-", "-", "-", "-", "-"])
            continue
        speed = "1" if name == EAGER else measured.speedup(name, EAGER).format()
        native = number(measured, f"{NATIVE}, {name}")
        rows.append(
            [
                name,
                measured.spread(name).format(1e3),
                speed,
                f"{number(measured, f'{TOTAL}, {name}'):.1f}",
                f"{number(measured, f'{SLOWEST}, {name}'):.2f}",
                f"{number(measured, f'{RUN}, {name}'):.0f}",
                "-" if native is None else f"{native:.0%}",
            ]
        )
    columns = [
        "variant",
        "ms a step, warm",
        "rate, eager = 1",
        "total, s",
        "slowest step, s",
        "steps run",
        "native, warm",
    ]
    note = (
        f"GPT, {plan.num_layers} layers, 128 wide, batches of 8, {plan.num_lengths} lengths, AdamW; "
        f"total and slowest step of {plan.num_cold_steps} steps from a cold start. Steps that were not run "
        f"within {plan.max_cold_seconds:.0f} s are taken to be like the last quarter of those that were."
    )
    return Table("Shapes that vary", columns, rows, note)


def run(is_quick: bool) -> Report:
    plan = QUICK if is_quick else FULL
    with tempfile.TemporaryDirectory(prefix="lazystep-shapes-") as directory:
        measured = measure(plan, Path(directory))
    tables = [to_table(measured, plan), goals.to_table(GOALS, measured, measured.others)]
    return Report("shapes", "python -m benchmarks.shapes", machine(), tables, {"gpt": measured})


if __name__ == "__main__":
    command(__doc__, run, lambda name: Worker(name).work)
