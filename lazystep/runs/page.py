"""The HTML page of a run's directory. It needs no network and no dependency, and every part is optional.

Python reads the files, reduces the numbers to the resolution of a screen, and writes texts and tables. The
script in page.html draws the charts from the numbers in the page.
"""

from __future__ import annotations

import html
import importlib.resources
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .chart_data import PageError, Segment, duration, read_json, read_lanes, read_series, thin, timeline_data
from .directory import FACTS, PROGRAM, TIMELINE


def write_page(directory: Path, target: Path | None = None) -> Path:
    """Write the page of a run, by default to `index.html` in its directory. Returns the page's path.

    Raises `PageError` if the directory holds no run, or a file can't be read.
    """
    page = to_html(directory)
    target = target or directory / "index.html"
    target.write_text(page, encoding="utf-8")
    return target


def to_html(directory: Path) -> str:
    """The page of a run, as HTML. Raises `PageError`."""
    if not directory.is_dir():
        raise PageError(f"{directory} is not a directory")
    facts = read_json(directory / FACTS)
    trace = read_json(directory / TIMELINE)
    series = read_series(directory)
    program = directory / PROGRAM
    if not (facts or trace or series):
        raise PageError(
            f"there is no run in {directory}: expected {FACTS}, {TIMELINE} or a log (*.jsonl, *.csv) with a "
            "column 'step'. lazystep.RunDirectory and `lazystep run --report DIR SCRIPT` write them"
        )
    lanes = read_lanes(trace.get("traceEvents", []))
    data: dict[str, Any] = {"series": [{"name": n, "points": thin(p)} for n, p in series.items()]}
    data |= timeline_data(trace.get("traceEvents", []), lanes)
    title = str(facts.get("title") or directory.absolute().name)
    body = [_header(title, facts), _tiles(facts, data, series)]
    body += [_charts(data), _phases(lanes, data)]
    body += [_programs(facts), _synchronizations(facts), _counters(facts)]
    if program.exists():
        text = program.read_text(encoding="utf-8")
        summary = f"The program of a step, {text.count(chr(10))} lines"
        body.append(_section("program", summary, f"<pre>{html.escape(text)}</pre>"))
    template = importlib.resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    # A text that contains "</script>" must not end the script.
    numbers = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    parts = {"<!--title-->": html.escape(title), "<!--body-->": "\n".join(body), "/*data*/": numbers}
    return re.sub("|".join(map(re.escape, parts)), lambda found: parts[found[0]], template)


# -- texts and tables ------------------------------------------------------------------------------


def _section(name: str, title: str, content: str, open_: bool = False) -> str:
    state = " open" if open_ else ""
    return f'<details id="{name}"{state}><summary>{html.escape(title)}</summary>{content}</details>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]], numeric: Sequence[int] = ()) -> str:
    def row(cells: Sequence[Any], tag: str) -> str:
        parts = [
            f"<{tag}{' class=n' if i in numeric else ''}>{_short_paths(str(cell))}</{tag}>"
            for i, cell in enumerate(cells)
        ]
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f"<div class=scroll><table><thead>{row(heads, 'th')}</thead><tbody>{body}</tbody></table></div>"


def _short_paths(text: str) -> str:
    """The escaped text, with the directories of source files moved into a tooltip."""
    parts = re.split(r"((?:/[^/\s:()]+)+/)(?=[^/\s:]+\.py:\d)", text)
    short, paths = html.escape("".join(parts[::2])), sorted(set(parts[1::2]))
    return f'<span title="{html.escape(" ".join(paths))}">{short}</span>' if paths else short


def _header(title: str, facts: Mapping[str, Any]) -> str:
    parts = [f"{name} {value}" for name, value in facts.get("versions", {}).items()]
    if facts:
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(facts.get("started", 0)))
        command = " ".join(map(str, facts.get("command", [])))
        parts = [when, f"{facts.get('seconds', 0):.0f} s", *parts]
        settings = ", ".join(f"{n} = {v}" for n, v in facts.get("settings", {}).items())
        parts += [f"settings: {settings}"] if settings else []
        parts += [command]
    described = " · ".join(html.escape(part) for part in parts)
    return f"<header><h1>{html.escape(title)}</h1><p class=quiet>{described}</p></header>"


def _tiles(facts: Mapping[str, Any], data: Mapping[str, Any], series: Mapping[str, Any]) -> str:
    count = facts.get("counters", {}).get
    tiles: list[tuple[str, str]] = []
    loss = next((points for name, points in series.items() if "loss" in name), None)
    if loss:
        tiles.append((f"{loss[0][1]:.3g} → {loss[-1][1]:.3g}", "loss, first and last logged"))
    for kind in ("reference", "native"):
        times = sorted(e[1] for e in data.get("executions", []) if e[2] == kind)
        if times:
            tiles.append((duration(times[len(times) // 2] / 1e3), f"median step, {kind}"))
    if facts:
        tiles += [
            (f"{count('programs_executed', 0):,}", "steps executed"),
            (f"{count('native_executions', 0):,}", "of them native"),
            (f"{count('builds_succeeded', 0)} + {count('disk_hits', 0)}", "libraries built + found on disk"),
            (f"{count('synchronizations', 0):,}", "reads that waited"),
            (f"{count('closures_run_async', 0):,}", "closures off the training thread"),
        ]
    cells = "".join(
        f"<div><strong>{html.escape(v)}</strong><span>{html.escape(label)}</span></div>" for v, label in tiles
    )
    return f'<section id="figures" class=tiles>{cells}</section>' if tiles else ""


def _charts(data: Mapping[str, Any]) -> str:
    charts = []
    if data["series"]:
        charts.append(
            ("series", "Logged numbers", "Each point is a step's own value, delivered by an async closure.")
        )
    else:
        charts.append(
            ("", "Logged numbers", "None: `run.log(step, loss=loss)` or report.JsonlLog writes some.")
        )
    if data.get("executions"):
        charts += [
            ("steptimes", "Step time", "Time on the executor, per step. The scale is logarithmic."),
            ("threads", "What each thread did", "The share of each interval that a thread spent on what."),
            ("zoom", "Step by step", ""),
        ]
    elif "total" not in data:
        charts.append(("", "Timeline", "None: `lazystep.profile` or RunDirectory writes one."))
    return "".join(
        f"<section><h2>{html.escape(title)}</h2><p class=quiet>{html.escape(text)}</p>"
        + (f'<div id="{name}"></div>' if name else "")
        + "</section>"
        for name, title, text in charts
    )


def _phases(lanes: Mapping[str, Sequence[Segment]], data: Mapping[str, Any]) -> str:
    """A table of the time per step, before and after the first native step."""
    if not data.get("executions"):
        return ""
    native = data["native"]
    phases = [("all", 0.0, math.inf)]
    if native is not None:
        phases = [("before the first native step", 0.0, native), ("from then on", native, math.inf)]
    seconds: list[Counter[tuple[str, str]]] = []
    counts = []
    for _, first, last in phases:
        spent: Counter[tuple[str, str]] = Counter()
        for lane, segments in lanes.items():
            for start, end, kind, _ in segments:
                spent[lane, kind] += max(min(end, last) - max(start, first), 0.0)  # type: ignore[assignment]
        seconds.append(spent)
        counts.append(sum(first <= s.start < last for s in _executions(lanes)))
    keys = [
        key for key in dict.fromkeys(k for spent in seconds for k in spent) if any(s[key] for s in seconds)
    ]
    rows = [
        [
            lane,
            kind,
            *(duration(s[lane, kind] / n) if n else "-" for s, n in zip(seconds, counts, strict=True)),
        ]
        for lane, kind in keys
    ]
    heads = [
        "thread",
        "doing",
        *(f"{name}, per step ({n})" for (name, *_), n in zip(phases, counts, strict=True)),
    ]
    table = _table(heads, rows, numeric=range(2, 2 + len(phases)))
    return f'<section id="phases"><h2>Where the time of a step goes</h2>{table}</section>'


def _executions(lanes: Mapping[str, Sequence[Segment]]) -> list[Segment]:
    return [s for s in lanes.get("executor", ()) if s.kind in ("reference", "native", "checked")]


def _programs(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    rows = [
        [
            p["number"],
            p["num_instructions"],
            p["num_runs"],
            p["num_native_runs"],
            p["line"],
            p["why"],
            p["standing"],
        ]
        for p in facts.get("programs", [])
    ]
    heads = ["program", "instructions", "runs", "native", "first line", "it is new because", "it runs"]
    steps = "".join(f"<li>{html.escape(text)}</li>" for text in facts.get("steps", []))
    content = _table(heads, rows, numeric=range(4)) + (
        f"<h3>Captured steps</h3><ul>{steps}</ul>" if steps else ""
    )
    return _section("programs", f"Programs, and why they were compiled: {len(rows)}", content, open_=True)


def _synchronizations(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    rows = [(n, reason, line) for reason, line, n in facts.get("synchronizations", [])]
    content = (
        _table(["times", "reason", "line"], rows, numeric=[0])
        if rows
        else "<p>No line waited for a value.</p>"
    )
    return _section("syncs", f"Lines that waited for values: {len(rows)}", content, open_=True)


def _counters(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    counters = facts.get("counters", {})
    rows = [(n, f"{v:.3f}" if isinstance(v, float) else f"{v:,}") for n, v in counters.items()]
    return _section("counters", f"All {len(rows)} counters", _table(["counter", "value"], rows, numeric=[1]))
