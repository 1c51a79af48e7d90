"""An LSTM reads one long text character by character and carries its state from step to step.

    python examples/lstm.py [--quick]

Each step reads the next 32 characters at 16 places in the text. It begins with the state at the end of the
previous step (truncated backpropagation through time). The state is kept in two attributes, and each step
assigns new tensors to them. A replay reads the tensors from the attributes and stores the new ones there. The
exit status is 1 if the loss did not fall.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lazystep

NUM_STREAMS = 16
NUM_CHARACTERS = 32


class Reader(nn.Module):
    """Predicts the next character. `hidden` and `cell` are the state at the end of the last call."""

    hidden: Tensor
    cell: Tensor

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, 128)

    def start_over(self, device: str) -> None:
        self.hidden = torch.zeros(1, NUM_STREAMS, self.lstm.hidden_size, device=device)
        self.cell = torch.zeros_like(self.hidden)

    def forward(self, x: Tensor) -> Tensor:
        y, (hidden, cell) = self.lstm(self.embedding(x), (self.hidden, self.cell))
        self.hidden, self.cell = (
            hidden.detach(),
            cell.detach(),
        )  # the next step uses the state, but no gradients flow back through it
        return self.out(y)


def make_streams() -> Tensor:
    """The source of argparse, cut into pieces of equal length that are read in parallel."""
    text = pathlib.Path(argparse.__file__).read_bytes()
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp(max=127).long()
    return codes[: len(codes) // NUM_STREAMS * NUM_STREAMS].view(NUM_STREAMS, -1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="once through the text instead of eight times")
    num_rounds = 1 if parser.parse_args().quick else 8

    torch.manual_seed(0)
    streams = make_streams()
    model = Reader().to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    @lazystep.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = []
    for number in range(1, num_rounds + 1):
        model.start_over("lazy")
        for start in range(0, streams.shape[1] - NUM_CHARACTERS - 1, NUM_CHARACTERS):
            window = streams[:, start : start + NUM_CHARACTERS + 1]
            losses.append(train_step(window[:, :-1], window[:, 1:]))
        print(f"round {number}: loss {losses[-1].item():.3f}", flush=True)

    first, last = (torch.stack(part).mean().item() for part in (losses[:10], losses[-10:]))
    print(f"loss {first:.3f} -> {last:.3f} in {len(losses)} steps")
    print(train_step.explain())
    return 0 if last < first else 1


if __name__ == "__main__":
    sys.exit(main())
