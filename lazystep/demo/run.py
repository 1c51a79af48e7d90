"""The demo's run: train, show progress without waiting, save, resume, report.

The step is an ordinary function under `@lazystep.step`. It runs on the reference executable until a native
library of the whole step has been built in the background or found on disk. The log, TensorBoard and the live
display are async closures. Half-way, a checkpoint is written, and a new model and optimizer continue from it,
as a new process would.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import config, metrics
from ..capture.step import step
from ..reads import save, to_cpu, wait_device_ops
from ..report import TensorBoardLog
from ..runs import facts
from ..runs.directory import RunDirectory
from ..runs.page import write_page
from .byte_gpt import ByteGPT, held_out_loss, next_byte_loss, read_corpus, sample_batch, write_sample
from .display import Display

_TITLE = "A byte-level GPT learns Python from Python's standard library"
_SHOW_EVERY = 5
# The demo may run this many extra seconds, until it has shown this many native steps.
_PATIENCE, _NATIVE_STEPS = 90.0, 150


class Trainer:
    """A model, its optimizer and its data: everything that a checkpoint holds."""

    def __init__(self, corpus: Tensor) -> None:
        self.model: nn.Module = ByteGPT().to("lazy")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.num_steps = 0
        self._corpus = corpus
        self._generator = torch.Generator().manual_seed(1)

    def train(
        self, is_over: Callable[[], bool], last_step: int | None, run: RunDirectory, looks: list[Any]
    ) -> None:
        """Train until `is_over()` or `last_step`. Nothing in this loop reads a value or waits for one."""
        model, optimizer = self.model, self.optimizer

        @step
        def train_step(x: Tensor, y: Tensor) -> Tensor:
            loss = next_byte_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        while not is_over() and (last_step is None or self.num_steps < last_step):
            loss = train_step(*sample_batch(self._corpus, self._generator))
            self.num_steps += 1
            run.log(self.num_steps, loss=loss)
            if self.num_steps % _SHOW_EVERY == 1:
                for look in looks:
                    look(self.num_steps, loss)

    def state(self) -> dict[str, Any]:
        """The contents of a checkpoint."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "batches": self._generator.get_state(),
            "random": torch.get_rng_state(),
            "num_steps": self.num_steps,
        }

    def load(self, path: Path) -> None:
        """Load a checkpoint, to continue from it."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["batches"])
        torch.set_rng_state(state["random"])
        self.num_steps = state["num_steps"]


def run_demo(directory: Path, seconds: float, num_steps: int | None, sample_bytes: int) -> bool:
    """Run the demo and write its page. Returns whether the loss fell and the resumed state was right."""
    torch.manual_seed(0)
    training, held_out = read_corpus()
    trainer = Trainer(training)
    size = sum(p.numel() for p in trainer.model.parameters())
    print(f"{size:,} parameters, {len(training):,} bytes to train on, {len(held_out):,} held out")
    before = _judge(trainer.model, held_out)

    start = time.monotonic()
    checkpoint = directory / "checkpoint.pt"
    with ExitStack() as stack:
        run = stack.enter_context(RunDirectory(directory, title=_TITLE))
        display = stack.enter_context(Display(seconds, num_steps))
        looks: list[Any] = [display.show]
        if importlib.util.find_spec("tensorboard") is not None:
            board = stack.enter_context(TensorBoardLog(directory / "tensorboard"))
            looks.append(lambda number, loss: board.scalars(number, loss=loss))
        else:
            print("no TensorBoard log: it needs the extra, pip install 'lazystep[demo]'")
        half = None if num_steps is None else num_steps // 2
        trainer.train(lambda: time.monotonic() >= start + seconds / 2, half, run, looks)
        with run.timeline.span("checkpoint"):
            save(trainer.state(), checkpoint)
        with run.timeline.span("resume"):
            resumed = Trainer(training)
            resumed.load(checkpoint)
            num_tensors, is_same = _compare(checkpoint, resumed.state())
        del trainer
        resumed.train(lambda: _is_over(start + seconds), num_steps, run, looks)
        wait_device_ops()
    elapsed = time.monotonic() - start

    after = _judge(resumed.model, held_out)
    print(f"\n{resumed.num_steps} steps in {elapsed:.0f} s")
    print(facts.to_text(facts.collect()))
    equal = "equal to the bit" if is_same else "DIFFERENT"
    print(f"\ncheckpoint  {checkpoint}: resumed from it, {num_tensors} tensors {equal}")
    print(f"held out    loss {before:.3f} before, {after:.3f} after, in nats per byte")
    with config.override(tier="reference"):
        print(f"it writes   {write_sample(resumed.model, b'def ', sample_bytes)!r}")
    print(f"report      {write_page(directory)}")
    return after < before and is_same


def _is_over(end: float) -> bool:
    """Whether to stop. A slow machine gets extra time, so that the native step is seen after its build."""
    now = time.monotonic()
    if now < end or now >= end + _PATIENCE:
        return now >= end
    count = metrics.counter_value
    is_built = count("builds_requested") > count("builds_failed")
    return not is_built or count("native_executions") >= _NATIVE_STEPS


def _judge(model: nn.Module, corpus: Tensor) -> float:
    # On the reference executable, so that the builder only builds the training step.
    with config.override(tier="reference"):
        return held_out_loss(model, corpus, 20)


def _compare(checkpoint: Path, state: Any) -> tuple[int, bool]:
    """The number of tensors in the file, and whether they equal the tensors of the state."""
    saved, loaded = (
        pytree.tree_leaves(s) for s in (torch.load(checkpoint, weights_only=True), to_cpu(state))
    )
    pairs = [(a, b) for a, b in zip(saved, loaded, strict=True) if isinstance(a, Tensor)]
    return len(pairs), all(torch.equal(a, b) for a, b in pairs)
