"""Looking at what is recorded, at what became of it, and at when: nothing here runs anything."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from . import history, metrics, timeline
from .barrier import handle_of, runtime
from .errors import LazyStepError
from .program.printer import to_dot
from .program.program import Program
from .record.assemble import assemble
from .step_closures import get_device_context

__all__ = ["dump_ir", "explain", "last_program", "pending_program", "profile", "render_ir_graph"]


def pending_program(tensors: Sequence[torch.Tensor]) -> Program:
    """The program that would compute these tensors now, as recorded since the last barrier.

        loss = loss_fn(model(x), y)
        print(lazystep.debug.pending_program([loss]))

    Records nothing, runs nothing. A tensor that has its value already is not part of it.
    """
    handles = [handle_of(t) for t in tensors]
    with runtime.recorder.lock:
        known = runtime.recorder.peek()
        wanted = [i for h in handles if (i := runtime.recorder.index_in_current(h)) >= 0]
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
    """The program of the step that was queued last; None before the first one. Does not wait for it.

    For example:

        lazystep.mark_step()
        print(lazystep.debug.last_program())
    """
    return runtime.last_program


def explain() -> str:
    """In plain words: which programs there are and why, on which tier each runs and why, which lines wait.

        print(lazystep.debug.explain())

    Does not synchronize: counts include what has run so far.
    """
    rows = [history.explain(runtime.remembered_programs())]
    lines = metrics.synchronizations()
    if lines:
        rows.append("lines that wait for values:")
        rows += [f"  {count} times {reason} at {line}" for reason, line, count in lines]
    return "\n".join(rows)


@contextmanager
def profile(path: str | Path, *, max_spans: int = 1_000_000) -> Iterator[timeline.Timeline]:
    """Write a Chrome trace of everything in the block: open it at ui.perfetto.dev or chrome://tracing.

        with lazystep.profile("trace.json") as timeline:
            for x, y in loader:
                train_step(x, y)
            with timeline.span("evaluation"):
                evaluate()

    A row per thread: recording and replays, barriers and waits (with the line that asked) on the training
    thread; each execution with its step, tier and program; closures; builds, as seen from here; DDP's
    buckets under `lazystep.overlap`. Clock, process and thread numbers are those of `torch.profiler`'s
    trace, so that the two line up. The last `max_spans` are kept.

    Leaving the block waits for queued steps and closures, so that they are in the trace; what failed in
    them is left for the next barrier. A block that raises does not wait, and has its trace, too. One at a
    time. A path that can't be written is an error at the start.
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
