"""The C++ compiler in the builder process: what libraries share is compiled once, the rest side by side.

Every call of the compiler that Inductor makes comes through `_run`, as a command line:

- Precompiled headers are kept in the setting `header_dir`, for all processes. Inductor would keep them in the
  system's temporary directory, where another user could have put them.
- Most of a small library's wrapper is the same text in every library: torch's C interface, and the templates
  of its base class. It is compiled once, to an object that is kept beside the headers.
- Both are written under a temporary name and renamed, because the process may be killed at any moment.
- Headers, interface, wrapper and kernels are compiled at the same time, in as many processes as there are
  processors. The command that links a library waits for them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import os
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import filelock
import torch
from torch._inductor import codecache, cpp_builder

from ..config import settings

_HEADER, _WRAPPER, _KERNELS = ".h.gch", ".wrapper.o", ".kernel.o"
_BASE = "torch::aot_inductor::AOTInductorModelBase<torch::aot_inductor::AOTInductorModel>"
# In place of the interface: its includes, and that the templates are in another object.
_DECLARATION = f"""
#include <iostream>
#include <string>
#include <unordered_map>
#include <vector>
extern template class {_BASE};
"""
_DEFINITION = f"#include <torch/csrc/inductor/aoti_include/cpu.h>\ntemplate class {_BASE};\n"

Job = concurrent.futures.Future[None]

_compile = cpp_builder.run_compile_cmd
_jobs: dict[str, Job] = {}  # by the file that they make
_interfaces: dict[str, str] = {}  # by wrapper: the object to link with it
_made: list[str] = []
_preparing = threading.Event()


class _Prepared(BaseException):
    """Ends the build inside `preparing`. No `Exception`, which Inductor would wrap in one of its own."""


@contextlib.contextmanager
def preparing() -> Iterator[None]:
    """Inside the block a build starts to compile what all libraries share, and ends before anything else."""
    _preparing.set()
    try:
        with contextlib.suppress(_Prepared):
            yield
    finally:
        _preparing.clear()


def take_made() -> dict[str, int]:
    """How many headers and interfaces this process has compiled since the last call."""
    made = [_made.pop() for _ in range(len(_made))]
    return {kind: made.count(kind) for kind in ("headers", "interfaces")}


def change_torch() -> None:
    """Have Inductor compile through this module."""
    cpp_builder.run_compile_cmd = _run
    if settings.header_dir:
        codecache._HEADER_DIR = settings.header_dir
        codecache._HEADER_LOCK_DIR = str(Path(settings.header_dir) / "locks")


def _run(cmd_line: str, cwd: str) -> None:
    words = shlex.split(cmd_line)
    target = words[words.index("-o") + 1] if "-o" in words else ""
    if target.endswith(_HEADER):
        _submit(target, functools.partial(_make_once, "headers", words, target))
    elif target.endswith(_WRAPPER):
        header = _jobs.get(f"{words[words.index('-include') + 1]}.gch") if "-include" in words else None
        _share_interface(words, target, header)
        if _preparing.is_set():
            raise _Prepared
        _submit(target, functools.partial(_make, words, target), header)
    elif target.endswith(_KERNELS):
        header = _jobs.get(f"{words[words.index('-include') + 1]}.gch") if "-include" in words else None
        _submit(target, functools.partial(_make, words, target), header)
    else:
        objects = [word for word in words if word in _jobs]
        shared = [_interfaces.pop(word) for word in objects if word in _interfaces]
        for needed in (*objects, *shared):
            job = _jobs[needed] if needed in shared else _jobs.pop(needed)
            job.result()
        _compile(shlex.join([*words[:1], *shared, *words[1:]]), cwd)


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    # A job waits only for jobs that were submitted before it, so any number of threads is enough.
    return concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0)), "compiler")


def _submit(target: str, make: Callable[[], None], needed: Job | None = None) -> None:
    def work() -> None:
        if needed is not None:
            needed.result()
        make()

    _jobs[target] = _pool().submit(work)


def _make(words: Sequence[str], target: str) -> None:
    _compile(shlex.join(words), os.path.dirname(target))


def _make_once(kind: str, words: Sequence[str], target: str) -> None:
    """Compile a file that other processes use, too. Only a whole file ever has its name."""
    with filelock.FileLock(f"{target}.lock", mode=0o600):
        if os.path.exists(target):
            return
        temporary = f"{target}.{os.getpid()}"
        try:
            _make([temporary if word == target else word for word in words], temporary)
            os.replace(temporary, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(temporary)
    _made.append(kind)


def _share_interface(words: list[str], target: str, header: Job | None) -> None:
    """Take the text that all wrappers share out of this one, and have the object made that has it."""
    (source,) = (Path(word) for word in words if word.endswith(".wrapper.cpp"))
    text, interface = source.read_text(), _interface_text()
    if not settings.header_dir or text.count(interface) != 1:
        return  # another release of torch: the wrapper is compiled as it is
    source.write_text(text.replace(interface, _DECLARATION))
    flags = [word for word in words if word not in (str(source), target)]
    compiler = cpp_builder.get_compiler_version_info(words[0])
    key = hashlib.sha256("\0".join([interface, *flags, compiler, torch.__version__]).encode()).hexdigest()
    made = Path(settings.header_dir) / f"interface-{key[:40]}.o"
    if str(made) not in _jobs:
        own = made.with_suffix(".cpp")
        temporary = own.with_suffix(f".{os.getpid()}")
        temporary.write_text(_DEFINITION + interface)
        os.replace(temporary, own)
        renames = {str(source): str(own), target: str(made)}
        command = [renames.get(word, word) for word in words]
        _submit(str(made), functools.partial(_make_once, "interfaces", command, str(made)), header)
    _interfaces[target] = str(made)


@functools.cache
def _interface_text() -> str:
    path = Path(codecache.__file__).parent / "codegen" / "aoti_runtime" / "interface.cpp"
    # As `IndentedBuffer.splice` writes it.
    return path.read_text().rstrip()
