"""Classes that decide how an object behaves: what they are made of, and what they get later.

Each scene was replayed with the old numbers before the witness knew its kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from .scenes import Scene, Scenes, check_replays

scene = Scenes()


class TwoParent:
    number: Any = 2.0

    def __len__(self) -> int:
        return 2

    def __add__(self, other: Any) -> float:
        return 2.0

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[int]:
        return iter((2,))

    def __enter__(self) -> float:
        return 2.0

    def __exit__(self, *_: Any) -> None:
        return None

    def __getattr__(self, name: str) -> float:
        return 2.0

    @classmethod
    def of_class(cls) -> float:
        return 2.0

    def method(self) -> float:
        return 2.0


class ThreeParent(TwoParent):
    number = 3.0

    def __len__(self) -> int:
        return 3

    def __add__(self, other: Any) -> float:
        return 3.0

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[int]:
        return iter((3,))

    def __enter__(self) -> float:
        return 3.0

    def __getattr__(self, name: str) -> float:
        return 3.0

    @classmethod
    def of_class(cls) -> float:
        return 3.0

    def method(self) -> float:
        return 3.0


def entered(thing: Any) -> Any:
    with thing as number:
        return number


def matched(thing: Any) -> float:
    match thing:
        case ThreeParent():
            return 3.0
        case _:
            return 2.0


USES: dict[str, Callable[[Any], Any]] = {
    "method": lambda thing: thing.method(),
    "attribute": lambda thing: thing.number,
    "super": lambda thing: thing.by_super(),
    "own object": lambda thing: type(thing)().number,
    "isinstance": lambda thing: 3.0 if isinstance(thing, ThreeParent) else 2.0,
    "issubclass": lambda thing: 3.0 if issubclass(type(thing), ThreeParent) else 2.0,
    "order": lambda thing: type(thing).__mro__[1].number,
    "bases": lambda thing: type(thing).__bases__[0].number,
    "class method": lambda thing: type(thing).of_class(),
    "operator": lambda thing: thing + 1,
    "getattr": lambda thing: thing.nothing_of_this_name,
    "length": lambda thing: len(thing),
    "iteration": lambda thing: sum(thing),
    "truth": lambda thing: 2.0 if thing else 3.0,
    "with": entered,
    "match": matched,
}


@pytest.mark.parametrize("is_above", [False, True], ids=["its bases", "bases of a base"])
@pytest.mark.parametrize("use", USES)
def test_class_that_gets_other_bases_is_noticed(use: str, is_above: bool) -> None:
    if is_above and use in ("order", "bases"):
        pytest.skip("the class itself keeps its bases")

    def make(device: str) -> Scene:
        class Above(TwoParent):
            pass

        class Thing(Above if is_above else TwoParent):  # type: ignore[misc]
            def by_super(self) -> Any:
                return super().method()

        thing = Thing()
        changed: Any = Above if is_above else Thing
        return Scene(
            step=lambda x: x * USES[use](thing),
            change=lambda: setattr(changed, "__bases__", (ThreeParent,)),
        )

    check_replays(make)


def tried(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except (TypeError, AttributeError):
        return 2.0


GETS: dict[str, tuple[Callable[[Any], Any], str, Any]] = {
    "operator": (lambda a: tried(lambda: a + 1), "__add__", lambda s, o: 3.0),
    "length": (lambda a: tried(lambda: len(a)), "__len__", lambda s: 3),
    "truth": (lambda a: 2.0 if a else 3.0, "__bool__", lambda s: False),
    "equality": (lambda a: 3.0 if a == 1 else 2.0, "__eq__", lambda s, o: True),
    "call": (lambda a: 3.0 if callable(a) else 2.0, "__call__", lambda s: 3.0),
    "getattr": (lambda a: tried(lambda: a.missing), "__getattr__", lambda s, n: 3.0),
    "getattribute": (lambda a: a.number, "__getattribute__", lambda s, n: 3.0),
    "property": (lambda a: a.number, "number", property(lambda s: 3.0)),
    "text": (lambda a: 2.0 if f"{a}".startswith("<") else 3.0, "__str__", lambda s: "a"),
    "float": (lambda a: tried(lambda: float(a)), "__float__", lambda s: 3.0),
    "init": (lambda a: type(a)().number, "__init__", lambda s: setattr(s, "number", 3.0)),
    "setattr": (lambda a: set_and_get(type(a)()), "__setattr__", lambda s, n, v: s.__dict__.update({n: 3.0})),
    "names": (lambda a: 3.0 if "added" in dir(type(a)) else 2.0, "added", 1),
}


def set_and_get(thing: Any) -> Any:
    thing.number = 2.0
    return thing.number


@pytest.mark.parametrize("name", GETS)
def test_class_that_gets_a_method_is_noticed(name: str) -> None:
    use, special, value = GETS[name]

    def make(device: str) -> Scene:
        class Plain:
            def __new__(cls) -> Any:
                made = super().__new__(cls)
                made.__dict__["number"] = 2.0
                return made

        thing = Plain()
        return Scene(step=lambda x: x * use(thing), change=lambda: setattr(Plain, special, value))

    check_replays(make)


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("special", ["__getitem__", "__iter__", "__contains__"])
def test_container_whose_class_gets_a_method_is_noticed(kind: type, special: str) -> None:
    uses: dict[str, Callable[[Any], Any]] = {
        "__getitem__": lambda box: box[0],
        "__iter__": lambda box: sum(number for number in box) + 2.0,
        "__contains__": lambda box: 5.0 if 7 in box else 2.0,
    }
    news = {
        "__getitem__": lambda s, k: 3.0,
        "__iter__": lambda s: iter((9,)),
        "__contains__": lambda s, k: True,
    }

    def make(device: str) -> Scene:
        class Box(kind):  # type: ignore[misc, valid-type]
            pass

        box = Box({0: 2.0}) if kind is dict else Box([2.0])
        return Scene(
            step=lambda x: x * uses[special](box), change=lambda: setattr(Box, special, news[special])
        )

    check_replays(make)


def metaclass(use: Callable[[Any], Any], name: str, value: Any) -> Callable[[str], Scene]:
    def make(device: str) -> Scene:
        class Meta(type):
            number = 2.0

            def __len__(cls) -> int:
                return 2

            def __getitem__(cls, key: Any) -> float:
                return 2.0

            def __getattr__(cls, name: str) -> float:
                return 2.0

            def __instancecheck__(cls, value: Any) -> bool:
                return True

        class Other(Meta):
            number = 3.0

        class Thing(metaclass=Meta):
            pass

        if name == "__class__":
            return Scene(step=lambda x: x * use(Thing), change=lambda: setattr(Thing, name, Other))
        return Scene(step=lambda x: x * use(Thing), change=lambda: setattr(Meta, name, value))

    return make


scene.rows(
    length_of_a_class=metaclass(len, "__len__", lambda cls: 3),
    item_of_a_class=metaclass(lambda kind: kind[0], "__getitem__", lambda cls, key: 3.0),
    missing_name_of_a_class=metaclass(lambda kind: kind.missing, "__getattr__", lambda cls, name: 3.0),
    instance_of_a_class=metaclass(
        lambda kind: 2.0 if isinstance(1, kind) else 3.0, "__instancecheck__", lambda cls, value: False
    ),
    another_metaclass=metaclass(lambda kind: kind.number, "__class__", None),
)


@scene
def descriptor_that_begins_to_come_first(device: str) -> Scene:
    class Descriptor:
        def __get__(self, owner: Any, kind: Any = None) -> float:
            return 3.0

    class Thing:
        number = Descriptor()

    thing = Thing()
    thing.__dict__["number"] = 2.0
    return Scene(
        step=lambda x: x * thing.number,
        change=lambda: setattr(Descriptor, "__set__", lambda s, o, v: None),
    )


@scene
def keywords_of_a_partial_method(device: str) -> Scene:
    class Thing:
        def method(self, number: float) -> float:
            return number

        doubled = functools.partialmethod(method, number=2.0)

    thing = Thing()
    return Scene(
        step=lambda x: x * thing.doubled(),
        change=lambda: Thing.__dict__["doubled"].keywords.update(number=3.0),
    )


@scene
def class_attribute_of_a_tensor(device: str) -> Scene:
    class Weight(torch.Tensor):
        number = 2.0

    weight: Any = torch.ones(3).to(device).as_subclass(Weight)
    return Scene(
        step=lambda x: (x * weight).as_subclass(torch.Tensor) * weight.number,
        change=lambda: setattr(Weight, "number", 3.0),
    )


@scene
def class_that_torch_asks(device: str) -> Scene:
    class Thing:
        number = 2.0

        @classmethod
        def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] * cls.number

    thing: Any = Thing()
    return Scene(step=lambda x: torch.add(x, thing), change=lambda: setattr(Thing, "number", 3.0))


@pytest.mark.parametrize("make", scene.parameters)
def test_change_is_noticed_and_replayed(make: Any) -> None:
    check_replays(make)
