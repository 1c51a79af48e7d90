"""Measure overlapped updates with 2 ranks over a limited link, and the memory of gradients.

    python -m benchmarks.overlap [--quick]

The links are 1 and 10 Gbit/s (`tc tbf` between two network namespaces) and the loopback without a limit. A
link that can't be made is skipped with the reason. Over each link these variants train the same model: plain
DDP, plain DDP with a fused optimizer, torch's private hook-then-optimizer, and `overlap_optimizer` with each
of the two optimizers. Each rank has one thread. Goals: not slower than plain DDP within the confidence
interval, and faster where the link is the bottleneck.

Then the peak memory of `optimizer_in_backward` is compared with the plain loop's, by the profiler's
allocation events. The model's activations and its largest gradient are each below 5 % of all gradients. Goal:
at least 90 % of the gradients' memory is saved.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.goals import Goal, Numbers, to_table
from benchmarks.link import LOOPBACK, End, LinkError, limited
from benchmarks.timing import (
    Measurements,
    Neighbours,
    Peer,
    PeerError,
    Report,
    Table,
    interleave,
    machine,
    serve,
)
from lazystep.overlap import optimizer_in_backward, overlap_optimizer

WIDTH, NUM_LAYERS, BATCH_SIZE, BUCKET_MB = 1024, 8, 32, 4
PEER_TIMEOUT = 300.0
PORT = 29571


def adamw(parameters: Any, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=fused)


class Variant:
    """One way to train, on one rank, with its own model."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        layers = [module for _ in range(NUM_LAYERS) for module in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=BUCKET_MB)
        self.optimizer: torch.optim.Optimizer | None = None
        self.handle: Any = None
        if name == "torch's private hook":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # importing torch's functional optimizers warns
                self.ddp._register_fused_optim(torch.optim.AdamW, lr=1e-3)
            return
        self.optimizer = adamw(self.ddp.parameters(), fused="fused" in name)
        if name.startswith("lazystep"):
            self.handle = overlap_optimizer(self.ddp, self.optimizer)

    def step(self, x: torch.Tensor) -> None:
        self.ddp(x).square().mean().backward()
        if self.optimizer is None:
            self.ddp.zero_grad()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()


VARIANTS = ["plain", "plain, fused", "torch's private hook", "lazystep", "lazystep, fused"]
# The baseline of each overlapped variant: the same optimizer, stepped after backward.
BASELINES = {"lazystep": "plain", "lazystep, fused": "plain, fused", "torch's private hook": "plain"}


class Rank:
    """One rank's process: it runs the requested turns together with the other rank."""

    def __init__(self, place: str) -> None:
        rank, address, port, interface = place.split()
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        torch.set_num_threads(1)
        store = dist.TCPStore(address, int(port), 2, is_master=rank == "0", timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=int(rank), world_size=2)
        self._variants = {name: Variant(name) for name in VARIANTS}
        self._x = torch.randn(BATCH_SIZE, WIDTH)

    def work(self, variant: str, num_steps: int) -> Mapping[str, float]:
        chosen = self._variants[variant]
        waited = chosen.handle.statistics.seconds_waiting if chosen.handle else 0.0
        dist.barrier()
        start = time.perf_counter()
        for _ in range(num_steps):
            chosen.step(self._x)
        dist.barrier()
        numbers = {variant: (time.perf_counter() - start) / num_steps}
        if chosen.handle:
            events = chosen.handle.events()
            first = events[-1].backward - num_steps
            times = [event.update_end - event.update_start for event in events if event.backward > first]
            updating = sum(times) / num_steps
            waiting = (chosen.handle.statistics.seconds_waiting - waited) / num_steps
            numbers |= {f"{variant}: waiting": waiting, f"{variant}: updating": updating}
        return numbers


def measure_link(ends: Sequence[End], port: int, is_quick: bool) -> Measurements:
    def place(rank: int) -> str:
        return f"{rank} {ends[0].address} {port} {ends[rank].interface}"

    with contextlib.ExitStack() as stack:
        ranks = []
        for rank, end in enumerate(ends):
            ranks.append(Peer("benchmarks.overlap", place(rank), PEER_TIMEOUT, end.prefix))
            stack.callback(ranks[-1].close)
        threads = stack.enter_context(ThreadPoolExecutor(2))
        neighbours = Neighbours(ranks)

        def turn(variant: str) -> Callable[[], Mapping[str, float]]:
            def ask(rank: Peer) -> Mapping[str, float]:
                return rank.ask(variant=variant, num_steps=2 if is_quick else 5)

            return lambda: next(iter(list(threads.map(ask, ranks))))

        turns = {variant: turn(variant) for variant in VARIANTS}
        repeats = 3 if is_quick else 15
        measured = interleave(turns, num_warm_ups=1, num_repeats=repeats, max_seconds=30 if is_quick else 240)
        measured.others = neighbours.share()
    return measured


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median of paired ratios and the two ends of its 95 % confidence interval, by bootstrap."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(4000))
    return statistics.median(ratios), medians[100], medians[-101]


def link_table(links: Mapping[str, Measurements], skipped: Mapping[str, str]) -> Table:
    rows = []
    for link, m in links.items():
        for variant in VARIANTS:
            row = [link, variant, m.spread(variant).format(1e3, 1)]
            baseline = BASELINES.get(variant)
            if baseline:
                pairs = zip(m.samples[baseline], m.samples[variant], strict=True)
                middle, low, high = interval([base / ours for base, ours in pairs])
                row.append(f"{middle:.3f} [{low:.3f}, {high:.3f}] of {baseline}")
            else:
                row.append("-")
            for part in ("waiting", "updating"):
                name = f"{variant}: {part}"
                row.append(m.spread(name).format(1e3, 1) if name in m.samples else "-")
            rows.append([*row, f"{m.others:.0%}"])
    rows += [[link, f"skipped: {reason}", *["-"] * 5] for link, reason in skipped.items()]
    megabytes = NUM_LAYERS * (WIDTH + 1) * WIDTH * 4 / 2**20
    note = (
        f"{NUM_LAYERS} linear layers of {WIDTH}, {megabytes:.0f} MiB of gradients in buckets of {BUCKET_MB} "
        f"MiB, batch {BATCH_SIZE}, AdamW; 2 ranks on one machine, one thread each. Rate: paired by round, "
        "median and 95 % confidence interval; above 1 is faster. Waiting and updating: inside backward, "
        "after the last gradient was computed."
    )
    columns = ["link", "variant", "ms a step", "rate", "waiting, ms", "updating, ms", "others' share"]
    return Table("A step over a limited link", columns, rows, note)


# -- memory ----------------------------------------------------------------------------------------


def peak_of_a_step(in_backward: bool, make: Callable[[Any], torch.optim.Optimizer]) -> tuple[int, int, int]:
    """Bytes: the peak of a step above its start, all gradients, the largest gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(*(module for _ in range(40) for module in (nn.Linear(256, 256), nn.Tanh())))
    optimizer = make(model.parameters())
    if in_backward:
        optimizer_in_backward(model, optimizer)

    def step() -> None:
        model(torch.ones(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the optimizer's state
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    results: Any = profile.profiler.kineto_results  # type: ignore[union-attr]
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    total = peak = 0
    for _, change in sorted(changes, key=lambda entry: entry[0]):
        total += change
        peak = max(peak, total)
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    return peak, sum(sizes), max(sizes)


def memory_rows() -> dict[str, tuple[list[str], float]]:
    """For each optimizer: the cells of its row, and the saved share of the gradients' memory."""
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "AdamW": lambda p: torch.optim.AdamW(p),
        "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    }
    rows = {}
    for name, make in kinds.items():
        plain, gradients, largest = peak_of_a_step(False, make)
        ours, _, _ = peak_of_a_step(True, make)
        saved = (plain - ours) / gradients
        cells = [f"{number / 2**20:.2f}" for number in (gradients, largest, plain, ours)]
        rows[name] = [name, *cells, f"{saved:.1%}"], saved
    return rows


def memory_table(rows: Mapping[str, tuple[list[str], float]]) -> Table:
    columns = ["optimizer", "all gradients, MiB", "largest one, MiB", "peak, plain", "peak, in backward"]
    note = "40 linear layers of 256, batch 4. Peak: above what is allocated at the start of a step."
    cells = [row for row, _ in rows.values()]
    return Table("Memory of gradients", [*columns, "saved, of all gradients"], cells, note)


# -- goals -----------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The measurements by link, and the saved share of the gradients' memory by optimizer."""

    links: Mapping[str, Measurements]
    saved: Mapping[str, float]

    def rates(self, bound: int) -> Numbers:
        """Rate of `lazystep`, plain DDP = 1: the median (0), or an end of its interval (1 or 2)."""
        numbers: dict[str, float | None] = {}
        for link, m in self.links.items():
            pairs = zip(m.samples[BASELINES["lazystep"]], m.samples["lazystep"], strict=True)
            numbers[link] = interval([base / ours for base, ours in pairs])[bound]
        return numbers


GOALS: list[Goal[Outcome]] = [
    Goal(
        "not slower than plain DDP: the interval's upper end on each link", lambda o: o.rates(2), at_least=1.0
    ),
    Goal(
        "ahead of plain DDP where the link is the bottleneck: the interval's lower end",
        lambda o: {link: rate for link, rate in o.rates(1).items() if link.startswith("1 ")},
        at_least=1.0,
    ),
    Goal("optimizer in backward: 90 % of the gradients' memory saved", lambda o: dict(o.saved), at_least=0.9),
]


def run(is_quick: bool) -> Report:
    facts = machine()
    links: dict[str, Measurements] = {}
    skipped: dict[str, str] = {}
    for number, gigabits in enumerate((1, 10)):
        name = f"{gigabits} Gbit/s"
        try:
            with limited(gigabits) as ends:
                links[name] = measure_link(ends, PORT + number, is_quick)
        except (LinkError, PeerError) as error:
            skipped[name] = str(error)
    links["loopback, no limit"] = measure_link(LOOPBACK, PORT + 2, is_quick)
    memory = memory_rows()
    outcome = Outcome(links, {name: saved for name, (_, saved) in memory.items()})
    others = max(m.others for m in links.values())
    tables = [to_table(GOALS, outcome, others), link_table(links, skipped), memory_table(memory)]
    return Report("overlap", "python -m benchmarks.overlap", facts, tables, links)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run: three rounds, nothing is written")
    parser.add_argument("--peer", help="serve turns of one rank as JSON (used internally)")
    arguments = parser.parse_args()
    if arguments.peer:
        serve(Rank(arguments.peer).work)
        return
    report = run(arguments.quick)
    print(report.to_markdown())
    if not arguments.quick:
        report.write()


if __name__ == "__main__":
    main()
