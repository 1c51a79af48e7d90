"""Reads that no instruction of the step's own code shows: by C code, by other packages, by `super()`.

Each scene was replayed with the old numbers before the witness knew its kind.
"""

from __future__ import annotations

import abc
import builtins
import ctypes
import datetime
import decimal
import functools
import gc
import importlib
import io
import logging
import math
import operator
import os
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import lazystep

from .common import captured
from .scenes import Scene, Scenes, check_replays, check_right, check_right_or_refused

scene, refused = Scenes(), Scenes()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    context = decimal.getcontext().copy()
    flash = torch.backends.cuda.flash_sdp_enabled()
    threshold = gc.get_threshold()
    with warnings.catch_warnings():
        yield
    gc.set_threshold(*threshold)
    torch.backends.cuda.enable_flash_sdp(flash)
    decimal.setcontext(context)
    for names in (sys.modules, vars(builtins)):
        for name in [name for name in names if name.startswith("users_")]:
            del names[name]


def space(**names: Any) -> Any:
    return types.SimpleNamespace(**names)


def put(container: Any, key: Any, value: Any) -> Callable[[], None]:
    return lambda: operator.setitem(container, key, value)


def assign(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


# -- classes: by `super()`, and by objects that the step makes ---------------------------------------


def family(change: str, use: str) -> Scene:
    """`Child` takes something of `Parent`'s by `super()` or as its own object."""

    class Parent:
        number: Any = 2.0
        table: Any = [2.0]  # noqa: RUF012 - the case is about a list in a class
        thing: Any = space(number=2.0)

    class Between(Parent):
        pass

    class Child(Between):
        def by_super(self, x: Any) -> Any:
            return x * super().number

        def by_text(self, x: Any) -> Any:
            return x * getattr(super(), "num" + "ber")

        def table_by_super(self, x: Any) -> Any:
            return x * super().table[0]

        @classmethod
        def of_class(cls, x: Any) -> Any:
            return x * super().number

    child = Child()
    uses: dict[str, Callable[[Any], Any]] = {
        "super": lambda x: child.by_super(x),
        "super as text": lambda x: child.by_text(x),
        "super of a list": lambda x: child.table_by_super(x),
        "super in a class method": lambda x: Child.of_class(x),
        "super of an own object": lambda x: Child().by_super(x),
        "list by an own object": lambda x: x * Child().table[0],
        "list by an own object as text": lambda x: x * getattr(Child(), "ta" + "ble")[0],
        "thing by an own object": lambda x: x * Child().thing.number,
    }
    changes = {
        "number": assign(Parent, "number", 3.0),
        "number between": assign(Between, "number", 3.0),
        "table": put(Parent.table, 0, 3.0),
        "thing": assign(Parent.thing, "number", 3.0),
    }
    return Scene(step=uses[use], change=changes[change])


@pytest.mark.parametrize(
    ("change", "use"),
    [
        ("number", "super"),
        ("number between", "super"),
        ("number", "super as text"),
        ("table", "super of a list"),
        ("number", "super in a class method"),
        ("number", "super of an own object"),
        ("table", "list by an own object"),
        ("table", "list by an own object as text"),
        ("thing", "thing by an own object"),
    ],
)
def test_name_that_a_class_has_is_noticed(change: str, use: str) -> None:
    check_replays(lambda device: family(change, use))


def test_list_that_a_property_of_a_parent_returns_is_noticed() -> None:
    class Parent:
        def __init__(self) -> None:
            self._table = [2.0]

        @property
        def table(self) -> list[float]:
            return self._table

    class Child(Parent):
        def scaled(self, x: Any) -> Any:
            return x * super().table[0]

    def make(device: str) -> Scene:
        child = Child()
        return Scene(step=lambda x: child.scaled(x), change=put(child._table, 0, 3.0))

    check_replays(make)


# -- functions in C that call functions in C ---------------------------------------------------------


def ranked() -> list[Any]:
    return [space(rank=float(rank), name=str(rank)) for rank in (1, 2, 3)]


RANK = operator.attrgetter("rank")
BY_RANK: Any = {"key": RANK}


def by_rank(use: Callable[[Any, list[Any]], Any]) -> Callable[[str], Scene]:
    def make(device: str) -> Scene:
        things = ranked()
        return Scene(step=lambda x: use(x, things), change=assign(things[2], "rank", -5.0))

    return make


def sorted_in_place(x: Any, things: list[Any]) -> Any:
    copied = list(things)
    copied.sort(key=RANK)
    return x * float(copied[0].name)


scene.rows(
    sorted_by_a_getter=by_rank(lambda x, things: x * float(sorted(things, key=RANK)[0].name)),
    sort_by_a_getter=by_rank(sorted_in_place),
    maximum_by_a_getter=by_rank(lambda x, things: x * float(max(things, key=RANK).name)),
    minimum_by_keywords=by_rank(lambda x, things: x * float(min(things, **BY_RANK).name)),
    map_of_a_getter=by_rank(lambda x, things: x * sum(map(RANK, things))),
    map_of_a_getter_over_an_iterator=by_rank(lambda x, things: x * sum(map(RANK, (t for t in things)))),
    filter_by_a_getter=by_rank(lambda x, things: x * sum(t.rank < 0 for t in filter(RANK, things))),
    map_of_getattr=by_rank(lambda x, things: x * sum(map(getattr, things, ["rank"] * 3))),
    map_of_a_partial=by_rank(lambda x, things: x * sum(map(functools.partial(getattr, things[2]), ["rank"]))),
)


def by_score(use: Callable[[Any, dict[str, float]], Any]) -> Callable[[str], Scene]:
    def make(device: str) -> Scene:
        scores = {"a": 1.0, "b": 2.0}
        return Scene(step=lambda x: use(x, scores), change=put(scores, "a", 9.0))

    return make


scene.rows(
    maximum_by_scores=by_score(lambda x, scores: x * (2 if max(["a", "b"], key=scores.get) == "a" else 3)),
    sorted_by_scores=by_score(lambda x, scores: x * (2 if sorted("ab", key=scores.get)[0] == "a" else 3)),
    map_of_scores=by_score(lambda x, scores: x * sum(map(scores.get, "ab"))),
    map_of_items=by_score(lambda x, scores: x * sum(map(scores.__getitem__, "ab"))),
)


@scene
def filter_by_a_set(device: str) -> Scene:
    allowed = {"a"}
    return Scene(
        step=lambda x: x * len(list(filter(allowed.__contains__, "ab"))), change=lambda: allowed.add("b")
    )


def test_a_type_that_is_an_argument_stays_that_type() -> None:
    """`reduce` begins with `int` here: it is no function to be called."""
    step, _ = check_right(
        lambda device: Scene(step=lambda x: x * functools.reduce(lambda a, b: b, [float], int)(2.5))
    )
    assert step.num_replayed > 0, step.explain()


# -- code of other packages --------------------------------------------------------------------------


@scene
def implementation_is_registered(device: str) -> Scene:
    @functools.singledispatch
    def scale(kind: Any, x: Any) -> Any:
        return x * 2

    return Scene(step=lambda x: scale(1.5, x), change=lambda: scale.register(float)(lambda kind, x: x * 3))


@scene
def implementation_of_a_method_is_registered(device: str) -> Scene:
    class Model:
        @functools.singledispatchmethod
        def scale(self, kind: Any, x: Any) -> Any:
            return x * 2

    model = Model()

    def change() -> None:
        Model.__dict__["scale"].register(str)(lambda self, kind, x: x * 3)

    return Scene(step=lambda x: model.scale("a", x), change=change)


@scene
def level_of_a_logger(device: str) -> Scene:
    logger = logging.getLogger("users.level")
    logger.setLevel(logging.INFO)
    return Scene(
        step=lambda x: x * logging.getLogger("users.level").level,
        change=lambda: logger.setLevel(logging.ERROR),
    )


@scene
def logger_that_is_enabled(device: str) -> Scene:
    logger = logging.getLogger("users.enabled")
    logger.setLevel(logging.INFO)

    def step(x: Any) -> Any:
        return x * 2 if logging.getLogger("users.enabled").isEnabledFor(logging.INFO) else x * 3

    return Scene(step=step, change=lambda: logger.setLevel(logging.ERROR))


@scene
def attribute_of_the_thread(device: str) -> Scene:
    thread: Any = threading.current_thread()
    thread.scale = 2.0
    return Scene(
        step=lambda x: x * threading.current_thread().scale,  # type: ignore[attr-defined]
        change=assign(thread, "scale", 3.0),
    )


def users_module(name: str, scale: float) -> Any:
    module: Any = types.ModuleType(name)
    module.scale = scale
    return module


@scene
def name_in_a_module_that_is_looked_up(device: str) -> Scene:
    module = sys.modules["users_settings"] = users_module("users_settings", 2.0)
    return Scene(
        step=lambda x: x * importlib.import_module("users_settings").scale,
        change=assign(module, "scale", 3.0),
    )


def imports(x: Any) -> Any:
    import users_settings  # type: ignore[import-not-found]

    return x * users_settings.scale


def imports_a_name(x: Any) -> Any:
    from users_settings import scale

    return x * scale


def imports_if_it_can(x: Any) -> Any:
    try:
        import users_settings
    except ImportError:
        return x * 5
    return x * users_settings.scale


def module_is_replaced(step: Callable[[Any], Any], first: Any) -> Callable[[str], Scene]:
    def make(device: str) -> Scene:
        sys.modules["users_settings"] = first
        return Scene(
            step=step, change=put(sys.modules, "users_settings", users_module("users_settings", 3.0))
        )

    return make


scene.rows(
    module_that_is_replaced=module_is_replaced(imports, users_module("users_settings", 2.0)),
    module_that_is_replaced_for_a_name=module_is_replaced(
        imports_a_name, users_module("users_settings", 2.0)
    ),
    module_that_can_be_imported_now=module_is_replaced(imports_if_it_can, None),
)


@scene
def setting_that_torch_tells(device: str) -> Scene:
    torch.backends.cuda.enable_flash_sdp(True)
    return Scene(
        step=lambda x: x * (2 if torch.backends.cuda.flash_sdp_enabled() else 3),
        change=lambda: torch.backends.cuda.enable_flash_sdp(False),
    )


@scene
def warning_that_raises(device: str) -> Scene:
    warnings.simplefilter("ignore", UserWarning)

    def step(x: Any) -> Any:
        try:
            warnings.warn("careful", stacklevel=1)
        except UserWarning:
            return x * 3
        return x * 2

    return Scene(step=step, change=lambda: warnings.simplefilter("error", UserWarning))


# -- weak references and proxies ---------------------------------------------------------------------


class Held:
    scale = 2.0

    def scaled(self, x: Any) -> Any:
        return x * self.scale


def weakly(use: Callable[[Any], Callable[[Any], Any]]) -> Callable[[str], Scene]:
    def make(device: str) -> Scene:
        held = Held()
        return Scene(step=use(held), change=assign(held, "scale", 3.0))

    return make


def by_proxy(held: Held) -> Callable[[Any], Any]:
    proxy = weakref.proxy(held)
    return lambda x: x * proxy.scale


def by_method_of_a_proxy(held: Held) -> Callable[[Any], Any]:
    proxy = weakref.proxy(held)
    return lambda x: proxy.scaled(x)


def by_weak_value(held: Held) -> Callable[[Any], Any]:
    values = weakref.WeakValueDictionary({"a": held})
    return lambda x: x * values["a"].scale


def by_weak_method(held: Held) -> Callable[[Any], Any]:
    method: Any = weakref.WeakMethod(held.scaled)
    return lambda x: method()(x)


scene.rows(
    weak_proxy=weakly(by_proxy),
    method_of_a_weak_proxy=weakly(by_method_of_a_proxy),
    weak_value=weakly(by_weak_value),
    weak_method=weakly(by_weak_method),
)


@scene
def counter_behind_a_weak_proxy(device: str) -> Scene:
    held = Held()
    proxy = weakref.proxy(held)

    def step(x: Any) -> Any:
        proxy.scale += 1
        return x * proxy.scale

    return Scene(step=step, change=assign(held, "scale", 30.0), kept=lambda: held.scale)


# -- values ------------------------------------------------------------------------------------------


def third(x: Any) -> Any:
    return x * float(decimal.Decimal(1) / decimal.Decimal(3))


@scene
def precision_of_decimals(device: str) -> Scene:
    decimal.setcontext(decimal.Context(prec=28))
    return Scene(step=lambda x: third(x), change=assign(decimal.getcontext(), "prec", 2))


@scene
def precision_of_decimals_from_outside(device: str) -> Scene:
    decimal.setcontext(decimal.Context(prec=28))
    one, three = decimal.Decimal(1), decimal.Decimal(3)
    return Scene(step=lambda x: x * float(one / three), change=assign(decimal.getcontext(), "prec", 2))


@scene
def precision_of_a_context(device: str) -> Scene:
    context = decimal.Context(prec=28)
    return Scene(
        step=lambda x: x * float(context.divide(decimal.Decimal(1), decimal.Decimal(3))),
        change=assign(context, "prec", 2),
    )


def records() -> Any:
    made = np.zeros(2, dtype=[("scale", "f8")])
    made["scale"] = 2.0
    return made


@scene
def record_of_an_array(device: str) -> Scene:
    array = records()
    record = array[0]
    return Scene(step=lambda x: x * float(record["scale"]), change=put(array["scale"], 0, 3.0))


@scene
def number_of_an_array_without_dimensions(device: str) -> Scene:
    array = np.array(2.0)
    return Scene(step=lambda x: x * float(array), change=put(array, (), 3.0))


@scene
def index_that_an_object_tells(device: str) -> Scene:
    class At:
        place = 1

        def __index__(self) -> int:
            return self.place

    at = At()
    return Scene(step=lambda x: x[at] * 1, change=assign(at, "place", 2))


@scene
def order_of_a_set(device: str) -> Scene:
    other = {8}
    other.add(0)
    held = space(numbers={0, 8})
    assert list(other) != list(held.numbers), "this case needs two orders of one set"

    def step(x: Any) -> Any:
        for number in held.numbers:
            x = x * 2 + number
        return x

    return Scene(step=step, change=assign(held, "numbers", other))


def sign(held: Any) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        return x * sum(math.copysign(1, number) for number in held.numbers)

    return step


def other_numbers(before: Any, after: Any) -> Callable[[str], Scene]:
    def make(device: str) -> Scene:
        held = space(numbers=before)
        return Scene(step=sign(held), change=assign(held, "numbers", after))

    return make


scene.rows(
    zero_in_a_set=other_numbers({0.0}, {-0.0}),
    zero_in_a_frozen_set=other_numbers(frozenset({0.0}), frozenset({-0.0})),
    zero_of_numpy=other_numbers((np.float32(0.0),), (np.float32(-0.0),)),
    double_zero_of_numpy=other_numbers((np.float64(0.0),), (np.float64(-0.0),)),
)


@scene
def form_of_a_memoryview(device: str) -> Scene:
    memory = bytearray(8)
    held = space(view=memoryview(memory))
    return Scene(step=lambda x: x * len(held.view), change=assign(held, "view", memoryview(memory).cast("i")))


@refused
def large_memoryview(device: str) -> Scene:
    memory = bytearray(2 << 20)
    memory[0] = 2
    view = memoryview(memory)
    return Scene(step=lambda x: x * view[0], change=put(memory, 0, 3))


@refused
def text_that_names_attributes(device: str) -> Scene:
    held = space(inside=[space(number=1.0)])
    return Scene(
        step=lambda x: x * (2 if "{0.inside[0].number}".format(held) == "1.0" else 3),  # noqa: UP030, UP032
        change=assign(held.inside[0], "number", 1.5),
    )


# -- views, files, records, locks --------------------------------------------------------------------


def changed(
    make: Callable[[], Any], use: Callable[[Any, Any], Any], change: Callable[[Any], Any]
) -> Callable[[str], Scene]:
    """A step that uses one object, which then changes."""

    def made(device: str) -> Scene:
        held = make()
        return Scene(step=lambda x: use(x, held), change=lambda: change(held))

    return made


def dict_and(view: Callable[[dict[str, float]], Any]) -> Callable[[], tuple[Any, Any]]:
    def make() -> tuple[Any, Any]:
        numbers = {"a": 2.0}
        return numbers, view(numbers)

    return make


def more(held: Any) -> None:
    held[0].update(a=3.0, b=4.0)


class Fields(ctypes.Structure):
    _fields_ = (("scale", ctypes.c_float),)


scene.rows(
    values_of_a_dict=changed(dict_and(dict.values), lambda x, held: x * sum(held[1]), more),
    items_of_a_dict=changed(dict_and(dict.items), lambda x, held: x * next(v for _, v in held[1]), more),
    number_of_keys=changed(dict_and(dict.keys), lambda x, held: x * len(held[1]), more),
    key_in_a_view=changed(dict_and(dict.keys), lambda x, held: x * (2 if "b" in held[1] else 3), more),
    keys_of_a_dict_and_a_set=changed(dict_and(dict.keys), lambda x, held: x * len(held[1] & {"b"}), more),
    flat_array=changed(
        lambda: np.ones(2), lambda x, held: x * float(held.flat[0]), lambda held: held.fill(5)
    ),
    array_on_its_side=changed(
        lambda: np.ones((2, 2)), lambda x, held: x * float(held.T[0, 0]), lambda held: held.fill(5)
    ),
    memory_of_an_array=changed(
        lambda: np.ones(2), lambda x, held: x * float(held.data[0]), lambda held: held.fill(5)
    ),
    array_of_ctypes=changed(
        lambda: (ctypes.c_float * 2)(2.0, 1.0), lambda x, held: x * held[0], lambda held: put(held, 0, 3.0)()
    ),
    structure_of_ctypes=changed(
        lambda: Fields(2.0), lambda x, held: x * held.scale, lambda held: setattr(held, "scale", 3.0)
    ),
    code_of_a_function=changed(
        lambda: lambda: 2.0,
        lambda x, held: x * held.__code__.co_consts[-1],
        lambda held: setattr(held, "__code__", (lambda: 3.0).__code__),
    ),
    sorted_by_a_partial=by_rank(
        lambda x, things: x * float(functools.partial(sorted, key=RANK)(things)[0].name)
    ),
    text_of_an_exception=changed(
        lambda: ValueError("2"),
        lambda x, held: x * float(str(held)),
        lambda held: setattr(held, "args", ("3",)),
    ),
    are_one=changed(
        lambda: space(a=[1], b=[1]),
        lambda x, held: x * (2 if operator.is_(held.a, held.b) else 3),
        lambda held: setattr(held, "b", held.a),
    ),
)
refused.rows(
    text_in_memory=changed(
        lambda: io.StringIO("2"),
        lambda x, held: x * float(held.getvalue()),
        lambda held: (held.seek(0), held.write("3")),
    ),
    text_in_memory_by_a_method_that_is_kept=changed(
        lambda: (lambda file: (file, file.getvalue))(io.StringIO("2")),
        lambda x, held: x * float(held[1]()),
        lambda held: (held[0].seek(0), held[0].write("3")),
    ),
    place_in_a_file=changed(
        lambda: io.StringIO("abc"), lambda x, held: x * held.tell(), lambda held: held.seek(2)
    ),
    lock=changed(
        threading.Lock, lambda x, held: x * (2 if held.locked() else 3), lambda held: held.acquire()
    ),
    lock_that_is_taken_if_it_is_free=changed(
        threading.Lock,
        lambda x, held: x * (2 if held.acquire(blocking=False) and not held.release() else 3),
        lambda held: held.acquire(),
    ),
    owner_of_a_lock=changed(
        threading.RLock, lambda x, held: x * (2 if held._is_owned() else 3), lambda held: held.acquire()
    ),
    state_of_the_generator=changed(
        lambda: torch.manual_seed(5),
        lambda x, held: x * float(torch.get_rng_state()[:8].sum()),
        lambda held: torch.manual_seed(77),
    ),
)


class Moment(datetime.datetime):
    """A user's own kind of time."""


class Day(datetime.date):
    """A user's own kind of date."""


@pytest.mark.parametrize(
    "ask",
    [
        Moment.now,
        Moment.utcnow,
        Moment.today,
        Day.today,
        lambda: os.fstat(0),
        lambda: os.isatty(0),
        lambda: os.statvfs("/"),
        lambda: os.sched_getaffinity(0),
    ],
    ids=["now", "utcnow", "today", "day", "open_file", "terminal", "room_on_a_disk", "processors"],
)
def test_question_about_time_or_the_system_is_refused(ask: Callable[[], object]) -> None:
    """By the class method of a user's subclass, too, and by each function of `os` that asks the system."""
    step = captured(lambda x: x * (2 if ask() else 3), fullgraph=True)
    with pytest.raises(lazystep.CaptureError, match=r"it calls .* at .*call it outside"):
        call_often(step)


def call_often(step: Any) -> None:
    for _ in range(4):
        step(torch.ones(2))


@scene
def name_among_the_builtins(device: str) -> Scene:
    builtins.users_scale = 2.0  # type: ignore[attr-defined]
    return Scene(
        step=lambda x: x * users_scale,  # type: ignore[name-defined]  # noqa: F821
        change=assign(builtins, "users_scale", 3.0),
    )


@scene
def class_is_registered(device: str) -> Scene:
    class Abstract(abc.ABC):  # noqa: B024
        pass

    class Other:
        pass

    other = Other()
    return Scene(
        step=lambda x: x * (2 if isinstance(other, Abstract) else 3), change=lambda: Abstract.register(Other)
    )


@scene
def classes_below(device: str) -> Scene:
    class Above:
        pass

    kept: list[type] = []
    return Scene(
        step=lambda x: x * len(Above.__subclasses__()) + 1,
        change=lambda: kept.append(type("Below", (Above,), {})),
    )


@scene
def names_of_a_class(device: str) -> Scene:
    class Registry:
        first = 1.0

    return Scene(step=lambda x: x * len(vars(Registry)), change=assign(Registry, "second", 2.0))


@scene
def version_of_a_tensor(device: str) -> Scene:
    weight = torch.ones(3, device=device)
    return Scene(
        step=lambda x: x * 2 if weight._version < 3 else x * 3,
        change=lambda: [weight.mul_(1) for _ in "12345"],
    )


def view_or_not(use: Callable[[Any], bool]) -> Callable[[str], Scene]:
    def make(device: str) -> Scene:
        whole = torch.ones(6, device=device)
        held = space(weight=torch.ones(3, device=device))
        return Scene(
            step=lambda x: x * 2 * held.weight if use(held.weight) else x * 3 * held.weight,
            change=assign(held, "weight", whole[:3]),
        )

    return make


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@refused
def scripted_module(device: str) -> Scene:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(Scaled()).to(device)
    return Scene(step=lambda x: model(x), change=assign(model, "scale", 3.0))


@refused
def method_of_a_scripted_module(device: str) -> Scene:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(Scaled()).to(device)
    forward = model.forward
    return Scene(step=lambda x: forward(x), change=assign(model, "scale", 3.0))


refused.rows(
    tensor_that_is_a_view=view_or_not(lambda weight: weight._is_view()),
    tensor_with_a_base=view_or_not(lambda weight: weight._base is not None),
)


# -- which of two containers it is -------------------------------------------------------------------


@scene
def two_lists_become_one(device: str) -> Scene:
    held = space(a=[2.0], b=[2.0])
    return Scene(
        step=lambda x: x * 2 * held.a[0] if held.a is held.b else x * 3 * held.b[0],
        change=assign(held, "b", held.a),
    )


@scene
def another_tuple(device: str) -> Scene:
    known = (1, [2])
    held = space(a=known)
    return Scene(step=lambda x: x * 2 if held.a is known else x * 3, change=assign(held, "a", (1, [2])))


def written_twice(first: Any, second: Any, key: Any) -> Callable[[str], Scene]:
    def make(device: str) -> Scene:
        held = space(a=first.copy(), b=second.copy())

        def step(x: Any) -> Any:
            held.a[key] += 1
            return x * held.b[key]

        return Scene(
            step=step, change=lambda: setattr(held, "b", held.a), kept=lambda: (held.a[key], held.b[key])
        )

    return make


scene.rows(
    list_that_becomes_the_one_that_is_written=written_twice([2.0], [3.0], 0),
    dict_that_becomes_the_one_that_is_written=written_twice({"k": 2.0}, {"k": 3.0}, "k"),
)


@pytest.mark.parametrize("make", scene.parameters)
def test_read_is_noticed(make: Callable[[str], Scene]) -> None:
    check_replays(make)


@pytest.mark.parametrize("make", refused.parameters)
def test_read_that_is_not_compared_is_refused(make: Callable[[str], Scene]) -> None:
    check_right_or_refused(make)


# -- the collector of garbage ------------------------------------------------------------------------


def test_step_sees_the_settings_of_the_garbage_collector() -> None:
    gc.set_threshold(500, 10, 10)

    def step(x: Any) -> Any:
        return x * gc.get_threshold()[0] if gc.isenabled() else x * 3

    check_replays(lambda device: Scene(step=step))
    assert gc.get_threshold() == (500, 10, 10)


def test_step_may_switch_the_garbage_collector_off() -> None:
    gc.enable()

    def step(x: Any) -> Any:
        gc.disable()
        return x * 2

    try:
        check_right(lambda device: Scene(step=step))
        assert not gc.isenabled()
    finally:
        gc.enable()
