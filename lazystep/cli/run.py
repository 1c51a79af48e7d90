"""`lazystep run`: run an unchanged training script, then print a report."""

from __future__ import annotations

import sys
import traceback
import types
from contextlib import nullcontext
from pathlib import Path

import click

from ..errors import LazyStepError
from ..reads import wait_device_ops
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

    The report lists programs, compiles with reasons, syncs with lines, closures and waits. The script's
    output and errors are unchanged. So is its exit status, unless a step or closure failed and the script did
    not see the error: then it is 1.
    """
    try:
        with RunDirectory(directory, title=script.name) if directory else nullcontext():
            status = _execute(script, arguments)
            status = _drain() or status
    except LazyStepError as error:  # raised by the step that ended with the run
        traceback.print_exception(error)
        status = 1
    sys.stdout.flush()
    click.echo(f"\n-- lazystep: {script.name} ended with exit status {status} --")
    click.echo(facts.to_text(facts.collect()))
    if directory is not None:
        click.echo(f"report     {write_page(directory)}")
    sys.exit(status)


def _execute(script: Path, arguments: tuple[str, ...]) -> int:
    """Run the script as `__main__` and return its exit status. Prints its traceback as Python would."""
    module = types.ModuleType("__main__")
    # Not with runpy, which clears the module at the end: closures may still use it.
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
    """Wait for queued steps and closures, so that they are counted. Returns 1 if one of them has failed."""
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
        trace = trace.tb_next  # leave out lazystep's own frames
    traceback.print_exception(kind, error, trace)
