"""Measure the cost of reporting: the small GPT logs loss, gradient norms and histograms in every step.

    python -m benchmarks.closures [--quick]

The variants take turns, each in its own process: eager without reports, eager with inline reports, and native
steps by `@lazystep.step` without reports, with sync closures, with async closures, and with async closures
whose reductions are recorded into the step. On all cores there is no spare one, so a report takes time from
the steps: at best its own processor time, divided by the number of cores. This time is measured, too: the
reports alone, on one thread. Then the same with one thread per step, which leaves a core to the closures.
`--quick` stays on the reference executable.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

import lazystep
from benchmarks.goals import Goal
from benchmarks.goals import to_table as goals_table
from benchmarks.recording import Trainer
from benchmarks.timing import (
    Measurements,
    Neighbours,
    Peer,
    Report,
    Table,
    command,
    interleave,
    machine,
)

NUM_BINS = 64
PEER_TIMEOUT = 900.0
# Called once a step, between backward and the optimizer.
Reporting = Callable[[nn.Module, Tensor], None]


def summarize(loss: Tensor, gradients: list[Tensor], weights: list[Tensor]) -> list[float]:
    """The numbers that a thorough logger computes in one step."""
    numbers = [loss.item()]
    numbers += [gradient.norm().item() for gradient in gradients]
    for weight in weights:
        numbers += torch.histc(weight, NUM_BINS).tolist()
    return numbers


def tensors_of(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return gradients, [p.detach() for p in parameters if p.dim() > 1]


def report_nothing(model: nn.Module, loss: Tensor) -> None:
    """The baseline: no report."""


def report_inline(model: nn.Module, loss: Tensor) -> None:
    summarize(loss.detach(), *tensors_of(model))


def report_by_closure(run_async: bool) -> Reporting:
    def report(model: nn.Module, loss: Tensor) -> None:
        lazystep.add_step_closure(summarize, (loss.detach(), *tensors_of(model)), run_async)

    return report


def report_recorded(model: nn.Module, loss: Tensor) -> None:
    """Norms and histograms are computed inside the step; the closure receives their results."""
    gradients, weights = tensors_of(model)
    norms = torch._foreach_norm(gradients)
    counts = []
    for weight in weights:
        low, high = weight.aminmax()
        scaled = (weight - low) / (high - low) * NUM_BINS
        counts.append(torch.histc(scaled, NUM_BINS, 0.0, float(NUM_BINS)))
    args = (loss.detach(), norms, counts)
    lazystep.add_step_closure(lambda *tree: [t.tolist() for t in (*tree[1], *tree[2])], args, run_async=True)


class Worker:
    """Does the turns of one variant."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device, report = VARIANTS[name]
        trainer = self.trainer = Trainer("gpt", self.device)
        self.make_batch = trainer.make_batch

        def train(x: Tensor, y: Tensor) -> Tensor:
            loss = trainer.loss_fn(trainer.model(x), y)
            loss.backward()
            report(trainer.model, loss)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            return loss

        self.step = lazystep.step(train) if self.device == "lazy" else train

    def turn(self, num_steps: int) -> Mapping[str, float]:
        """Seconds per step, from the start to the end of the last closure."""
        if self.name == ALONE:
            return self.reports_alone(num_steps)
        start = time.perf_counter()
        for _ in range(num_steps):
            self.step(*self.make_batch())
        if self.device == "lazy":
            lazystep.wait_device_ops()
            lazystep.flush_step_closures()
        return {self.name: (time.perf_counter() - start) / num_steps}

    def reports_alone(self, num_reports: int) -> Mapping[str, float]:
        """Processor time of one report on one thread, as a closure has it."""
        torch.set_num_threads(1)
        loss = self.trainer.loss_fn(self.trainer.model((batch := self.make_batch())[0]), batch[1])
        loss.backward()
        start = time.thread_time()
        for _ in range(num_reports):
            report_inline(self.trainer.model, loss)
        seconds = time.thread_time() - start
        self.trainer.optimizer.zero_grad()
        return {self.name: seconds / num_reports}

    def make_native(self, num_steps: int) -> Mapping[str, float]:
        """Train until the step runs natively and its number of threads is chosen."""
        if self.device == "lazy":
            for _ in range(4):
                before = lazystep.metrics.counter_value("native_executions")
                self.turn(num_steps)
                lazystep.wait_for_compile()
            if lazystep.metrics.counter_value("native_executions") == before:
                raise RuntimeError(f"not native: {lazystep.debug.explain()}")
        return {}

    def work(self, task: str, num_steps: int) -> Mapping[str, float]:
        """Do the named task."""
        return {"turn": self.turn, "make_native": self.make_native}[task](num_steps)


ALONE, NONE, SYNC, ASYNC = "reports alone", "no reports", "sync closures", "async closures"
RECORDED = "async, reductions in the step"
VARIANTS: dict[str, tuple[str, Reporting]] = {
    ALONE: ("cpu", report_inline),
    "eager, no reports": ("cpu", report_nothing),
    "eager, inline": ("cpu", report_inline),
    f"lazystep, {NONE}": ("lazy", report_nothing),
    f"lazystep, {SYNC}": ("lazy", report_by_closure(False)),
    f"lazystep, {ASYNC}": ("lazy", report_by_closure(True)),
    f"lazystep, {RECORDED}": ("lazy", report_recorded),
}
ALL_CORES, SPARE_CORE = "all cores", "a spare core"
# The threads of a step, None for torch's own choice, and the variants.
SETTINGS: dict[str, tuple[int | None, list[str]]] = {
    ALL_CORES: (None, list(VARIANTS)),
    SPARE_CORE: (1, [f"lazystep, {kind}" for kind in (NONE, ASYNC, RECORDED)]),
}
Outcomes = Mapping[str, Measurements]


def over_none(measured: Measurements, name: str) -> float:
    """What the reports of a variant add to the time of a step, relative to the step without reports."""
    baseline = "eager, no reports" if name.startswith("eager") else f"lazystep, {NONE}"
    return measured.spread(name).median / measured.spread(baseline).median - 1


def over_own_time(outcomes: Outcomes) -> dict[str, float | None]:
    """What reports add to a step, over their own processor time divided by the cores."""
    measured = outcomes[ALL_CORES]
    own = measured.spread(ALONE).median / (os.cpu_count() or 1)
    base = measured.spread(f"lazystep, {NONE}").median
    return {
        kind: (measured.spread(f"lazystep, {kind}").median - base) / own for kind in (ASYNC, SYNC, RECORDED)
    }


GOALS: tuple[Goal[Outcomes], ...] = (
    Goal(
        "what reports add to a step, their own processor time over the cores = 1", over_own_time, at_most=1.0
    ),
    Goal(
        "what reports add to a step, with a spare core",
        lambda outcomes: {
            kind: over_none(outcomes[SPARE_CORE], f"lazystep, {kind}") for kind in (ASYNC, RECORDED)
        },
        at_most=0.03,
        unit=" %",
        scale=1e2,
    ),
)


def to_table(setting: str, measured: Measurements) -> Table:
    rows = []
    for name in SETTINGS[setting][1]:
        is_baseline = name.endswith(NONE) or name == ALONE
        cell = "-" if is_baseline else f"{over_none(measured, name):+.0%}"
        rows.append([name, measured.spread(name).format(1e3), cell])
    note = (
        "Small GPT, AdamW, a report of every step: loss, all gradient norms, histograms of all matrices. "
        "Reports alone: processor time on one thread."
    )
    return Table(f"Reporting every step, {setting}", ["variant", "ms a step", "over no reports"], rows, note)


def measure(setting: str, num_steps: int, num_repeats: int, is_quick: bool) -> Measurements:
    """Turns of all variants of one setting."""
    num_threads, variants = SETTINGS[setting]
    environ = {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}
    if is_quick:
        environ["LAZYSTEP_TIER"] = "reference"
    systems = {name: Peer("benchmarks.closures", name, PEER_TIMEOUT, environ=environ) for name in variants}
    try:
        if not is_quick:
            for peer in systems.values():
                peer.ask(task="make_native", num_steps=num_steps)
        turns = {
            name: functools.partial(peer.ask, task="turn", num_steps=num_steps)
            for name, peer in systems.items()
        }
        neighbours = Neighbours(systems.values())
        measured = interleave(turns, 1 if is_quick else 2, num_repeats, max_seconds=120)
        measured.others = neighbours.share()
    finally:
        for peer in systems.values():
            peer.close()
    return measured


def run(is_quick: bool) -> Report:
    num_steps, num_repeats = (2, 1) if is_quick else (10, 15)
    outcomes = {setting: measure(setting, num_steps, num_repeats, is_quick) for setting in SETTINGS}
    others = max(measured.others for measured in outcomes.values())
    facts = {**machine(), "processor time taken by others": f"{others:.0%}"}
    tables = [to_table(setting, measured) for setting, measured in outcomes.items()]
    tables.append(goals_table(GOALS, outcomes, others))
    return Report("closures", "python -m benchmarks.closures", facts, tables, outcomes)


if __name__ == "__main__":
    command(__doc__, run, lambda name: Worker(name).work)
