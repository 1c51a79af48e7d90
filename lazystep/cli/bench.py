"""`lazystep bench`: the benchmarks of a source checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

_ROOT = Path(__file__).parents[2]


@click.command(short_help="Measure against eager and the peers.")
@click.argument("names", nargs=-1)
@click.option("--quick", is_flag=True, help="Smoke runs: the numbers mean nothing, and nothing is written.")
def bench(names: tuple[str, ...], quick: bool) -> None:
    """Run all benchmarks, or only NAMES (recording, closures, steps, ...). Needs a source checkout.

    Exit status 1 if a benchmark fails; the others still run.
    """
    package = _ROOT / "benchmarks"
    if not (package / "__main__.py").exists():
        raise click.ClickException(
            "there are no benchmarks here: they are part of the source tree, not of the installed package. "
            "Clone the repository and run `make bench` there"
        )
    for name in names:
        if not (package / f"{name}.py").exists():
            raise click.UsageError(f"there is no benchmark {name!r} in {package}")
    failed = []
    for module in [f"benchmarks.{name}" for name in names] or ["benchmarks"]:
        command = [sys.executable, "-m", module, *(["--quick"] if quick else [])]
        if subprocess.run(command, cwd=_ROOT, check=False).returncode:
            failed.append(module)
    if failed:
        raise click.ClickException(f"failed: {', '.join(failed)}")
