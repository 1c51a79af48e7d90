"""Modes and settings of torch that begin or end between two calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .scenes import Scene, check_right
from .undo import restore, undo


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    restore()


class AddsOne(TorchFunctionMode):
    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result + 1 if function is torch.mul else result


class AddsOneBelow(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result + 1 if function is torch.ops.aten.sin.default else result


@contextlib.contextmanager
def setting(change: Callable[[Any], Any], on: Any, off: Any) -> Iterator[None]:
    change(on)
    try:
        yield
    finally:
        change(off)


def gradient(x: Any) -> Any:
    y = x.detach().clone().requires_grad_()
    return torch.autograd.grad(y.sin().sum(), y)[0]


def gradient_of_nothing(x: Any) -> Any:
    y = (x * 0).detach().clone().requires_grad_()
    try:
        return torch.autograd.grad((y.sqrt() * 0).sum(), y)[0]
    except RuntimeError:
        return x * 3


def packed(x: Any) -> Any:
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            return gradient(x)
    except RuntimeError:
        return x * 3


class Plain(torch.Tensor):
    pass


def outer(x: Any) -> Any:
    return torch.mm(x.reshape(3, 1), x.reshape(1, 3))


MODES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch function": (AddsOne, lambda x: torch.mul(x, 3)),
    "dispatch": (AddsOneBelow, torch.sin),
    "default type": (
        lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
        lambda x: torch.ones(3, device=x.device) / 3,
    ),
    "device": (
        lambda: torch.device("meta"),
        lambda x: x * (2.0 if torch.empty(1).device.type == "meta" else 3.0),
    ),
    "default device": (
        lambda: setting(torch.set_default_device, "meta", None),
        lambda x: x * (2.0 if torch.empty(1).device.type == "meta" else 3.0),
    ),
    "no grad": (
        torch.no_grad,
        lambda x: x * (2.0 if (x.detach().requires_grad_() * 2).requires_grad else 3.0),
    ),
    "inference": (torch.inference_mode, lambda x: x * (2.0 if (x * 1).is_inference() else 3.0)),
    "hooks of saved tensors": (
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t),
        gradient,
    ),
    "no hooks of saved tensors": (lambda: torch.autograd.graph.disable_saved_tensors_hooks("no"), packed),
    "anomaly": (lambda: torch.autograd.set_detect_anomaly(True), gradient_of_nothing),
    "deterministic": (
        lambda: setting(torch.use_deterministic_algorithms, True, False),
        lambda x: x * (2.0 if torch.are_deterministic_algorithms_enabled() else 3.0),
    ),
    "unfilled memory": (
        lambda: setting(torch._C._set_deterministic_fill_uninitialized_memory, False, True),
        lambda x: x * (2.0 if torch.utils.deterministic.fill_uninitialized_memory else 3.0),  # type: ignore[attr-defined]
    ),
    "autocast": (lambda: torch.autocast("cpu"), outer),
    "type of autocast": (lambda: torch.autocast("cpu", dtype=torch.float16), outer),
    "attention": (
        lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
        lambda x: nn.functional.scaled_dot_product_attention(*[x.reshape(1, 1, 3, 1).repeat(1, 1, 1, 8)] * 3),
    ),
    "denormals": (
        lambda: setting(torch.set_flush_denormal, True, False),
        lambda x: x * 1e-38 * 1e-3 * 1e30,
    ),
    "subclasses": (
        torch._C.DisableTorchFunctionSubclass,
        lambda x: x * (2.0 if type(x.as_subclass(Plain) * 2) is Plain else 3.0),
    ),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("is_left", [False, True], ids=["entered", "left"])
@pytest.mark.parametrize("name", MODES)
def test_mode_between_two_calls_is_noticed(name: str, is_left: bool) -> None:
    enter, step = MODES[name]

    def make(device: str) -> Scene:
        restore()
        stack = contextlib.ExitStack()
        undo.append(stack.close)
        if is_left:
            stack.enter_context(enter())

        def arguments(number: int) -> tuple[Any, ...]:
            return (torch.linspace(-1, 1, 3, device="cpu", dtype=torch.float32) + number,)

        return Scene(
            step=step,
            change=stack.close if is_left else lambda: stack.enter_context(enter()),
            arguments=arguments,
        )

    step_function, replays = check_right(make)
    assert replays[-1] or len(step_function.explain().splitlines()) > 1
    if name != "anomaly":  # which looks for NaNs, and so waits
        assert replays[5] >= 2, step_function.explain()
        assert replays[-1] > replays[5], step_function.explain()
