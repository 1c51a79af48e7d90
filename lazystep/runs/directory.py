"""The directory that a training run writes, from which `lazystep report` makes a page.

run.json         counters, programs and reasons, lines that waited, versions
timeline.json    the trace of `lazystep.profile`
log.jsonl        the numbers logged per step
program.txt      the text of the program that did most of the work
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from .. import timeline
from ..barrier import run_step_closures
from ..debug import profile
from ..report import JsonlLog
from . import facts

FACTS, TIMELINE, LOG, PROGRAM = "run.json", "timeline.json", "log.jsonl", "program.txt"


class RunDirectory:
    """Writes the log, timeline and facts of a run into a directory, for `lazystep report`.

        with lazystep.RunDirectory("runs/1") as run:
            for step, (x, y) in enumerate(loader):
                loss = train_step(x, y)
                run.log(step, loss=loss)

    `log` adds one async closure and does not wait. The block takes a profile. Its end ends the step, as
    `run_step_closures` does, waits for queued steps and closures, raises the errors of closures, and writes
    the files. A block that raises also writes its files, as far as it got. Counters are those of the whole
    process.
    """

    def __init__(self, path: str | Path, *, title: str = "", every: int = 1) -> None:
        self.path = Path(path)
        self._title = title or self.path.absolute().name
        self._every = every
        self._stack = ExitStack()
        self._log: JsonlLog | None = None
        self._timeline: timeline.Timeline | None = None
        self._started = time.time()

    @property
    def timeline(self) -> timeline.Timeline:
        """The run's timeline, for your own spans: `with run.timeline.span("evaluation"): ...`."""
        if self._timeline is None:
            raise RuntimeError("the run has not begun: use it in a with statement")
        return self._timeline

    def log(self, step: int, **values: Any) -> None:
        """Log numbers and one-element tensors of this step, in every N-th step. Does not synchronize."""
        if self._log is None:
            raise RuntimeError("the run is not open: log inside its with statement")
        self._log(step, **values)

    def __enter__(self) -> RunDirectory:
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (FACTS, PROGRAM):  # a killed run must not show the files of an earlier run
            (self.path / name).unlink(missing_ok=True)
        self._started = time.time()
        self._timeline = self._stack.enter_context(profile(self.path / TIMELINE))
        self._log = self._stack.enter_context(JsonlLog(self.path / LOG, every=self._every))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as last:
            last.callback(self._write)
            last.push(self._stack.pop_all())
            self._log = None
            if error is None:
                run_step_closures()

    def _write(self) -> None:
        now = time.time()
        run = {"title": self._title, "command": sys.argv, "started": self._started}
        run |= {"seconds": now - self._started, **facts.collect()}
        (self.path / FACTS).write_text(json.dumps(run, indent=1))
        program = facts.main_program()
        if program is not None:
            (self.path / PROGRAM).write_text(f"{program}\n")
