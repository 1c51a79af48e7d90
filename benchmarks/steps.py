"""Measure training steps: lazystep's native steps against eager, torch.compile, torch._lazy and JAX.

    python -m benchmarks.steps [--quick] [--models gpt,lstm]

Each variant trains the same four models with AdamW in its own process, and all variants take turns in rounds.
Before each step the training thread samples the batch on the host. Other numbers: the first step, the time
until the first native step, the cost of the build for the steps meanwhile, the start with a library on disk,
the rate beside a busy Python thread, the cost of one replay call, and the share of audits. `steps_report` has
the goals.

JAX takes part if `make bench-peers` has made its environment. Libraries and compiled code go to temporary
directories, so every start except the warm start is cold.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import readme
from .models import MODELS
from .recording import System, Trainer, load_system
from .steps_report import (
    AUDITS,
    BUSY,
    COMPILED_MODEL,
    COMPILED_STEP,
    EAGER,
    FIRST_STEPS,
    FUSED,
    IN_A_LOOP,
    JAX,
    LOOP,
    REPLAY_CALL,
    STEP,
    STEP_UNTIL_NATIVE,
    TORCH_LAZY,
    UNTIL_NATIVE,
    VARIANTS,
    WHILE_BUILDING,
    WITHOUT_BUILD,
    Outcome,
    all_tables,
    audit_share,
)
from .timing import (
    Measurements,
    Neighbours,
    Peer,
    PeerError,
    Report,
    Turn,
    interleave,
    machine,
    serve,
    spinning,
)

JAX_PYTHON = Path(__file__).parent.parent / ".venv-jax" / "bin" / "python"
# torch.compile of a whole step and the build of a library may take minutes.
PEER_TIMEOUT = 600.0
BUILD_TIMEOUT = 500.0
# With these numbers a turn takes about a second, much longer than filling and draining the queue.
NUM_STEPS = {"mlp": 160, "gpt": 20, "conv": 20, "lstm": 80}
# torch._lazy takes up to a hundred times as long for a step.
NUM_STEPS_TORCH_LAZY = 2
# Enough for torch.compile's last recompilation and for the choice of a library's number of threads.
NUM_STEPS_READY = 30
# Below the limit of steps in flight (four by default), so that no call waits for a place.
NUM_CALLS = 3


class Plan(NamedTuple):
    """Numbers of repeats and time limits of a run."""

    num_repeats: int
    num_busy_repeats: int
    num_reference_steps: int
    num_call_groups: int
    max_seconds: float
    steps_divisor: int
    num_ready_steps: int = NUM_STEPS_READY


FULL = Plan(9, 4, 40, 40, 90.0, 1)
QUICK = Plan(2, 2, 20, 10, 20.0, 8)


# -- in the peer's process: do the work and measure it ----------------------------------------------------


def _nothing() -> None:
    pass


def step_function(trainer: Trainer) -> Callable[[Tensor, Tensor], Tensor]:
    """The step as a function of the batch, as in a script that decorates it."""
    model, optimizer, loss_fn = trainer.model, trainer.optimizer, trainer.loss_fn

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def start(variant: str) -> System:
    """Import and start everything that the variant needs, so that its first step imports nothing."""
    import torch._dynamo  # otherwise torch.optim imports it in the first step

    if variant in (COMPILED_MODEL, COMPILED_STEP):
        import torch._inductor.compile_fx  # noqa: F401
    if variant == LOOP:
        return load_system("lazystep")
    if variant == STEP:  # each call begins and ends with a barrier
        return load_system("lazystep")._replace(mark_step=_nothing)
    return load_system("torch._lazy" if variant == TORCH_LAZY else "eager")


class Worker:
    """Does the turns of one variant on one model."""

    def __init__(self, variant: str) -> None:
        self.name = variant
        self.system = start(variant)

    def work(self, task: str, **details: Any) -> Mapping[str, float]:
        """Do the named task. The first task must be `make`."""
        tasks: dict[str, Callable[..., Mapping[str, float]]] = {
            "make": self.make,
            "first": self.first,
            "until_native": self.until_native,
            "without_build": self.without_build,
            "ready": self.ready,
            "turn": self.turn,
            "calls": self.calls,
            "audits": self.audits,
            "peak_memory": self.peak_memory,
        }
        return tasks[task](**details)

    def make(self, model: str) -> dict[str, float]:
        """Make the model on its device, its optimizer and its step. No step runs."""
        trainer = Trainer(model, self.system.device)
        if self.name == FUSED:
            trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-3, fused=True)
        num_parameters = sum(p.numel() for p in trainer.model.parameters())
        self.make_batch = trainer.make_batch
        self.step: Callable[[Tensor, Tensor], Tensor] = trainer.step
        if self.name == COMPILED_MODEL:
            compiled: nn.Module = torch.compile(trainer.model)  # type: ignore[assignment]
            trainer.model = compiled
        elif self.name == COMPILED_STEP:
            self.step = torch.compile(step_function(trainer), fullgraph=False)
        elif self.name == STEP:
            import lazystep

            self.step = lazystep.step(step_function(trainer))
        self.system.wait()
        return {"parameters": num_parameters}

    def first(self) -> dict[str, float]:
        """Seconds until the first step's loss is known."""
        x, y = self.make_batch()
        start = time.perf_counter()
        loss = self.step(x, y)
        self.first_barrier = time.perf_counter()
        self.system.mark_step()
        loss.item()
        return {f"first step, {self.name}": time.perf_counter() - start}

    def train(self, num_steps: int, batches: Sequence[Any] | None = None) -> list[float]:
        """Train and return the training thread's time for each step, including waits for a full queue.

        Batches are sampled one by one unless they are given.
        """
        seconds = []
        for number in range(num_steps):
            before = time.perf_counter()
            loss = self.step(*(self.make_batch() if batches is None else batches[number]))
            self.system.mark_step()
            seconds.append(time.perf_counter() - before)
        del loss  # kept until here, as in a loop that reports the loss
        return seconds

    def until_native(self) -> dict[str, float]:
        """Train until a step has run natively. Seconds since the first barrier, and seconds per step."""
        from lazystep import metrics

        seconds: list[float] = []
        num_steps = 0
        while not metrics.counter_value("native_executions"):
            is_building = metrics.counter_value("builds_requested") > 0
            latest = self.train(1)
            num_steps += 1
            if is_building:
                seconds += latest
            refusals = [name for name in metrics.counter_names() if name.startswith("programs_on_reference:")]
            if refusals:
                raise RuntimeError(f"stays on the reference executable ({', '.join(refusals)})")
            if time.perf_counter() - self.first_barrier > BUILD_TIMEOUT:
                raise TimeoutError(f"not native after {BUILD_TIMEOUT:g} s")
        until = time.perf_counter() - self.first_barrier
        numbers = {UNTIL_NATIVE: until, STEP_UNTIL_NATIVE: until / max(num_steps, 1)}
        return numbers | _distribution(seconds, WHILE_BUILDING)

    def without_build(self, num_steps: int) -> dict[str, float]:
        """Seconds per step on the reference executable without a build in the background."""
        import lazystep

        lazystep.wait_for_compile()
        lazystep.wait_device_ops()
        with lazystep.config.override(tier="reference"):
            self.train(lazystep.config.settings.max_in_flight)  # these find free places, so they do not wait
            seconds = self.train(num_steps)
            lazystep.wait_device_ops()
        return _distribution(seconds, WITHOUT_BUILD)

    def ready(self, num_steps: int) -> dict[str, float]:
        """Train until steps are compiled or native, and the number of threads is chosen."""
        num_steps = NUM_STEPS_TORCH_LAZY if self.name == TORCH_LAZY else num_steps
        self.train(num_steps)
        self.system.wait()
        if self.name in (LOOP, STEP):
            import lazystep

            lazystep.wait_for_compile()
            self.until_native()
            self.train(num_steps)
            self.system.wait()
        return {}

    def turn(self, num_steps: int, is_sampled: bool = True, is_busy: bool = False) -> dict[str, float]:
        """Seconds per step, including sampling if `is_sampled`.

        If `is_busy`, another thread spins in Python meanwhile.
        """
        before = self._num_native()
        batches = None if is_sampled else [self.make_batch() for _ in range(num_steps)]
        with spinning(is_busy):
            start = time.perf_counter()
            self.train(num_steps, batches)
            self.system.wait()
            seconds = time.perf_counter() - start
        if is_busy:
            return {f"{self.name}, busy": seconds / num_steps}
        numbers = {self.name: seconds / num_steps}
        if self.name in (LOOP, STEP):
            numbers[f"{self.name}, native"] = (self._num_native() - before) / num_steps
        return numbers

    def calls(self) -> dict[str, float]:
        """Seconds of the training thread for one call, while the queue has free places."""
        batches = [self.make_batch() for _ in range(NUM_CALLS)]
        self.system.wait()
        seconds = []
        for x, y in batches:
            before = time.perf_counter()
            self.step(x, y)
            seconds.append(time.perf_counter() - before)
        self.system.wait()
        return {REPLAY_CALL: statistics.median(seconds)}

    def audits(self, max_seconds: float) -> dict[str, float]:
        """What audits take of the time from one steady audit to the next, and a replay in that loop."""
        from lazystep import metrics

        calls: list[tuple[float, bool]] = []
        num_audits, begin, give_up_at = -1, 0.0, time.perf_counter() + max_seconds
        while num_audits < 1 and time.perf_counter() < give_up_at:
            x, y = self.make_batch()
            num_before = metrics.counter_value("captures_audited")
            before = time.thread_time()
            self.step(x, y)
            seconds = time.thread_time() - before
            is_audit = metrics.counter_value("captures_audited") > num_before
            num_audits += is_audit
            if num_audits == 0 and is_audit:
                begin = time.perf_counter()  # the audit that begins the period is not part of it
            elif num_audits >= 0:
                calls.append((seconds, is_audit))
        share = audit_share(calls, time.perf_counter() - begin)
        self.system.wait()
        if share is None:
            return {}
        return {AUDITS: share, IN_A_LOOP: statistics.median(time for time, is_audit in calls if not is_audit)}

    def peak_memory(self) -> dict[str, float]:
        """The most bytes that this process has had in memory so far."""
        return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}

    def _num_native(self) -> float:
        if self.name not in (LOOP, STEP):
            return 0
        from lazystep import metrics

        return metrics.counter_value("native_executions")


def _distribution(seconds: Sequence[float], phase: str) -> dict[str, float]:
    if len(seconds) < 2:
        return {}
    high = statistics.quantiles(seconds, n=20, method="inclusive")[-1]
    return {f"median {phase}": statistics.median(seconds), f"95 % {phase}": high}


# -- the benchmark -----------------------------------------------------------------------------


@contextlib.contextmanager
def started(variants: Sequence[str], directory: Path) -> Iterator[dict[str, Peer]]:
    """One process per variant. Each has its own cache, except that lazystep's variants share one."""
    threads = str(torch.get_num_threads())
    environs = {
        COMPILED_MODEL: {"TORCHINDUCTOR_CACHE_DIR": str(directory / "compiled-model")},
        COMPILED_STEP: {"TORCHINDUCTOR_CACHE_DIR": str(directory / "compiled-step")},
        JAX: {"NPROC": threads, "PJRT_NPROC": threads},
    }
    lazystep = {"LAZYSTEP_CACHE_DIR": str(directory / "lazystep"), "LAZYSTEP_TIER": "auto"}
    environs |= dict.fromkeys((LOOP, STEP), lazystep)
    with contextlib.ExitStack() as stack:
        systems = {}
        for name in variants:
            module, python = "benchmarks.steps", sys.executable
            if name == JAX:
                module, python = "benchmarks.jax_models", str(JAX_PYTHON)
            systems[name] = Peer(module, name, PEER_TIMEOUT, python=python, environ=environs.get(name))
            stack.callback(systems[name].close)
        yield systems


def available(variants: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The variants that can run on this machine, and for each other variant the reason."""
    if JAX_PYTHON.exists():
        return list(variants), {}
    return [name for name in variants if name != JAX], {JAX: "skipped: no .venv-jax (make bench-peers)"}


def prepare(systems: Mapping[str, Peer], model: str, plan: Plan, once: Measurements) -> dict[str, str]:
    """Start the variants one after the other and measure their starts. Returns the failures by variant."""
    failures = {}

    def measure(peer: Peer, task: str, **details: Any) -> None:
        for name, value in peer.ask(task=task, **details).items():
            once.samples.setdefault(name, []).append(value)

    # All imports finish before the first measurement.
    made = {}
    for name, peer in systems.items():
        try:
            made[name] = peer.ask(task="make", model=model)["parameters"]
        except PeerError as error:
            failures[name] = str(error)
    for name, num_parameters in made.items():
        if num_parameters != made.get(EAGER):
            failures[name] = f"not eager's model: it has {num_parameters} parameters"
            continue
        peer = systems[name]
        try:
            if name in FIRST_STEPS:
                measure(peer, "first")
            if name == LOOP:
                measure(peer, "until_native")
                measure(peer, "without_build", num_steps=plan.num_reference_steps)
            elif name == STEP:
                peer.ask(task="first")
            peer.ask(task="ready", num_steps=plan.num_ready_steps)
        except PeerError as error:
            failures[name] = str(error)
    return failures


def take_turns(
    systems: Mapping[str, Peer], failures: Mapping[str, str], plan: Plan, num_steps: int
) -> Measurements:
    """Rounds of the variants that `prepare` has started. Each but eager may fail."""
    turns = {
        name: functools.partial(peer.ask, task="turn", num_steps=num_steps)
        for name, peer in systems.items()
        if name not in failures
    }
    neighbours = Neighbours(systems.values())
    measured = interleave(turns, 1, plan.num_repeats, plan.max_seconds, [n for n in turns if n != EAGER])
    measured.others = neighbours.share()
    measured.failures |= failures
    return measured


def measure_warm_start(model: str, directory: Path, once: Measurements) -> None:
    """Measure the time until native in a new process that finds the library on disk."""
    with started([LOOP], directory) as systems:
        try:
            for task in ({"task": "make", "model": model}, {"task": "first"}):
                systems[LOOP].ask(**task)
            once.samples["warm start"] = [systems[LOOP].ask(task="until_native")["until native"]]
        except PeerError as error:
            once.failures["warm start"] = str(error)


def measure_model(model: str, plan: Plan, directory: Path) -> Outcome:
    """All measurements of one model."""
    variants, missing = available(VARIANTS)
    once = Measurements()
    num_steps = max(NUM_STEPS[model] // plan.steps_divisor, 2)
    with started(variants, directory) as systems:
        failures = missing | prepare(systems, model, plan, once)
        once.failures = {
            **{f"first step, {name}": reason for name, reason in failures.items()},
            **({REPLAY_CALL: failures[STEP]} if STEP in failures else {}),
            **({"until native": failures[LOOP]} if LOOP in failures else {}),
        }
        going = {name: peer for name, peer in systems.items() if name not in failures}
        turns: dict[str, Turn] = {}
        for name, peer in going.items():
            number = NUM_STEPS_TORCH_LAZY if name == TORCH_LAZY else num_steps
            turns[name] = functools.partial(peer.ask, task="turn", num_steps=number)
        neighbours = Neighbours(systems.values())
        may_fail = [name for name in going if name != EAGER]
        steps = interleave(turns, 1, plan.num_repeats, plan.max_seconds, may_fail)
        steps.others = neighbours.share()
        steps.failures |= failures

        busy_turns: dict[str, Turn] = {}
        for name in BUSY:
            if name not in steps.failures:
                ask = functools.partial(
                    systems[name].ask, task="turn", is_sampled=False, num_steps=max(num_steps // 2, 2)
                )
                busy_turns |= {name: ask, f"{name}, busy": functools.partial(ask, is_busy=True)}
        neighbours = Neighbours(systems.values())
        busy = interleave(busy_turns, 0, plan.num_busy_repeats, plan.max_seconds, list(busy_turns))
        busy.others = neighbours.share()

        if STEP not in steps.failures:
            calls = {REPLAY_CALL: functools.partial(systems[STEP].ask, task="calls")}
            replays = interleave(calls, 1, plan.num_call_groups, plan.max_seconds, [REPLAY_CALL])
            once.samples |= replays.samples
            once.failures |= replays.failures
            try:
                shares = systems[STEP].ask(task="audits", max_seconds=plan.max_seconds)
                once.samples |= {name: [share] for name, share in shares.items()}
            except PeerError as error:
                once.failures[AUDITS] = str(error)
    measure_warm_start(model, directory, once)
    return Outcome(steps, once, busy)


def run(models: Sequence[str], plan: Plan) -> Report:
    outcomes = {}
    for model in models:
        with tempfile.TemporaryDirectory(prefix="lazystep-steps-") as directory:
            outcomes[model] = measure_model(model, plan, Path(directory))
    measurements: dict[str, Measurements] = {}
    for model, (steps, once, busy) in outcomes.items():
        measurements |= {model: steps, f"{model}, once": once, f"{model}, busy": busy}
    return Report("steps", "python -m benchmarks.steps", machine(), all_tables(outcomes), measurements)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run: two rounds of short turns")
    parser.add_argument("--models", default=",".join(MODELS), help="some of them, separated by commas")
    parser.add_argument(
        "--peer", choices=VARIANTS, help="serve one variant's turns as JSON (used internally)"
    )
    arguments = parser.parse_args()
    if arguments.peer:
        serve(Worker(arguments.peer).work)
        return
    models = arguments.models.split(",")
    unknown = sorted(set(models) - MODELS.keys())
    if unknown:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    report = run(models, QUICK if arguments.quick else FULL)
    print(report.to_markdown())
    # A run of some models must not replace the report of all models.
    if not arguments.quick and set(models) == MODELS.keys():
        report.write()
        readme.update()


if __name__ == "__main__":
    main()
