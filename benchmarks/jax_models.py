"""The four models of `models` in JAX: same sizes, same losses, AdamW. The whole step is one jitted function.

`steps` runs this file as a peer, with the interpreter of a separate environment (`make bench-peers`). The
code is idiomatic JAX: pure functions over dictionaries of arrays, donated state, and images in channels-last
order, which XLA prefers. NumPy samples batches on the host. Parameters are drawn from torch's default
distributions.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import serve, spinning

Arrays = Any  # a tree of arrays
LEARNING_RATE, BETA1, BETA2, EPSILON, WEIGHT_DECAY = 1e-3, 0.9, 0.999, 1e-8, 1e-2


class Workload(NamedTuple):
    """`loss_fn(parameters, buffers, x, y)` returns the loss and the buffers after the step."""

    parameters: Arrays
    buffers: Arrays
    make_batch: Callable[[], tuple[Any, Any]]
    loss_fn: Callable[..., tuple[Any, Arrays]]


def _uniform(rng: np.random.Generator, bound: float, *shape: int) -> Any:
    return jnp.asarray(rng.uniform(-bound, bound, shape), jnp.float32)


def _linear(rng: np.random.Generator, before: int, after: int) -> Arrays:
    bound = before**-0.5
    return {"w": _uniform(rng, bound, before, after), "b": _uniform(rng, bound, after)}


def _apply(layer: Arrays, x: Any) -> Any:
    return x @ layer["w"] + layer["b"]


def _cross_entropy(logits: Any, target: Any) -> Any:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), target[..., None], axis=-1)
    return -picked.mean()


def mlp(num_layers: int = 6, width: int = 256, batch_size: int = 64) -> Workload:
    rng = np.random.default_rng(0)

    def make_batch() -> tuple[Any, Any]:
        x = rng.standard_normal((batch_size, width), np.float32)
        return x, np.roll(x, 1, axis=1)

    def loss_fn(parameters: Arrays, buffers: Arrays, x: Any, y: Any) -> tuple[Any, Arrays]:
        for layer in parameters[:-1]:
            x = jax.nn.relu(_apply(layer, x))
        return jnp.square(_apply(parameters[-1], x) - y).mean(), buffers

    return Workload([_linear(rng, width, width) for _ in range(num_layers)], {}, make_batch, loss_fn)


def _norm(layer: Arrays, x: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * layer["w"] + layer["b"]


def _attention(block: Arrays, x: Any, num_heads: int) -> Any:
    heads = jnp.split(_apply(block["qkv"], x), 3, axis=-1)
    q, k, v = (h.reshape(*h.shape[:2], num_heads, -1) for h in heads)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return _apply(block["out"], mixed.reshape(x.shape))


def gpt_logits(parameters: Arrays, tokens: Any, num_heads: int = 4) -> Any:
    x = parameters["token"][tokens] + parameters["position"]
    for b in parameters["blocks"]:
        x = x + _attention(b, _norm(b["norm1"], x), num_heads)
        hidden = jax.nn.gelu(_apply(b["up"], _norm(b["norm2"], x)), approximate=False)
        x = x + _apply(b["down"], hidden)
    return _norm(parameters["norm"], x) @ parameters["token"].T


def gpt(
    num_layers: int = 4, width: int = 128, num_heads: int = 4, batch_size: int = 8, num_tokens: int = 64
) -> Workload:
    rng = np.random.default_rng(0)
    vocabulary = 256

    def embedding(rows: int) -> Any:
        return jnp.asarray(rng.normal(0, 0.02, (rows, width)), jnp.float32)

    def norm() -> Arrays:
        return {"w": jnp.ones(width), "b": jnp.zeros(width)}

    def block() -> Arrays:
        return {
            "norm1": norm(),
            "qkv": _linear(rng, width, 3 * width),
            "out": _linear(rng, width, width),
            "norm2": norm(),
            "up": _linear(rng, width, 4 * width),
            "down": _linear(rng, 4 * width, width),
        }

    def make_batch() -> tuple[Any, Any]:
        tokens = rng.integers(vocabulary, size=(batch_size, num_tokens + 1), dtype=np.int32)
        return tokens[:, :-1], tokens[:, 1:]

    def loss_fn(parameters: Arrays, buffers: Arrays, tokens: Any, target: Any) -> tuple[Any, Arrays]:
        return _cross_entropy(gpt_logits(parameters, tokens, num_heads), target), buffers

    parameters = {
        "token": embedding(vocabulary),
        "position": embedding(num_tokens),
        "blocks": [block() for _ in range(num_layers)],
        "norm": norm(),
    }
    return Workload(parameters, {}, make_batch, loss_fn)


def _batch_norm(layer: Arrays, running: Arrays, x: Any) -> tuple[Any, Arrays]:
    mean = x.mean((0, 1, 2))
    variance = jnp.square(x - mean).mean((0, 1, 2))
    count = x.size // x.shape[-1]
    running = {
        "mean": 0.9 * running["mean"] + 0.1 * mean,
        "variance": 0.9 * running["variance"] + 0.1 * variance * count / (count - 1),
    }
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * layer["w"] + layer["b"], running


def conv(batch_size: int = 16, image_size: int = 32, num_classes: int = 10) -> Workload:
    rng = np.random.default_rng(0)
    channels = [3, 32, 64, 64, 128, 128]

    def make_batch() -> tuple[Any, Any]:
        images = rng.standard_normal((batch_size, image_size, image_size, 3), np.float32)
        return images, rng.integers(num_classes, size=batch_size, dtype=np.int32)

    def loss_fn(parameters: Arrays, buffers: Arrays, x: Any, y: Any) -> tuple[Any, Arrays]:
        after = []
        for number, (layer, running) in enumerate(zip(parameters["layers"], buffers, strict=True)):
            strides = (1 + number % 2,) * 2
            sizes = ("NHWC", "HWIO", "NHWC")
            padding = [(1, 1), (1, 1)]  # as in torch; with stride 2, "SAME" pads one side only
            x = jax.lax.conv_general_dilated(x, layer["kernel"], strides, padding, dimension_numbers=sizes)
            x, running = _batch_norm(layer, running, x)
            x = jax.nn.relu(x)
            after.append(running)
        return _cross_entropy(_apply(parameters["out"], x.mean((1, 2))), y), after

    layers, buffers = [], []
    for before, after in itertools.pairwise(channels):
        kernel = _uniform(rng, (9 * before) ** -0.5, 3, 3, before, after)
        layers.append({"kernel": kernel, "w": jnp.ones(after), "b": jnp.zeros(after)})
        buffers.append({"mean": jnp.zeros(after), "variance": jnp.ones(after)})
    parameters = {"layers": layers, "out": _linear(rng, channels[-1], num_classes)}
    return Workload(parameters, buffers, make_batch, loss_fn)


def lstm(num_steps: int = 24, width: int = 64, batch_size: int = 16) -> Workload:
    rng = np.random.default_rng(0)

    def make_batch() -> tuple[Any, Any]:
        x = rng.standard_normal((batch_size, num_steps, width), np.float32)
        return x, x[:, 0].copy()

    def loss_fn(parameters: Arrays, buffers: Arrays, x: Any, y: Any) -> tuple[Any, Arrays]:
        hidden = state = jnp.zeros((x.shape[0], x.shape[2]))
        for moment in range(x.shape[1]):
            gates = _apply(parameters["input"], x[:, moment]) + _apply(parameters["hidden"], hidden)
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            state = jax.nn.sigmoid(f) * state + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(state)
        return jnp.square(_apply(parameters["out"], hidden) - y).mean(), buffers

    bound = width**-0.5

    def gates() -> Arrays:
        return {"w": _uniform(rng, bound, width, 4 * width), "b": _uniform(rng, bound, 4 * width)}

    parameters = {"input": gates(), "hidden": gates(), "out": _linear(rng, width, width)}
    return Workload(parameters, {}, make_batch, loss_fn)


MODELS: dict[str, Callable[[], Workload]] = {"mlp": mlp, "gpt": gpt, "conv": conv, "lstm": lstm}


class State(NamedTuple):
    """Everything that a step changes."""

    parameters: Arrays
    buffers: Arrays
    first_moments: Arrays
    second_moments: Arrays
    num_steps: Any


def make_step(loss_fn: Callable[..., tuple[Any, Arrays]]) -> Callable[..., tuple[State, Any]]:
    """Forward, backward and torch's AdamW as one jitted function. It reuses the old state's memory."""

    def step(state: State, x: Any, y: Any) -> tuple[State, Any]:
        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, buffers), gradients = value_and_grad(state.parameters, state.buffers, x, y)
        count = state.num_steps + 1
        scale1, scale2 = 1 - BETA1**count, 1 - BETA2**count
        tree_map = jax.tree_util.tree_map
        first = tree_map(lambda m, g: BETA1 * m + (1 - BETA1) * g, state.first_moments, gradients)
        second = tree_map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, state.second_moments, gradients)

        def update(p: Any, m: Any, v: Any) -> Any:
            p = p * (1 - LEARNING_RATE * WEIGHT_DECAY)
            return p - LEARNING_RATE * (m / scale1) / (jnp.sqrt(v / scale2) + EPSILON)

        return State(tree_map(update, state.parameters, first, second), buffers, first, second, count), loss

    return jax.jit(step, donate_argnums=0)


class Worker:
    """Does the turns. It has those tasks of `steps.Worker` that apply to JAX."""

    def __init__(self, name: str) -> None:
        self.name = name

    def work(self, task: str, **details: Any) -> Mapping[str, float]:
        """Do the named task."""
        tasks: dict[str, Callable[..., Mapping[str, float]]]
        tasks = {"make": self.make, "first": self.first, "ready": self.ready, "turn": self.turn}
        return tasks[task](**details)

    def make(self, model: str) -> dict[str, float]:
        """Make the model, its state and the step. Nothing is compiled yet."""
        parameters, buffers, self.make_batch, loss_fn = MODELS[model]()
        # Two trees of zeros: donated memory must not be shared.
        first, second = (jax.tree_util.tree_map(jnp.zeros_like, parameters) for _ in range(2))
        self.state = State(parameters, buffers, first, second, jnp.zeros((), jnp.int32))
        self.step = make_step(loss_fn)
        jax.block_until_ready(self.state)
        return {"parameters": sum(p.size for p in jax.tree_util.tree_leaves(parameters))}

    def first(self) -> dict[str, float]:
        """Seconds until the first step's loss is known, including tracing and compiling."""
        x, y = self.make_batch()
        start = time.perf_counter()
        self.state, loss = self.step(self.state, x, y)
        float(loss)
        return {f"first step, {self.name}": time.perf_counter() - start}

    def ready(self, num_steps: int) -> dict[str, float]:
        """Run some steps that are not measured."""
        self.turn(num_steps)
        return {}

    def turn(self, num_steps: int, is_sampled: bool = True, is_busy: bool = False) -> dict[str, float]:
        """Seconds per step, including sampling if `is_sampled`.

        If `is_busy`, another thread spins in Python meanwhile.
        """
        batches = [] if is_sampled else [self.make_batch() for _ in range(num_steps)]
        with spinning(is_busy):
            start = time.perf_counter()
            for number in range(num_steps):
                x, y = self.make_batch() if is_sampled else batches[number]
                self.state, _ = self.step(self.state, x, y)
            jax.block_until_ready(self.state)
            seconds = time.perf_counter() - start
        return {f"{self.name}, busy" if is_busy else self.name: seconds / num_steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peer", required=True, help="the name to report numbers under")
    serve(Worker(parser.parse_args().peer).work)


if __name__ == "__main__":
    main()
