"""The demo on a model that is small enough for a test, and the example that shares its model."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from lazystep import cli, metrics
from lazystep.demo import run as demo_run
from lazystep.demo.byte_gpt import ByteGPT, read_corpus, sample_batch
from tests.helpers import ROOT, run_python


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_run, "ByteGPT", functools.partial(ByteGPT, 16, num_layers=1, num_heads=2))


def run_demo(directory: Path, *args: str) -> Result:
    return CliRunner().invoke(cli.main, ["demo", "--quick", "--directory", str(directory), *args])


def test_demo_trains_logs_saves_resumes_and_reports(tmp_path: Path) -> None:
    done = run_demo(tmp_path)
    assert done.exit_code == 0, done.output
    for text in ("40 steps in", "tensors equal to the bit", "step     1  loss 5.", "closures queued"):
        assert text in done.output
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 41)), "resuming neither repeats nor leaves out"
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["num_steps"] == 20
    page = (tmp_path / "index.html").read_text()
    for text in ("learns Python", '"checkpoint"', '"resume"', "train_step: captured", "aten.embedding"):
        assert text in page
    # Nothing in the training loop waits for a value: what does is the judging, the saving, the sample.
    lines = {line for _, line, _ in metrics.synchronizations()}
    assert not any("in train" in line for line in lines), lines
    assert metrics.counter_value("programs_replayed") >= 20


def test_resumed_run_gives_the_losses_of_one_that_went_on(tmp_path: Path) -> None:
    """A checkpoint holds everything: batches, dropout and the optimizer go on as if nothing had been."""
    losses: dict[str, list[float]] = {}

    class Run:
        def __init__(self) -> None:
            self.losses: list[torch.Tensor] = []

        def log(self, step: int, loss: torch.Tensor) -> None:
            self.losses.append(loss)

    corpus, _ = read_corpus()
    trainer = demo_run.Trainer(corpus)
    for name in ("went on", "resumed"):
        if name == "went on":
            trainer.train(lambda: False, 4, Run(), [])  # type: ignore[arg-type]
            demo_run.save(trainer.state(), tmp_path / "checkpoint.pt")
        else:
            trainer = demo_run.Trainer(corpus)
            trainer.load(tmp_path / "checkpoint.pt")
        run = Run()
        trainer.train(lambda: False, 8, run, [])  # type: ignore[arg-type]
        losses[name] = [loss.item() for loss in run.losses]
    assert len(losses["resumed"]) == 4
    assert losses["resumed"] == losses["went on"]


def test_demo_waits_for_the_native_step_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now = demo_run.time.monotonic()
    assert demo_run._is_over(now - 1), "nothing is being built"
    metrics.count("builds_requested")
    assert not demo_run._is_over(now - 1)
    assert demo_run._is_over(now - demo_run._PATIENCE - 1)
    metrics.count("native_executions", demo_run._NATIVE_STEPS)
    assert demo_run._is_over(now - 1)
    metrics.reset()
    metrics.count("builds_requested")
    metrics.count("builds_failed")
    assert demo_run._is_over(now - 1)


def test_demo_fails_if_the_resumed_state_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = demo_run.Trainer.load

    def load_and_move(self: Any, path: Path) -> None:
        load(self, path)
        with torch.no_grad():
            self.model.position.add_(1e-3)

    monkeypatch.setattr(demo_run.Trainer, "load", load_and_move)
    done = run_demo(tmp_path, "--steps", "6")
    assert done.exit_code == 1
    assert "tensors DIFFERENT" in done.output


def test_demo_goes_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name)
    )
    done = run_demo(tmp_path, "--steps", "6")
    assert done.exit_code == 0, done.output
    assert "pip install 'lazystep[demo]'" in done.output
    assert not (tmp_path / "tensorboard").exists()


def test_interrupted_demo_leaves_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> Any:
        if metrics.counter_value("programs_replayed"):
            raise KeyboardInterrupt
        return sample_batch(*args)

    monkeypatch.setattr(demo_run, "sample_batch", interrupt)
    done = run_demo(tmp_path)
    assert done.exit_code == 130
    assert (tmp_path / "run.json").exists()


def test_example_is_an_ordinary_script(tmp_path: Path) -> None:
    script = ROOT / "examples" / "byte_gpt.py"
    done = run_python("-W", "error", script, "--steps", "12", LAZYSTEP_TIER="reference")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss ") >= 2
    assert "held-out loss" in done.stdout
