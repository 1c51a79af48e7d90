"""Ops of lazystep's own, for what no aten op on CPU tensors does by itself.

Those that are recorded are composite, so that shape inference and the compiler see aten ops.
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
_library.define("checked(Tensor self, Tensor is_right, str message) -> Tensor")
# oneDNN's LSTM layer in libraries: see `LSTM_LAYERS`.
_library.define(
    "lstm_layer(Tensor input, Tensor weight0, Tensor weight1, Tensor weight2, Tensor weight3, "
    "Tensor hx_, Tensor cx_, bool reverse, int mode, int hidden_size, int num_layers, bool has_biases, "
    "bool bidirectional, bool batch_first, bool train) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "lstm_layer_backward(Tensor input, Tensor weight1, Tensor weight2, Tensor weight3, Tensor weight4, "
    "Tensor hx_, Tensor cx_tmp, Tensor output, Tensor hy_, Tensor cy_, Tensor? grad_output, Tensor? grad_hy, "
    "Tensor? grad_cy, bool reverse, int mode, int hidden_size, int num_layers, bool has_biases, bool train, "
    "bool bidirectional, bool batch_first, Tensor workspace) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
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


# Without batch sizes, which only packed sequences have: AOTInductor can't pass an empty list of integers.
def _lstm_layer(*args: Any) -> tuple[torch.Tensor, ...]:
    # The kernel reads the grad mode, and without it makes no workspace.
    with torch.enable_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
        layer: tuple[torch.Tensor, ...] = torch.ops.aten.mkldnn_rnn_layer.default(*args[:8], [], *args[8:])
        return layer


def _lstm_layer_types(*args: Any) -> tuple[torch.Tensor, ...]:
    output, hidden, cell, _ = torch.ops.aten.mkldnn_rnn_layer.default(*args[:8], [], *args[8:])
    return output, hidden, cell, output.new_empty(1, dtype=torch.uint8)


def _lstm_layer_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    backward = torch.ops.aten.mkldnn_rnn_layer_backward.default
    with torch._C._AutoDispatchBelowADInplaceOrView():
        grads: tuple[torch.Tensor, ...] = backward(*args[:20], [], *args[20:])
        return grads


def _lstm_layer_backward_types(*args: Any) -> tuple[torch.Tensor, ...]:
    x, weight1, weight2, _, _, hidden, cell = args[:7]
    bias = weight1.shape[:1]  # the kernel makes gradients of biases, whether there are biases or not
    shapes = (x.shape, weight1.shape, weight2.shape, bias, bias, hidden.shape, cell.shape)
    return tuple(x.new_empty(shape) for shape in shapes)


def _histc_of_integers(self: torch.Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> torch.Tensor:
    counts: torch.Tensor = torch.ops.aten.histc.default(self.float(), bins, min, max)
    return counts.to(self.dtype)


def _checked(self: torch.Tensor, is_right: torch.Tensor, message: str) -> torch.Tensor:
    if not is_right:
        raise RuntimeError(message)
    return self.clone()


def _updated(written: list[torch.Tensor], *rest: Any) -> list[torch.Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in written]


_library.impl("update", lambda *_: None, "Meta")
_library.impl("updated", _updated, "Meta")
_library.impl("lstm_layer_without_grad", _lstm_layer_without_grad, "CompositeImplicitAutograd")
_library.impl("lstm_layer", _lstm_layer, "CPU")
_library.impl("lstm_layer", _lstm_layer_types, "Meta")
_library.impl("lstm_layer_backward", _lstm_layer_backward, "CPU")
_library.impl("lstm_layer_backward", _lstm_layer_backward_types, "Meta")
_library.impl("checked", _checked, "CPU")
_library.impl("checked", lambda self, is_right, message: self.clone(), "Meta")
_library.impl("histc_of_integers", _histc_of_integers, "CompositeImplicitAutograd")

# oneDNN's LSTM layer as it runs under `torch.no_grad()`: another kernel, without a workspace for backward.
# The op reads the grad mode of its thread, and the executor thread has none of the training thread's modes.
LSTM_LAYER_WITHOUT_GRAD = torch.ops.lazystep.lstm_layer_without_grad.default

# What a library calls for oneDNN's LSTM layer, by the recorded op: the op, and at which place the recorded op
# has its batch sizes. The workspace has a size that only oneDNN knows. torch infers it as empty, and the
# compiler drops empty tensors. Here it is inferred as one byte: the compiler allocates nothing for it, and
# passes to backward what the kernel has made.
LSTM_LAYER = "aten.mkldnn_rnn_layer.default"
LSTM_WORKSPACE = 3  # among the results
LSTM_LAYERS = {
    LSTM_LAYER: (torch.ops.lazystep.lstm_layer.default, 8),
    "lazystep.lstm_layer_without_grad.default": (torch.ops.lazystep.lstm_layer.default, 8),
    "aten.mkldnn_rnn_layer_backward.default": (torch.ops.lazystep.lstm_layer_backward.default, 20),
}

# `histc` of integers, which CUDA has and the CPU has not. Third-party code calls it on every device that is
# not the CPU. Counts what eager counts with floats, and returns the data type that CUDA returns.
HISTC_OF_INTEGERS = torch.ops.lazystep.histc_of_integers.default

# A copy of a tensor, or an error with this text: for what eager finds out about values before it computes.
CHECKED = torch.ops.lazystep.checked.default
