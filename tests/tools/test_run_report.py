"""What a run leaves in its directory, and the page that is made of it."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import lazystep
from lazystep.errors import ClosureError
from lazystep.runs import chart_data, facts
from lazystep.runs.chart_data import PageError, Segment, read_lanes, read_series, thin
from lazystep.runs.page import to_html, write_page
from tests.helpers import descend, failing

NUM_STEPS = 12


sizes = itertools.count(4)


def train(run: lazystep.RunDirectory) -> None:
    # A size of its own, so that its program is a new one in each test.
    batch = torch.ones(next(sizes), 3)
    model = torch.nn.Linear(3, 2).to("lazy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @lazystep.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        descend(loss, optimizer)
        return loss

    for step in range(NUM_STEPS):
        loss = train_step(batch)
        run.log(step, loss=loss, rate=0.1)
    with run.timeline.span("evaluation"):
        loss.item()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with lazystep.RunDirectory(tmp_path / "run", title="<b>a run</b> & </script>") as run:
        train(run)
    return tmp_path / "run"


def make_native(directory: Path) -> None:
    """The trace as if the second half had run natively: a build takes longer than this test may."""
    trace = json.loads((directory / "timeline.json").read_text())
    executions = [e for e in trace["traceEvents"] if e.get("cat") == "execution"]
    for event in executions[NUM_STEPS // 2 :]:
        event["args"]["tier"] = "native"
    (directory / "timeline.json").write_text(json.dumps(trace))


# -- the directory -------------------------------------------------------------------------------------


def test_run_leaves_facts_timeline_log_and_program(directory: Path) -> None:
    run = json.loads((directory / "run.json").read_text())
    assert run["counters"]["programs_executed"] >= NUM_STEPS
    assert run["counters"]["programs_replayed"] == NUM_STEPS - run["counters"]["step_calls_recorded"]
    assert [program["number"] for program in run["programs"]] == [1, 2][: len(run["programs"])]
    assert [reason for reason, _, _ in run["synchronizations"]] == ["item"]
    assert run["synchronizations"][0][1].startswith(__file__)
    assert any("captured" in text for text in run["steps"])
    rows = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(NUM_STEPS)), "the last step's closure has run, too"
    assert rows[0]["loss"] > rows[-1]["loss"]
    events = json.loads((directory / "timeline.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "execution" for event in events) >= NUM_STEPS
    assert "aten.addmm" in (directory / "program.txt").read_text()


def test_block_that_raises_leaves_what_it_has(tmp_path: Path) -> None:
    def train_and_raise(run: lazystep.RunDirectory) -> None:
        train(run)
        lazystep.mark_step()
        raise KeyError("mine")

    run = lazystep.RunDirectory(tmp_path)
    with pytest.raises(KeyError, match="mine"), run:
        train_and_raise(run)
    assert (tmp_path / "run.json").exists()
    assert read_series(tmp_path)["loss"]
    lazystep.flush_step_closures()
    with pytest.raises(RuntimeError, match="not open"):
        run.log(1, loss=1.0)


def test_row_of_a_step_that_ends_after_its_log_is_counted(tmp_path: Path) -> None:
    run = lazystep.RunDirectory(tmp_path)

    def log_and_raise() -> None:
        run.log(1, loss=torch.ones((), device="lazy"))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), run:
        log_and_raise()
    lazystep.mark_step()
    lazystep.flush_step_closures()
    assert lazystep.metrics.counter_value("log_rows_late") == 1
    assert (tmp_path / "log.jsonl").read_text() == ""


def test_failed_closure_is_raised_in_the_end(tmp_path: Path) -> None:
    with pytest.raises(ClosureError, match="no"), lazystep.RunDirectory(tmp_path):
        lazystep.add_step_closure(failing("no"), run_async=True)
    assert json.loads((tmp_path / "run.json").read_text())["counters"]["closures_failed"] == 1


def test_killed_run_does_not_show_the_facts_of_the_one_before(directory: Path) -> None:
    run = lazystep.RunDirectory(directory)
    with run:
        assert not (directory / "run.json").exists()


def test_closing_report_names_reasons_and_lines(directory: Path) -> None:
    text = facts.to_text(json.loads((directory / "run.json").read_text()))
    for expected in ("programs   ", "compiles   0 started", "syncs      1", "1 times item at", "closures   "):
        assert expected in text
    assert f"{__file__}:" in text


# -- the numbers of the charts -------------------------------------------------------------------------


def span(start: float, end: float, kind: str, thread: int = 1) -> dict[str, Any]:
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "name": kind, "cat": kind, "tid": thread, "pid": 1, **times}


def test_innermost_span_counts() -> None:
    events = [span(0, 10, "closure"), span(2, 5, "waiting"), span(3, 4, "mark"), span(12, 13, "closure")]
    lanes = read_lanes(events)
    seen = [(s.start, s.end, s.kind) for s in lanes["1"]]
    assert seen == [
        (0, 2, "closure"),
        (2, 3, "waiting"),
        (3, 4, "mark"),
        (4, 5, "waiting"),
        (5, 10, "closure"),
        (12, 13, "closure"),
    ]


def test_shares_of_the_intervals_add_up_to_the_time_spent() -> None:
    lane = [Segment(0.0, 0.7, "recording", ""), Segment(0.7, 3.0, "waiting", "")]
    bins = chart_data._bins(lane, 3.0)
    width = 3.0 / chart_data._NUM_BINS
    assert sum(bins["recording"]) * width == pytest.approx(0.7, abs=0.01)
    assert sum(bins["waiting"]) * width == pytest.approx(2.3, abs=0.01)
    assert max(a + b for a, b in zip(bins["recording"], bins["waiting"], strict=True)) <= 1.002


def test_thinning_keeps_the_ends() -> None:
    assert thin(range(5), 10) == [0, 1, 2, 3, 4]
    few = thin(range(1001), 11)
    assert few == list(range(0, 1001, 100))


# -- the page ------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collects what the page refers to, its texts and its data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.texts: list[str] = []
        self.data: dict[str, Any] = {}
        self._in: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.links += [value for name in ("src", "href") if (value := found.get(name))]
        self.ids += [found["id"]] if found.get("id") else []
        self._in.append(f"{tag}#{found.get('id', '')}")

    def handle_data(self, data: str) -> None:
        if self._in and self._in[-1] == "script#data":
            self.data = json.loads(data)
            self._in.append("")
        else:
            self.texts.append(data)


def test_page_has_everything_and_needs_no_network(directory: Path) -> None:
    make_native(directory)
    text = to_html(directory)
    page = Page(text)
    assert page.links == []
    assert "@import" not in text
    assert re.findall(r"https?://[^\"'\s]+", text) == ["http://www.w3.org/2000/svg"], "a name, not an address"
    expected = ["figures", "series", "steptimes", "threads", "zoom", "phases", "programs", "syncs"]
    assert [name for name in page.ids if name in expected] == expected
    assert {"counters", "program"} <= set(page.ids)
    assert [s["name"] for s in page.data["series"]] == ["loss", "rate"]
    assert len(page.data["series"][0]["points"]) == NUM_STEPS
    assert list(page.data["bins"]) == ["training thread", "executor", "closures"]
    kinds = [kind for _, _, kind, _ in page.data["executions"]]
    assert {"reference", "native"} == set(kinds)
    first = min(t for t, _, kind, _ in page.data["executions"] if kind == "native")
    assert page.data["native"] == first
    assert [name for _, _, name in page.data["marks"]] == ["evaluation"]
    words = " ".join(page.texts)
    assert "<b>a run</b> & </script>" in words, "escaped in the title"
    assert "aten.addmm" in words
    assert "before the first native step, per step" in words
    assert "captured" in words


@pytest.mark.parametrize("missing", ["run.json", "timeline.json", "log.jsonl", "program.txt"])
def test_every_part_is_optional(directory: Path, missing: str) -> None:
    (directory / missing).unlink()
    page = Page(to_html(directory))
    assert ("syncs" in page.ids) == (missing != "run.json")
    assert ("steptimes" in page.ids) == (missing != "timeline.json")
    assert ("series" in page.ids) == (missing != "log.jsonl")
    assert ("program" in page.ids) == (missing != "program.txt")


def test_log_alone_is_enough_also_as_csv(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,loss,note\n1,2.5,hello\n2,nan,there\n3,1.5,\n")
    assert read_series(tmp_path) == {"loss": [(1, 2.5), (3, 1.5)]}
    assert write_page(tmp_path) == tmp_path / "index.html"


def test_what_can_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PageError, match="no run in"):
        to_html(tmp_path)
    with pytest.raises(PageError, match="not a directory"):
        to_html(tmp_path / "missing")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(PageError, match=r"run\.json can't be read"):
        to_html(tmp_path)
    (tmp_path / "run.json").unlink()
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2}\nnonsense\n{"step": 2, "loss": 1}\n')
    with pytest.raises(PageError, match=r"log\.jsonl can't be read"):
        to_html(tmp_path)
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2}\n{"step": 2, "lo')  # killed while writing
    assert read_series(tmp_path) == {"loss": [(1, 2)]}


def test_script_finds_in_the_page_what_it_draws(directory: Path) -> None:
    """No browser runs here: the script's names are held against the data, the elements and the colors."""
    make_native(directory)
    text = to_html(directory)
    page, script = Page(text), text.rpartition("<script>")[2]
    read = set(re.findall(r"\bdata\.(\w+)", script))
    assert {"series", "executions", "bins", "zoom", "marks", "builds", "native"} <= read <= set(page.data)
    assert "{ start, end, lanes: shown } = data.zoom" in script
    assert {"start", "end", "lanes"} == set(page.data["zoom"])
    drawn = re.findall(r'\["(\w+)", (draw\w+)\]', script)
    assert len(drawn) == 4
    for name, function in drawn:
        assert name in page.ids
        assert f"function {function}(box)" in script
    names = script.partition("const NAMES = {")[2].partition("};")[0]
    kinds = set(re.findall(r'(\w+): "', names))
    used = {kind for _, _, kind, _ in page.data["executions"]}
    used |= {kind for lane in page.data["bins"].values() for kind in lane}
    used |= {kind for lane in page.data["zoom"]["lanes"].values() for _, _, kind, _ in lane}
    assert {"recording", "reference", "native", "closure"} <= used <= kinds
    for theme in re.findall(r":root \{(.*?)\}", text, re.DOTALL):
        assert kinds <= set(re.findall(r"--(\w+):", theme)), "every kind has its color, by day and by night"
