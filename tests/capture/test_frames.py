"""Frames of generators, coroutines, exceptions: variables are refused; which frame it is, is compared."""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch

import lazystep

from .common import captured
from .scenes import Scene, Scenes, check_replays, check_right

scene = Scenes()


class Pause:
    def __await__(self) -> Generator[int, float, float]:
        return (yield 1)


async def coroutine_with(number: float) -> None:
    while number:
        number = await Pause()


def generator_with(number: float) -> Generator[float, float, None]:
    while True:
        number = yield number


def kept_generator() -> Any:
    generator = generator_with(2.0)
    next(generator)
    return generator


def kept_coroutine() -> Any:
    coroutine = coroutine_with(2.0)
    coroutine.send(None)
    return coroutine


def caught(number: float) -> Exception:
    try:
        raise ValueError(number)
    except ValueError as error:
        return error


def frame_of(error: BaseException) -> types.FrameType:
    assert error.__traceback__ is not None
    return error.__traceback__.tb_frame


LOCALS = operator.attrgetter("gi_frame.f_locals")


def behind_its_own_frame(x: Any, _: Any) -> Any:
    frame: Any = frame_of(caught(1.0))
    while "secret" not in frame.f_locals:
        frame = frame.f_back
    return x * frame.f_locals["secret"]


def call_often(step: Any) -> None:
    for _ in range(4):
        step(torch.ones(2))


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (kept_generator, lambda x, held: x * held.gi_frame.f_locals["number"]),
        (kept_generator, lambda x, held: x * inspect.getgeneratorlocals(held)["number"]),
        (kept_generator, lambda x, held: x * LOCALS(held)["number"]),
        (kept_coroutine, lambda x, held: x * held.cr_frame.f_locals["number"]),
        (lambda: frame_of(caught(2.0)), lambda x, held: x * held.f_locals["number"]),
        (lambda: None, behind_its_own_frame),
    ],
    ids=["generator", "inspect", "getter", "coroutine", "exception", "own"],
)
def test_variables_of_a_frame_are_refused(make: Callable[[], Any], use: Callable[[Any, Any], Any]) -> None:
    secret, held = 2.0, make()
    step: Any = captured(lambda x: use(x, held), fullgraph=True)
    with pytest.raises(lazystep.CaptureError, match=r"it reads f_(locals|back) of a frame at .*outside"):
        call_often(step)
    assert secret == 2.0
    if hasattr(held, "close"):
        held.close()


# -- objects in C that hold others ---------------------------------------------------------------------


@scene
def coroutine_that_is_closed(device: str) -> Scene:
    coroutine = kept_coroutine()
    return Scene(step=lambda x: x * 2 if coroutine.cr_frame is None else x * 3, change=coroutine.close)


@scene
def cause_of_an_exception(device: str) -> Scene:
    error = ValueError("a")
    error.__cause__ = KeyError(2.0)
    return Scene(
        step=lambda x: x * error.__cause__.args[0],  # type: ignore[union-attr]
        change=lambda: setattr(error, "__cause__", KeyError(3.0)),
    )


@scene
def traceback_of_an_exception(device: str) -> Scene:
    error = caught(2.0)

    def other() -> None:
        try:
            raise ValueError
        except ValueError as another:
            error.__traceback__ = another.__traceback__

    return Scene(
        step=lambda x: x * error.__traceback__.tb_lineno,  # type: ignore[union-attr]
        change=other,
    )


@scene
def end_of_a_traceback(device: str) -> Scene:
    error = caught(2.0)
    try:
        raise error
    except ValueError:
        pass
    assert error.__traceback__ is not None
    assert error.__traceback__.tb_next is not None
    return Scene(
        step=lambda x: x * (2 if error.__traceback__.tb_next else 3),  # type: ignore[union-attr]
        change=lambda: setattr(error.__traceback__, "tb_next", None),
    )


@pytest.mark.parametrize("make", scene.parameters)
def test_another_object_behind_an_attribute_is_noticed(make: Callable[[str], Scene]) -> None:
    check_replays(make)


def test_frame_of_the_call_is_not_kept() -> None:
    """What a frame of the call's own holds must not live on until the call has ended."""

    def step(x: Any) -> Any:
        error = caught(2.0)
        return x * (2 if frame_of(error).f_code.co_name == "caught" else 3)

    step_of, _ = check_right(lambda device: Scene(step=step))
    assert step_of.num_replayed > 0, step_of.explain()


# -- the text of an exception --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "name", "value"),
    [
        (lambda: ValueError("2"), "args", ("three",)),
        (lambda: OSError(2, "x"), "strerror", "three"),
        (lambda: UnicodeDecodeError("utf8", b"abc", 0, 1, "two"), "reason", "three"),
        (lambda: SyntaxError("2"), "msg", "three"),
        (lambda: ImportError("2"), "msg", "three"),
    ],
    ids=["arguments", "OSError", "UnicodeDecodeError", "SyntaxError", "ImportError"],
)
@pytest.mark.parametrize(
    "text",
    [str, lambda error: f"{error}", lambda error: "%s" % error, "{}".format],  # noqa: UP031
    ids=["str", "f_string", "percent", "format"],
)
def test_text_of_an_exception_is_noticed(
    error: Callable[[], Exception], name: str, value: Any, text: Callable[[Exception], str]
) -> None:
    def make(device: str) -> Scene:
        held = error()
        return Scene(step=lambda x: x * len(text(held)), change=lambda: setattr(held, name, value))

    check_replays(make)
