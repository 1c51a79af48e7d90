"""`lazystep cache`: list, show, verify and remove the libraries on disk."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import click

from ..compile.cache import CacheError, Entry, LibraryCache, cache_directory


@click.group()
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="The cache directory; by default the one that training uses.",
)
@click.pass_context
def cache(context: click.Context, directory: Path | None) -> None:
    """List, show, verify and remove the libraries on disk."""
    root = directory or cache_directory()
    if not root.exists():
        context.obj = LibraryCache(root)  # no cache yet: an empty list, not an error
        return
    try:
        context.obj = LibraryCache.open(root)
    except CacheError as error:
        raise click.ClickException(str(error)) from error


@cache.command("ls")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.pass_obj
def list_entries(libraries: LibraryCache, as_json: bool) -> None:
    """List the libraries, the most recently used first."""
    entries = sorted(libraries.entries(), key=lambda entry: -entry.last_used)
    if as_json:
        for entry in entries:
            row = {"key": entry.key, "nbytes": entry.nbytes, "last_used": entry.last_used}
            click.echo(json.dumps({**row, "torch": entry.manifest.get("torch")}))
        return
    for entry in entries:
        age = (time.time() - entry.last_used) / 3600
        click.echo(f"{entry.key}  {entry.nbytes / 1e6:6.1f} MB  used {age:7.1f} h ago  {_summary(entry)}")
    total = sum(entry.nbytes for entry in entries) / 1e6
    click.echo(f"{len(entries)} libraries, {total:.1f} MB in {libraries.root}")


@cache.command("show")
@click.argument("key")
@click.pass_obj
def show_entry(libraries: LibraryCache, key: str) -> None:
    """Show how a library was built, and its program. The first characters of KEY are enough."""
    entry = _find(libraries, key)
    for name, value in entry.manifest.items():
        if name != "program":
            click.echo(f"{name}: {value if isinstance(value, str) else json.dumps(value)}")
    click.echo(entry.manifest.get("program", "(no program in the manifest)"))


@cache.command("verify")
@click.pass_obj
def verify_entries(libraries: LibraryCache) -> None:
    """Compare every file with its digest. Exit status 1 if an entry is damaged."""
    damaged = 0
    for entry in libraries.entries():
        problem = libraries.verify(entry.key)
        damaged += bool(problem)
        click.echo(f"{entry.key}  {problem or 'good'}")
    click.echo(f"{damaged} damaged")
    if damaged:
        sys.exit(1)


@cache.command("clear")
@click.argument("key", required=False)
@click.pass_obj
def clear_entries(libraries: LibraryCache, key: str | None) -> None:
    """Remove one library, or all. Running processes keep the libraries that they have loaded."""
    entries = libraries.entries() if key is None else [_find(libraries, key)]
    for entry in entries:
        libraries.remove(entry.key)
    if key is None:
        # Inductor's own intermediate files.
        shutil.rmtree(libraries.root / "inductor", ignore_errors=True)
    click.echo(f"removed {len(entries)}, {sum(entry.nbytes for entry in entries) / 1e6:.1f} MB")


def _find(libraries: LibraryCache, key: str) -> Entry:
    found = [entry for entry in libraries.entries() if entry.key.startswith(key)]
    if len(found) != 1:
        what = f"{len(found)} libraries have keys" if found else "no library has a key"
        raise click.ClickException(f"{what} that begin with {key!r}; see `lazystep cache ls`")
    return found[0]


def _summary(entry: Entry) -> str:
    if not entry.manifest:
        return "damaged"
    lines = str(entry.manifest.get("program", "")).count("\n")
    return f"{lines} lines, built in {entry.manifest.get('build_seconds', 0):.0f} s"
