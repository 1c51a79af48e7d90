"""`lazystep demo`: train a small GPT for about two minutes, and write a report."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command(short_help="Train a small GPT, look on, resume, report.")
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=90.0, show_default=True, help="How long to train."
)
@click.option("--steps", type=click.IntRange(min=2), help="Stop after this many steps, if that comes first.")
@click.option("--quick", is_flag=True, help="A smoke run: 40 steps, if not --steps, and a short sample.")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-report"),
    show_default=True,
    help="Where the report, logs and the checkpoint go.",
)
def demo(seconds: float, steps: int | None, quick: bool, directory: Path) -> None:
    """Train a byte-level GPT on the source of Python's standard library, and write a report.

    Steps run on the reference executable until a native library has been built in the background. Logs are
    closures on a worker thread. Half-way, the demo writes a checkpoint and resumes from it. Exit status 1 if
    the loss on held-out files did not fall, or if the resumed state differs from the saved one.
    """
    from ..demo.run import run_demo  # only needed to run the demo, not for --help

    try:
        is_good = run_demo(directory, seconds, steps or (40 if quick else None), 40 if quick else 200)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(130)
    sys.exit(0 if is_good else 1)
