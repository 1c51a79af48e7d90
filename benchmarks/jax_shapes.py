"""The GPT of `shapes` in JAX: lengths are padded to buckets, because `jit` compiles every shape anew.

`shapes` runs this file as a peer, with the interpreter of a separate environment (`make bench-peers`). The
padding is at the end, where causal attention does not see it, and its tokens do not count in the loss.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.jax_models import Arrays, State, gpt, gpt_logits, make_step
from benchmarks.timing import serve
from benchmarks.training_time import TrainingTime

BUCKET = 16  # lengths are rounded up to a multiple of it
IGNORED = -1


class Worker:
    """Trains on lengths that vary: the tasks of `shapes.Worker`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def work(
        self, task: str, num_lengths: int, num_layers: int, num_steps: int, max_seconds: float
    ) -> Mapping[str, float]:
        """Do the named task: `cold`, once, or `turn`."""
        if task == "turn":
            return {self.name: self.train(num_steps, max_seconds).seconds / num_steps}
        self.make(num_lengths, num_layers)
        return self.train(num_steps, max_seconds).numbers(self.name)

    def make(self, num_lengths: int, num_layers: int) -> None:
        """Make the model, its state and the step. Nothing is compiled yet."""
        self.lengths = random.Random(0)
        self.choices = [24 + 2 * number for number in range(num_lengths)]
        self.rng = np.random.default_rng(0)
        longest = _padded(max(self.choices))
        parameters, buffers, _, _ = gpt(num_layers=num_layers, num_tokens=longest)
        first, second = (jax.tree_util.tree_map(jnp.zeros_like, parameters) for _ in range(2))
        self.state = State(parameters, buffers, first, second, jnp.zeros((), jnp.int32))
        self.step = make_step(_masked_loss)

    def train(self, num_steps: int, max_seconds: float) -> TrainingTime:
        """Time these steps."""
        times = TrainingTime(num_steps, max_seconds)
        loss = None
        while times.goes_on():
            before = time.perf_counter()
            length = self.lengths.choice(self.choices)
            tokens = self.rng.integers(256, size=(8, length + 1), dtype=np.int32)
            room = ((0, 0), (0, _padded(length) - length))
            x, y = np.pad(tokens[:, :-1], room), np.pad(tokens[:, 1:], room, constant_values=IGNORED)
            self.state, loss = self.step(self.state, x, y)
            times.add(time.perf_counter() - before)
        jax.block_until_ready(loss)
        return times.end()


def _padded(length: int) -> int:
    return -(-length // BUCKET) * BUCKET


def _masked_loss(parameters: Arrays, buffers: Arrays, tokens: Any, target: Any) -> tuple[Any, Arrays]:
    """The loss of `jax_models.gpt` over the tokens that are not padding."""
    own = {**parameters, "position": parameters["position"][: tokens.shape[1]]}
    logits = gpt_logits(own, tokens)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(target, 0)[..., None], axis=-1)
    is_counted = target != IGNORED
    return -jnp.where(is_counted, picked[..., 0], 0).sum() / is_counted.sum(), buffers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peer", required=True, help="the name to report numbers under")
    serve(Worker(parser.parse_args().peer).work)


if __name__ == "__main__":
    main()
