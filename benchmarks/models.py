"""The four models that benchmarks and tests train, each as (model, make_batch, loss_fn).

The models are small, because large matrices would hide the cost per op. They cover what makes recording hard:
plain layers (mlp), views and a shared parameter (gpt), buffers that are updated in place (conv), a long
unrolled loop (lstm). This file imports only torch, so that all variants of a benchmark can train the same
model on any device:

    model, make_batch, loss_fn = MODELS["gpt"]()
    model.to(device)
    optimizer = make_optimizer(model)
    x, y = make_batch()
    loss_fn(model(x.to(device)), y.to(device)).backward()
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class Workload(NamedTuple):
    """A model on the CPU, a function that makes its batches, and its loss function.

    `make_batch(generator=None)` samples inputs and targets on the host, as a data loader would. Without an
    argument it uses the default generator. `loss_fn(output, target)` is a mean over the batch.
    """

    model: nn.Module
    make_batch: Callable[..., Batch]
    loss_fn: Callable[[Tensor, Tensor], Tensor]


def make_optimizer(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """AdamW. Torch chooses its implementation, unless you pass `foreach=True` or `fused=True`."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **implementation)


def mlp(num_layers: int = 6, width: int = 256, batch_size: int = 64) -> Workload:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for _ in range(num_layers - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    layers.append(nn.Linear(width, width))

    def make_batch(generator: torch.Generator | None = None) -> Batch:
        x = torch.randn(batch_size, width, generator=generator)
        return x, x.roll(1, dims=1)

    return Workload(nn.Sequential(*layers), make_batch, F.mse_loss)


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = [t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1)]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(*heads, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            nn.LayerNorm(width), CausalSelfAttention(width, num_heads, dropout), nn.Dropout(dropout)
        )
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.feed_forward(x)


class GPT(nn.Module):
    """A decoder-only transformer whose output layer and token embedding share one parameter."""

    def __init__(
        self, vocabulary: int, num_tokens: int, num_layers: int, width: int, num_heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(num_tokens, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, num_heads, dropout) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        return self.head(self.norm(self.blocks(x)))


def gpt(
    num_layers: int = 4,
    width: int = 128,
    num_heads: int = 4,
    batch_size: int = 8,
    num_tokens: int = 64,
    dropout: float = 0.0,
) -> Workload:
    """A byte-level GPT with a vocabulary of 256 that predicts the next of random bytes."""
    vocabulary = 256

    def make_batch(generator: torch.Generator | None = None) -> Batch:
        tokens = torch.randint(vocabulary, (batch_size, num_tokens + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    return Workload(GPT(vocabulary, num_tokens, num_layers, width, num_heads, dropout), make_batch, loss_fn)


def conv(batch_size: int = 16, image_size: int = 32, num_classes: int = 10) -> Workload:
    """Five convolutions with batch norm. Every second convolution halves the image."""
    channels = [3, 32, 64, 64, 128, 128]
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(itertools.pairwise(channels)):
        layers += [
            nn.Conv2d(before, after, 3, stride=1 + number % 2, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], num_classes)]

    def make_batch(generator: torch.Generator | None = None) -> Batch:
        images = torch.randn(batch_size, 3, image_size, image_size, generator=generator)
        return images, torch.randint(num_classes, (batch_size,), generator=generator)

    return Workload(nn.Sequential(*layers), make_batch, F.cross_entropy)


class CellLoop(nn.Module):
    """An LSTM unrolled by an ordinary Python loop over time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = state = x.new_zeros(x.shape[0], x.shape[2])
        for moment in x.unbind(1):
            hidden, state = self.cell(moment, (hidden, state))
        return self.out(hidden)


def lstm(num_steps: int = 24, width: int = 64, batch_size: int = 16) -> Workload:
    """`nn.LSTMCell` in a loop. The target is the first element of the sequence."""

    def make_batch(generator: torch.Generator | None = None) -> Batch:
        x = torch.randn(batch_size, num_steps, width, generator=generator)
        return x, x[:, 0].contiguous()

    return Workload(CellLoop(width), make_batch, F.mse_loss)


MODELS: dict[str, Callable[..., Workload]] = {"mlp": mlp, "gpt": gpt, "conv": conv, "lstm": lstm}

# Transformers with 50 and 120 million parameters.
LARGE: dict[str, Callable[..., Workload]] = {
    "gpt-50m": functools.partial(gpt, num_layers=16, width=512, num_heads=8),
    "gpt-120m": functools.partial(gpt, num_layers=17, width=768, num_heads=12),
}


def make_workload(name: str) -> Workload:
    """A model by its name, or by name and width: `gpt:64`."""
    if name in LARGE:
        return LARGE[name]()
    kind, _, width = name.partition(":")
    return MODELS[kind](width=int(width)) if width else MODELS[kind]()
