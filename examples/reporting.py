"""Use every ready-made closure in one small loop: progress bar, JSONL and CSV logs, TensorBoard.

    python examples/reporting.py [--quick] [--directory runs/reporting]

The training thread adds a closure and continues. The worker waits for the values of that step and writes
them. `tensorboard --logdir runs/reporting` shows the scalars and the histogram.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

import lazystep
from lazystep.report import CsvLog, JsonlLog, ProgressBar, TensorBoardLog, gradient_norms


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="40 steps instead of 2,000")
    parser.add_argument("--directory", type=Path, default=Path("runs/reporting"))
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    num_steps = 40 if arguments.quick else 2000

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)

    with ExitStack() as stack:
        progress = stack.enter_context(ProgressBar(num_steps, every=10))
        jsonl = stack.enter_context(JsonlLog(arguments.directory / "log.jsonl"))
        table = stack.enter_context(CsvLog(arguments.directory / "log.csv", every=10))
        board = stack.enter_context(TensorBoardLog(arguments.directory, every=20))
        for step in range(num_steps):
            x = torch.randn(128, 8).to("lazy")
            loss = (model(x) - x.prod(1, keepdim=True)).square().mean()
            loss.backward()
            jsonl(step, loss=loss, **gradient_norms(model))
            table(step, loss=loss, learning_rate=schedule.get_last_lr()[0])
            progress(step, loss=loss)
            board.scalars(step, loss=loss)
            board.histogram(step, "first layer", model[0].weight)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            lazystep.mark_step()

    print(f"wrote {arguments.directory}: log.jsonl, log.csv and events for TensorBoard")
    counters = [lazystep.metrics.counter_value(name) for name in ("programs_executed", "synchronizations")]
    print(f"{num_steps} steps, {counters[0]} executions, {counters[1]} syncs")


if __name__ == "__main__":
    main()
