"""The builder process: reads requests from standard input, builds libraries, writes one answer per line.

    python -m lazystep.compile.worker

A request is a line of JSON: the program's text, its fixed scalars, the number of threads, Inductor's
options, a directory and, for a family, its fit. The answer says what was built, or why the build failed. A
request without a program has this process prepare for the first one.

The process has the priority of its parent. The steps that run meanwhile use all processors, so a build with a
lower one takes two to three times as long: the small MLP of the benchmarks was native after 92 s with
`SCHED_IDLE`, 58 s with `nice 10` and 37 s without, and its steps ran at half of eager's rate in each case.

The process ends with its parent: when the kernel signals the parent's death, or when standard input ends. It
kills its compilers then.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from .cache import LIBRARY, PROXY_NODES

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve requests until the parent process ends."""
    _end_with_parent()
    # Standard output is for answers only: output of compilers and torch goes to standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    while True:
        request = json.loads(requests.get())
        start, processor_start = time.perf_counter(), _processor_seconds()
        try:
            answer = _build(request) if "program" in request else _prepare(request)
        except BaseException as error:
            traceback.print_exc()
            text = str(error).strip() or type(error).__name__
            answer = {"error": text[:4000], "kind": _kind_of(error)}
            # Only the parent has the user's lines: it finds the line of the instruction at this position.
            answer["position"] = getattr(error, "position", None)
        answer["seconds"] = time.perf_counter() - start
        answer["processor_seconds"] = _processor_seconds() - processor_start
        answer["id"] = request["id"]
        answer["made"] = _take_made()
        print(json.dumps(answer), file=answers)


def _prepare(request: dict[str, Any]) -> dict[str, Any]:
    # What the first build needs; only a part of it is needed to compile a small graph.
    from . import lower, scalars, symbolic  # noqa: F401
    from .inductor import prepare

    directory = Path(request["directory"])
    try:
        prepare(_options(request), directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return {}


def _take_made() -> dict[str, int]:
    if "lazystep.compile.compilers" not in sys.modules:
        return {}  # the build failed before it came to the compiler
    from .compilers import take_made

    return take_made()


def _options(request: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in request["options"].items()}


def _build(request: dict[str, Any]) -> dict[str, Any]:
    import torch

    from ..family.plan import Region, fit_from_data
    from ..program.collectives import launches_of
    from ..program.serialize import from_json
    from ..program.signature import signature_of
    from .collectives import check_library
    from .inductor import compile_graph
    from .lower import lower
    from .scalars import fixed_slots
    from .symbolic import guards_of, lower_family

    torch.set_num_threads(request["num_threads"])
    program = from_json(request["program"])
    fixed = {int(slot): _number(text) for slot, text in request["fixed"].items()}
    signature = signature_of(program, fixed_slots(program))
    family = request.get("family")
    if family is None:
        graph, inputs = lower(program, signature, fixed)
    else:
        fit = fit_from_data(family)
        lowered = lower_family(program, signature, fixed, fit, family["numbers"])
        graph, inputs = lowered.graph, lowered.inputs
    num_nodes = len(graph.graph.nodes)
    directory = Path(request["directory"])
    options = _options(request)
    options["aot_inductor.output_path"] = str(directory / LIBRARY)
    compile_graph(graph, inputs, options)
    if not (directory / LIBRARY).exists():
        raise RuntimeError("the compiler made no library")
    answer: dict[str, Any] = {
        "proxy_ops": _proxy_ops(directory),
        "nodes": num_nodes,
        "wrapper_lines": sum(_num_lines(path) for path in directory.glob("*.wrapper.cpp")),
    }
    if launches_of(program):
        answer["collectives"] = check_library(program, directory, directory / PROXY_NODES)
    if family is not None:
        # Only now: the compiler adds guards, too.
        region = Region(fit, tuple(guards_of(lowered, family["members"])))
        answer["family"] = region.to_data()
    return answer


def _num_lines(path: Path) -> int:
    return path.read_text().count("\n")


def _processor_seconds() -> float:
    """The processor time of this process and of the compilers that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _number(text: str) -> Any:
    kind, _, value = text.partition(":")
    if kind == "float":
        return float.fromhex(value)
    return int(value) if kind == "int" else complex(value)


def _proxy_ops(directory: Path) -> list[str]:
    """The ops without a C interface, which the library runs through torch's dispatcher.

    Their list must be beside the library, under the library's name. Without the list, the library loads and
    then fails.
    """
    found = list(directory.glob("*.wrapper.json"))
    if not found:
        return []
    nodes = found[0].rename(directory / PROXY_NODES)
    return [node["node"]["target"] for node in json.loads(nodes.read_text())["nodes"]]


def _kind_of(error: BaseException) -> str:
    """`lowering`: this program can't be built; `family`: these programs can't share a library;
    `order`: its collectives came out in another order; `compiler`: the tools failed; `system`: the machine
    failed.
    """
    if type(error).__name__ == "LoweringError":
        return "lowering"
    if type(error).__name__ == "NoFamilyError":
        return "family"
    if type(error).__name__ == "OrderError":
        return "order"
    if isinstance(error, (OSError, MemoryError)) or "No space left" in str(error):
        return "system"
    return "compiler"


def _read(requests: queue.Queue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    _end()


def _end_with_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training loop
    signal.signal(signal.SIGTERM, lambda *_: _end())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end() -> None:
    # This process leads its own process group, so this also kills running compilers.
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
