"""`lazystep.profile`: what is in the trace, on which thread, and in torch.profiler's clock."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, record_function

import lazystep
from lazystep import config, metrics, notices, timeline
from lazystep.compile.builder import Builder, BuildError, Request
from lazystep.errors import ClosureError, LazyStepError, StepError
from lazystep.execute.run import Run
from lazystep.overlap.event_log import EventLog
from tests.helpers import descend, failing

Events = list[dict[str, Any]]


def read(path: Path) -> Events:
    events: Events = json.loads(path.read_text())["traceEvents"]
    return events


def of(events: Events, category: str) -> Events:
    return [event for event in events if event.get("cat") == category]


def thread_of(events: Events, event: dict[str, Any]) -> str:
    names = [e for e in events if e["name"] == "thread_name" and e["tid"] == event["tid"]]
    assert len(names) == 1
    return str(names[0]["args"]["name"])


def end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def train(num_steps: int, done: Callable[[Any], None] | None = None) -> torch.Tensor:
    model = torch.nn.Linear(3, 2).to("lazy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        loss = model(torch.ones(4, 3, device="lazy")).square().mean()
        descend(loss, optimizer)
        if done is not None:
            lazystep.add_step_closure(done, (loss,), run_async=True)
        lazystep.mark_step()
    return loss


def test_every_part_of_a_step_is_there_on_its_thread(tmp_path: Path) -> None:
    seen: list[float] = []

    def look(loss: torch.Tensor) -> None:
        seen.append(loss.item())

    with lazystep.profile(tmp_path / "trace.json"):
        loss = train(3, look)
        loss.item()
    events = read(tmp_path / "trace.json")
    steps = [event["args"]["step"] for event in of(events, "barrier")]
    assert len(steps) == 3
    threads = {"recording": {"MainThread"}, "barrier": {"MainThread"}}
    threads["execution"] = {"lazystep-executor", "MainThread"}  # the read may run a step by itself
    for category, allowed in threads.items():
        found = of(events, category)
        assert [event["args"]["step"] for event in found] == steps, category
        assert {thread_of(events, event) for event in found} <= allowed
    assert [event["args"]["tier"] for event in of(events, "execution")] == ["reference"] * 3
    # SGD makes no state: one program, and its number is the one that `explain` prints.
    assert {event["args"]["program"] for event in of(events, "execution")} == {1}
    closures = of(events, "closure")
    assert len(seen) == len(closures) == 3, "leaving the block waits for closures"
    assert {thread_of(events, event) for event in closures} == {"lazystep-closures"}
    assert "look" in closures[0]["name"]
    assert closures[0]["args"]["where"].startswith(__file__)
    # A recording ends where its barrier begins, and no step runs before its barrier has begun.
    pairs = zip(of(events, "recording"), of(events, "barrier"), of(events, "execution"), strict=True)
    for recording, barrier, execution in pairs:
        assert end(recording) == pytest.approx(barrier["ts"])
        assert barrier["ts"] <= execution["ts"]
    reads = [event for event in events if event["name"] == "synchronization: item"]
    assert [event["ph"] for event in reads] == ["i"]
    assert reads[0]["args"]["line"].startswith(__file__)
    assert {event["pid"] for event in events} == {os.getpid()}
    arrows = [(event["ph"], event["id"]) for event in of(events, "step")]
    assert sorted(arrows) == sorted([("s", s) for s in steps] + [("f", s) for s in steps])


def test_replays_and_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: Any) -> None:
    weight = torch.ones(3, device="lazy")

    @lazystep.step(audit_every=0)
    def double(x: torch.Tensor) -> torch.Tensor:
        weight.add_(x)
        return weight * 2

    for _ in range(6):
        double(torch.ones(3))
    assert double.num_replayed > 0
    lazystep.wait_device_ops()
    before = double.num_replayed
    is_awaited, execute = threading.Event(), Run.execute

    def execute_when_awaited(run: Run) -> Any:
        assert is_awaited.wait(30)
        is_awaited.clear()
        return execute(run)

    monkeypatch.setattr(Run, "execute", execute_when_awaited)
    for name in ("_wait_without_python", "_wait_in_python"):
        block = getattr(runtime.executor, name)

        def note_and_block(condition: Any, block: Any = block) -> Any:
            is_awaited.set()
            return block(condition)

        monkeypatch.setattr(runtime.executor, name, note_and_block)
    with config.override(max_in_flight=1), lazystep.profile(tmp_path / "trace.json"):
        for _ in range(3):
            double(torch.ones(3))
    events = read(tmp_path / "trace.json")
    replays = [event for event in of(events, "recording") if event["name"] == "replay"]
    assert len(replays) == double.num_replayed - before == 3
    assert len(of(events, "execution")) == 3
    waits = [event["name"] for event in of(events, "waiting")]
    assert sum("steps in flight" in name for name in waits) == 2
    assert waits[-1] == "wait for queued steps"


def test_marker_is_at_the_same_place_in_both_traces(tmp_path: Path) -> None:
    """A span of ours lies between a marker of torch.profiler's around it and one inside it."""
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    torch.randn(4) + 1
    with ExitStack() as stack:
        profiler = stack.enter_context(torch.profiler.profile(activities=[ProfilerActivity.CPU]))
        taken = stack.enter_context(lazystep.profile(ours))
        with record_function("around"), taken.span("marker"), record_function("inside"):
            train(2)
            lazystep.wait_device_ops()
    profiler.export_chrome_trace(str(theirs))
    bases = [json.loads(path.read_text())["baseTimeNanoseconds"] for path in (ours, theirs)]
    assert bases[0] == bases[1], "the two can be joined as they are"

    def find(path: Path, name: str) -> dict[str, Any]:
        # The profiler lists an annotation twice: as one, and as an op.
        return next(event for event in read(path) if event["name"] == name and event["ph"] == "X")

    around, marker, inside = find(theirs, "around"), find(ours, "marker"), find(theirs, "inside")
    assert around["ts"] <= marker["ts"] <= inside["ts"]
    assert end(inside) <= end(marker) <= end(around)
    # The same process and thread: joined, they are in one row.
    assert {(event["pid"], event["tid"]) for event in (around, marker, inside)} == {
        (os.getpid(), threading.get_native_id())
    }
    for barrier in of(read(ours), "barrier"):
        assert inside["ts"] <= barrier["ts"] <= end(barrier) <= end(inside)


def test_without_a_profile_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[str] = []
    original = timeline.Timeline.add
    monkeypatch.setattr(timeline.Timeline, "add", lambda self, name, *a, **k: added.append(name))
    train(3, lambda loss: None).item()
    lazystep.flush_step_closures()
    assert added == []
    monkeypatch.setattr(timeline.Timeline, "add", original)
    with lazystep.profile(tmp_path / "trace.json"):
        pass
    assert of(read(tmp_path / "trace.json"), "execution") == []


def test_number_of_spans_does_not_depend_on_the_number_of_ops(tmp_path: Path) -> None:
    counts = []
    for num_ops in (5, 500):
        with lazystep.profile(tmp_path / "trace.json") as taken:
            x = torch.ones(2, device="lazy")
            for _ in range(num_ops):
                x = x + 1
            lazystep.mark_step()
        counts.append(taken.num_added)
    assert counts[0] == counts[1]


def test_last_spans_are_kept_and_the_rest_is_counted(tmp_path: Path) -> None:
    with lazystep.profile(tmp_path / "trace.json", max_spans=4) as taken:
        train(5)
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] in "Xi"]
    assert len(spans) == 4
    assert trace["lazystep"]["spans_dropped"] == taken.num_added - 4 > 0
    with pytest.raises(ValueError, match="max_spans"), lazystep.profile(tmp_path / "t.json", max_spans=0):
        pass


# -- builds and buckets ----------------------------------------------------------------------------


def request(deliver: Callable[[Any], None]) -> Request:
    x = torch.ones(3, device="lazy")
    program = lazystep.debug.pending_program([x + 1])
    lazystep.mark_step()
    return Request(program, {}, 1, deliver)


def test_failed_build_is_seen_from_the_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazystep.compile.builder.COMMAND", ("false",))
    results: list[Any] = []
    done = threading.Event()
    builder = Builder()
    with lazystep.profile(tmp_path / "trace.json"):
        builder.submit(request(lambda result: (results.append(result), done.set())))
        assert done.wait(60)
    builder.close()
    notices.forget()  # the warning that the next barrier would give is another test's matter
    assert isinstance(results[0], BuildError)
    events = read(tmp_path / "trace.json")
    builds = of(events, "build")
    assert len(builds) == 1
    assert thread_of(events, builds[0]) == "lazystep-builder"
    assert builds[0]["args"]["instructions"] == 2


def test_what_has_not_ended_is_marked(tmp_path: Path) -> None:
    with timeline.span("began before", "build"), lazystep.profile(tmp_path / "trace.json") as taken:
        pass
    event = next(event for event in read(tmp_path / "trace.json") if event["name"] == "began before")
    assert event["args"] == {"unfinished": True}
    assert taken.spans() == [], "it has ended now, after the timeline"


def test_buckets_are_in_the_trace_and_in_the_log_by_one_writer(tmp_path: Path) -> None:
    log = EventLog()
    with lazystep.profile(tmp_path / "trace.json"):
        first, second = (log.bucket_ready(index, torch.zeros(4)) for index in range(2))
        first.update_start = first.reduce_end = first.ready + 1e-6
        first.update_end = first.ready + 2e-6
        second.reduced()  # reduced, never updated
    events = read(tmp_path / "trace.json")
    buckets = of(events, "overlap")
    names = {(thread_of(events, event), event["name"]) for event in buckets}
    reductions = {(f"reduction of bucket {number}", f"reduce {number}") for number in range(2)}
    assert names == {("updates", "update 0"), *reductions}
    mine = of(log.to_chrome_trace(3)["traceEvents"], "overlap")
    assert {event["name"] for event in mine} == {event["name"] for event in buckets}
    assert {event["pid"] for event in mine} == {3}


# -- what goes wrong -------------------------------------------------------------------------------


def raise_after(_: torch.Tensor) -> None:
    raise KeyError("mine")


def test_block_that_raises_has_its_trace(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"), lazystep.profile(tmp_path / "trace.json"):
        raise_after(train(1))
    assert len(of(read(tmp_path / "trace.json"), "barrier")) == 1
    assert timeline.active is None


def test_failures_are_left_for_the_next_barrier(tmp_path: Path) -> None:
    with lazystep.profile(tmp_path / "trace.json"):
        lazystep.add_step_closure(failing("no"), run_async=True)
        lazystep.run_step_closures()
    with pytest.raises(ClosureError, match="no"):
        lazystep.mark_step()
    assert len(of(read(tmp_path / "trace.json"), "closure")) == 1


def test_failed_step_is_in_the_trace(tmp_path: Path) -> None:
    with lazystep.profile(tmp_path / "trace.json"):
        index = torch.tensor([7]).to("lazy")
        picked = torch.zeros(3, device="lazy").index_select(0, index)
        lazystep.mark_step()
    with pytest.raises(StepError, match="index_select"):
        picked.tolist()
    assert len(of(read(tmp_path / "trace.json"), "execution")) == 1


def test_one_profile_at_a_time_and_a_path_that_can_be_written(tmp_path: Path) -> None:
    with lazystep.profile(tmp_path / "a.json"):
        with pytest.raises(LazyStepError, match="one at a time"), lazystep.profile(tmp_path / "b.json"):
            pass
        assert timeline.active is not None
    with pytest.raises(FileNotFoundError), lazystep.profile(tmp_path / "missing" / "a.json"):
        pass
    assert timeline.active is None
    assert metrics.counter_value("steps_failed") == 0
