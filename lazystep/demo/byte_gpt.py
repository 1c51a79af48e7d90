"""A small byte-level GPT in ordinary PyTorch, and its data: the source of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..barrier import mark_step

VOCABULARY = 256
NUM_TOKENS = 64
BATCH_SIZE = 8
MAX_BYTES = 4_000_000


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with a residual connection."""

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
        """Mix the positions, then the channels."""
        parts = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        out: Tensor = x + self.feed_forward(x)
        return out


class ByteGPT(nn.Module):
    """Predicts the next byte. The output layer shares its weight with the token embedding."""

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
        """Logits of the next byte at every position."""
        x = self.dropout(self.token(tokens) + self.position)
        return F.linear(self.norm(self.blocks(x)), self.token.weight)


def next_byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy, in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def read_corpus() -> tuple[Tensor, Tensor]:
    """The bytes for training, and the bytes of held-out files: every tenth file is held out."""
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
    """Windows from random positions, and the same windows one byte later, as CPU tensors."""
    starts = torch.randint(len(corpus) - NUM_TOKENS, (BATCH_SIZE, 1), generator=generator)
    windows = corpus[starts + torch.arange(NUM_TOKENS + 1)].long()
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: Tensor, num_batches: int) -> float:
    """The mean loss on batches that are the same in every call. Synchronizes once, at the end."""
    generator = torch.Generator().manual_seed(2)
    model.eval()
    total = torch.zeros((), device="lazy")
    for _ in range(num_batches):
        x, y = sample_batch(corpus, generator)
        total += next_byte_loss(model(x.to("lazy")), y.to("lazy"))
        mark_step()
    model.train()
    return total.item() / num_batches


@torch.no_grad()
def write_sample(model: nn.Module, prompt: bytes, num_bytes: int) -> str:
    """Continue a prompt. Synchronizes once per byte: each byte is needed for the next one."""
    generator = torch.Generator().manual_seed(3)
    model.eval()
    # All windows have the same size, so every byte has the same program, which is found in the cache.
    text = bytearray(prompt.rjust(NUM_TOKENS, b"\n"))
    for _ in range(num_bytes):
        window = torch.tensor([list(text[-NUM_TOKENS:])])
        logits = model(window.to("lazy"))[0, -1].cpu()
        text.append(int(torch.multinomial(F.softmax(logits / 0.7, dim=0), 1, generator=generator)))
    model.train()
    return text.decode(errors="replace").strip()
