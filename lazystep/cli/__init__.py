"""The command line, one file per command. Exit status: 0 for success, 1 for a failure, 2 for wrong usage."""

from __future__ import annotations

import click

from .._version import __version__
from .bench import bench
from .cache import cache
from .demo import demo
from .doctor import doctor
from .report import report
from .run import run


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """lazystep: each training step is one program, compiled in the background.

    Begin with `lazystep doctor`, then `lazystep demo`. `lazystep run train.py` runs your own script and
    prints a report.
    """


for command in (demo, doctor, run, report, cache, bench):
    main.add_command(command)
