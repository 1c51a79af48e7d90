"""Predict the time of a data-parallel step for N ranks, and compare with 2, 3 and 4 ranks over a slow link.

    python -m benchmarks.scaling [--quick]

The model (benchmarks/step_model.py) takes two measurements:

- *The timeline of a rank*: when the gradients of each bucket are there, and how long its update takes. N
  ranks are measured at once on this machine, each in a process group of its own, so nothing is sent.
- *The link*: its latency and bandwidth, from a small and a large all-reduce of 2 ranks.

From both it predicts the steps of N ranks, which are then measured over the same link (`tc tbf` between
network namespaces, benchmarks/link.py). Goal: the prediction is within 20 % of each measured step.

`docs/scaling.svg` shows predictions up to 1,024 ranks. They assume that each rank has a processor of its own,
the timeline of 2 ranks on this machine, equal ranks, and a network without congestion. Ring and tree are the
two usual ways to reduce. The plot needs matplotlib (`pip install lazystep[bench]`).
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import links
from benchmarks.goals import Goal, to_table
from benchmarks.link import LOOPBACK, LinkError, limited
from benchmarks.links import CAPTURED, COMMUNICATING, OVERLAP_FUSED, PLAIN_FUSED, Ranks, lazystep
from benchmarks.step_model import Bucket, Link, Timeline, in_backward, overlapped, plain, ring, tree
from benchmarks.step_model import fit as fit_link
from benchmarks.timing import Measurements, PeerError, Report, Table, command, machine
from lazystep.program.schedule import AHEAD

MODULE = "benchmarks.scaling"
PORT = 29631
GIGABITS = 1.0
NUM_RANKS = (2, 3, 4)
SMALL, LARGE = 4 * 2**10, 16 * 2**20  # bytes of the reductions that measure the link
MAX_ERROR = 0.2
# The order in which each variant waits and updates.
MODELS: dict[str, Callable[[Timeline, Callable[[float], float]], float]] = {
    PLAIN_FUSED: plain,
    OVERLAP_FUSED: overlapped,
    CAPTURED: lambda timeline, reduce: in_backward(timeline, reduce, AHEAD),
}
ALGORITHMS = {"ring": ring, "tree": tree}
# Of the plot: the measured link, and one of a data centre, which is assumed.
FAST_LINK = Link(latency=20e-6, bandwidth=1.25e9)
PLOTTED_RANKS = [2**exponent for exponent in range(11)]


# -- in the processes of ranks ---------------------------------------------------------------------


class Rank(links.Rank):
    """A rank that can also say when its buckets are ready, or how long a reduction takes."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self._ready: list[tuple[float, int]] = []
        is_alone = dist.get_world_size() == 1
        if is_alone and self._variant.name == PLAIN_FUSED:
            self._variant.model.register_comm_hook(self._ready, _note_bucket)

    def work(self, task: str, num_steps: int = 0, num_bytes: int = 0) -> Mapping[str, float]:
        if task == "timeline":
            return self._timeline(num_steps)
        if task == "reduce":
            tensor = torch.zeros(num_bytes // 4)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(num_steps):
                dist.all_reduce(tensor)
            return {str(num_bytes): (time.perf_counter() - start) / num_steps}
        return super().work(task, num_steps)

    def _timeline(self, num_steps: int) -> Mapping[str, float]:
        measure: Mapping[str, Callable[[], Timeline]] = {
            PLAIN_FUSED: self._plain_timeline,
            OVERLAP_FUSED: self._overlap_timeline,
        }
        name = self._variant.name
        found = (
            self._lazy_timelines(num_steps)
            if name == CAPTURED
            else [measure[name]() for _ in range(num_steps)]
        )
        return to_numbers(typical(found))

    def _plain_timeline(self) -> Timeline:
        optimizer = self._variant.optimizer
        assert optimizer is not None
        self._ready.clear()
        start = time.perf_counter()
        self._variant.model(self._x).square().mean().backward()
        computed = time.perf_counter()
        optimizer.step()
        updated = time.perf_counter()
        optimizer.zero_grad()
        end = time.perf_counter()
        ready = [moment for moment, _ in self._ready]
        sizes = [size for _, size in self._ready]
        updates = [(updated - computed) * size / sum(sizes) for size in sizes]
        return make_timeline(start, ready, sizes, updates, computed - ready[-1] + end - updated)

    def _overlap_timeline(self) -> Timeline:
        start = time.perf_counter()
        self._variant.step(self._x)
        end = time.perf_counter()
        events = self._variant.handle.events()
        events = [event for event in events if event.backward == events[-1].backward]
        updates = [event.update_end - event.update_start for event in events]
        ready = [event.ready for event in events]
        rest = end - ready[-1] - sum(updates)
        return make_timeline(start, ready, [event.num_bytes for event in events], updates, rest)

    def _lazy_timelines(self, num_steps: int) -> list[Timeline]:
        """From the spans of native steps: launches, waits, and the whole execution.

        Behind a wait come the update of its bucket and backward until the next launch. Both count as the
        update: the model has them in the same order.
        """
        with tempfile.TemporaryDirectory() as directory:
            with lazystep().profile(Path(directory) / "trace.json") as profile:
                start = time.perf_counter()
                self._variant.turn(self._x, num_steps)
                seconds = (time.perf_counter() - start) / num_steps
            spans = profile.spans()
        sizes = [buffer.nbytes for buffer in links.bucket_buffers(self._variant.model)]
        runs = [span for span in spans if span.category == "execution"]
        found = []
        for run in runs:
            inside = [s for s in spans if s.category == "collective" and run.start <= s.start < run.end]
            launches = [span.start for span in inside]
            begun = [span.end - span.args["waited"] for span in inside]  # to wait
            ends = [*launches[AHEAD + 1 :], *begun[max(len(inside) - AHEAD, 1) :], run.end]
            updates = [end - span.end for span, end in zip(inside, ends, strict=True)]
            # What is outside of executions is time of the step, too.
            rest = max(begun[max(len(inside) - 1 - AHEAD, 0)] - launches[-1], 0.0)
            rest += max(seconds - (run.end - run.start), 0.0)
            timeline = make_timeline(run.start, launches, sizes, updates, rest)
            buckets = [
                bucket if number <= AHEAD else bucket._replace(compute=0.0)
                for number, bucket in enumerate(timeline.buckets)
            ]
            found.append(timeline._replace(buckets=buckets))
        return found


def _note_bucket(ready: Any, bucket: Any) -> Any:
    ready.append((time.perf_counter(), bucket.buffer().nbytes))
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


_note_bucket.__annotations__ = {}  # DDP compares them with classes, and ours are strings


# -- timelines ---------------------------------------------------------------------------------------


def make_timeline(
    start: float, ready: Sequence[float], sizes: Sequence[int], updates: Sequence[float], rest: float
) -> Timeline:
    """From the moments at which buckets are ready."""
    compute = [moment - before for before, moment in zip([start, *ready], ready, strict=False)]
    return Timeline([Bucket(*one) for one in zip(compute, sizes, updates, strict=True)], max(rest, 0.0))


def typical(timelines: Sequence[Timeline]) -> Timeline:
    """The median of each number."""
    middle = statistics.median
    buckets = [
        Bucket(*(middle(numbers) for numbers in zip(*same, strict=True)))
        for same in zip(*(timeline.buckets for timeline in timelines), strict=True)
    ]
    return Timeline(buckets, middle(timeline.rest for timeline in timelines))


def to_numbers(timeline: Timeline) -> dict[str, float]:
    """A timeline as numbers by name, for the pipe between processes."""
    numbers = {"rest": timeline.rest}
    for index, bucket in enumerate(timeline.buckets):
        numbers |= {f"{field} {index}": float(value) for field, value in bucket._asdict().items()}
    return numbers


def from_numbers(numbers: Mapping[str, float]) -> Timeline:
    """The reverse of `to_numbers`."""
    count = sum(name.startswith("compute ") for name in numbers)
    buckets = [Bucket(*(numbers[f"{field} {n}"] for field in Bucket._fields)) for n in range(count)]
    return Timeline(buckets, numbers["rest"])


# -- measuring ---------------------------------------------------------------------------------------


class Prediction(NamedTuple):
    """One step, in seconds."""

    num_ranks: int
    variant: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def measure_timelines(num_ranks: int, port: int, is_quick: bool) -> dict[str, Timeline]:
    """The timeline of each variant, while so many ranks compute at once and send nothing."""
    found = {}
    for variant in MODELS:
        ranks = Ranks(MODULE, variant, [LOOPBACK[0]] * num_ranks, port, are_apart=True)
        with contextlib.closing(ranks):
            ranks.ask(task="prepare")
            answers = ranks.ask_all(task="timeline", num_steps=4 if is_quick else 24)
        found[variant] = typical([from_numbers(answer) for answer in answers])
    return found


def measure_link(port: int, is_quick: bool) -> Link:
    """The latency and bandwidth of the limited link, as reductions between 2 ranks see them."""
    points = []
    with limited(GIGABITS) as ends, contextlib.closing(Ranks(MODULE, COMMUNICATING, ends, port)) as ranks:
        for num_bytes, count in ((SMALL, 50), (LARGE, 3 if is_quick else 10)):
            ranks.ask(task="reduce", num_steps=2, num_bytes=num_bytes)
            (seconds,) = ranks.ask(task="reduce", num_steps=count, num_bytes=num_bytes).values()
            points.append((float(num_bytes), seconds))
    return fit_link(points[0], points[1], 2)


def measure_steps(num_ranks: int, port: int, is_quick: bool) -> Measurements:
    """The steps of all variants over the limited link."""
    with limited(GIGABITS, num_ranks) as ends:
        return links.measure_link(ends, port, list(MODELS), is_quick, max_seconds=50)


def curves(timelines: Mapping[str, Timeline], link: Link) -> dict[str, list[float]]:
    """The predicted seconds of each variant and algorithm, for the numbers of ranks of the plot."""

    def seconds(variant: str, algorithm: str, num_ranks: int) -> float:
        reduce = ALGORITHMS[algorithm]
        return MODELS[variant](timelines[variant], lambda size: reduce(size, num_ranks, link))

    return {
        f"{variant}, {algorithm}": [seconds(variant, algorithm, num_ranks) for num_ranks in PLOTTED_RANKS]
        for variant in MODELS
        for algorithm in ALGORITHMS
    }


# -- the report --------------------------------------------------------------------------------------

GOALS: list[Goal[Sequence[Prediction]]] = [
    Goal(
        f"predicted steps are within {MAX_ERROR:.0%} of measured ones",
        lambda found: {f"{p.variant}, {p.num_ranks} ranks": abs(p.error) for p in found},
        at_most=MAX_ERROR,
        unit=" %",
        scale=100,
    )
]


def check_table(predictions: Sequence[Prediction], link: Link) -> Table:
    rows = [
        [
            str(p.num_ranks),
            p.variant,
            f"{p.predicted * 1e3:.1f}",
            f"{p.measured * 1e3:.1f}",
            f"{p.error:+.0%}",
        ]
        for p in predictions
    ]
    note = (
        f"{GIGABITS:g} Gbit/s: gloo's reductions see a latency of {link.latency * 1e6:.0f} µs and "
        f"{link.bandwidth * 8 / 1e9:.2f} Gbit/s. The model of benchmarks/links.py. More ranks than cores "
        "slow each other down, which is in the timelines."
    )
    return Table(
        "Predicted and measured steps", ["ranks", "variant", "predicted, ms", "ms", "error"], rows, note
    )


def timeline_table(timelines: Mapping[str, Timeline]) -> Table:
    def milliseconds(values: Sequence[float]) -> str:
        return " ".join(f"{value * 1e3:.1f}" for value in values)

    rows = [
        [
            variant,
            milliseconds([bucket.compute for bucket in timeline.buckets]),
            milliseconds([timeline.rest]),
            milliseconds([bucket.update for bucket in timeline.buckets]),
            f"{timeline.alone * 1e3:.1f}",
        ]
        for variant, timeline in timelines.items()
    ]
    columns = ["variant", "until each bucket, ms", "rest, ms", "update of each bucket, ms", "all, ms"]
    note = (
        "Behind a wait, a lazy step updates the bucket and goes on with backward until the next launch. "
        "Both are in the column of updates."
    )
    return Table("The timeline of a rank that sends nothing, with 2 at once", columns, rows, note)


def run(is_quick: bool) -> Report:
    facts = machine()
    predictions: list[Prediction] = []
    measured: dict[str, Measurements] = {}
    tables: list[Table] = []
    first: dict[str, Timeline] = {}
    others = 0.0
    try:
        link = measure_link(PORT, is_quick)
        for number, num_ranks in enumerate(NUM_RANKS[:1] if is_quick else NUM_RANKS):
            port = PORT + 1 + 20 * number
            timelines = measure_timelines(num_ranks, port, is_quick)
            first = first or timelines
            steps = measured[f"{num_ranks} ranks"] = measure_steps(num_ranks, port + 10, is_quick)
            others = max(others, steps.others)
            for variant, step in MODELS.items():
                if not links.was_measured(steps, variant):
                    raise PeerError(f"{variant}: {steps.failures.get(variant, 'not measured')}")
                predicted = step(timelines[variant], lambda b, n=num_ranks: ring(b, n, link))
                predictions.append(Prediction(num_ranks, variant, predicted, steps.spread(variant).median))
    except (LinkError, PeerError) as error:
        tables.append(Table("Skipped", ["reason"], [[str(error)]]))
    else:
        tables += [check_table(predictions, link), timeline_table(first)]
        measured[f"{GIGABITS:g} Gbit/s"] = Measurements(curves(first, link))
        measured["10 Gbit/s, 20 µs"] = Measurements(curves(first, FAST_LINK))
        if not is_quick:
            draw(measured, facts["date"], others)
    tables.insert(0, to_table(GOALS, predictions, others))
    return Report("scaling", "python -m benchmarks.scaling", facts, tables, measured)


def draw(measured: Mapping[str, Measurements], date: str, others: float) -> None:
    """Write docs/scaling.svg."""
    from benchmarks.plots import draw_predictions  # not at the top: ranks do not need matplotlib

    predicted = {name: m.samples for name, m in measured.items() if not name.endswith(" ranks")}
    draw_predictions(predicted, date, others)


if __name__ == "__main__":
    command(__doc__, run, lambda name: Rank(name).work)
