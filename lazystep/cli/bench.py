"""`lazystep bench`: the benchmarks of a source checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

_ROOT = Path(__file__).parents[2]
_NAMES = ("recording", "closures", "overlap", "steps")


@click.command(short_help="Measure against eager and the peers.")
@click.argument("names", nargs=-1, type=click.Choice(_NAMES))
@click.option("--quick", is_flag=True, help="Smoke runs: the numbers mean nothing.")
def bench(names: tuple[str, ...], quick: bool) -> None:
    """Measure against eager and the peers: all benchmarks, or those named. Needs a source checkout.

    Each is a process of its own. Exit status 1 if one of them fails; the others run all the same.
    """
    if not (_ROOT / "benchmarks" / "__init__.py").exists():
        raise click.ClickException(
            "there are no benchmarks here: they are part of the source tree, not of the installed package. "
            "Clone the repository and run `make bench` there"
        )
    failed = []
    for name in names or _NAMES:
        command = [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if quick else [])]
        if subprocess.run(command, cwd=_ROOT, check=False).returncode:
            failed.append(name)
    if failed:
        raise click.ClickException(f"failed: {', '.join(failed)}")
