"""`torch._lazy.ir_cache`: the programs that this process knows."""

from __future__ import annotations

from pathlib import Path

from ...program.printer import to_dot as _to_dot
from ...runtime import runtime as _runtime
from ..names import Names

_names = Names(__name__)


@_names.does("`lazystep.debug.explain()`", "a graph for each program that is remembered, in one file")
def dump(dot_file_name: str) -> None:
    """Write the programs of the process, in order of appearance, as graphs in the dot language."""
    graphs = [_to_dot(executable.program) for executable in _runtime.remembered_programs()]
    Path(dot_file_name).write_text("\n".join([*graphs, ""]), encoding="utf-8")


@_names.does("a new process", "programs are found anew; captures, and libraries on the disk, stay")
def reset() -> None:
    """Forget the programs of this process. The next step is looked up anew: a cache miss."""
    with _runtime.recorder.lock:
        _runtime.programs.clear()
