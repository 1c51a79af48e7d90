"""Reads that no instruction of the step's own code shows: by `super()`, functions in C, other packages,
weak references.

Each scene was replayed with the old numbers before the witness knew its kind.
"""

from __future__ import annotations

import functools
import importlib
import logging
import operator
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from .scenes import Scene, Scenes, assign, check_replays, check_right, put, space

scene = Scenes()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    flash = torch.backends.cuda.flash_sdp_enabled()
    with warnings.catch_warnings():
        yield
    torch.backends.cuda.enable_flash_sdp(flash)
    for name in [name for name in sys.modules if name.startswith("users_")]:
        del sys.modules[name]


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
    sorted_by_a_partial=by_rank(
        lambda x, things: x * float(functools.partial(sorted, key=RANK)(things)[0].name)
    ),
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


@pytest.mark.parametrize("make", scene.parameters)
def test_read_is_noticed(make: Callable[[str], Scene]) -> None:
    check_replays(make)
