"""Tables and goals from the measurements of `steps`. This file measures nothing.

Names of numbers: `<variant>` is its seconds per step. `<variant>, busy` is the same beside a spinning thread.
`<variant>, native` is the share of its steps that ran natively. `audits` is a share of the time. All other
numbers (`first step, <variant>`, `until native`, `warm start`, ...) are seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .goals import Goal, Numbers, to_table
from .timing import Measurements, Spread, Table

EAGER, FUSED, COMPILED_MODEL, COMPILED_STEP = (
    "eager",
    "eager, fused",
    "torch.compile(model)",
    "torch.compile(step)",
)
TORCH_LAZY, JAX, LOOP, STEP = "torch._lazy", "JAX jit", "lazystep loop", "lazystep step"
VARIANTS = (EAGER, FUSED, COMPILED_MODEL, COMPILED_STEP, TORCH_LAZY, JAX, LOOP, STEP)
# The variants whose first step is reported. Each other variant starts like one of these.
FIRST_STEPS = (EAGER, COMPILED_MODEL, JAX, LOOP)
# The variants that are also measured beside a thread that spins in Python.
BUSY = (EAGER, COMPILED_MODEL, JAX, LOOP, STEP)
WHILE_BUILDING, WITHOUT_BUILD = "while building", "without a build"
UNTIL_NATIVE = "until native"
# The mean from the first barrier to the first native step: of a loop that does not wait for the build.
STEP_UNTIL_NATIVE = "a step until native"
REPLAY_CALL = "replay call"
IN_A_LOOP = "in a loop"
AUDITS = "audits"
OTHERS = "processor time taken by others"


class Outcome(NamedTuple):
    """The measurements of one model: in rounds, once, and in rounds beside a spinning thread."""

    steps: Measurements
    once: Measurements
    busy: Measurements

    def median(self, name: str) -> float | None:
        """The median of a number from the first measurement that has it; None if there is none."""
        for measured in self:
            if name in measured.samples and name not in measured.failures:
                return measured.spread(name).median
        return None

    def rate(self, variant: str, baseline: str = EAGER) -> float | None:
        """Rate relative to the baseline, by round; None if one of the two failed."""
        if not {variant, baseline} <= self.steps.samples.keys() - self.steps.failures.keys():
            return None
        return self.steps.speedup(variant, baseline).median

    def kept(self, variant: str) -> Spread | None:
        """The share of its rate that a variant keeps beside a spinning thread; None if one turn failed."""
        pair = {variant, f"{variant}, busy"}
        if not pair <= self.busy.samples.keys() - self.busy.failures.keys():
            return None
        return self.busy.speedup(f"{variant}, busy", variant)


Outcomes = Mapping[str, Outcome]


def geometric_mean(rates: Sequence[float]) -> float:
    """The geometric mean, which suits ratios."""
    return math.exp(statistics.fmean(map(math.log, rates)))


# -- goals -------------------------------------------------------------------------------------


def _rates(variant: str, baselines: Sequence[str]) -> Callable[[Outcomes], Numbers]:
    """Rates relative to the fastest baseline that was measured."""

    def measure(outcomes: Outcomes) -> Numbers:
        numbers: dict[str, float | None] = {}
        for model, outcome in outcomes.items():
            rates = [outcome.rate(variant, baseline) for baseline in baselines]
            numbers[model] = min((rate for rate in rates if rate is not None), default=None)
        return numbers

    return measure


def _mean(measure_each: Callable[[Outcomes], Numbers]) -> Callable[[Outcomes], Numbers]:
    """The geometric mean over all models; None if one is missing."""

    def measure(outcomes: Outcomes) -> Numbers:
        numbers = measure_each(outcomes).values()
        found = [number for number in numbers if number is not None]
        return {"mean": geometric_mean(found) if found and len(found) == len(numbers) else None}

    return measure


def _medians(name: str, less: str = "", only: str = "") -> Callable[[Outcomes], Numbers]:
    def measure(outcomes: Outcomes) -> Numbers:
        numbers: dict[str, float | None] = {}
        for model, outcome in outcomes.items():
            if only in ("", model):
                number, base = outcome.median(name), outcome.median(less) if less else 0.0
                numbers[model] = None if number is None or base is None else number - base
        return numbers or {only: None}

    return measure


def _until_native_beside_compile(outcomes: Outcomes) -> Numbers:
    """The time until native, less the first step of `torch.compile` of the model alone."""
    return _medians(UNTIL_NATIVE, less=f"first step, {COMPILED_MODEL}")(outcomes)


def rate_until_native(outcomes: Outcomes) -> Numbers:
    """The rate of steps from a cold start to the first native one, eager = 1."""
    numbers: dict[str, float | None] = {}
    for model, outcome in outcomes.items():
        meanwhile, eager = outcome.median(STEP_UNTIL_NATIVE), outcome.median(EAGER)
        numbers[model] = None if meanwhile is None or eager is None else eager / meanwhile
    return numbers


def _steps_after(seconds: float, only: str) -> Callable[[Outcomes], Numbers]:
    """Steps that the plain loop makes in this time from a cold start, eager = 1."""

    def measure(outcomes: Outcomes) -> Numbers:
        if only not in outcomes:
            return {only: None}
        outcome = outcomes[only]
        names = (UNTIL_NATIVE, STEP_UNTIL_NATIVE, LOOP, EAGER)
        until, meanwhile, native, eager = (outcome.median(name) for name in names)
        if until is None or meanwhile is None or native is None or eager is None:
            return {only: None}
        early = min(until, seconds)
        return {only: (early / meanwhile + (seconds - early) / native) / (seconds / eager)}

    return measure


# What JAX keeps of its rate beside a spinning thread, measured on 2 cores, for runs without JAX.
_JAX_BUSY = {"mlp": 0.45, "lstm": 0.94}


def _busy_shares(variant: str) -> Callable[[Outcomes], Numbers]:
    """What a variant keeps of its rate beside a spinning thread, over what JAX keeps. For small steps."""

    def measure(outcomes: Outcomes) -> Numbers:
        numbers: dict[str, float | None] = {}
        for model, known in _JAX_BUSY.items():
            own, jax = (outcomes[model].kept(name) if model in outcomes else None for name in (variant, JAX))
            numbers[model] = None if own is None else own.median / (jax.median if jax else known)
        return numbers

    return measure


_AHEAD = 1.0
# Below 1, because an audit of a captured step may record a program that has no library yet.
_NATIVE = 0.99


def _goals() -> list[Goal[Outcomes]]:
    goals = []
    for variant, mean, each in ((LOOP, 1.6, 1.1), (STEP, 1.8, 1.15)):
        native = f"{variant}: all measured steps ran natively"
        goals += [
            Goal(native, _medians(f"{variant}, native"), at_least=_NATIVE),
            Goal(
                f"{variant}: {mean} times eager's rate, geometric mean",
                _mean(_rates(variant, [EAGER])),
                at_least=mean,
            ),
            Goal(f"{variant}: {each} times eager's rate on each", _rates(variant, [EAGER]), at_least=each),
            Goal(
                f"{variant}: ahead of the best torch.compile on each",
                _rates(variant, [COMPILED_MODEL, COMPILED_STEP]),
                at_least=_AHEAD,
            ),
            Goal(
                f"{variant}: ahead of the best of torch.compile and fused eager, geometric mean",
                _mean(_rates(variant, [COMPILED_MODEL, COMPILED_STEP, FUSED])),
                at_least=_AHEAD,
            ),
            Goal(f"{variant}: ahead of JAX on each", _rates(variant, [JAX]), at_least=_AHEAD),
        ]
    first = _medians(f"first step, {LOOP}", less=f"first step, {EAGER}")
    goals += [
        Goal("first step: 0.3 s after eager's at most", first, at_most=0.3, unit=" s"),
        Goal(
            "until native: not later than the first step of torch.compile of the model alone",
            _until_native_beside_compile,
            at_most=0.0,
            unit=" s",
        ),
        Goal("cold start: steps until native at 0.9 of eager's rate", rate_until_native, at_least=0.9),
        Goal(
            "cold start of the small GPT: ahead of eager after 45 s", _steps_after(45.0, "gpt"), at_least=1.0
        ),
        Goal(
            "warm start: native 1 s after the first barrier", _medians("warm start"), at_most=1.0, unit=" s"
        ),
        Goal(
            "replay call of the small GPT: 100 µs of the training thread at most",
            _medians(REPLAY_CALL, only="gpt"),
            at_most=100e-6,
            unit=" µs",
            scale=1e6,
        ),
        Goal(
            f"{STEP}: beside a busy Python thread, small steps keep as much of their rate as JAX's",
            _busy_shares(STEP),
            at_least=1.0,
        ),
        Goal(
            "steady audits of captured steps: 1 % of the time at most",
            _medians(AUDITS),
            at_most=0.01,
            unit=" %",
            scale=1e2,
        ),
    ]
    return goals


GOALS = _goals()


def audit_share(calls: Sequence[tuple[float, bool]], seconds: float) -> float | None:
    """The share of the time that audits take: of `seconds`, which these calls and all between them took.

    `calls`: the training thread's processor time of each call, and whether the call was an audit. An audit
    also does the work of a replay, which does not count. None if there was no audit, or nothing else.
    """
    audits = [time for time, is_audit in calls if is_audit]
    replays = [time for time, is_audit in calls if not is_audit]
    if not audits or not replays:
        return None
    return sum(audits) / seconds - len(audits) * statistics.median(replays) / seconds


# -- tables ------------------------------------------------------------------------------------


def steps_table(outcomes: Outcomes) -> Table:
    rows = []
    for model, (steps, _, _) in outcomes.items():
        cells = [steps.failures.get(name) or steps.spread(name).format(1e3) for name in VARIANTS]
        rows.append([model, *cells, f"{steps.others:.0%}"])
    note = "ms a step: host-side sampling, forward, backward, AdamW; a turn ends when its last step has run."
    return Table("Training steps", ["model", *VARIANTS, OTHERS], rows, note)


def rates_table(outcomes: Outcomes) -> Table:
    rows = []
    for model, outcome in outcomes.items():
        steps = outcome.steps
        rows.append(
            [model]
            + [
                "-" if outcome.rate(name) is None else steps.speedup(name, EAGER).format()
                for name in VARIANTS
            ]
        )
    means = []
    for name in VARIANTS:
        rates = [rate for outcome in outcomes.values() if (rate := outcome.rate(name)) is not None]
        of = "" if len(rates) == len(outcomes) else f" of {len(rates)}"
        means.append(f"{geometric_mean(rates):.2f}{of}" if rates else "-")
    rows.append(["geometric mean", *means])
    return Table("Rate, eager = 1", ["model", *VARIANTS], rows, "Taken within each round.")


def starts_table(outcomes: Outcomes) -> Table:
    def cell(once: Measurements, name: str, digits: int = 2) -> str:
        if name in once.failures or name not in once.samples:
            return once.failures.get(name, "-")
        return f"{once.spread(name).median:.{digits}f}"

    firsts = [f"first step, {name}" for name in FIRST_STEPS]
    names = [*firsts, UNTIL_NATIVE, "warm start"]
    rows = [[model, *(cell(o.once, name) for name in names)] for model, o in outcomes.items()]
    note = (
        "Seconds, measured once. First step: everything imported, the model made, until its loss is known. "
        "Until native: from the first barrier to the first native execution while the loop goes on training; "
        "warm start: the same in a second process, the library on disk."
    )
    return Table("Starting", ["model", *names], rows, note)


def building_table(outcomes: Outcomes) -> Table:
    rows = []
    for model, outcome in outcomes.items():
        row = [model]
        for part in ("median", "95 %"):
            for phase in (WITHOUT_BUILD, WHILE_BUILDING):
                number = outcome.median(f"{part} {phase}")
                row.append("-" if number is None else f"{number * 1e3:.2f}")
        rows.append(row)
    columns = [
        "model",
        *(f"{part} {phase}" for part in ("median", "95 %") for phase in (WITHOUT_BUILD, WHILE_BUILDING)),
    ]
    note = "ms a step of the plain loop on the reference executable: what a build in the background costs."
    return Table("Steps while a library is built", columns, rows, note)


def busy_table(outcomes: Outcomes) -> Table:
    rows = []
    for model, outcome in outcomes.items():
        shares = [outcome.kept(name) for name in BUSY]
        cells = ["-" if share is None else share.format() for share in shares]
        rows.append([model, *cells, f"{outcome.busy.others:.0%}"])
    note = (
        "Rate beside one thread that spins in Python, without it = 1. The thread takes one core as well. The "
        "batches are there already: each op of torch that samples would give the interpreter lock away, and "
        "NumPy, which samples for JAX, keeps it."
    )
    return Table("A busy Python thread", ["model", *BUSY, OTHERS], rows, note)


def calls_table(outcomes: Outcomes) -> Table:
    rows = []
    for model, (_, once, _) in outcomes.items():
        is_there = REPLAY_CALL in once.samples
        cell = once.spread(REPLAY_CALL).format(1e6, 0) if is_there else once.failures.get(REPLAY_CALL, "-")
        audits = f"{once.spread(AUDITS).median:.2%}" if AUDITS in once.samples else "-"
        in_a_loop = f"{once.spread(IN_A_LOOP).median * 1e6:.0f}" if IN_A_LOOP in once.samples else "-"
        rows.append([model, cell, in_a_loop, audits])
    note = (
        "Replay call: µs of the training thread, with CPU tensors as arguments and places free among the "
        "steps in flight; the middle one of three calls. In a loop: µs of the thread's processor time, where "
        "it sleeps for a place and then finds nothing in the caches. Audits: the share of the time from one "
        "steady audit to the next that the training thread spends on the audit, beyond what a replay takes."
    )
    return Table("One replay call of `@lazystep.step`", ["model", REPLAY_CALL, IN_A_LOOP, AUDITS], rows, note)


def goals_table(outcomes: Outcomes) -> Table:
    others = max((max(o.steps.others, o.busy.others) for o in outcomes.values()), default=0.0)
    return to_table(GOALS, outcomes, others)


def all_tables(outcomes: Outcomes) -> list[Table]:
    makers = (goals_table, steps_table, rates_table, starts_table, building_table, busy_table, calls_table)
    return [make(outcomes) for make in makers]
