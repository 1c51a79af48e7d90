"""What descriptors, classes, objects made in C and other threads tell a step without a read of an attribute.

Each scene was replayed with the old numbers before the witness knew its kind.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import queue
import threading
import types
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from .scenes import Scene, Scenes, check_replays, check_right

scene, refused = Scenes(), Scenes()


# -- descriptors and classes -------------------------------------------------------------------------


class Base:
    __slots__ = ("number",)


class Child(Base):
    __slots__ = ("number",)  # hides the slot of its base


def hidden_slot(read: Callable[[Any], float]) -> Callable[[str], Scene]:
    def make(device: str) -> Scene:
        child = Child()
        child.number = 2.0
        Base.number.__set__(child, 5.0)  # type: ignore[attr-defined]
        return Scene(lambda x: x * read(child), lambda: Base.number.__set__(child, 7.0))  # type: ignore[attr-defined]

    return make


def named(read: Callable[[Any], str], name: str) -> Callable[[str], Scene]:
    def make(device: str) -> Scene:
        kind = type("Short", (), {})
        return Scene(lambda x: x * len(read(kind)), lambda: setattr(kind, name, "LongerName"))

    return make


scene.rows(
    slot_by_its_descriptor=hidden_slot(lambda child: child.number * Base.number.__get__(child)),  # type: ignore[attr-defined]
    slot_by_the_type_of_its_descriptor=hidden_slot(
        lambda child: types.MemberDescriptorType.__get__(Base.number, child)  # type: ignore[attr-defined]
    ),
    name_of_a_class=named(lambda kind: kind.__name__, "__name__"),
    qualified_name_of_a_class=named(lambda kind: kind.__qualname__, "__qualname__"),
    name_of_the_class_of_an_object=named(lambda kind: type(kind()).__name__, "__name__"),
)


@refused
def slot_written_by_its_descriptor(device: str) -> Scene:
    child = Child()
    Base.number.__set__(child, 0.0)  # type: ignore[attr-defined]

    def step(x: Any) -> Any:
        Base.number.__set__(child, Base.number.__get__(child) + 1)  # type: ignore[attr-defined]
        return x * 2

    return Scene(step, kept=lambda: Base.number.__get__(child))  # type: ignore[attr-defined]


# -- objects made in C, which keep their state out of sight --------------------------------------------


@refused
def hash_that_goes_on(device: str) -> Scene:
    found = hashlib.md5(b"a")
    return Scene(lambda x: x * found.digest()[0], lambda: found.update(b"b"))


@refused
def checksum_of_a_stream(device: str) -> Scene:
    stream = zlib.decompressobj()
    packed = zlib.compress(b"a" * 100)
    return Scene(lambda x: x * len(stream.copy().decompress(packed)), lambda: stream.decompress(packed))


# -- other threads ---------------------------------------------------------------------------------------


@refused
def pool_of_threads(device: str) -> Scene:
    settings = types.SimpleNamespace(number=2.0)
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.submit(int).result()  # its thread runs before the step does
    step = lambda x: x * pool.submit(lambda: settings.number).result()  # noqa: E731
    return Scene(step, lambda: setattr(settings, "number", 3.0))


@refused
def worker_with_queues(device: str) -> Scene:
    settings = types.SimpleNamespace(number=2.0)
    asked: queue.Queue[Any] = queue.Queue()
    answered: queue.Queue[Any] = queue.Queue()

    def work() -> None:
        while True:
            answered.put(asked.get()())

    threading.Thread(target=work, daemon=True).start()

    def step(x: Any) -> Any:
        asked.put(lambda: settings.number)
        return x * answered.get()

    return Scene(step, lambda: setattr(settings, "number", 3.0))


@refused
def worker_with_events(device: str) -> Scene:
    settings = types.SimpleNamespace(number=2.0, answer=None)
    asked, answered = threading.Event(), threading.Event()

    def work() -> None:
        while True:
            asked.wait()
            asked.clear()
            settings.answer = settings.number
            answered.set()

    threading.Thread(target=work, daemon=True).start()

    def step(x: Any) -> Any:
        asked.set()
        answered.wait()
        answered.clear()
        return x * settings.answer

    return Scene(step, lambda: setattr(settings, "number", 3.0))


@pytest.mark.parametrize("make", scene.parameters)
def test_change_is_noticed(make: Callable[[str], Scene]) -> None:
    check_replays(make)


@pytest.mark.parametrize("make", refused.parameters)
def test_what_is_not_compared_is_refused(make: Callable[[str], Scene]) -> None:
    step, replays = check_right(make)
    assert replays[-1] == 0
    assert "not replayed" in step.explain()
