"""Ops of lazystep's own, for what no aten op on CPU tensors does by itself.

All are composite, so that shape inference and the compiler see aten ops.
"""

from __future__ import annotations

from typing import Any

import torch

# Kept for the life of the process: dropping a Library removes its ops.
_library = torch.library.Library("lazystep", "DEF")
_library.define(
    "lstm_layer_without_grad(Tensor input, Tensor weight0, Tensor weight1, Tensor weight2, Tensor weight3, "
    "Tensor hx_, Tensor cx_, bool reverse, int[] batch_sizes, int mode, int hidden_size, int num_layers, "
    "bool has_biases, bool bidirectional, bool batch_first, bool train) -> (Tensor, Tensor, Tensor)"
)
_library.define("histc_of_integers(Tensor self, int bins=100, Scalar min=0, Scalar max=0) -> Tensor")
# Its kernel is in execute/update.h; `compile/update.py` writes its code. It is in no program, only in graphs
# that are compiled.
_library.define("update(Tensor(a!)[] written, Tensor[] read, Tensor? floats, Tensor? ints, str code) -> ()")
# The same without mutation, for tracing.
_library.define(
    "updated(Tensor[] written, Tensor[] read, Tensor? floats, Tensor? ints, str code) -> Tensor[]"
)


def _lstm_layer_without_grad(*args: Any) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        layer: tuple[torch.Tensor, ...] = torch.ops.aten.mkldnn_rnn_layer.default(*args)
        return layer[:3]


def _histc_of_integers(self: torch.Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> torch.Tensor:
    counts: torch.Tensor = torch.ops.aten.histc.default(self.float(), bins, min, max)
    return counts.to(self.dtype)


def _updated(written: list[torch.Tensor], *rest: Any) -> list[torch.Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in written]


_library.impl("update", lambda *_: None, "Meta")
_library.impl("updated", _updated, "Meta")
_library.impl("lstm_layer_without_grad", _lstm_layer_without_grad, "CompositeImplicitAutograd")
_library.impl("histc_of_integers", _histc_of_integers, "CompositeImplicitAutograd")

# oneDNN's LSTM layer as it runs under `torch.no_grad()`: another kernel, without a workspace for backward.
# The op reads the grad mode of its thread, and the executor thread has none of the training thread's modes.
LSTM_LAYER_WITHOUT_GRAD = torch.ops.lazystep.lstm_layer_without_grad.default

# `histc` of integers, which CUDA has and the CPU has not. Third-party code calls it on every device that is
# not the CPU. Counts what eager counts with floats, and returns the data type that CUDA returns.
HISTC_OF_INTEGERS = torch.ops.lazystep.histc_of_integers.default
