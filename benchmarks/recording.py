"""Measure recording, the barrier, and the reference executable.

    python -m benchmarks.recording [--quick]

Eager, lazystep and torch._lazy take turns. Each has its own process: torch._lazy and lazystep register the
same device, and `timing` says why eager is apart. Goals: recording an op takes 3 µs or less on average,
including all Python of the loop. A barrier of the small GPT takes 50 µs or less. The reference executable
runs a step's program at eager's rate or faster.

Recording is timed on the training thread while the executor is idle: each step is recorded, queued and waited
for before the next one begins. If an op needs values, it waits inside the step. This wait is subtracted, and
the table shows the number of such waits.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .goals import Goal, Numbers, to_table
from .models import make_optimizer, make_workload
from .timing import Measurements, Neighbours, Peer, Report, Table, command, interleave, machine, peers

SYSTEMS = ("eager", "lazystep", "torch._lazy")
# By name: arguments of the optimizer. The default is torch's own choice for the device.
OPTIMIZERS: dict[str, dict[str, bool]] = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
# Long enough for the slowest turn of a working system, short enough to bound the whole run.
PEER_TIMEOUT = 25.0
# No new round begins after this many seconds. It applies to the single ops and to each model.
MAX_SECONDS = 32.0
# A row with a large number in this column is doubtful.
OTHERS = "processor time taken by others"
NUM_OPS = 1000
# With these numbers a turn takes a few tenths of a second.
NUM_STEPS = {"mlp": 40, "gpt": 8, "conv": 8, "lstm": 20}
# torch._lazy takes up to a hundred times as long for a step.
NUM_STEPS_TORCH_LAZY = 2


# -- in the peer's process: do the work and measure it -----------------------------------------


class System(NamedTuple):
    """How one system ends a step. In eager both functions do nothing."""

    name: str
    device: str
    mark_step: Callable[[], None]
    wait: Callable[[], None]


def load_system(name: str) -> System:
    """Import and start one system. A process can start only one."""
    if name == "eager":
        return System(name, "cpu", lambda: None, lambda: None)
    if name == "lazystep":
        import lazystep

        return System(name, "lazy", lazystep.mark_step, lazystep.wait_device_ops)
    import torch._lazy
    import torch._lazy.ts_backend

    torch._lazy.ts_backend.init()
    return System(name, "lazy", torch._lazy.mark_step, torch._lazy.wait_device_ops)


class Trainer:
    """The state of an ordinary training loop: one model and its optimizer on one device."""

    def __init__(self, model: str, device: str, optimizer: str = "default") -> None:
        torch.manual_seed(0)
        self.device = device
        self.model, self.make_batch, self.loss_fn = make_workload(model)
        self.model.to(device)
        self.optimizer = make_optimizer(self.model, **OPTIMIZERS[optimizer])

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss_fn(self.model(x.to(self.device)), y.to(self.device))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class Op(NamedTuple):
    """A single op. Its arguments are the result of the previous call and a constant tensor.

    Both have 4 x 4 elements, so that running the op costs almost nothing.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    has_grad: bool = False
    is_cast: bool = False  # under autocast to bfloat16


OPS = {
    "`x + y`": Op(lambda x, y: x + y),
    "`x + y`, with autograd": Op(lambda x, y: x + y, has_grad=True),
    "`x + y`, under autocast, which does not cast it": Op(lambda x, y: x + y, is_cast=True),
    "`x.add_(y)`": Op(lambda x, y: x.add_(y)),
    "`x * 1.0`": Op(lambda x, y: x * 1.0),
    "`y.view(16)`": Op(lambda x, y: y.view(16)),
    "`y @ y`": Op(lambda x, y: y @ y),
    "`y @ y`, under autocast: three instructions": Op(lambda x, y: y @ y, is_cast=True),
}


class Worker:
    """Does the turns of one system."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._trainer = functools.cache(lambda model, *how: Trainer(model, system.device, *how))

    def work(self, task: str, **details: object) -> Mapping[str, float]:
        """Do the named task: `ops`, `loop` or `phases`."""
        tasks: dict[str, Callable[..., Mapping[str, float]]]
        tasks = {"ops": self.ops, "loop": self.loop, "phases": self.phases}
        return tasks[task](**details)

    def ops(self, op: str) -> dict[str, float]:
        """Seconds that the training thread spends on one op, without the barrier."""
        function, has_grad, is_cast = OPS[op]
        x = torch.ones(4, 4).to(self.system.device)
        y = torch.ones(4, 4).to(self.system.device).requires_grad_(has_grad)
        with torch.set_grad_enabled(has_grad), torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            start = time.perf_counter()
            for _ in range(NUM_OPS):
                x = function(x, y)
            seconds = time.perf_counter() - start
        self.system.mark_step()
        self.system.wait()
        return {f"{self.system.name} {op}": seconds / NUM_OPS}

    def loop(self, model: str, num_steps: int) -> dict[str, float]:
        """Seconds per step of the plain loop, with and without the sampling of batches on the host."""
        trainer = self._trainer(model)
        sampling = 0.0
        start = time.perf_counter()
        for _ in range(num_steps):
            before = time.perf_counter()
            x, y = trainer.make_batch()
            sampling += time.perf_counter() - before
            loss = trainer.step(x, y)
            self.system.mark_step()
        self.system.wait()
        seconds = time.perf_counter() - start
        del loss  # kept until here, as in a loop that reports the loss
        name = self.system.name
        return {f"{name} loop": seconds / num_steps, f"{name} step": (seconds - sampling) / num_steps}

    def phases(self, model: str, num_steps: int, optimizer: str = "default") -> dict[str, float]:
        """Seconds of recording, barrier and execution in lazystep, each while the other thread is idle."""
        from lazystep import metrics

        trainer = self._trainer(model, optimizer)
        recording = barrier = 0.0
        before = {name: metrics.counter_value(name) for name in COUNTERS}
        for _ in range(num_steps):
            x, y = trainer.make_batch()
            start = time.perf_counter()
            loss = trainer.step(x, y)
            recorded = time.perf_counter()
            waiting = metrics.counter_value("seconds_waiting")
            self.system.mark_step()
            queued = time.perf_counter()
            recording += recorded - start
            barrier += queued - recorded
            self.system.wait()
            after_wait = metrics.counter_value("seconds_waiting")
            before["seconds_waiting"] += after_wait - waiting  # only waits inside the step count
        del loss
        used = {name: metrics.counter_value(name) - before[name] for name in COUNTERS}
        recording -= used["seconds_waiting"]
        numbers = {
            "recording an op": recording / used["instructions_recorded"],
            "recording": recording / num_steps,
            "barrier": barrier / num_steps,
            "program": used["seconds_executing"] / num_steps,
            "instructions": used["instructions_recorded"] / num_steps,
            "programs": used["programs_recorded"] / num_steps,
            "synchronizations": used["synchronizations"] / num_steps,
            "cache misses": used["cache_misses"],
        }
        name = self.system.name if optimizer == "default" else optimizer
        return {f"{name} {quantity}": value for quantity, value in numbers.items()}


COLUMNS = ("lazystep", "torch._lazy", "eager")
COUNTERS = (
    "cache_misses",
    "instructions_recorded",
    "programs_recorded",
    "seconds_executing",
    "seconds_waiting",
    "synchronizations",
)


# -- the benchmark -----------------------------------------------------------------------------


def measure_ops(systems: Mapping[str, Peer], num_repeats: int) -> Measurements:
    """Single ops in all systems."""
    turns = {
        f"{name} {op}": functools.partial(peer.ask, task="ops", op=op)
        for op in OPS
        for name, peer in systems.items()
    }
    neighbours = Neighbours(systems.values())
    peer_turns = [name for name in turns if name.startswith("torch._lazy")]
    measured = interleave(turns, 4, num_repeats, MAX_SECONDS, may_fail=peer_turns)
    measured.others = neighbours.share()
    return measured


def measure_model(systems: Mapping[str, Peer], model: str, num_repeats: int, num_steps: int) -> Measurements:
    """Training steps of one model: lazystep's phases, and the plain loop in all systems."""
    ask = {name: functools.partial(peer.ask, model=model) for name, peer in systems.items()}
    turns = {
        "eager": functools.partial(ask["eager"], task="loop", num_steps=num_steps),
        "phases": functools.partial(ask["lazystep"], task="phases", num_steps=num_steps),
        **{
            f"phases, {how}": functools.partial(
                ask["lazystep"], task="phases", num_steps=num_steps, optimizer=how
            )
            for how in OPTIMIZERS
            if how != "default"
        },
        "lazystep": functools.partial(ask["lazystep"], task="loop", num_steps=num_steps),
        "torch._lazy": functools.partial(ask["torch._lazy"], task="loop", num_steps=NUM_STEPS_TORCH_LAZY),
    }
    neighbours = Neighbours(systems.values())
    measured = interleave(turns, 2, num_repeats, MAX_SECONDS, may_fail=["torch._lazy"])
    measured.others = neighbours.share()
    return measured


Models = Mapping[str, Measurements]


def ops_table(measured: Measurements) -> Table:
    def cell(system: str, op: str) -> str:
        name = f"{system} {op}"
        return measured.failures.get(name) or measured.spread(name).format(1e6)

    rows = [[op, *(cell(system, op) for system in COLUMNS)] for op in OPS]
    note = (
        f"{NUM_OPS} ops on 4 x 4 elements, without the barrier, µs an op. Eager runs them. "
        f"Others used {measured.others:.0%} of the processor meanwhile."
    )
    return Table("One op", ["op", *COLUMNS], rows, note)


def recording_table(models: Mapping[str, Measurements]) -> Table:
    rows = []
    for model, m in models.items():
        counts = ("instructions", "programs", "synchronizations")
        row = [model, *(f"{m.spread(f'lazystep {name}').median:g}" for name in counts)]
        row.append(m.spread("lazystep recording an op").format(1e6, 1))
        row.append(m.spread("lazystep recording").format(1e3))
        row.append(m.spread("lazystep barrier").format(1e6, 0))
        rows.append([*row, f"{sum(m.samples['lazystep cache misses']):g}", f"{m.others:.0%}"])
    columns = ["model", "instructions", "programs", "synchronizations"]
    columns += ["recording, µs an op", "recording, ms a step", "barrier, µs", "cache misses", OTHERS]
    average = statistics.mean(m.spread("lazystep recording an op").median for m in models.values())
    note = (
        "Per step: forward, backward, AdamW, and all Python of the loop. Goal: 3 µs an op, averaged over the "
        f"models; measured: {average * 1e6:.1f}. If ops synchronize, their waits are not included, but their "
        "computations on the training thread are. Cache misses: the sum over all measured steps."
    )
    return Table("Recording a training step", columns, rows, note)


def optimizer_table(models: Mapping[str, Measurements]) -> Table:
    rows = []
    for model, m in models.items():
        for how in OPTIMIZERS:
            name = "lazystep" if how == "default" else how
            row = [model, how, f"{m.spread(f'{name} instructions').median:g}"]
            row.append(m.spread(f"{name} recording").format(1e3))
            rows.append([*row, m.spread(f"{name} program").format(1e3), f"{m.others:.0%}"])
    columns = ["model", "AdamW", "instructions", "recording, ms a step", "program, ms", OTHERS]
    note = "The same step with the optimizer's other implementations: fewer, larger instructions."
    return Table("Optimizers", columns, rows, note)


def execution_table(models: Mapping[str, Measurements]) -> Table:
    rows = []
    for model, m in models.items():
        name = model
        if m.spread("lazystep synchronizations").median:
            name += " (in part: ops that synchronize run outside of the program)"
        eager, program = m.spread("eager step").format(1e3), m.spread("lazystep program").format(1e3)
        rate = m.speedup("lazystep program", "eager step").format()
        rows.append([name, eager, program, rate, f"{m.others:.0%}"])
    columns = ["model", "eager step, ms", "program, ms", "program's rate, eager = 1", OTHERS]
    note = "The executor's time for a step's program while nothing is recorded. Goal: 1 or more."
    return Table("Reference executable against eager", columns, rows, note)


def loop_table(models: Mapping[str, Measurements]) -> Table:
    rows = []
    for model, m in models.items():
        row = [model, *(m.spread(f"{name} loop").format(1e3) for name in ("eager", "lazystep"))]
        row.append(m.speedup("lazystep loop", "eager loop").format())
        if "torch._lazy" in m.failures:
            row += [m.failures["torch._lazy"], "-"]
        else:
            row.append(m.spread("torch._lazy loop").format(1e3))
            row.append(m.speedup("torch._lazy loop", "eager loop").format())
        rows.append([*row, f"{m.others:.0%}"])
    columns = ["model", "eager, ms", "lazystep, ms", "rate, eager = 1", "torch._lazy, ms", "rate, eager = 1"]
    columns.append(OTHERS)
    note = "Per step of the plain loop from start to end, batches sampled on the host; no loss is read."
    return Table("The plain loop", columns, rows, note)


def _average(models: Models) -> Numbers:
    return {"mean": statistics.mean(m.spread("lazystep recording an op").median for m in models.values())}


GOALS: list[Goal[Models]] = [
    Goal(
        "recording: 3 µs an instruction or less, autograd and the optimizer's Python included, on average",
        _average,
        at_most=3e-6,
        unit=" µs",
        scale=1e6,
    ),
    Goal(
        "barrier of the small GPT: 50 µs or less",
        lambda models: {"gpt": models["gpt"].spread("lazystep barrier").median},
        at_most=50e-6,
        unit=" µs",
        scale=1e6,
    ),
    Goal(
        "reference executable: eager's rate or more on each",
        lambda models: {
            name: m.speedup("lazystep program", "eager step").median for name, m in models.items()
        },
        at_least=1.0,
    ),
]


def run(is_quick: bool) -> Report:
    facts = machine()
    num_repeats = 2 if is_quick else 11
    with peers("benchmarks.recording", SYSTEMS, PEER_TIMEOUT) as systems:
        ops = measure_ops(systems, num_repeats)
        models = {
            model: measure_model(systems, model, num_repeats, 2 if is_quick else num_steps)
            for model, num_steps in NUM_STEPS.items()
        }
    others = max(m.others for m in (ops, *models.values()))
    tables = [
        to_table(GOALS, models, others),
        ops_table(ops),
        recording_table(models),
        optimizer_table(models),
    ]
    tables += [execution_table(models), loop_table(models)]
    return Report("recording", "python -m benchmarks.recording", facts, tables, {"ops": ops, **models})


def make_work(name: str) -> Callable[..., Mapping[str, float]]:
    # No compiler may run beside the measured recording and reference executable.
    os.environ["LAZYSTEP_TIER"] = "reference"
    return Worker(load_system(name)).work


if __name__ == "__main__":
    command("Cost of recording, barriers and the reference executable.", run, make_work)
