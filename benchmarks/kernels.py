"""Measure each kernel of a native step, and compare options of Inductor.

    python -m benchmarks.kernels [--models gpt,conv] [--quick]

Builds the library of a model's training step once per set of options. The libraries take turns in one process
on the same inputs, without recording and without the queue. One more build marks its kernels for torch's
profiler. A build takes about a minute, so `python -m benchmarks` does not include this benchmark.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

import lazystep
from lazystep import config
from lazystep.compile import builder as building
from lazystep.compile.cache import Library
from lazystep.compile.key import inductor_options
from lazystep.compile.scalars import fixed_slots
from lazystep.execute.library import load
from lazystep.execute.malloc import keep_freed_memory
from lazystep.execute.native import NativeExecutable
from lazystep.program.program import Program
from lazystep.program.signature import signature_of
from lazystep.tiers.tiered import TieredExecutable

from .models import MODELS, make_optimizer
from .timing import Measurements, Neighbours, PeerError, Report, Table, interleave, machine

AS_SHIPPED = "as shipped"
OPTIONS: dict[str, dict[str, Any]] = {
    AS_SHIPPED: {},
    "layout_optimization": {"layout_optimization": True},
    "max_autotune": {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,CPP"},
    "combo_kernels": {"combo_kernels": True},
    "fp contraction": {"cpp.enable_floating_point_contract_flag": "fast"},
    "256-bit vectors": {"cpp.simdlen": 256},
}
MARKED = {"cpp.enable_kernel_profile": True}
NUM_ROWS = 14


class Step(NamedTuple):
    """A training step as the executor receives it."""

    program: Program
    inputs: Sequence[torch.Tensor]
    scalars: Sequence[Any]


def record(model_name: str) -> Step:
    """The program of a model's step, and the inputs of one run."""
    torch.manual_seed(0)
    model, make_batch, loss_fn = MODELS[model_name]()
    model.to("lazy")
    optimizer = make_optimizer(model)
    steps = []
    run = TieredExecutable.run

    def keep(self: TieredExecutable, inputs: list[torch.Tensor], scalars: Sequence[Any]) -> Any:
        steps.append(Step(self.program, [tensor.clone() for tensor in inputs], list(scalars)))
        return run(self, inputs, scalars)

    with config.override(tier="reference"), mock.patch.object(TieredExecutable, "run", keep):
        for _ in range(4):
            x, y = make_batch()
            loss_fn(model(x.to("lazy")), y.to("lazy")).backward()
            optimizer.step()
            optimizer.zero_grad()
            lazystep.mark_step(wait=True)
    return steps[-1]


def build(step: Step, options: Mapping[str, Any], directory: Path) -> NativeExecutable:
    """Build the step's library with these options. Raises `PeerError` if the build fails."""
    slots = fixed_slots(step.program)
    fixed = {slot: step.scalars[slot] for slot in slots}
    num_threads = torch.get_num_threads()
    results: list[Library | building.BuildError] = []
    is_done = threading.Event()

    def deliver(result: Library | building.BuildError) -> None:
        results.append(result)
        is_done.set()

    all_options = {**inductor_options(num_threads), **options}
    with (
        config.override(cache_dir=str(directory)),
        mock.patch.object(building, "inductor_options", return_value=all_options),
    ):
        builder = building.Builder()
        builder.submit(building.Request(step.program, fixed, num_threads, deliver))
        is_done.wait(config.settings.build_timeout)
        builder.close()
    if not results or isinstance(results[0], building.BuildError):
        raise PeerError(f"not built: {results[0] if results else 'it took too long'}")
    signature = signature_of(step.program, slots)
    return NativeExecutable(step.program, signature, load(results[0].path), num_threads)


def turn(name: str, native: NativeExecutable, step: Step, num_runs: int) -> Mapping[str, float]:
    """Seconds per run. State is updated in place, as in training."""
    start = time.perf_counter()
    for _ in range(num_runs):
        native.run(list(step.inputs), step.scalars)
    return {name: (time.perf_counter() - start) / num_runs}


def kernels_table(model: str, native: NativeExecutable, step: Step, num_runs: int) -> Table:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        turn("", native, step, num_runs)
    rows = sorted(profiled.key_averages(), key=lambda row: -row.self_cpu_time_total)
    total = sum(row.self_cpu_time_total for row in rows)
    cells = [
        [
            f"`{row.key[:70]}`",
            f"{row.count / num_runs:g}",
            f"{row.self_cpu_time_total / num_runs / 1e3:.2f}",
            f"{row.self_cpu_time_total / total:.0%}",
        ]
        for row in rows[:NUM_ROWS]
    ]
    rest = sum(row.self_cpu_time_total for row in rows[NUM_ROWS:])
    cells.append(
        [f"{max(len(rows) - NUM_ROWS, 0)} others", "", f"{rest / num_runs / 1e3:.2f}", f"{rest / total:.0%}"]
    )
    note = (
        "By torch's profiler, on the thread that runs the library; calls into torch have rows of their own."
    )
    return Table(f"Kernels of {model}", ["kernel", "calls a step", "ms a step", "share"], cells, note)


def measure(
    model: str, options: Mapping[str, Mapping[str, Any]], num_repeats: int
) -> tuple[Measurements, Table]:
    step = record(model)
    failures, turns = {}, {}
    with tempfile.TemporaryDirectory(prefix="lazystep-kernels-") as directory:
        for number, (name, chosen) in enumerate(options.items()):
            try:
                native = build(step, chosen, Path(directory) / str(number))
            except PeerError as error:
                failures[name] = str(error)
                continue
            own = step._replace(inputs=[tensor.clone() for tensor in step.inputs])
            turns[name] = functools.partial(turn, name, native, own, 10)
        marked = build(step, MARKED, Path(directory) / "marked")
        neighbours = Neighbours()
        measured = interleave(turns, 2, num_repeats, 120.0)
        measured.others = neighbours.share()
        measured.failures = failures
        return measured, kernels_table(model, marked, step, 10)


def options_table(measured: Mapping[str, Measurements], options: Sequence[str]) -> Table:
    rows = []
    for name in options:
        row = [name]
        for m in measured.values():
            if name in m.failures:
                row += [m.failures[name][:80], "-"]
            else:
                row += [m.spread(name).format(1e3), m.speedup(name, AS_SHIPPED).format()]
        rows.append(row)
    columns = ["options"]
    for model in measured:
        columns += [f"{model}, ms", f"{model}, {AS_SHIPPED} = 1"]
    return Table(
        "Inductor's options", columns, rows, "The library alone, all threads. Rates above 1 are faster."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help="some of them, separated by commas")
    parser.add_argument(
        "--quick", action="store_true", help="two sets of options, few runs; nothing is written"
    )
    arguments = parser.parse_args()
    keep_freed_memory()
    options = dict(list(OPTIONS.items())[:2]) if arguments.quick else OPTIONS
    measured, tables = {}, []
    for model in arguments.models.split(","):
        measured[model], table = measure(model, options, 2 if arguments.quick else 12)
        tables.append(table)
    tables.insert(0, options_table(measured, list(options)))
    report = Report("kernels", "python -m benchmarks.kernels", machine(), tables, measured)
    print(report.to_markdown())
    if not arguments.quick:
        report.write()


if __name__ == "__main__":
    main()
