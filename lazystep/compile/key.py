"""The key of a library on disk: a digest of everything that determines the library's code.

That is the program's text, the values of its fixed scalars, the number of threads, and the tools: torch, the
compiler, the processor's features and Inductor's options.
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

# Must change when lazystep makes another library for the same program.
FORMAT = 9


class NoCompilerError(Exception):
    """There is no C++ compiler to build with."""


def inductor_options(num_threads: int) -> dict[str, Any]:
    """Inductor's options for every build.

    - `dynamic_threads`: a library built for a fixed number of threads crashes on more threads. Reading the
      number at run time cost nothing measurable on the benchmark models.
    - `layout_optimization` rewrites convolutions to channels last, which was slower on the benchmark's conv
      net.
    - `enable_line_tables`: nobody reads the line tables, and they take an eighth of the compiler's time.
    - `compile_wrapper_opt_level`: the wrapper calls kernels and frees memory. The small GPT's is compiled in
      3.3 s instead of the 5.2 s with O1, and it is what the build waits for in the end.
    - `vec_isa_ok`: trust the processor's own list of vector instructions. Otherwise Inductor makes a test
      build of six seconds, and if it fails for any reason, the process builds without vector instructions.
    """
    return {
        "cpp.threads": num_threads,
        "cpp.dynamic_threads": True,
        "cpp.cxx": (None, find_compiler()),
        "cpp.vec_isa_ok": True,
        "layout_optimization": False,
        "aot_inductor.enable_line_tables": False,
        "aot_inductor.compile_wrapper_opt_level": "Og",
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
    """The tools that a library depends on. The first call runs the compiler, to read its version."""
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
    """The key of the library for the program with this text."""
    described = {
        "environment": environment(),
        "options": inductor_options(num_threads),
        "fixed": {slot: repr(value) for slot, value in fixed.items()},
        "program": text,
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:40]


def family_key(skeleton: str, number: int, num_threads: int) -> str:
    """The key of the library with this number, of the family whose skeleton has this key."""
    return library_key(f"library {number} of the family {skeleton}", {}, num_threads)


def _cpu_flags() -> str:
    # Code is compiled with -march=native, so a library only fits processors with the same features.
    try:
        with open("/proc/cpuinfo") as file:
            return next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor()
