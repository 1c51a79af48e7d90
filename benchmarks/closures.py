"""What reporting costs: the small GPT with loss, gradient norms and histograms in every step.

    python -m benchmarks.closures [--quick]

Side by side: eager with and without inline reporting; `@lazystep.step` with native steps and none, with sync
closures, with async closures, and with async closures whose reductions are recorded into the step. There is
no spare core: what a report computes is taken from the steps. `--quick` stays on the reference executable.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import lazystep
from benchmarks.models import gpt, make_optimizer
from benchmarks.timing import Measurements, Neighbours, Report, Table, interleave, machine

NUM_BINS = 64
# Called once a step, between backward and the optimizer.
Reporting = Callable[[nn.Module, Tensor], None]


def summarize(loss: Tensor, gradients: list[Tensor], weights: list[Tensor]) -> list[float]:
    """What a diligent logger computes of one step."""
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
    """The baseline."""


def report_inline(model: nn.Module, loss: Tensor) -> None:
    summarize(loss.detach(), *tensors_of(model))


def report_by_closure(run_async: bool) -> Reporting:
    def report(model: nn.Module, loss: Tensor) -> None:
        lazystep.add_step_closure(summarize, (loss.detach(), *tensors_of(model)), run_async)

    return report


def report_recorded(model: nn.Module, loss: Tensor) -> None:
    """Norms and histograms are part of the step; the closure gets numbers."""
    gradients, weights = tensors_of(model)
    norms = torch._foreach_norm(gradients)
    counts = []
    for weight in weights:
        low, high = weight.aminmax()
        scaled = (weight - low) / (high - low) * NUM_BINS
        counts.append(torch.histc(scaled, NUM_BINS, 0.0, float(NUM_BINS)))
    args = (loss.detach(), norms, counts)
    lazystep.add_step_closure(lambda *tree: [t.tolist() for t in (*tree[1], *tree[2])], args, run_async=True)


def make_turn(device: str, report: Reporting, name: str, num_steps: int) -> Callable[[], Mapping[str, float]]:
    """A turn of `num_steps` steps; measures seconds a step, from start to the last closure's end."""
    torch.manual_seed(0)
    model, make_batch, loss_fn = gpt()
    model.to(device)
    optimizer = make_optimizer(model)

    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_fn(model(x), y)
        loss.backward()
        report(model, loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = lazystep.step(train) if device == "lazy" else train

    def turn() -> Mapping[str, float]:
        start = time.perf_counter()
        for _ in range(num_steps):
            step(*make_batch())
        if device == "lazy":
            lazystep.wait_device_ops()
            lazystep.flush_step_closures()
        return {name: (time.perf_counter() - start) / num_steps}

    return turn


def make_native(turn: Callable[[], Mapping[str, float]]) -> None:
    """Train until the step runs natively, on as many threads as suit it."""
    for _ in range(4):
        before = lazystep.metrics.counter_value("native_executions")
        turn()
        lazystep.wait_for_compile()
    if lazystep.metrics.counter_value("native_executions") == before:
        raise RuntimeError(f"not native:\n{lazystep.debug.explain()}")


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
    quick: Any = parser.parse_args().quick
    num_steps, num_repeats = (3, 2) if quick else (10, 7)
    if quick:
        lazystep.config.settings.tier = "reference"
    turns = {name: make_turn(device, report, name, num_steps) for name, (device, report) in VARIANTS.items()}
    if not quick:
        for name, (device, _) in VARIANTS.items():
            if device == "lazy":
                make_native(turns[name])
    neighbours = Neighbours()
    measured = interleave(turns, num_warm_ups=1 if quick else 2, num_repeats=num_repeats, max_seconds=120)
    facts = {**machine(), "processor time taken by others": f"{neighbours.share():.0%}"}
    result = Report(
        "closures", "python -m benchmarks.closures", facts, [to_table(measured)], {"all": measured}
    )
    print(result.to_markdown())
    if not quick:
        result.write()


if __name__ == "__main__":
    main()
