"""Train a small byte-level GPT on the source of Python's standard library, on `device="lazy"`.

    python examples/byte_gpt.py [--steps 500] [--quick]

The loop is ordinary. `@lazystep.step` records the step until it repeats and then replays it. The executor
thread runs the step while Python samples the next batch. A background process builds a native library of the
whole step, which takes over between two steps. If an earlier run has left the library on disk, it is loaded
at once. An async closure prints the loss, so nothing in the loop waits. `lazystep demo` trains the same model
and writes a report. The exit status is 1 if the loss on held-out files did not fall.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

import lazystep
from lazystep.demo.byte_gpt import ByteGPT, held_out_loss, next_byte_loss, read_corpus, sample_batch


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 30 steps")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    training, held_out = read_corpus()
    generator = torch.Generator().manual_seed(1)
    model = ByteGPT().to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = held_out_loss(model, held_out, num_batches=2)  # too few batches to be worth building a library

    @lazystep.step_closure(run_async=True, every=10)
    def log(loss: Tensor) -> None:
        print(f"loss {loss.item():.3f}", flush=True)

    @lazystep.step
    def train_step(x: Tensor, y: Tensor) -> None:
        loss = next_byte_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log(loss)

    for _ in range(30 if arguments.quick else arguments.steps):
        train_step(*sample_batch(training, generator))

    after = held_out_loss(model, held_out, num_batches=2)
    print(f"held-out loss {before:.3f} before, {after:.3f} after")
    print(lazystep.debug.explain())
    return 0 if after < before else 1


if __name__ == "__main__":
    sys.exit(main())
