"""Measure the cost of reporting: the small GPT logs loss, gradient norms and histograms in every step.

    python -m benchmarks.closures [--quick]

The variants take turns, each in its own process: eager without reports, eager with inline reports, and native
steps by `@lazystep.step` without reports, with sync closures, with async closures, and with async closures
whose reductions are recorded into the step. There is no spare core, so a report's computation takes time from
the steps. `--quick` stays on the reference executable.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

import lazystep
from benchmarks.recording import Trainer
from benchmarks.timing import Measurements, Neighbours, Report, Table, interleave, machine, peers, serve

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
        trainer = Trainer("gpt", self.device)
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
        start = time.perf_counter()
        for _ in range(num_steps):
            self.step(*self.make_batch())
        if self.device == "lazy":
            lazystep.wait_device_ops()
            lazystep.flush_step_closures()
        return {self.name: (time.perf_counter() - start) / num_steps}

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


VARIANTS: dict[str, tuple[str, Reporting]] = {
    "eager, no reports": ("cpu", report_nothing),
    "eager, inline": ("cpu", report_inline),
    "lazystep, no reports": ("lazy", report_nothing),
    "lazystep, sync closures": ("lazy", report_by_closure(False)),
    "lazystep, async closures": ("lazy", report_by_closure(True)),
    "lazystep, async, reductions in the step": ("lazy", report_recorded),
}


def to_table(measured: Measurements) -> Table:
    rows = []
    for name in VARIANTS:
        baseline = "eager, no reports" if name.startswith("eager") else "lazystep, no reports"
        spread = measured.spread(name)
        over = spread.median / measured.spread(baseline).median - 1
        rows.append([name, spread.format(1e3), f"{over:+.0%}" if name != baseline else "-"])
    note = "Small GPT, AdamW, a report of every step: loss, all gradient norms, histograms of all matrices."
    return Table("Reporting every step", ["variant", "ms a step", "over no reports"], rows, note)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--peer", choices=VARIANTS, help="serve turns of one variant (used internally)")
    arguments = parser.parse_args()
    if arguments.peer:
        serve(Worker(arguments.peer).work)
        return
    quick: bool = arguments.quick
    num_steps, num_repeats = (3, 2) if quick else (10, 15)
    if quick:
        os.environ["LAZYSTEP_TIER"] = "reference"
    with peers("benchmarks.closures", list(VARIANTS), PEER_TIMEOUT) as systems:
        if not quick:
            for peer in systems.values():
                peer.ask(task="make_native", num_steps=num_steps)
        turns = {
            name: functools.partial(peer.ask, task="turn", num_steps=num_steps)
            for name, peer in systems.items()
        }
        neighbours = Neighbours(systems.values())
        measured = interleave(turns, num_warm_ups=1 if quick else 2, num_repeats=num_repeats, max_seconds=180)
        measured.others = neighbours.share()
    facts = {**machine(), "processor time taken by others": f"{measured.others:.0%}"}
    result = Report(
        "closures", "python -m benchmarks.closures", facts, [to_table(measured)], {"all": measured}
    )
    print(result.to_markdown())
    if not quick:
        result.write()


if __name__ == "__main__":
    main()
