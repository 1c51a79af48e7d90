"""How all benchmarks measure: alternating turns in one run, medians with their spread, ratios by round.

A *turn* does a fixed amount of work and returns the measured numbers by name. `interleave` warms up all turns
and then runs them in rounds, one after the other. So a machine that becomes slower slows all of them. For the
same reason a ratio is taken within each round, and then the median of these ratios.

A variant that must not share a process is a `Peer`. OpenMP gives a separate pool to every thread that
computes, and pools that compete for cores slow each other down. Eager steps measured beside an executor
thread would look slower than they are.

On a shared machine, set `OMP_NUM_THREADS=1`. OpenMP threads spin while they wait for a thread that has no
core. This can slow a step down ten times or more, and not equally for each variant. `OMP_WAIT_POLICY=passive`
does not help: it doubles the time of eager's small kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

Turn = Callable[[], Mapping[str, float]]

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
RESULTS = Path(__file__).parent / "results"


class PeerError(Exception):
    """A peer could not do its turn. The message is short enough for a table."""


class Spread(NamedTuple):
    """The median of some samples and their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """The spread of samples. A single sample is its own median and quartiles."""
        if len(samples) < 2:
            return cls(samples[0], samples[0], samples[0])
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(statistics.median(samples), low, high)

    def format(self, scale: float = 1.0, digits: int = 2) -> str:
        """`median [low, high]`, each multiplied by `scale`."""
        median, low, high = (f"{value * scale:.{digits}f}" for value in self)
        return f"{median} [{low}, {high}]"


@dataclass
class Measurements:
    """Samples by name, one per round, and the reasons of failed turns.

    `others`: the share of the processor's time that other processes took meanwhile, see `Neighbours`.
    """

    samples: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    others: float = 0.0

    def spread(self, name: str) -> Spread:
        """The spread of one measured number."""
        return Spread.of(self.samples[name])

    def speedup(self, name: str, baseline: str) -> Spread:
        """Rate relative to the baseline, by round: above 1 is faster. Both names stand for times."""
        pairs = zip(self.samples[baseline], self.samples[name], strict=True)
        return Spread.of([base / time for base, time in pairs])


def interleave(
    turns: Mapping[str, Turn],
    num_warm_ups: int,
    num_repeats: int,
    max_seconds: float,
    may_fail: Sequence[str] = (),
) -> Measurements:
    """Run all turns in rounds. A turn in `may_fail` that raises `PeerError` is left out of later rounds.

    No round begins after `max_seconds`, so a slow machine gives fewer samples instead of a longer run. At
    least two rounds are measured.
    """
    measured = Measurements()
    going = dict(turns)
    deadline = time.monotonic() + max_seconds
    for number in range(num_warm_ups + num_repeats):
        if number >= num_warm_ups + 2 and time.monotonic() > deadline:
            break
        for name, turn in list(going.items()):
            try:
                numbers = turn()
            except PeerError as error:
                if name not in may_fail:
                    raise PeerError(f"{name}: {error}") from error
                measured.failures[name] = str(error)
                del going[name]
                continue
            if number >= num_warm_ups:
                for quantity, value in numbers.items():
                    measured.samples.setdefault(quantity, []).append(value)
    return measured


# -- variants in processes of their own --------------------------------------------------------


class Peer:
    """A variant in its own process: `python -m <module> --peer <name>`, see `serve`.

    If the process has ended, the next request starts a new one, so that one failure does not cause others.
    `prefix` is a command in front (`ip netns exec ...`). `python` is the interpreter of another environment.
    `environ` is added to our environment variables.
    """

    def __init__(
        self,
        module: str,
        name: str,
        timeout: float,
        prefix: Sequence[str] = (),
        python: str = sys.executable,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._command = [*prefix, python, "-m", module, "--peer", name]
        self._timeout = timeout
        self._environ = {**os.environ, **(environ or {})}
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self._command,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self._environ,
        )

    def ask(self, **request: Any) -> Mapping[str, float]:
        """Send one request to the peer. Raises `PeerError` if the peer fails, dies or takes too long."""
        if self._process.poll() is not None:
            self._process = self._start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], self._timeout)[0]:
            self.close()
            raise PeerError(f"no answer within {self._timeout:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"its process ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        numbers: Mapping[str, float] = answer["numbers"]
        return numbers

    def processor_seconds(self) -> float:
        """Processor time that the process has used on all cores; 0 if it has ended."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def peers(module: str, names: Sequence[str], timeout: float) -> Iterator[dict[str, Peer]]:
    """Peers by name. The end of the `with` block kills them."""
    started = {name: Peer(module, name, timeout) for name in names}
    try:
        yield started
    finally:
        for peer in started.values():
            peer.close()


def serve(work: Callable[..., Mapping[str, float]]) -> None:
    """The loop of a peer: reads one JSON request per line from stdin, writes one JSON answer per line."""
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"numbers": dict(work(**json.loads(line)))}
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            answer = {"error": f"{type(error).__name__}: {reason}"}
        print(json.dumps(answer), flush=True)


@contextlib.contextmanager
def spinning(is_on: bool) -> Iterator[None]:
    """If `is_on`, a Python thread spins during the `with` block. It uses a core and the interpreter lock."""
    is_over = threading.Event()

    def spin() -> None:
        number = 0
        while not is_over.is_set():
            number += 1

    thread = threading.Thread(target=spin, daemon=True)
    if is_on:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if is_on:
            thread.join()


# -- reports -----------------------------------------------------------------------------------


@dataclass
class Table:
    """A table of a report. Cells are text, so that a cell can hold a failure instead of a number."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""

    def to_markdown(self) -> str:
        """The table under its title, with its note."""
        lines = [f"### {self.title}", ""]
        if self.note:
            lines += [self.note, ""]
        return "\n".join([*lines, markdown_table(self.columns, self.rows)])


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table alone."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def machine() -> dict[str, str]:
    """Facts that a reader needs to judge the numbers: processor, threads, versions."""
    import torch  # not at the top: JAX's environment has no torch

    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "torch threads": str(torch.get_num_threads()),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "unset"),
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "lazystep": importlib.metadata.version("lazystep"),
        "date": datetime.date.today().isoformat(),
    }


class Neighbours:
    """Measures the processor time that other processes take: results of a busy machine are doubtful."""

    def __init__(self, systems: Collection[Peer] = ()) -> None:
        self._systems = systems
        self._start = time.perf_counter(), self._seconds_of_others()

    def share(self) -> float:
        """The share of all cores' time, 0 to 1, that other processes took since the start."""
        wall, others = self._start
        used = self._seconds_of_others() - others
        return max(used, 0.0) / ((time.perf_counter() - wall) * (os.cpu_count() or 1))

    def _seconds_of_others(self) -> float:
        user, nice, system, _, _, irq, softirq, *_ = Path("/proc/stat").read_text().split()[1:]
        busy = sum(map(int, (user, nice, system, irq, softirq))) / _CLOCK_TICKS
        ours = os.times()  # its children are peers that have ended
        ours_ended = ours.user + ours.system + ours.children_user + ours.children_system
        return busy - ours_ended - sum(peer.processor_seconds() for peer in self._systems)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass
class Report:
    """The result of one benchmark: tables for people, samples for programs."""

    name: str
    command: str
    machine: dict[str, str]
    tables: list[Table]
    measurements: dict[str, Measurements]

    def to_markdown(self) -> str:
        """The whole report."""
        facts = "; ".join(f"{key} {value}" for key, value in self.machine.items())
        head = [f"## {self.name}", "", f"`{self.command}`: {facts}.", "Cells: median [quartiles].", ""]
        return "\n".join(head) + "\n" + "\n\n".join(table.to_markdown() for table in self.tables) + "\n"

    def write(self) -> None:
        """Write `results/<name>.md` and `.json`."""
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{self.name}.md").write_text(self.to_markdown())
        (RESULTS / f"{self.name}.json").write_text(json.dumps(asdict(self), indent=1) + "\n")


def command(
    description: str | None,
    run: Callable[[bool], Report],
    make_work: Callable[[str], Callable[..., Mapping[str, float]]] | None = None,
) -> None:
    """What a benchmark does as a command: run, print its report and, unless the run is quick, write it.

    `run` is told whether the run is quick. With `make_work` the command can serve as a peer: see `peers`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run; nothing is written")
    if make_work is not None:
        parser.add_argument("--peer", help="serve the turns of one variant as JSON (used internally)")
    arguments = parser.parse_args()
    if make_work is not None and arguments.peer:
        serve(make_work(arguments.peer))
        return
    report = run(arguments.quick)
    print(report.to_markdown())
    if not arguments.quick:
        report.write()
