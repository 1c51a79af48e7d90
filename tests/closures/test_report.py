"""The ready-made closures: what they write, that it costs no extra execution, and how they fail."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lazystep
from lazystep.report import CsvLog, JsonlLog, ProgressBar, TensorBoardLog, gradient_norms
from tests.helpers import ROOT, count, run_python


def loop(num_steps: int, report: Callable[..., object], device: str = "lazy") -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(num_steps):
        loss = model(torch.ones(4, 3).to(device)).square().mean()
        loss.backward()
        report(step, model, loss)
        optimizer.step()
        optimizer.zero_grad()
        lazystep.mark_step()


def eager_losses(num_steps: int) -> list[float]:
    losses: list[float] = []
    loop(num_steps, lambda step, model, loss: losses.append(loss.item()), "cpu")
    return losses


def test_jsonl_and_csv_hold_the_values_of_each_step(tmp_path: Path) -> None:
    with JsonlLog(tmp_path / "log.jsonl") as jsonl, CsvLog(tmp_path / "log.csv", every=2) as table:

        def report(step: int, model: torch.nn.Module, loss: torch.Tensor) -> None:
            jsonl(step, loss=loss, lr=0.1, **gradient_norms(model))
            table(step, loss=loss)

        loop(6, report)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == eager_losses(6)
    assert [row["step"] for row in rows] == list(range(6))
    assert rows[0]["lr"] == 0.1
    assert rows[0]["grad_norm/weight"] > 0
    with (tmp_path / "log.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [0, 2, 4]
    # Reporting is part of the step: one execution each, and nobody waited for a value.
    assert count("programs_executed") == 6
    assert count("synchronizations") == 0


def test_tensorboard_gets_scalars_and_histograms(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    weights = []
    with TensorBoardLog(tmp_path, every=2) as board:

        def report(step: int, model: torch.nn.Module, loss: torch.Tensor) -> None:
            board.scalars(step, loss=loss)
            board.histogram(step, "weight", model.weight, bins=8)
            weights.append(model.weight.detach().clone())

        loop(4, report)
    events = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0})
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [0, 2]
    assert [e.value for e in events.Scalars("loss")] == pytest.approx(eager_losses(4)[::2])
    histogram = events.Histograms("weight")[1].histogram_value
    want = weights[2].cpu()
    assert histogram.num == want.numel() == 6
    assert histogram.min == pytest.approx(want.min().item())
    assert histogram.max == pytest.approx(want.max().item())
    assert histogram.sum == pytest.approx(want.sum().item(), rel=1e-4)
    assert count("synchronizations") == 1  # our own .cpu() above


def test_progress_bar_prints_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar(4, every=2) as progress:
        loop(4, lambda step, model, loss: progress(step, loss=loss, note="fine"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 2"]
    assert "loss" in lines[0]
    assert "note fine" in lines[0]


def test_failure_to_write_is_raised_when_the_log_is_closed(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "log.csv")
    log(0, loss=1.0)
    log(1, loss=1.0, surprise=2.0)
    lazystep.mark_step()
    with pytest.raises(lazystep.ClosureError, match="surprise"):
        log.close()
    assert (tmp_path / "log.csv").read_text().splitlines() == ["step,loss", "0,1.0"]


def test_bad_interval_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every = 0"):
        JsonlLog(tmp_path / "log.jsonl", every=0)


def test_example_runs(tmp_path: Path) -> None:
    done = run_python(ROOT / "examples" / "reporting.py", "--quick", "--directory", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "40 steps, 40 executions, 0 syncs" in done.stdout
    losses = [json.loads(line)["loss"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(losses) == 40
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0})
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        (n, pytest.approx(losses[n])) for n in (0, 20)
    ]
    assert [e.step for e in events.Histograms("first layer")] == [0, 20]
