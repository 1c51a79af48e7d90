"""Steps that change what a later call reads: a replay does the same, or the step is not replayed."""

from __future__ import annotations

import collections
import itertools
import operator
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from .scenes import Scene, Scenes, check_right_or_refused

scene = Scenes()


def on(box: Any, step: Callable[[Any, torch.Tensor], Any], **options: Any) -> Scene:
    """A step that works on one object, whose attributes are compared after each call."""
    return Scene(lambda x: step(box, x), kept=lambda: dict(vars(box)), **options)


def deleting(kind: str, what: str) -> Callable[[str], Scene]:
    """`h` is set before each call; the call uses and deletes it."""

    def make(device: str) -> Scene:
        box: Any = {"object": types.SimpleNamespace, "slots": SlotsH, "module": nn.Module, "class": Hides}[
            kind
        ]()

        def step(x: torch.Tensor) -> torch.Tensor:
            y = x * box.h
            del box.h
            return y

        def arguments(number: int) -> tuple[torch.Tensor]:
            box.h = torch.full((3,), float(number)).to(device) if what == "tensor" else 2.0
            return (torch.ones(3) + number,)

        return Scene(step, kept=lambda: getattr(box, "h", "not there"), arguments=arguments)

    return make


class SlotsH:
    __slots__ = ("h",)


class Hides:
    h: Any = 3.0  # what the attribute of the object hides


scene.rows(
    **{
        f"{kind}_{what}_deleted": deleting(kind, what)
        for kind in ("object", "slots", "module", "class")
        for what in ("number", "tensor")
    }
)


@scene
def item_is_deleted(device: str) -> Scene:
    cache: dict[str, torch.Tensor] = {}

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * cache["h"]
        del cache["h"]
        return y

    def arguments(number: int) -> tuple[torch.Tensor]:
        cache["h"] = torch.full((3,), float(number)).to(device)
        return (torch.ones(3),)

    return Scene(step, kept=lambda: list(cache), arguments=arguments)


@scene
def hidden_state_is_deleted_and_made_again(device: str) -> Scene:
    box = types.SimpleNamespace(h=torch.ones(3).to(device))

    def step(x: torch.Tensor) -> torch.Tensor:
        h = box.h * 0.5 + x
        del box.h
        box.h = h
        return h * 2

    return Scene(step, lambda: setattr(box, "h", torch.zeros(3).to(device)), kept=lambda: box.h + 0)


@scene
def hidden_state_is_dropped(device: str) -> Scene:
    """There at every other call only."""
    box = types.SimpleNamespace()

    def step(x: torch.Tensor) -> torch.Tensor:
        if hasattr(box, "h"):
            y = x * box.h
            del box.h
            return y
        box.h = x * 2
        return x

    return Scene(step, kept=lambda: getattr(box, "h", "not there"))


@scene
def buffer_is_deleted_and_made_again(device: str) -> Scene:
    model = nn.Module()
    model.register_buffer("h", torch.ones(3).to(device))

    def step(x: torch.Tensor) -> torch.Tensor:
        h = model.h * x
        del model.h
        model.register_buffer("h", h)
        return h * 2

    return Scene(step, kept=lambda: [name for name, _ in model.named_buffers()])


@scene
def attribute_is_deleted_once(device: str) -> Scene:
    def step(box: Any, x: torch.Tensor) -> torch.Tensor:
        if hasattr(box, "first"):
            del box.first
            return x * 5
        return x * 2

    box = types.SimpleNamespace(first=True)
    return on(box, step, change=lambda: setattr(box, "first", True))


def items_scene(step: Callable[[Any, torch.Tensor], Any], start: Any, change: Any = None) -> Scene:
    """A step that works on one container, whose items are compared after each call."""
    return Scene(
        lambda x: step(start, x),
        (lambda: change(start)) if change else lambda: None,
        kept=lambda: dict(start) if isinstance(start, dict) else list(start),
    )


def popped_and_put_back(d: Any, x: torch.Tensor) -> torch.Tensor:
    h = d.pop("h", 2.0)
    d["h"] = h + 1
    return x * h


def popped_once(d: Any, x: torch.Tensor) -> torch.Tensor:
    return x * d.pop("first", 2.0)


def default_is_set(d: Any, x: torch.Tensor) -> torch.Tensor:
    return x * d.setdefault("h", 4.0)


def updated(d: Any, x: torch.Tensor) -> torch.Tensor:
    d.update(h=d["h"] * 0.5)
    return x * d["h"]


def merged(d: Any, x: torch.Tensor) -> torch.Tensor:
    d |= {"h": d["h"] + 1}
    return x * d["h"]


def moved_to_the_end(d: Any, x: torch.Tensor) -> torch.Tensor:
    d.move_to_end(next(iter(d)))
    return x * next(iter(d.values()))


def rotated(q: Any, x: torch.Tensor) -> torch.Tensor:
    q.rotate(1)
    return x * q[0]


def reversed_in_place(items: Any, x: torch.Tensor) -> torch.Tensor:
    items.reverse()
    return x * items[0]


def taken_and_put_back(items: Any, x: torch.Tensor) -> torch.Tensor:
    items.append(items.pop(0))
    return x * items[0]


def sliced(items: Any, x: torch.Tensor) -> torch.Tensor:
    items[:] = [items[1], items[0] + 1, items[2]]
    return x * items[0]


def shuffled(items: Any, x: torch.Tensor) -> torch.Tensor:
    random.shuffle(items)
    return x * items[0]


def ring(q: Any, x: torch.Tensor) -> torch.Tensor:
    q.append(x.sum())
    return torch.stack(list(q)).sum()


def added(s: Any, x: torch.Tensor) -> torch.Tensor:
    s.add(len(s) % 3)
    return x * len(s)


def set_moves(s: Any, x: torch.Tensor) -> torch.Tensor:
    s.add(s.pop() % 3 + 1)
    return x * max(s)


scene.rows(
    dict_pop_and_put_back=lambda device: items_scene(popped_and_put_back, {"h": 1.0}),
    dict_pop_once=lambda device: items_scene(popped_once, {"first": 5.0}, lambda d: d.update(first=7.0)),
    dict_setdefault=lambda device: items_scene(default_is_set, {}, lambda d: d.clear()),
    dict_setdefault_that_is_there=lambda device: items_scene(
        default_is_set, {"h": 2.0}, lambda d: d.update(h=3.0)
    ),
    dict_update=lambda device: items_scene(updated, {"h": 1.0}),
    dict_merge=lambda device: items_scene(merged, {"h": 1.0}),
    dict_order=lambda device: items_scene(moved_to_the_end, collections.OrderedDict(a=1.0, b=2.0)),
    deque_rotate=lambda device: items_scene(rotated, collections.deque([1.0, 2.0, 3.0])),
    deque_as_a_ring=lambda device: items_scene(ring, collections.deque([torch.zeros(()).to(device)] * 3, 3)),
    list_reverse=lambda device: items_scene(reversed_in_place, [1.0, 2.0]),
    list_reverse_of_tensors=lambda device: items_scene(
        reversed_in_place, [torch.ones(3).to(device), torch.zeros(3).to(device)]
    ),
    list_queue=lambda device: items_scene(taken_and_put_back, [1.0, 2.0, 3.0]),
    list_queue_of_tensors=lambda device: items_scene(
        taken_and_put_back, [torch.full((3,), n).to(device) for n in (1.0, 2.0, 3.0)]
    ),
    list_slice=lambda device: items_scene(sliced, [1.0, 2.0, 3.0]),
    list_shuffle=lambda device: items_scene(shuffled, [1.0, 2.0, 3.0]),
    set_add=lambda device: items_scene(added, set()),
    set_pop=lambda device: items_scene(set_moves, {1}),
)


@scene
def modules_are_swapped(device: str) -> Scene:
    def step(box: Any, x: torch.Tensor) -> torch.Tensor:
        box.a, box.b = box.b, box.a
        return box.a(x)

    box = types.SimpleNamespace(a=nn.Softmax(0), b=nn.Sigmoid())
    return Scene(lambda x: step(box, x), kept=lambda: type(box.a).__name__)


@scene
def pointer_into_a_queue(device: str) -> Scene:
    """As in momentum contrast: a queue of keys on the device, a pointer that wraps around."""
    model = nn.Module()
    model.register_buffer("queue", torch.zeros(4, 3).to(device))
    model.pointer = 0  # type: ignore[assignment]

    def step(x: torch.Tensor) -> torch.Tensor:
        model.queue[model.pointer] = x
        model.pointer = (model.pointer + 1) % 4
        return model.queue.sum(0)

    return Scene(step, kept=lambda: (model.pointer, model.queue + 0))


@scene
def written_and_not_read(device: str) -> Scene:
    def step(box: Any, x: torch.Tensor) -> torch.Tensor:
        box.done = True
        return x * 2

    box = types.SimpleNamespace(done=False)
    return on(box, step, change=lambda: setattr(box, "done", False))


@scene
def class_attribute_is_written(device: str) -> Scene:
    class Model:
        is_first = True
        calls = 0

        def step(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 5 if type(self).is_first else x * 2
            type(self).is_first = False
            type(self).calls += 1
            return y

    model = Model()
    return Scene(
        lambda x: model.step(x),
        lambda: setattr(Model, "is_first", True),
        kept=lambda: (Model.is_first, Model.calls),
    )


@scene
def attribute_that_hides_that_of_the_class(device: str) -> Scene:
    class Model:
        scale = 2.0

    def step(x: torch.Tensor) -> torch.Tensor:
        model.scale = model.scale + 1
        return x * model.scale

    model = Model()
    return Scene(step, lambda: vars(model).clear(), kept=lambda: (Model.scale, dict(vars(model))))


@scene
def array_is_written(device: str) -> Scene:
    array = np.ones(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        array[0] = array[0] % 3 + 1
        return x * float(array[0])

    return Scene(step, kept=lambda: array.copy())


@scene
def object_with_its_own_setattr(device: str) -> Scene:
    class Options:
        def __init__(self) -> None:
            object.__setattr__(self, "values", {"n": 1})

        def __getattr__(self, name: str) -> Any:
            return object.__getattribute__(self, "values")[name]

        def __setattr__(self, name: str, value: Any) -> None:
            self.values[name] = value % 3

    options: Any = Options()

    def step(x: torch.Tensor) -> torch.Tensor:
        options.n += 1
        return x * options.n

    return Scene(step, kept=lambda: options.n)


ITERATORS: dict[str, Callable[[list[Any]], Any]] = {
    "list": iter,
    "reversed": reversed,
    "generator": lambda items: (item for item in items),
    "cycle": lambda items: itertools.cycle(items[:3]),
    "chain": lambda items: itertools.chain(items[:3], items[3:]),
    "islice": lambda items: itertools.islice(items, 1, None),
    "map": lambda items: map(operator.neg, items),
    "zip": lambda items: (one for one, _ in zip(items, items, strict=True)),
    "enumerate": lambda items: iter([item for _, item in enumerate(items)]),
    "dict": lambda items: iter(dict(enumerate(items)).values()),
    "keys": lambda items: iter(dict.fromkeys(items)),
    "tee": lambda items: itertools.tee(items)[0],
    "deque": lambda items: iter(collections.deque(items)),
    "batches": lambda items: iter(torch.utils.data.DataLoader(Items(items), batch_size=None)),
}


class Items(torch.utils.data.Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


@pytest.mark.parametrize("what", ["numbers", "tensors"])
@pytest.mark.parametrize("kind", ITERATORS)
def test_iterator_that_the_step_advances(kind: str, what: str) -> None:
    def make(device: str) -> Scene:
        numbers = [float(n // 2) for n in range(40)]  # several calls see the same
        items = [torch.full((3,), n).to(device) for n in numbers] if what == "tensors" else numbers
        iterator = ITERATORS[kind](items)
        return Scene(lambda x: x * next(iterator))

    check_right_or_refused(make)


@pytest.mark.parametrize("make", scene.parameters)
def test_write_is_repeated_or_refused(make: Callable[[str], Scene]) -> None:
    check_right_or_refused(make)


# -- containers that are made inside ---------------------------------------------------------------

MADE: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda x: [],
    "dict": lambda x: {},
    "set": lambda x: set(),
    "deque": lambda x: collections.deque(),
    "default dict": lambda x: collections.defaultdict(list),
    "object": lambda x: types.SimpleNamespace(),
    "array": lambda x: np.zeros(2),
    "nested": lambda x: {"a": []},
    "list of numbers": lambda x: [1, 2],
    "list with a tensor": lambda x: [x * 2],
    "dict with a tensor": lambda x: {"x": x * 2},
    "tuple with a list": lambda x: ([], 1),
    "tensor": lambda x: x * 2,
    "tensor on the host": lambda x: torch.zeros(2),
}


@pytest.mark.parametrize("starts", ["none", "not there", "one like it"])
@pytest.mark.parametrize("kind", MADE)
def test_container_that_each_call_makes_is_a_new_one(kind: str, starts: str) -> None:
    """As `if self.cache is None: self.cache = []`: no two calls may share one."""

    def make(device: str) -> Scene:
        box: Any = types.SimpleNamespace()
        seen: list[Any] = []

        def step(x: torch.Tensor) -> torch.Tensor:
            if getattr(box, "cache", None) is None or starts == "one like it":
                box.cache = MADE[kind](x)
            return x * 2

        def arguments(number: int) -> tuple[torch.Tensor]:
            if starts == "none":
                box.cache = None
            elif starts == "not there":
                vars(box).pop("cache", None)
            else:
                box.cache = MADE[kind](torch.ones(3).to(device))
            return (torch.ones(3) * number,)

        def kept() -> list[int]:
            seen.append(box.cache)
            return [id(box.cache) == id(one) for one in seen]

        return Scene(step, kept=kept, arguments=arguments)

    check_right_or_refused(make)
