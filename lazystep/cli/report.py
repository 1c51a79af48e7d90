"""`lazystep report`: write the HTML page of a run."""

from __future__ import annotations

from pathlib import Path

import click

from ..runs.chart_data import PageError
from ..runs.page import write_page


@click.command(short_help="Write the page of a run.")
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write the page; by default index.html in RUN_DIR.",
)
def report(run_dir: Path, output: Path | None) -> None:
    """Write one HTML page about the run in RUN_DIR, readable without a network.

    RUN_DIR is a directory that lazystep.RunDirectory or `lazystep run --report` has written. Any directory
    with a timeline.json of lazystep.profile, or a log (*.jsonl, *.csv) with a column "step", works too.
    """
    try:
        click.echo(write_page(run_dir, output))
    except (PageError, OSError) as error:
        raise click.ClickException(str(error)) from error
