"""Draw the results on disk: step time against model size, the cost of reporting, predictions for N ranks.

    python -m benchmarks.plots

Reads `results/*.json`, and writes `results/*.svg` and `docs/scaling.svg`. Needs matplotlib (`pip install
lazystep[bench]`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from .timing import RESULTS, Spread

SCALING = Path(__file__).parents[1] / "docs" / "scaling.svg"
COLORS = {"eager": "#888888", "torch.compile(step)": "#d08770", "lazystep step": "#2e6fbb"}


def load(name: str) -> dict[str, Any]:
    """A report from disk. Raises `FileNotFoundError` if there is none."""
    report: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return report


def draw_sizes() -> None:
    """Step time against width on logarithmic axes. Bars are quartiles."""
    measured = load("sizes")["measurements"]
    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for variant, color in COLORS.items():
        points = [
            (int(width), Spread.of(m["samples"][variant]))
            for width, m in measured.items()
            if variant in m["samples"] and variant not in m["failures"]
        ]
        widths = [width for width, _ in points]
        medians = [spread.median * 1e3 for _, spread in points]
        bars = [[(s.median - s.low) * 1e3 for _, s in points], [(s.high - s.median) * 1e3 for _, s in points]]
        axes.errorbar(widths, medians, bars, label=variant, color=color, marker="o", markersize=4, capsize=2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([int(width) for width in measured], list(measured))
    axes.set_xlabel("width of the GPT (4 layers)")
    axes.set_ylabel("ms a step")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(RESULTS / "sizes.svg", facecolor="white")


def draw_closures() -> None:
    """Step time with each way of reporting."""
    samples = load("closures")["measurements"]["all cores"]["samples"]
    names = [name for name in samples if name != "reports alone"][::-1]
    spreads = [Spread.of(samples[name]) for name in names]
    figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
    bars = [[(s.median - s.low) * 1e3 for s in spreads], [(s.high - s.median) * 1e3 for s in spreads]]
    colors = ["#888888" if name.startswith("eager") else "#2e6fbb" for name in names]
    axes.barh(names, [s.median * 1e3 for s in spreads], xerr=bars, color=colors, capsize=2)
    axes.set_xlabel("ms a step: small GPT, loss, gradient norms and histograms of every step")
    figure.savefig(RESULTS / "closures.svg", facecolor="white")


def draw_scaling() -> None:
    """Predicted step time against the number of ranks, for each link and both ways to reduce."""
    report = load("scaling")
    measured = report["measurements"]
    links = {name: m["samples"] for name, m in measured.items() if not name.endswith(" ranks")}
    if links:  # none if the link could not be made
        draw_predictions(links, report["machine"]["date"], max(m["others"] for m in measured.values()))


def draw_predictions(links: Mapping[str, Mapping[str, Sequence[float]]], date: str, others: float) -> None:
    """Write docs/scaling.svg from the predicted seconds of each curve, for 1, 2, 4, ... ranks, by link."""
    # The same input gives the same file.
    plt.rcParams["svg.hashsalt"] = "lazystep"
    colors = {"DDP, fused": "#888888", "overlap, fused": "#d08770", "lazy DDP, captured": "#2e6fbb"}
    figure, all_axes = plt.subplots(1, len(links), figsize=(5 * len(links), 3.8), layout="constrained")
    for axes, (link, curves) in zip(all_axes, links.items(), strict=True):
        for name, seconds in curves.items():
            variant, _, algorithm = name.rpartition(", ")
            style = "-" if algorithm == "ring" else "--"
            ranks = [2**exponent for exponent in range(len(seconds))]
            axes.plot(ranks, [s * 1e3 for s in seconds], style, color=colors[variant], label=name)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"ranks, {link}")
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("predicted ms a step")
    all_axes[0].legend(frameon=False, fontsize=8)
    measured = f"timelines and a link that were measured on {date}"
    figure.suptitle(f"From {measured}; others used {others:.0%} of the processor", fontsize=9)
    figure.savefig(SCALING, facecolor="white", metadata={"Date": None})


def main() -> None:
    draw_sizes()
    draw_closures()
    if (RESULTS / "scaling.json").exists():
        draw_scaling()


if __name__ == "__main__":
    main()
