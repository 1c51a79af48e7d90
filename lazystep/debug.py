"""Inspection: the recorded program, the programs so far and their tiers, and a timeline.

Nothing here runs a program. Only `profile` waits, at the end of its block.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from . import metrics, timeline
from .errors import LazyStepError
from .program.printer import to_dot
from .program.program import Program
from .record import _recorder
from .record.assemble import assemble
from .record.tensor import handle_of
from .runtime import runtime
from .step_closures import get_device_context
from .tiers.history import explain as explain_programs

__all__ = ["dump_ir", "explain", "last_program", "pending_program", "profile", "render_ir_graph"]


def pending_program(tensors: Sequence[torch.Tensor]) -> Program:
    """The program that would compute these tensors, from the recording since the last barrier.

        loss = loss_fn(model(x), y)
        print(lazystep.debug.pending_program([loss]))

    Records nothing and runs nothing. A tensor that already has its value is not part of the program.
    """
    handles = [handle_of(t) for t in tensors]
    with runtime.recorder.lock:
        known = _recorder.peek()
        wanted = [i for h in handles if (i := _recorder.index_in_current(h)) >= 0]
        return assemble(known.entries, known.sources, tuple(dict.fromkeys(wanted)))


def dump_ir(tensors: Sequence[torch.Tensor], format: str = "text") -> str:
    """The pending program of these tensors, as `"text"` or as a `"dot"` graph. Runs nothing.

    For example:

        print(lazystep.debug.dump_ir([loss]))
    """
    if format == "text":
        return str(pending_program(tensors))
    if format == "dot":
        return to_dot(pending_program(tensors))
    raise ValueError(f"format {format!r}: expected 'text' or 'dot'")


def render_ir_graph(tensors: Sequence[torch.Tensor]) -> str:
    """The pending program of these tensors as a graph in the dot language. Runs nothing.

    For example:

        Path("loss.dot").write_text(lazystep.debug.render_ir_graph([loss]))     # then: dot -Tsvg loss.dot
    """
    return dump_ir(tensors, "dot")


def last_program() -> Program | None:
    """The program of the step that was queued last; None before the first step. Does not wait.

    For example:

        lazystep.mark_step()
        print(lazystep.debug.last_program())
    """
    return runtime.last_program


def explain() -> str:
    """Explain as text which programs exist and why, on which tier each runs and why, which programs share a
    library or why they share none, and which lines wait.

        print(lazystep.debug.explain())

    Does not synchronize: the counts include only steps that have already run.
    """
    rows = [explain_programs(runtime.remembered_programs())]
    rows += runtime.tiers.families.describe()
    lines = metrics.synchronizations()
    if lines:
        rows.append("lines that wait for values:")
        rows += [f"  {count} times {reason} at {line}" for reason, line, count in lines]
    return "\n".join(rows)


@contextmanager
def profile(path: str | Path, *, max_spans: int = 1_000_000) -> Iterator[timeline.Timeline]:
    """Write a Chrome trace of the block to `path`: open it in ui.perfetto.dev or chrome://tracing.

        with lazystep.profile("trace.json") as timeline:
            for x, y in loader:
                train_step(x, y)
            with timeline.span("evaluation"):
                evaluate()

    The trace has one row per thread. It shows recording, replays, barriers and waits (with the user's line)
    on the training thread; each execution with its step, tier and program; closures; builds, as this process
    sees them; and DDP's buckets under `lazystep.overlap`. Clock, process numbers and thread numbers are those
    of `torch.profiler`'s trace, so the two traces line up. The last `max_spans` spans are kept.

    At the end the block waits for queued steps and closures, so that the trace includes them. Their errors
    stay for the next barrier. A block that raises does not wait, but still writes its trace. Only one profile
    can run at a time. A path that can't be written is an error at the start.
    """
    if timeline.active is not None:
        raise LazyStepError("a profile is being taken already: there is one at a time")
    with open(path, "w", encoding="utf-8") as file:
        timeline.active = taken = timeline.Timeline(max_spans)
        try:
            yield taken
            runtime.executor.wait_idle()
            get_device_context().async_handler.wait_idle()
        finally:
            timeline.active = None
            json.dump(taken.to_chrome_trace(), file)
