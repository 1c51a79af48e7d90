"""Recurrent layers take the kernels that eager takes on the CPU, in every mode: bit for bit."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

MODES = {"train": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def run(d: str, layer: nn.RNNBase, x: torch.Tensor, mode: str, is_packed: bool) -> list[torch.Tensor]:
    layer = copy.deepcopy(layer).to(d)
    inputs: Any = x.to(d)
    if is_packed:
        lengths = torch.tensor([3, 2, 1, 1] if layer.batch_first else [4, 2, 1])
        inputs = pack_padded_sequence(inputs, lengths, batch_first=layer.batch_first)
    torch.manual_seed(1)
    with MODES[mode]():
        out, state = layer(inputs)
    results = [out.data if is_packed else out, *(state if isinstance(state, tuple) else (state,))]
    if results[0].requires_grad:
        torch.stack([r.square().sum() for r in results]).sum().backward()
        results += [p.grad for p in layer.parameters() if p.grad is not None]
    return [r.detach().cpu() for r in results]


@pytest.mark.parametrize("frozen", ["none", "all", "some"])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layer_equals_eager_bitwise(
    kind: type[nn.RNNBase], mode: str, is_packed: bool, frozen: str
) -> None:
    x = torch.randn(4, 3, 5)
    for options in (
        {"num_layers": 1},
        {"num_layers": 2, "batch_first": True},
        {"num_layers": 2, "dropout": 0.5},
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
    ):
        layer = kind(5, 6, **options)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(frozen == "none" or (frozen == "some" and "weight_ih" not in name))
        for is_training in (True, False):
            layer.train(is_training)
            want = run("cpu", layer, x, mode, is_packed)
            got = run("lazy", layer, x, mode, is_packed)
            assert [torch.equal(g, w) for g, w in zip(got, want, strict=True)] == [True] * len(want)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_input_that_wants_gradients_under_inference_mode_equals_eager_bitwise(kind: type[nn.RNNBase]) -> None:
    for options in ({"batch_first": True}, {"bidirectional": True}, {"num_layers": 2}):
        layer = kind(5, 6, **options)
        x = torch.randn(4, 3, 5)
        want = run("cpu", layer, x.requires_grad_(), "inference", False)
        got = run("lazy", layer, x.requires_grad_(), "inference", False)
        assert [torch.equal(g, w) for g, w in zip(got, want, strict=True)] == [True] * len(want)
