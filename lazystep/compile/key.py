"""The name of a library on disk: a digest of everything that decides what is in it.

The program's text, the scalars that are fixed in it, the number of threads that its loops were cut
for, and the tools that made it: torch, the compiler, the processor's features, Inductor's options.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

import torch

# Changes whenever the same key would stand for another library.
FORMAT = 3


class NoCompilerError(Exception):
    """There is no C++ compiler to build with."""


def inductor_options(num_threads: int) -> dict[str, Any]:
    """What Inductor is told for every build.

    `dynamic_threads`: a library built for a fixed count crashes when it runs on more threads; one that
    asks at run time cost nothing measurable on the benchmark models. `layout_optimization` rewrites
    convolutions to channels last, which lost on the benchmark's conv net. Line tables, which nobody looks at,
    take an eighth of the compiler's time. `vec_isa_ok`: the processor's vectors are taken as it states them,
    without a trial build of six seconds, whose failure for any other reason leaves a process without vectors.
    """
    return {
        "cpp.threads": num_threads,
        "cpp.dynamic_threads": True,
        "cpp.cxx": (None, find_compiler()),
        "cpp.vec_isa_ok": True,
        "layout_optimization": False,
        "aot_inductor.enable_line_tables": False,
        "compile_threads": 1,
        "fx_graph_cache": False,
    }


@functools.cache
def find_compiler() -> str:
    """The path of the C++ compiler: `$CXX` or g++. Raises `NoCompilerError`."""
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        raise NoCompilerError(
            f"there is no C++ compiler {name!r} on the PATH, so no step is built: the numbers are the same, "
            "the steps slower. Install g++ or set CXX to a compiler; LAZYSTEP_TIER=reference silences this"
        )
    return path


@functools.cache
def environment() -> Mapping[str, str]:
    """The tools that a library depends on. Runs the compiler once, to ask for its version."""
    compiler = find_compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=False)
    return {
        "format": str(FORMAT),
        "torch": torch.__version__,
        "compiler": version.stdout.partition("\n")[0],
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_features": hashlib.sha256(_cpu_flags().encode()).hexdigest()[:16],
    }


def library_key(text: str, fixed: Mapping[int, Any], num_threads: int) -> str:
    """The digest that names the library of the program with this text."""
    described = {
        "environment": environment(),
        "options": inductor_options(num_threads),
        "fixed": {slot: repr(value) for slot, value in fixed.items()},
        "program": text,
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:40]


def _cpu_flags() -> str:
    # The compiler is told -march=native: a library fits processors with the same features alone.
    try:
        with open("/proc/cpuinfo") as file:
            return next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor()
