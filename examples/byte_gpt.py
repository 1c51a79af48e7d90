"""Train a small byte-level GPT on the source of Python's standard library, on `device="lazy"`.

    python examples/byte_gpt.py [--seconds 75] [--steps N] [--quick]

The step in `train` is an ordinary function. `@lazystep.step` records it until it repeats and replays it from
then on; the executor thread runs it while Python samples the next batch. A native library of the whole
step is built in the background and switched in between two steps, or loaded at once if an earlier run
has left it on disk. The loss is read every few steps, and only these reads wait. Shows progress with
rich in a terminal, plain lines elsewhere. The exit status is 1 if the loss on held-out files did not fall.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lazystep

VOCABULARY = 256
NUM_TOKENS = 64
BATCH_SIZE = 8
MAX_BYTES = 4_000_000
READ_EVERY = 25

# Called once a step, with the loss where it was read.
Show = Callable[[int, float | None], None]


# -- the model ---------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to what comes in."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        return x + self.feed_forward(x)


class ByteGPT(nn.Module):
    """Predicts the next byte. The output layer is the token embedding."""

    def __init__(
        self, width: int = 128, num_layers: int = 4, num_heads: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(NUM_TOKENS, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, num_heads, dropout) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.token(tokens) + self.position)
        return F.linear(self.norm(self.blocks(x)), self.token.weight)


def next_byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


# -- the data ----------------------------------------------------------------------------------


def read_corpus() -> tuple[Tensor, Tensor]:
    """Bytes to train on and bytes of other files to judge by: every tenth file is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3"}
    paths = [p for p in sorted(root.rglob("*.py")) if not skipped & set(p.relative_to(root).parts)]
    parts: tuple[bytearray, bytearray] = bytearray(), bytearray()
    for number, path in enumerate(paths):
        parts[number % 10 == 9].extend(path.read_bytes())
        if sum(map(len, parts)) > MAX_BYTES:
            break
    training, held_out = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return training, held_out


def sample_batch(corpus: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Windows from random places, and the same windows one byte later. On the host."""
    starts = torch.randint(len(corpus) - NUM_TOKENS, (BATCH_SIZE, 1), generator=generator)
    windows = corpus[starts + torch.arange(NUM_TOKENS + 1)].long()
    return windows[:, :-1], windows[:, 1:]


# -- training, judging, writing ----------------------------------------------------------------


def train(model: nn.Module, corpus: Tensor, steps: Iterator[int], show: Show) -> int:
    """Train for as long as there are steps; return how many there were."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @lazystep.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = next_byte_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = 0
    for step in steps:
        loss = train_step(*sample_batch(corpus, generator))
        show(step, loss.item() if step % READ_EVERY == 0 else None)
    return step


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: Tensor, num_batches: int) -> float:
    """The mean loss on batches that are the same at every call. One read, at the end."""
    generator = torch.Generator().manual_seed(2)
    model.eval()
    total = torch.zeros((), device="lazy")
    for _ in range(num_batches):
        x, y = sample_batch(corpus, generator)
        total += next_byte_loss(model(x.to("lazy")), y.to("lazy"))
        lazystep.mark_step()
    model.train()
    return total.item() / num_batches


@torch.no_grad()
def write_sample(model: nn.Module, prompt: bytes, num_bytes: int) -> str:
    """Continue a prompt. Every byte is read before the next one: this part does wait, once a byte."""
    generator = torch.Generator().manual_seed(3)
    model.eval()
    # Windows of one size give programs of one shape, so that they are recorded anew but never made anew.
    text = bytearray(prompt.rjust(NUM_TOKENS, b"\n"))
    for _ in range(num_bytes):
        window = torch.tensor([list(text[-NUM_TOKENS:])])
        logits = model(window.to("lazy"))[0, -1].cpu()
        text.append(int(torch.multinomial(F.softmax(logits / 0.7, dim=0), 1, generator=generator)))
    model.train()
    return text.decode(errors="replace").strip()


def steps_within(seconds: float, num_steps: int | None) -> Iterator[int]:
    """Step numbers from 1, until the time is over or, if given, the number is reached."""
    deadline = time.monotonic() + seconds
    for step in itertools.count(1):
        if time.monotonic() >= deadline or (num_steps is not None and step > num_steps):
            return
        yield step


# -- what is shown -----------------------------------------------------------------------------


def steps_in_flight() -> int:
    value = lazystep.metrics.counter_value
    return int(value("programs_recorded") + value("programs_replayed") - value("programs_executed"))


def tier() -> str:
    return "native" if lazystep.metrics.counter_value("native_executions") else "reference"


@contextlib.contextmanager
def plain_progress() -> Iterator[Show]:
    start = time.monotonic()

    def show(step: int, loss: float | None) -> None:
        if loss is not None and step % (4 * READ_EVERY) == 0:
            seconds = time.monotonic() - start
            print(
                f"step {step:5d}  loss {loss:.3f}  {step / seconds:5.1f} steps/s  {seconds:4.0f} s  {tier()}",
                flush=True,
            )

    yield show


@contextlib.contextmanager
def rich_progress(seconds: float, num_steps: int | None) -> Iterator[Show]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    start = time.monotonic()
    columns = "step {task.fields[step]}", "loss {task.fields[loss]}", "{task.fields[rate]:.1f} steps/s"
    in_flight = TextColumn("{task.fields[in_flight]} in flight, {task.fields[tier]}")
    with Progress(BarColumn(), *map(TextColumn, columns), in_flight, TimeElapsedColumn()) as progress:
        task = progress.add_task("", total=1.0, step=0, loss="-", rate=0.0, in_flight=0, tier="")

        def show(step: int, loss: float | None) -> None:
            elapsed = time.monotonic() - start
            done = max(elapsed / seconds, step / num_steps if num_steps else 0.0)
            read = {} if loss is None else {"loss": f"{loss:.3f}"}
            progress.update(
                task,
                completed=done,
                step=step,
                rate=step / elapsed,
                in_flight=steps_in_flight(),
                tier=tier(),
                **read,
            )

        yield show


def progress_display(seconds: float, num_steps: int | None) -> contextlib.AbstractContextManager[Show]:
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        return rich_progress(seconds, num_steps)
    return plain_progress()


def print_summary(num_steps: int, seconds: float) -> None:
    """What the runtime did in training, from its counters."""
    lazystep.wait_device_ops()
    value = lazystep.metrics.counter_value
    print(f"\n{num_steps} steps in {seconds:.0f} s, {num_steps / seconds:.1f} steps/s")
    for name in (
        "programs_recorded",
        "programs_replayed",
        "native_executions",
        "reference_executions",
        "builds_succeeded",
        "disk_hits",
        "synchronizations",
    ):
        print(f"  {name.replace('_', ' '):<20} {value(name):>7}")
    for reason, line, count in lazystep.metrics.synchronizations():
        print(f"    {count:>6} x {reason}, at {line.rpartition('/')[2]}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on Python's standard library.")
    parser.add_argument("--seconds", type=float, default=75.0, help="how long to train (default: 75)")
    parser.add_argument("--steps", type=int, help="stop after this many steps, if that comes first")
    parser.add_argument("--quick", action="store_true", help="a smoke run: 60 steps, a short sample")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    seconds, num_steps = arguments.seconds, 60 if arguments.quick else arguments.steps
    torch.manual_seed(0)
    training, held_out = read_corpus()
    model = ByteGPT().to("lazy")
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters:,} parameters, {len(training):,} bytes to train on, {len(held_out):,} held out")

    before = held_out_loss(model, held_out, num_batches=20)
    lazystep.metrics.reset()
    start = time.monotonic()
    with progress_display(seconds, num_steps) as show:
        num_steps = train(model, training, steps_within(seconds, num_steps), show)
    print_summary(num_steps, time.monotonic() - start)

    after = held_out_loss(model, held_out, num_batches=20)
    print(f"\nheld-out loss {before:.3f} before, {after:.3f} after")
    print(f"\n{write_sample(model, b'def ', 40 if arguments.quick else 300)}")
    return 0 if after < before else 1


if __name__ == "__main__":
    sys.exit(main())
