"""Tensors that a step only looks at: are they there, of which shape, of which type? None reaches an op."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from .common import captured
from .scenes import Scene, check_replays, check_right_or_refused

Look = Callable[[Any], float]


def ones(*shape: int, **options: Any) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.ones(*shape, **{"device": device, **options})


def parameter(device: str) -> nn.Parameter:
    return nn.Parameter(torch.ones(3, device=device))


def pruned(device: str) -> torch.Tensor:
    tensor = torch.ones(3, device=device)
    tensor.sparsity = 3  # type: ignore[attr-defined]
    return tensor


# What is looked at; what makes the tensor before the change, and the one after it.
LOOKS: dict[str, tuple[Look, Callable[[str], Any], Callable[[str], Any]]] = {
    "there": (lambda w: 2 if w is not None else 3, ones(3), lambda device: None),
    "there at last": (lambda w: 2 if w is not None else 3, lambda device: None, ones(3)),
    "a tensor": (lambda w: 2 if torch.is_tensor(w) else 3, ones(3), lambda device: 4.0),
    "length": (len, ones(3, 2), ones(5, 2)),
    "shape": (lambda w: w.shape[1], ones(2, 3), ones(2, 4)),
    "shape as a whole": (lambda w: 2 if w.shape == (2, 3) else 3, ones(2, 3), ones(3, 2)),
    "size": (lambda w: w.size(0), ones(3), ones(4)),
    "numel": (lambda w: w.numel(), ones(3), ones(4)),
    "ndim": (lambda w: w.ndim, ones(3), ones(3, 1)),
    "dim()": (lambda w: w.dim(), ones(3), ones(3, 1)),
    "stride": (lambda w: w.stride(0), ones(3, 3), lambda device: torch.ones(9, 3, device=device)[::3]),
    "contiguous": (lambda w: 2 if w.is_contiguous() else 3, ones(3, 3), lambda d: ones(3, 3)(d).t()),
    "bytes per element": (lambda w: w.element_size(), ones(3), ones(3, dtype=torch.float64)),
    "dtype": (lambda w: torch.finfo(w.dtype).bits, ones(3), ones(3, dtype=torch.float64)),
    "dtype equal": (lambda w: 2 if w.dtype == torch.float32 else 3, ones(3), ones(3, dtype=torch.float64)),
    "floating point": (lambda w: 2 if w.is_floating_point() else 3, ones(3), ones(3, dtype=torch.int64)),
    "device": (lambda w: 2 if w.device.type != "meta" else 3, ones(3), ones(3, device="meta")),
    "is_meta": (lambda w: 2 if w.is_meta else 3, ones(3, device="meta"), ones(3)),
    "isinstance": (lambda w: 2 if isinstance(w, nn.Parameter) else 3, parameter, ones(3)),
    "type": (lambda w: 2 if type(w) is torch.Tensor else 3, ones(3), parameter),
    "requires_grad": (lambda w: 2 if w.requires_grad else 3, ones(3, requires_grad=True), ones(3)),
    "leaf": (lambda w: 2 if w.is_leaf else 3, ones(3, requires_grad=True), lambda d: parameter(d) * 2),
    "graph": (lambda w: 2 if w.grad_fn is None else 3, parameter, lambda device: parameter(device) * 2),
    "list of tensors": (lambda w: 2 if w else 3, lambda device: [ones(3)(device)], lambda device: []),
    "attribute of a tensor": (lambda w: getattr(w, "sparsity", 2), ones(3), pruned),
}


class Slots:
    __slots__ = ("w",)


class OnTheClass:
    w: Any


def holder_of(kind: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Where the tensor is kept: how the step gets it, and how it is replaced."""
    if kind in ("namespace", "slots", "module"):
        box: Any = {"namespace": types.SimpleNamespace, "slots": Slots, "module": nn.Module}[kind]()
        return lambda: box.w, lambda w: setattr(box, "w", w)
    if kind == "buffer":
        module = nn.Module()
        module.register_buffer("w", None)
        return lambda: module.w, lambda w: setattr(module, "w", w)
    if kind == "class":
        own = type("Own", (OnTheClass,), {})
        return lambda: own().w, lambda w: setattr(own, "w", w)
    if kind == "global":
        return lambda: GLOBAL, lambda w: globals().update(GLOBAL=w)
    if kind in ("dict", "list"):
        items: Any = {0: None} if kind == "dict" else [None]
        return lambda: items[0], lambda w: items.__setitem__(0, w)
    if kind == "tuple":
        inner = types.SimpleNamespace(pair=(1, None))
        return lambda: inner.pair[1], lambda w: setattr(inner, "pair", (1, w))
    assert kind == "variable"
    variable: Any = None

    def change(w: Any) -> None:
        nonlocal variable
        variable = w

    return lambda: variable, change


GLOBAL: Any = None
HOLDERS = ("namespace", "slots", "module", "buffer", "class", "global", "dict", "list", "tuple", "variable")


def look_scene(kind: str, look: str, device: str) -> Scene:
    read, before, after = LOOKS[look]
    get, put = holder_of(kind)
    put(before(device))
    return Scene(lambda x: x * read(get()), lambda: put(after(device)))


@pytest.mark.parametrize("look", LOOKS)
def test_tensor_that_is_only_looked_at(look: str) -> None:
    check_replays(lambda device: look_scene("namespace", look, device))


@pytest.mark.parametrize("look", ["there", "there at last", "length", "dtype"])
@pytest.mark.parametrize("kind", HOLDERS[1:])
def test_wherever_it_is_kept(kind: str, look: str) -> None:
    check_replays(lambda device: look_scene(kind, look, device))


def test_tensor_on_the_host_that_is_only_looked_at() -> None:
    def make(device: str) -> Scene:
        box = types.SimpleNamespace(bank=torch.ones(3, 2))
        return Scene(lambda x: x * len(box.bank), lambda: setattr(box, "bank", torch.ones(5, 2)))

    check_replays(make)


def is_there(box: Any) -> bool:
    return hasattr(box, "mask")


@pytest.mark.parametrize(
    "look",
    [
        is_there,
        lambda box: getattr(box, "mask", None) is not None,
        lambda box: "mask" in vars(box),
        lambda box: "mask" in box.__dict__,
        lambda box: "mask" in dir(box),
    ],
    ids=["hasattr", "getattr", "vars", "__dict__", "dir"],
)
@pytest.mark.parametrize("was_there", [True, False])
def test_whether_an_attribute_is_there(look: Callable[[Any], bool], was_there: bool) -> None:
    def make(device: str) -> Scene:
        box = types.SimpleNamespace()
        mask = torch.ones(3, device=device)
        if was_there:
            box.mask = mask
        change = (lambda: delattr(box, "mask")) if was_there else (lambda: setattr(box, "mask", mask))
        return Scene(lambda x: x * 2 if look(box) else x * 3, change)

    check_replays(make)


@pytest.mark.parametrize("was_same", [True, False])
def test_whether_two_places_hold_one_tensor(was_same: bool) -> None:
    def make(device: str) -> Scene:
        one, other = torch.ones(3, device=device), torch.ones(3, device=device)
        tied = types.SimpleNamespace(head=one, embedding=one if was_same else other)
        change = lambda: setattr(tied, "embedding", other if was_same else one)  # noqa: E731
        return Scene(lambda x: x * 2 if tied.head is tied.embedding else x * 3, change)

    check_replays(make)


def test_whether_a_gradient_is_there() -> None:
    def make(device: str) -> Scene:
        w = torch.ones(3, device=device, requires_grad=True)
        return Scene(
            lambda x: x * 2 if w.grad is None else x * 3,
            lambda: setattr(w, "grad", torch.ones(3, device=device)),
        )

    check_replays(make)


def test_whether_a_layer_has_a_bias() -> None:
    def make(device: str) -> Scene:
        layer = nn.Linear(3, 3).to(device)
        return Scene(lambda x: x * (2 if layer.bias is not None else 3), lambda: setattr(layer, "bias", None))

    check_replays(make)


@pytest.mark.parametrize(
    ("look", "values"),
    [
        (lambda w: 2 if w is None else 3, [None, torch.ones(2)]),
        (lambda w: w.shape[0], [torch.ones(2), torch.ones(3)]),
        (lambda w: torch.finfo(w.dtype).bits, [torch.ones(2), torch.ones(2).double()]),
        (lambda w: 2 if w.requires_grad else 3, [torch.ones(2), torch.ones(2).requires_grad_()]),
        (len, [[torch.ones(2)], [torch.ones(2), torch.ones(2)]]),
        (lambda w: 2 if "mask" in w else 3, [{"mask": torch.ones(2)}, {"mark": torch.ones(2)}]),
    ],
    ids=["there", "shape", "dtype", "requires_grad", "list", "dict"],
)
def test_argument_that_is_only_looked_at(look: Look, values: list[Any]) -> None:
    step = captured(lambda x, w: x * look(w), fullgraph=True)
    for value in [values[0]] * 4 + [values[1]] * 4 + values:
        assert step(torch.ones(1), value).item() == look(value)
    assert step.num_replayed >= 6


@pytest.mark.parametrize("kind", ["tensor", "object", "weak set", "weak keys"])
def test_whether_something_weakly_held_is_still_there(kind: str) -> None:
    def make(device: str) -> Scene:
        held: list[Any] = [torch.ones(3, device=device) if kind == "tensor" else nn.Identity()]
        reference = weakref.ref(held[0])
        members: Any = weakref.WeakSet(held)
        keys = weakref.WeakKeyDictionary({held[0]: 1} if kind != "tensor" else {})

        def is_there() -> bool:
            if kind == "weak set":
                return len(members) > 0
            return len(keys) > 0 if kind == "weak keys" else reference() is not None

        return Scene(lambda x: x * 2 if is_there() else x * 3, lambda: (held.clear(), gc.collect()))

    check_right_or_refused(make)
