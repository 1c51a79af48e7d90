"""Draw the results on disk: step time against model size, and the cost of reporting.

    python -m benchmarks.plots

Reads `results/*.json` and writes `results/*.svg`. Needs matplotlib (`pip install lazystep[bench]`).
"""

from __future__ import annotations

import json
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from .timing import RESULTS, Spread

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
    samples = load("closures")["measurements"]["all"]["samples"]
    names = list(samples)[::-1]
    spreads = [Spread.of(samples[name]) for name in names]
    figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
    bars = [[(s.median - s.low) * 1e3 for s in spreads], [(s.high - s.median) * 1e3 for s in spreads]]
    colors = ["#888888" if name.startswith("eager") else "#2e6fbb" for name in names]
    axes.barh(names, [s.median * 1e3 for s in spreads], xerr=bars, color=colors, capsize=2)
    axes.set_xlabel("ms a step: small GPT, loss, gradient norms and histograms of every step")
    figure.savefig(RESULTS / "closures.svg", facecolor="white")


def main() -> None:
    draw_sizes()
    draw_closures()


if __name__ == "__main__":
    main()
