"""Every report of `lazystep.report` at once, called as one, and what each has written."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lazystep.report import CsvLog, JsonlLog, ProgressBar, TensorBoardLog


class Reports:
    """Called with the step and its loss, which all reports get."""

    def __init__(self, path: Path, num_steps: int) -> None:
        self.path = path
        path.mkdir(exist_ok=True)
        self.jsonl, self.csv = JsonlLog(path / "log.jsonl"), CsvLog(path / "log.csv")
        self.board = TensorBoardLog(path / "board")
        self.bar = ProgressBar(num_steps)

    def __call__(self, step: int, **values: Any) -> None:
        for report in (self.jsonl, self.csv, self.board.scalars, self.bar):
            report(step, loss=values["loss"])
        self.board.histogram(step, "loss", values["loss"])

    def close(self) -> None:
        for report in (self.jsonl, self.csv, self.board, self.bar):
            report.close()

    def check(self, steps: list[int], losses: list[float], printed: str) -> None:
        """Each report has these losses, in this order. Closes the reports."""
        self.close()
        rows = [json.loads(line) for line in (self.path / "log.jsonl").read_text().splitlines()]
        assert rows == [{"step": n, "loss": loss} for n, loss in zip(steps, losses, strict=True)]
        with open(self.path / "log.csv", newline="") as file:
            assert [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)] == list(
                zip(steps, losses, strict=True)
            )
        board = EventAccumulator(str(self.path / "board"), {"scalars": 0, "histograms": 0}).Reload()
        assert [event.step for event in board.Scalars("loss")] == steps
        assert [event.value for event in board.Scalars("loss")] == pytest.approx(losses, rel=1e-6)
        assert [event.step for event in board.Histograms("loss")] == steps
        lines = [line for line in printed.splitlines() if line.startswith("step ")]
        assert lines == [f"step {n}: loss {loss:.4g}" for n, loss in zip(steps, losses, strict=True)]
