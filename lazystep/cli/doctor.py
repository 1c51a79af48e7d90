"""`lazystep doctor`: what works on this machine, what won't, and what to do about it."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import torch

from .. import config, metrics
from .._version import __version__
from ..barrier import mark_step
from ..compile.cache import CacheError, LibraryCache, cache_directory
from ..compile.key import NoCompilerError, environment, find_compiler
from ..extensions import PLACES, RECORDER, RUNNER, WITNESS, ExtensionError
from ..openmp import can_release
from ..reads import wait_for_compile
from ..runs.facts import changed_settings
from ..runtime import runtime
from ..tiers.history import describe

_TORCH = ((2, 13), (2, 16))  # the bounds in pyproject.toml: from, and up to but without
_PYTHONS = ((3, 11), (3, 12), (3, 13))
_MIN_FREE = 500_000_000  # a build's own files, and room for libraries


@dataclasses.dataclass
class Finding:
    """What a check has found: `good`, a `note` (an optional part), or a `problem`: something won't work."""

    state: str
    text: str


@click.command(short_help="Check what works on this machine.")
@click.option("--build", is_flag=True, help="Build a small step natively, too: half a minute.")
def doctor(build: bool) -> None:
    """Check what lazystep needs: torch, compiler, cache directory, threads, extensions, extras.

    Exit status 1 if something won't work. Changes nothing but an empty cache directory.
    """
    checks = [_software, _device, _compiler, _cache, _threads, _extensions, _extras, _settings]
    problems = 0
    for check in [*checks, *([_native_step] if build else [])]:
        for finding in _attempt(check):
            problems += finding.state == "problem"
            color = {"good": "green", "note": "yellow", "problem": "red"}[finding.state]
            click.echo(f"{click.style(f'{finding.state:<8}', fg=color)} {finding.text}")
    if problems:
        click.echo(f"\nproblems: {problems}. Each says above what won't work, and the way out")
        sys.exit(1)
    click.echo("\neverything that training needs works here")


def _attempt(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:  # a check that breaks is a finding, not the end of the others
        yield Finding("problem", f"{check.__name__.strip('_')}: {type(error).__name__}: {error}")


def _software() -> Iterator[Finding]:
    yield Finding(
        "good", f"lazystep {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    if not _TORCH[0] <= _release(torch.__version__) < _TORCH[1]:
        wanted = ">={}.{},<{}.{}".format(*_TORCH[0], *_TORCH[1])
        remedy = f"lazystep is made for {wanted}; pip install 'torch{wanted}'"
        yield Finding("problem", f"torch {torch.__version__}: {remedy}")
    if _release(platform.python_version()) not in _PYTHONS:
        known = ", ".join("{}.{}".format(*python) for python in _PYTHONS)
        yield Finding("note", f"Python {platform.python_version()}: lazystep was tried with {known}")


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _device() -> Iterator[Finding]:
    x = torch.ones(3, device="lazy", requires_grad=True)
    loss = (2 * x).sum()
    loss.backward()
    mark_step(wait=True)
    assert x.grad is not None
    is_right = loss.item() == 6.0 and x.grad.tolist() == [2.0, 2.0, 2.0]
    if is_right:
        yield Finding("good", "lazy device: a step with a backward pass was recorded, run and read")
    else:
        yield Finding("problem", "lazy device: a small step gave wrong numbers; please report this")


def _compiler() -> Iterator[Finding]:
    try:
        compiler = find_compiler()
    except NoCompilerError as error:
        yield Finding("problem", f"compiler: {error}")
        return
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory, "a.cpp"), Path(directory, "a.so")
        source.write_text('#include <omp.h>\nextern "C" int f() { return omp_get_max_threads(); }\n')
        command = [compiler, "-shared", "-fPIC", "-fopenmp", str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding(
            "problem", f"compiler: {compiler} can't build an OpenMP library ({reason}): no native steps"
        )
    else:
        yield Finding("good", f"compiler: {compiler}, {environment()['compiler']}: native steps can be built")


def _cache() -> Iterator[Finding]:
    root = cache_directory()
    try:
        cache = LibraryCache.open(root)
        cache.temporary_directory().rmdir()
    except CacheError as error:
        yield Finding("problem", f"cache: {error}: libraries are not kept, each process builds anew")
        return
    entries, free = cache.entries(), shutil.disk_usage(root).free
    size = sum(entry.nbytes for entry in entries) / 1e6
    mode = root.stat().st_mode & 0o777
    text = f"cache: {root} (mode {mode:o}), {len(entries)} libraries, {size:.0f} MB, {free / 1e9:.1f} GB free"
    if free < _MIN_FREE:
        variable = config.variable("cache_dir")
        text += f": too little for a build; free some, or set {variable} to a directory with more"
    yield Finding("good" if free >= _MIN_FREE else "problem", text)


def _threads() -> Iterator[Finding]:
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    text = f"threads: {threads} for steps, {processors} processors"
    if threads > processors:
        yield Finding(
            "note", f"{text}: more threads than processors are slow; set OMP_NUM_THREADS={processors}"
        )
    else:
        yield Finding("good", text)
    if not can_release():
        yield Finding(
            "note", "threads: torch's OpenMP can't give its threads back: CPU work beside steps slows them"
        )


def _extensions() -> Iterator[Finding]:
    for extension in (RECORDER, RUNNER, PLACES, WITNESS):
        try:
            built = extension.load()
        except ExtensionError as error:
            yield Finding("problem", f"extension: {error}")
        else:
            release = f"torch {built.torch_version}" if extension.needs_torch else "any torch"
            yield Finding("good", f"extension: {extension.name}, built for {release}")
            if extension.module == WITNESS.module and not built.supported:
                text = f"captures need CPython {built.versions}; here every call of a step is recorded"
                yield Finding("note", f"extension: {text}")


def _extras() -> Iterator[Finding]:
    for module, what, extra in (
        ("tensorboard", "report.TensorBoardLog", "tensorboard"),
        ("rich", "report.ProgressBar", "progress"),
    ):
        if importlib.util.find_spec(module) is None:
            yield Finding("note", f"{what} needs {module}: pip install 'lazystep[{extra}]'")


def _settings() -> Iterator[Finding]:
    for name, value in changed_settings().items():
        yield Finding("note", f"setting {name} = {value} ({config.variable(name)})")
    if config.settings.tier == "reference":
        yield Finding("note", "tier = reference: nothing is built, all steps run op by op")


def _native_step() -> Iterator[Finding]:
    weight = torch.ones(8, device="lazy")
    with config.override(tier="native", build_after=1):
        for _ in range(3):
            weight.mul_(0.5).add_(1.0)
            mark_step(wait=True)
        wait_for_compile()
    if metrics.counter_value("native_executions") and weight.tolist() == [1.875] * 8:
        yield Finding("good", "native step: one was built, compared with the reference, and run")
    else:
        standing = describe(runtime.remembered_programs())[-1].standing
        yield Finding("problem", f"native step: not built, or wrong: it {standing}. Training goes on without")
