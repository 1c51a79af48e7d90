"""Measure data-parallel training steps with 2 ranks over links of 1 and 10 Gbit/s and over the loopback.

    python -m benchmarks.links [--quick] [--link loopback]

The links are `tc tbf` between two network namespaces (benchmarks/link.py). A link that can't be made is
skipped with the reason. Over each link the same model is trained with torch's DDP, with a fused optimizer,
with `torch.compile`, with torch's private hook-then-optimizer, with `lazystep.overlap`, and as a lazy
data-parallel step, by the plain loop and captured. Lazy steps are measured when they run natively.

Two more variants bound a step from below: *computing alone* is the captured lazy step on both ranks at once,
without DDP; *communicating alone* reduces DDP's buckets and computes nothing.

Each rank of each variant is a process of its own with one thread, and the variants take turns. Goals: the
captured lazy step is ahead of the best of the others on each link, and takes at most 1.15 times as long as
the longer one of the two bounds; `overlap` is not slower than plain DDP, and ahead where the link is slow.
Overlap is measured after it has made its choice: it switches itself off where it does not pay.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
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

WIDTH, NUM_LAYERS, BATCH_SIZE, BUCKET_MB = 1024, 8, 32, 4
PEER_TIMEOUT = 400.0
BUILD_TIMEOUT = 300.0
NUM_TRIALS = 80  # steps, in which overlap decides whether it pays: see lazystep/overlap/choice.py
PORT = 29571

PLAIN, PLAIN_FUSED, COMPILED = "DDP", "DDP, fused", "DDP, fused, torch.compile"
PRIVATE = "torch's private hook"
OVERLAP, OVERLAP_FUSED = "overlap", "overlap, fused"
LAZY, CAPTURED = "lazy DDP", "lazy DDP, captured"
COMPUTING, COMMUNICATING = "computing alone", "communicating alone"
VARIANTS = [
    PLAIN, PLAIN_FUSED, COMPILED, PRIVATE, OVERLAP, OVERLAP_FUSED, LAZY, CAPTURED, COMPUTING, COMMUNICATING
]  # fmt: skip
OTHERS = [PLAIN, PLAIN_FUSED, COMPILED, PRIVATE, OVERLAP, OVERLAP_FUSED]
IS_LAZY = {LAZY, CAPTURED, COMPUTING}
# What a variant is compared with in its row: the same optimizer in plain DDP.
BASELINES = {PRIVATE: PLAIN, OVERLAP: PLAIN} | dict.fromkeys(
    (COMPILED, OVERLAP_FUSED, LAZY, CAPTURED), PLAIN_FUSED
)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(NUM_LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def bucket_buffers(model: nn.Module) -> list[Tensor]:
    """Tensors of the sizes of DDP's buckets from its second backward on."""
    gradients = [torch.empty_like(parameter) for parameter in model.parameters()][::-1]
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, BUCKET_MB * 2**20]
    found, _ = dist._compute_bucket_assignment_by_size(gradients, limits)
    return [torch.zeros(sum(gradients[number].numel() for number in bucket)) for bucket in found]


class Variant:
    """One way to train, on one rank, with a model of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.handle: Any = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.run: Callable[[Tensor], object] = self.step
        if name in IS_LAZY:
            lazystep().config.settings.build_after = 4
        model = make_model().to("lazy" if name in IS_LAZY else "cpu")
        self.model: Any = model
        if name == COMMUNICATING:
            self._buffers = bucket_buffers(model)
            self.run = self._reduce_buckets
            return
        if name != COMPUTING:
            self.model = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
        if name == PRIVATE:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # importing torch's functional optimizers warns
                self.model._register_fused_optim(torch.optim.AdamW, lr=1e-3)
            return
        is_fused = "fused" in name or name in IS_LAZY
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=is_fused)
        if name in (OVERLAP, OVERLAP_FUSED):
            from lazystep.overlap import overlap_optimizer

            # A rank that is alone, for benchmarks/scaling.py, has nothing to choose by.
            overlap = True if dist.get_world_size() == 1 else None
            self.handle = overlap_optimizer(self.model, self.optimizer, overlap=overlap)
        if name == COMPILED:
            self.model = torch.compile(self.model)
        if name in (CAPTURED, COMPUTING):
            self.run = lazystep().step(self.step)

    def step(self, x: Tensor) -> None:
        self.model(x).square().mean().backward()
        if self.optimizer is None:
            self.model.zero_grad()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _reduce_buckets(self, x: Tensor) -> None:
        works = [dist.all_reduce(buffer, async_op=True) for buffer in self._buffers]
        for work in works:
            assert work is not None
            work.wait()

    def turn(self, x: Tensor, num_steps: int) -> None:
        """Some steps, until they have run."""
        for _ in range(num_steps):
            self.run(x.to("lazy") if self.name == LAZY else x)
            if self.name == LAZY:
                lazystep().mark_step()
        if self.name in IS_LAZY:
            lazystep().wait_device_ops()

    def prepare(self, x: Tensor) -> None:
        """Train until nothing is compiled any more, and overlap has made its choice.

        All ranks take the same number of steps.
        """
        # A fixed number: a rank may hear of the choice a step later than another one.
        self.turn(x, NUM_TRIALS if self.handle else 8)
        if self.handle and self.handle.decision is None and dist.get_world_size() > 1:
            raise RuntimeError(f"overlap has not made its choice after {NUM_TRIALS} steps")
        if self.name in IS_LAZY:
            lazystep().wait_for_compile(BUILD_TIMEOUT)
            self.turn(x, 4)  # the first one is checked
            if not self.num_native:
                raise RuntimeError(f"not native after {BUILD_TIMEOUT:g} s")

    @property
    def num_native(self) -> float:
        return float(lazystep().metrics.counter_value("native_executions")) if self.name in IS_LAZY else 0.0


def lazystep() -> Any:
    """The package, which a rank without lazy steps does not load: it would register the device."""
    import lazystep

    return lazystep


class Rank:
    """One rank of one variant, in its own process. It takes turns together with the other ranks."""

    def __init__(self, place: str) -> None:
        variant, rank, size, address, port, interface = place.split("|")
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        torch.set_num_threads(1)
        timeout = timedelta(seconds=PEER_TIMEOUT)
        store = dist.TCPStore(address, int(port), int(size), is_master=rank == "0", timeout=timeout)
        dist.init_process_group(
            "gloo", store=store, rank=int(rank), world_size=int(size), timeout=timedelta(seconds=120)
        )
        self._variant = Variant(variant)
        self._x = torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(int(rank)))

    def work(self, task: str, num_steps: int = 0) -> Mapping[str, float]:
        variant, name = self._variant, self._variant.name
        if task == "prepare":
            variant.prepare(self._x)
            return {}
        waited = variant.handle.statistics.seconds_waiting if variant.handle else 0.0
        before = variant.num_native
        dist.barrier()
        start = time.perf_counter()
        variant.turn(self._x, num_steps)
        dist.barrier()
        numbers = {name: (time.perf_counter() - start) / num_steps}
        if name in IS_LAZY and variant.num_native - before < num_steps:
            raise RuntimeError("a step did not run natively")
        if variant.handle:
            waiting = (variant.handle.statistics.seconds_waiting - waited) / num_steps
            numbers[f"{name}: waiting"] = waiting
            numbers[f"{name}: overlaps"] = float(variant.handle.decision.overlaps)
        return numbers


class Ranks:
    """The ranks of one variant over one link. If `are_apart`, each of them is in a group of its own."""

    def __init__(
        self, module: str, variant: str, ends: Sequence[End], port: int, are_apart: bool = False
    ) -> None:
        self.peers = []
        for number, end in enumerate(ends):
            group = (
                f"0|1|{end.address}|{port + number}"
                if are_apart
                else (f"{number}|{len(ends)}|{ends[0].address}|{port}")
            )
            place = f"{variant}|{group}|{end.interface}"
            environ = {"OMP_NUM_THREADS": "1"}
            self.peers.append(Peer(module, place, PEER_TIMEOUT, end.prefix, environ=environ))
        self._threads = ThreadPoolExecutor(len(ends))

    def ask(self, **request: Any) -> Mapping[str, float]:
        """Ask all ranks at once. Returns what rank 0 says; raises what the first failing rank says."""
        return self.ask_all(**request)[0]

    def ask_all(self, **request: Any) -> list[Mapping[str, float]]:
        """Ask all ranks at once, for the answers of all."""
        return list(self._threads.map(lambda peer: peer.ask(**request), self.peers))

    def close(self) -> None:
        """Kill the processes. Threads that wait for them then end."""
        for peer in self.peers:
            peer.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def started(
    variants: Sequence[str], ends: Sequence[End], port: int, module: str = "benchmarks.links"
) -> Iterator[dict[str, Ranks]]:
    """The ranks of all variants over a link. The end of the `with` block kills them."""
    with contextlib.ExitStack() as stack:
        found = {}
        for number, name in enumerate(variants):
            found[name] = Ranks(module, name, ends, port + number)
            stack.callback(found[name].close)
        yield found


def measure_link(
    ends: Sequence[End], port: int, variants: Sequence[str], is_quick: bool, max_seconds: float = 110.0
) -> Measurements:
    """Prepare all variants one after the other, then let them take turns."""
    failures: dict[str, str] = {}
    with started(variants, ends, port) as ranks:
        for name in variants:
            try:
                ranks[name].ask(task="prepare")
            except PeerError as error:
                failures[name] = str(error)
                ranks[name].close()
        going = {name: one for name, one in ranks.items() if name not in failures}
        neighbours = Neighbours([peer for one in going.values() for peer in one.peers])
        num_steps = 2 if is_quick else 5

        def turn(one: Ranks) -> Callable[[], Mapping[str, float]]:
            return lambda: one.ask(task="turn", num_steps=num_steps)

        measured = interleave(
            {name: turn(one) for name, one in going.items()},
            num_warm_ups=1,
            num_repeats=2 if is_quick else 12,
            max_seconds=20 if is_quick else max_seconds,
            may_fail=list(going),
        )
        measured.failures |= failures
        measured.others = neighbours.share()
    return measured


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median of paired ratios and the two ends of its 95 % confidence interval, by bootstrap."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(4000))
    return statistics.median(ratios), medians[100], medians[-101]


def was_measured(m: Measurements, *names: str) -> bool:
    """Whether these variants took part in every round."""
    return all(name in m.samples and name not in m.failures for name in names)


def rate(m: Measurements, name: str, baseline: str) -> tuple[float, float, float] | None:
    """The rate of a variant, the baseline's = 1, with its interval; None if one of them is missing."""
    if not was_measured(m, name, baseline):
        return None
    pairs = zip(m.samples[baseline], m.samples[name], strict=True)
    return interval([base / ours for base, ours in pairs])


def best_other(m: Measurements) -> str | None:
    """The variant of others with the smallest median; None if one was not measured: it may be the best."""
    if not was_measured(m, *OTHERS):
        return None
    return min(OTHERS, key=lambda name: m.spread(name).median)


def bound(m: Measurements) -> float | None:
    """The longer one of computing alone and communicating alone, in seconds."""
    if not was_measured(m, COMPUTING, COMMUNICATING):
        return None
    return max(m.spread(name).median for name in (COMPUTING, COMMUNICATING))


def link_table(links: Mapping[str, Measurements], skipped: Mapping[str, str]) -> Table:
    rows = []
    for link, m in links.items():
        limit = bound(m)
        for variant in VARIANTS:
            if not was_measured(m, variant):
                rows.append([link, variant, m.failures.get(variant, "not measured"), *["-"] * 4])
                continue
            spread = m.spread(variant)
            overlaps = m.samples.get(f"{variant}: overlaps", [1.0])
            name = variant if all(overlaps) else f"{variant} (has switched itself off)"
            row = [link, name, spread.format(1e3, 1)]
            compared = rate(m, variant, BASELINES[variant]) if variant in BASELINES else None
            if compared:
                middle, low, high = compared
                row.append(f"{middle:.2f} [{low:.2f}, {high:.2f}] of {BASELINES[variant]}")
            else:
                row.append("-")
            row.append(f"{spread.median / limit:.2f}" if limit else "-")
            waiting = f"{variant}: waiting"
            row.append(m.spread(waiting).format(1e3, 1) if waiting in m.samples else "-")
            rows.append([*row, f"{m.others:.0%}"])
    rows += [[link, f"skipped: {reason}", *["-"] * 5] for link, reason in skipped.items()]
    megabytes = NUM_LAYERS * (WIDTH + 1) * WIDTH * 4 / 2**20
    note = (
        f"{NUM_LAYERS} linear layers of {WIDTH}, {megabytes:.0f} MiB of gradients in buckets of {BUCKET_MB} "
        f"MiB, batch {BATCH_SIZE}, AdamW; 2 ranks on one machine, one thread each. Rate: paired by round, "
        "median and 95 % confidence interval; above 1 is faster. Bound: the longer one of computing alone "
        "and communicating alone. Waiting: for reductions, inside backward."
    )
    columns = ["link", "variant", "ms a step", "rate", "bound = 1", "waiting, ms", "others' share"]
    return Table("A step over a limited link", columns, rows, note)


# -- goals -----------------------------------------------------------------------------------------

Links = Mapping[str, Measurements]


def _ahead(links: Links) -> Numbers:
    found: dict[str, float | None] = {}
    for link, m in links.items():
        best = best_other(m)
        compared = rate(m, CAPTURED, best) if best else None
        found[f"{link} ({best})"] = compared[0] if compared else None
    return found


def _bounded(links: Links) -> Numbers:
    found: dict[str, float | None] = {}
    for link, m in links.items():
        limit = bound(m)
        is_known = limit is not None and was_measured(m, CAPTURED)
        found[link] = m.spread(CAPTURED).median / limit if is_known and limit else None
    return found


def _overlapped(links: Links, end: int) -> Numbers:
    found: dict[str, float | None] = {}
    for link, m in links.items():
        compared = rate(m, OVERLAP, PLAIN)
        found[link] = compared[end] if compared else None
    return found


GOALS: list[Goal[Links]] = [
    Goal("the captured lazy step is ahead of the best of the others on each link", _ahead, at_least=1.0),
    Goal(
        "the captured lazy step takes at most 1.15 times the longer one of computing and communicating alone",
        _bounded,
        at_most=1.15,
    ),
    Goal(
        "overlap is not slower than plain DDP: the interval's upper end on each link",
        lambda links: _overlapped(links, 2),
        at_least=1.0,
    ),
    Goal(
        "overlap is ahead of plain DDP where the link is the bottleneck: the interval's lower end",
        lambda links: _overlapped({n: m for n, m in links.items() if n.startswith("1 ")}, 1),
        at_least=1.0,
    ),
]


def run(is_quick: bool, only: str = "") -> Report:
    facts = machine()
    links: dict[str, Measurements] = {}
    skipped: dict[str, str] = {}
    wanted = {"loopback": 0.0, "10 Gbit/s": 10.0, "1 Gbit/s": 1.0}
    for number, (name, gigabits) in enumerate(wanted.items()):
        if only and only != name:
            continue
        port = PORT + number * len(VARIANTS)
        try:
            with limited(gigabits) if gigabits else contextlib.nullcontext(LOOPBACK) as ends:
                links[name] = measure_link(ends, port, VARIANTS, is_quick)
        except (LinkError, PeerError) as error:
            skipped[name] = str(error)
    others = max((m.others for m in links.values()), default=0.0)
    tables = [to_table(GOALS, links, others), link_table(links, skipped)]
    return Report("links", "python -m benchmarks.links", facts, tables, links)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run: two rounds, nothing is written")
    parser.add_argument("--link", default="", help="this link alone; nothing is written")
    parser.add_argument("--peer", help="serve turns of one rank as JSON (used internally)")
    arguments = parser.parse_args()
    if arguments.peer:
        serve(Rank(arguments.peer).work)
        return
    report = run(arguments.quick, arguments.link)
    print(report.to_markdown())
    if not arguments.quick and not arguments.link:
        report.write()


if __name__ == "__main__":
    main()
