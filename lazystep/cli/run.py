"""`lazystep run`: a training script as it is, then what became of it."""

from __future__ import annotations

import sys
import traceback
import types
from contextlib import nullcontext
from pathlib import Path

import click

from ..barrier import wait_device_ops
from ..errors import LazyStepError
from ..runs import facts
from ..runs.directory import RunDirectory
from ..runs.page import write_page
from ..step_closures import flush_step_closures


@click.command(
    short_help="Run a training script, then say what became of it.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--report",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Take a profile as well, and write the page of the run into this directory.",
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def run(directory: Path | None, script: Path, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT with its ARGS as `python SCRIPT ARGS` does, then print the closing report.

    The report: programs, compiles with reasons, syncs with lines, closures, waits. The script's output,
    errors and exit status are its own; a step or closure that failed and that nobody looked at makes it 1.
    """
    try:
        with RunDirectory(directory, title=script.name) if directory else nullcontext():
            status = _execute(script, arguments)
            status = _drain() or status
    except LazyStepError as error:  # a step that the end of the run has cut
        traceback.print_exception(error)
        status = 1
    sys.stdout.flush()
    click.echo(f"\n-- lazystep: {script.name} ended with exit status {status} --")
    click.echo(facts.to_text(facts.collect()))
    if directory is not None:
        click.echo(f"report     {write_page(directory)}")
    sys.exit(status)


def _execute(script: Path, arguments: tuple[str, ...]) -> int:
    """Run the script as `__main__`; its exit status. Prints its traceback as Python would."""
    module = types.ModuleType("__main__")
    # Not by runpy, which takes the module apart in the end: closures may still run in it.
    module.__dict__.update(__file__=str(script), __builtins__=__builtins__)
    sys.modules["__main__"] = module
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        exec(compile(script.read_bytes(), str(script), "exec"), module.__dict__)
    except SystemExit as request:
        if request.code is None or isinstance(request.code, int):
            return request.code or 0
        print(request.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        _print_error(script)
        return 130
    except BaseException:
        _print_error(script)
        return 1
    return 0


def _drain() -> int:
    """Wait for what is queued, so that it is counted. 1 if something has failed in the background."""
    status = 0
    for wait in (wait_device_ops, flush_step_closures):
        try:
            wait()
        except LazyStepError as error:
            traceback.print_exception(error)
            status = 1
    return status


def _print_error(script: Path) -> None:
    kind, error, trace = sys.exc_info()
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next  # our own frames are none of the script's business
    traceback.print_exception(kind, error, trace)
