"""Recurrent layers take the kernels that eager takes on the CPU, in every mode: bit for bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import lazystep
from lazystep.ops import facade

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


def two_calls(layer: nn.RNNBase, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return layer(x)[0].square().mean() + layer(y)[0].sin().sum()


def one_call_for_each_time(layer: nn.RNNBase, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    state, loss = None, y.sum() * 0
    for time in range(len(x)):
        out, state = layer(x[time : time + 1], state)
        loss = loss + out.square().sum() * (time + 1)
    return loss


def a_read_between_two_calls(layer: nn.RNNBase, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first = layer(x)[0].square().mean()
    return first * 2 + layer(y)[0].sum() if first.item() > 0 else first


def a_graph_that_is_dropped(layer: nn.RNNBase, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    layer(x)
    return two_calls(layer, x, y)


def another_graph_before(layer: nn.RNNBase, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, second = layer(x)[0].square().mean(), two_calls(layer, y, x)
    first.backward()
    return second


def weights_with_other_data(layer: nn.RNNBase, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    layer(x)
    for parameter in layer.parameters():
        parameter.data = parameter.data * 1.5
    return two_calls(layer, x, y)


@pytest.mark.parametrize(
    "loss_of",
    [
        two_calls,
        one_call_for_each_time,
        a_read_between_two_calls,
        a_graph_that_is_dropped,
        another_graph_before,
        weights_with_other_data,
    ],
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_gradients_of_several_calls_are_added_as_in_eager(
    kind: type[nn.RNNBase], loss_of: Callable[..., torch.Tensor]
) -> None:
    original = kind(5, 7, num_layers=2)
    batches = [torch.randn(2, 6, 3, 5) for _ in range(3)]
    found = {}
    for device in "cpu", "lazy":
        layer = copy.deepcopy(original).to(device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        found[device] = []
        for batch in batches:
            loss_of(layer, *batch.to(device)).backward()
            found[device] += [p.grad.clone().cpu() for p in layer.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
            lazystep.mark_step()
    assert len(found["cpu"]) == len(found["lazy"]) == 3 * 8
    assert all(map(torch.equal, found["cpu"], found["lazy"]))


def test_weights_are_kept_no_longer_than_the_graph() -> None:
    layer = nn.GRU(5, 6).to("lazy")
    out = layer(torch.randn(4, 3, 5).to("lazy"))
    assert len(facade._weights) == 4
    out[0].sum().backward()
    dead = [weakref.ref(parameter) for parameter in layer.parameters()]
    del out
    gc.collect()
    assert not facade._weights
    del layer
    gc.collect()
    assert [reference() for reference in dead] == [None] * len(dead)
