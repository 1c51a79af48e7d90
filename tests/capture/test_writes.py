"""Steps that change what a later call reads: a replay does the same, or the step is not replayed."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import itertools
import math
import operator
import os
import random
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers import descend

from .scenes import Scene, Scenes, check_replays, check_right_or_refused


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USERS_COUNT", "1")


# -- counters --------------------------------------------------------------------------------------


class Slots:
    __slots__ = ("n",)


@dataclasses.dataclass
class Data:
    n: Any = 0


class Counts:
    """A counter that is a property."""

    def __init__(self) -> None:
        self._n: Any = 0

    @property
    def n(self) -> Any:
        return self._n

    @n.setter
    def n(self, value: Any) -> None:
        self._n = value


COUNT: Any = 0


def holder_of(kind: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Where a number is kept: how to read and how to write it."""
    if kind == "global":

        def write_global(n: Any) -> None:
            global COUNT
            COUNT = n

        return lambda: COUNT, write_global
    if kind == "variable":
        count: Any = 0

        def write_variable(n: Any) -> None:
            nonlocal count
            count = n

        return lambda: count, write_variable
    if kind in ("dict", "list", "default dict"):
        items: Any = {"dict": {0: 0}, "list": [0], "default dict": collections.defaultdict(int)}[kind]

        def write_item(n: Any) -> None:
            items[0] = n

        return lambda: items[0], write_item
    if kind in ("optimizer's group", "optimizer's state"):
        weight = torch.ones(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def values() -> Any:
            return optimizer.param_groups[0] if kind == "optimizer's group" else optimizer.state[weight]

        def write_option(n: Any) -> None:
            values()["n"] = n

        return lambda: values()["n"], write_option
    holders: dict[str, Callable[[], Any]] = {
        "attribute": types.SimpleNamespace,
        "slots": Slots,
        "data class": Data,
        "module": nn.Module,
        "property": Counts,
        "class": lambda: type("Own", (), {}),
        "python module": lambda: types.ModuleType("users_counts"),
        "function": lambda: lambda: None,
        "thread's own": threading.local,
    }
    holder = holders[kind]()

    def write_attribute(n: Any) -> None:
        holder.n = n

    return lambda: holder.n, write_attribute


HOLDERS = (
    ["attribute", "slots", "data class", "module", "property", "class", "python module", "function"]
    + ["global", "variable", "dict", "list", "default dict", "optimizer's group", "optimizer's state"]
    + ["thread's own"]
)
# How the number changes in each call, and how it is used.
CHANGES: dict[str, tuple[Any, Callable[[Any], Any], Callable[[torch.Tensor, Any], torch.Tensor]]] = {
    "counted, not used": (0, lambda n: n + 1, lambda x, n: x * 2),
    "counted by an operand": (0, lambda n: n + 1, lambda x, n: x + n),
    "counted as a float": (0.0, lambda n: n + 1.0, lambda x, n: x * n),
    "counted in threes": (5, lambda n: n + 3, lambda x, n: x * n),
    "counted down": (100, lambda n: n - 1, lambda x, n: x / n),
    "bias correction": (0, lambda n: n + 1, lambda x, n: x * (1 - 0.9**n)),
    "root of a count": (0, lambda n: n + 1, lambda x, n: x * math.sqrt(n)),
    "decays": (1.0, lambda n: n * 0.9, lambda x, n: x * n),
    "average": (1.0, lambda n: 0.9 * n + 0.1 * 3.0, lambda x, n: x + n),
}


def counting(kind: str, how: str, device: str) -> Scene:
    start, change, use = CHANGES[how]
    read, write = holder_of(kind)
    write(start)

    def step(x: torch.Tensor) -> torch.Tensor:
        write(change(read()))
        return use(x, read())

    return Scene(step, lambda: write(start), kept=read)  # it starts anew between two calls


@pytest.mark.parametrize("how", CHANGES)
def test_count_is_carried(how: str) -> None:
    check_replays(lambda device: counting("attribute", how, device))


@pytest.mark.parametrize("kind", HOLDERS[1:])
def test_count_is_carried_wherever_it_is_kept(kind: str) -> None:
    check_replays(lambda device: counting(kind, "counted by an operand", device))


@pytest.mark.parametrize(
    "change",
    [
        lambda n: (n + 1) % 3,
        lambda n: n * 2 % 7,
        lambda n: -n,
        lambda n: not n,
        lambda n: 1 if n == 2 else 2,
        lambda n: "b" if n == "a" else "a",
        lambda n: n + 1 if n < 3 else n,
        lambda n: None if n else 2,
        lambda n: (*n, 1) if isinstance(n, tuple) and len(n) < 3 else (),
        lambda n: n ^ 1,
        lambda n: float(n) if isinstance(n, int) else int(n),
    ],
    ids=["thirds", "powers", "sign", "flag", "pair", "text", "warm-up", "none", "tuple", "parity", "type"],
)
@pytest.mark.parametrize("kind", ["attribute", "dict", "variable", "class", "optimizer's group"])
def test_state_that_cycles(change: Callable[[Any], Any], kind: str) -> None:
    def make(device: str) -> Scene:
        read, write = holder_of(kind)
        write(1)
        factors = collections.defaultdict(
            lambda: 11.0, {1: 2.0, 2: 3.0, 0: 5.0, "a": 6.0, None: 7.0, (): 8.0}
        )

        def step(x: torch.Tensor) -> torch.Tensor:
            y = x * factors[read()]
            write(change(read()))
            return y

        return Scene(step, lambda: write(2), kept=read)

    check_right_or_refused(make)


# -- other writes ----------------------------------------------------------------------------------

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
def mode_is_toggled(device: str) -> Scene:
    model = nn.Sequential(nn.Dropout(1.0), nn.Softmax(0)).to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        model.train(not model.training)
        return y

    return Scene(step, kept=lambda: model[0].training)


@scene
def mode_is_restored(device: str) -> Scene:
    model = nn.Sequential(nn.Dropout(1.0), nn.Softmax(0)).to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        was = model.training
        model.eval()
        y = model(x)
        model.train(was)
        return y + model(x)

    return Scene(step, lambda: model.eval(), kept=lambda: model[0].training)


@scene
def mode_is_left(device: str) -> Scene:
    model = nn.Sequential(nn.Dropout(1.0), nn.Softmax(0)).to(device)
    return Scene(lambda x: model.eval()(x), lambda: model.train(), kept=lambda: model[0].training)


def with_weights(step: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[str], Scene]:
    def make(device: str) -> Scene:
        weight = torch.ones(3).to(device).requires_grad_()
        other = torch.full((3,), 2.0).to(device).requires_grad_()

        def function(x: torch.Tensor) -> Any:
            step(weight, other)
            (x * weight * other).sum().backward()
            made = [None if w.grad is None else w.grad + 0 for w in (weight, other)]
            weight.grad = other.grad = None
            return made

        return Scene(
            function,
            lambda: weight.requires_grad_(True),
            kept=lambda: (weight.requires_grad, other.requires_grad),
        )

    return make


def freeze_alternately(weight: torch.Tensor, other: torch.Tensor) -> None:
    weight.requires_grad_(not weight.requires_grad)


def freeze(weight: torch.Tensor, other: torch.Tensor) -> None:
    weight.requires_grad_(False)


def thaw_what_was_frozen(weight: torch.Tensor, other: torch.Tensor) -> None:
    weight.requires_grad = not other.requires_grad or not weight.requires_grad


scene.rows(
    requires_grad_toggled=with_weights(freeze_alternately),
    requires_grad_frozen=with_weights(freeze),
    requires_grad_assigned=with_weights(thaw_what_was_frozen),
)


@scene
def frozen_after_a_few_steps(device: str) -> Scene:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    box = types.SimpleNamespace(steps=0)

    def step(x: torch.Tensor) -> torch.Tensor:
        box.steps += 1
        if box.steps == 8:
            model[0].requires_grad_(False)
        loss = model(x).square().sum()
        descend(loss, optimizer)
        return loss.detach()

    return Scene(step, kept=lambda: (model[0].weight + 0, model[0].weight.requires_grad))


def seed_first(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(5)
    return nn.functional.dropout(x, 0.5)


def seed_last(x: torch.Tensor) -> torch.Tensor:
    y = x * torch.rand(3, device=x.device)
    torch.manual_seed(5)
    return y


def seed_without_a_draw(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(5)
    return x * 2


def seed_between_draws(x: torch.Tensor) -> torch.Tensor:
    y = x * torch.rand(3, device=x.device)
    torch.manual_seed(5)
    return y * torch.rand(3, device=x.device)


def state_put_back(x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    y = x * torch.rand(3, device=x.device)
    torch.set_rng_state(state)
    return y * torch.rand(3, device=x.device)


def seed_of_the_default_generator(x: torch.Tensor) -> torch.Tensor:
    torch.default_generator.manual_seed(5)
    return x * torch.rand(3, device=x.device)


SEEDING = [seed_first, seed_last, seed_without_a_draw, seed_between_draws] + [
    state_put_back,
    seed_of_the_default_generator,
]


@pytest.mark.parametrize("is_drawn_outside", [False, True])
@pytest.mark.parametrize("step", SEEDING)
def test_seed_that_is_set_inside(step: Callable[..., Any], is_drawn_outside: bool) -> None:
    kept = (lambda: torch.rand(1)) if is_drawn_outside else torch.initial_seed
    check_right_or_refused(lambda device: Scene(step, lambda: torch.manual_seed(9), kept))


@scene
def forked_generator(device: str) -> Scene:
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            y = torch.rand(3, device=x.device)
        return x * y + torch.rand(3, device=x.device)

    return Scene(step, kept=lambda: torch.rand(1))


@scene
def python_seeded_inside(device: str) -> Scene:
    def step(x: torch.Tensor) -> torch.Tensor:
        random.seed(5)
        np.random.seed(5)
        return x * 2

    return Scene(step, kept=lambda: (random.random(), np.random.rand()))


@scene
def default_dtype_set_inside(device: str) -> Scene:
    def step(x: torch.Tensor) -> torch.Tensor:
        was = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        y = torch.ones(3, device=x.device) / 3 + x
        torch.set_default_dtype(was)
        return y

    return Scene(step, kept=torch.get_default_dtype)


@scene
def hook_added_inside(device: str) -> Scene:
    weight = torch.ones(3).to(device).requires_grad_()

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.register_hook(lambda gradient: gradient * 2)
        return torch.autograd.grad((weight * x).sum(), weight)[0]

    return Scene(step)


@scene
def group_option_changed_inside(device: str) -> Scene:
    weight = torch.ones(3).to(device).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1, weight_decay=0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        descend((weight * x).sum(), optimizer)
        optimizer.param_groups[0]["weight_decay"] *= 0.5
        return weight.detach() + 0

    return Scene(step, kept=lambda: optimizer.param_groups[0]["weight_decay"])


@scene
def flag_of_a_group_toggled_inside(device: str) -> Scene:
    weight = torch.ones(3).to(device).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1, maximize=False)

    def step(x: torch.Tensor) -> torch.Tensor:
        descend((weight * x).sum(), optimizer)
        group = optimizer.param_groups[0]
        group["maximize"] = not group["maximize"]
        return weight.detach() + 0

    return Scene(step, kept=lambda: optimizer.param_groups[0]["maximize"])


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
def variable_of_the_environment(device: str) -> Scene:
    os.environ["USERS_COUNT"] = "1"

    def step(x: torch.Tensor) -> torch.Tensor:
        count = int(os.environ["USERS_COUNT"])
        os.environ["USERS_COUNT"] = str(count + 1)
        return x * count

    return Scene(step, kept=lambda: os.environ["USERS_COUNT"])


@scene
def context_variable(device: str) -> Scene:
    variable = contextvars.ContextVar("variable", default=1)

    def step(x: torch.Tensor) -> torch.Tensor:
        variable.set(variable.get() % 3 + 1)
        return x * variable.get()

    return Scene(step, kept=variable.get)


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
