"""Draw one data-parallel lazy step as it ran: docs/distributed.svg.

    python -m benchmarks.picture

Two ranks train the model of benchmarks/links.py over 1 Gbit/s, or over the loopback if that link can't be
made, once on the reference executable and once natively. Each half of the picture shows a step of rank 0 from
the spans of `lazystep.profile`: the executor computes, waits and updates; each reduction has a lane, from its
launch to the end of the wait for it. Needs matplotlib (`pip install lazystep[bench]`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import links
from benchmarks.link import LOOPBACK, LinkError, limited
from benchmarks.links import CAPTURED, Ranks, lazystep
from benchmarks.timing import serve

PORT = 29711
PICTURE = Path(__file__).parents[1] / "docs" / "distributed.svg"
COLORS = {
    "forward, backward": "#2e6fbb",
    "wait": "#dddddd",
    "update, then backward": "#5b9e6f",
    "update": "#a3be8c",
    "reduction": "#d08770",
}
Numbers = Mapping[str, float]


class Rank(links.Rank):
    """A rank that gives the spans of its last step."""

    def work(self, task: str, num_steps: int = 0) -> Numbers:
        if task == "warm up":  # on the reference: there is no library to wait for
            self._variant.turn(self._x, 8)
            return {}
        if task != "spans":
            return super().work(task, num_steps)
        with tempfile.TemporaryDirectory() as directory:
            with lazystep().profile(Path(directory) / "trace.json") as timeline:
                self._variant.turn(self._x, 4)
            spans = timeline.spans()
        run = [span for span in spans if span.category == "execution"][-2]
        numbers = {"end": run.end - run.start}
        for span in spans:
            if span.category == "collective" and run.start <= span.start < run.end:
                row = span.row.rpartition(" ")[2]
                numbers[f"launch {row}"] = span.start - run.start
                numbers[f"arrival {row}"] = span.end - run.start
                numbers[f"waited {row}"] = span.args["waited"]
        return numbers


def record(tier: str, port: int) -> tuple[str, Numbers]:
    """The link, and the spans of a step of rank 0."""
    os.environ["LAZYSTEP_TIER"] = tier
    with contextlib.ExitStack() as stack:
        try:
            ends, link = stack.enter_context(limited(1.0)), "1 Gbit/s"
        except LinkError:
            ends, link = LOOPBACK, "loopback"
        ranks = stack.enter_context(contextlib.closing(Ranks("benchmarks.picture", CAPTURED, ends, port)))
        ranks.ask(task="warm up" if tier == "reference" else "prepare")
        return link, ranks.ask(task="spans")


def lanes(numbers: Numbers) -> Iterator[tuple[int, str, float, float]]:
    """The lane, kind, start and length of each bar. Lane 0 is the executor."""
    num_buckets = sum(name.startswith("launch") for name in numbers)
    last_launch = max(numbers[f"launch {bucket}"] for bucket in range(num_buckets))
    now = 0.0
    for bucket in range(num_buckets):
        arrival = numbers[f"arrival {bucket}"]
        waiting = arrival - numbers[f"waited {bucket}"]
        kind = "update" if now > last_launch else "update, then backward"
        yield 0, kind if bucket else "forward, backward", now, waiting - now
        yield 0, "wait", waiting, arrival - waiting
        launch = numbers[f"launch {bucket}"]
        yield bucket + 1, "reduction", launch, arrival - launch
        now = arrival
    yield 0, "update", now, numbers["end"] - now


def draw(halves: Mapping[str, Numbers], link: str) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    # The same input gives the same file.
    plt.rcParams["svg.hashsalt"] = "lazystep"
    figure, found = plt.subplots(len(halves), 1, figsize=(8, 2.6 * len(halves)), layout="constrained")
    for axes, (name, numbers) in zip(found, halves.items(), strict=True):
        names = ["executor"]
        for lane, kind, start, length in lanes(numbers):
            axes.barh(lane, length * 1e3, left=start * 1e3, color=COLORS[kind], height=0.7)
            if lane == len(names):
                names.append(f"reduction {lane - 1}")
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.invert_yaxis()
        axes.set_title(f"{name}: a step of rank 0 of 2, {link}", fontsize=9, loc="left")
    found[-1].set_xlabel("ms since the start of the step")
    patches: list[Any] = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    figure.legend(handles=patches, frameon=False, fontsize=8, ncols=5, loc="outside lower center")
    figure.savefig(PICTURE, facecolor="white", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", help="serve turns of one rank as JSON (used internally)")
    arguments = parser.parse_args()
    if arguments.peer:
        serve(Rank(arguments.peer).work)
        return
    link, reference = record("reference", PORT)
    link, native = record("auto", PORT + 1)
    draw({"reference executable": reference, "native library": native}, link)
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
