"""What differs between releases of Python: the value stack, events, other tools, versions of dicts."""

from __future__ import annotations

import argparse
import asyncio.tasks
import contextlib
import dis
import inspect
import json.decoder
import re
import sys
import tarfile
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lazystep
from lazystep.capture import _witness
from lazystep.capture._places import Plan
from lazystep.errors import CaptureError

from .common import NUM_CALLS, captured, check_change

needs_monitoring = pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is new in 3.12")


class Holder:
    """State that steps read."""

    rate = 0.5

    def __init__(self) -> None:
        self.scale = 2.0
        self.numbers = [1.0, 2.0, 3.0, 4.0]
        self.table = {"a": 1.5, "b": 2.5}

    def times(self, value: Any, *more: Any, by: Any = 1.0) -> Any:
        return value * self.scale * by * (len(more) + 1)


class Child(Holder):
    def times(self, value: Any, *more: Any, by: Any = 1.0) -> Any:
        return super().times(value, *more, by=by) + 1


def test_release_is_supported() -> None:
    assert _witness.supported, "the suite is for releases with captures"
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in re.findall(r"\d\.\d+", _witness.versions)


# -- where the operands lie ------------------------------------------------------------------------------


def in_a_call_with_keywords(h: Holder, x: Any) -> Any:
    return h.times(x, 1, 2, by=h.table["a"])


def in_an_expanded_call(h: Holder, x: Any) -> Any:
    args, kwargs = (x, 1), {"by": h.table["a"]}
    return h.times(*args, **kwargs)


def in_a_comprehension(h: Holder, x: Any) -> Any:
    return sum([x * n * k for n in h.numbers for k in (h.scale, 1.0)])


def in_nested_comprehensions(h: Holder, x: Any) -> Any:
    return sum(x * sum([n * h.scale for n in h.numbers if n < k]) for k in [3.0, *h.numbers])


def in_a_slice(h: Holder, x: Any) -> Any:
    return x * h.numbers[1:][0] + x * sum(h.numbers[: int(h.scale)])


def after_a_slice_is_set(h: Holder, x: Any) -> Any:
    own = list(h.numbers)
    own[1:3] = [h.scale, 0.5]
    return x * own[1] * own[2]


def in_a_try(h: Holder, x: Any) -> Any:
    try:
        raise KeyError(x * h.scale)
    except KeyError as error:
        return error.args[0] * h.table["a"]
    finally:
        h.table.get("b")


def in_a_with(h: Holder, x: Any) -> Any:
    with contextlib.suppress(ValueError), torch.no_grad():
        for number in h.numbers:
            if number > 3.0:
                return x * number * h.scale
    return x


def in_a_generator(h: Holder, x: Any) -> Any:
    def produce() -> Iterator[Any]:
        for number in h.numbers:
            got = yield x * number
            yield got * h.scale
            yield from [h.table["a"] * x]

    running = produce()
    total = next(running)
    for _ in h.numbers:
        total = total + running.send(h.scale * x) + next(running)
        next(running, None)
    return total


def in_a_match(h: Holder, x: Any) -> Any:
    match h.table:
        case {"a": number, **rest}:
            return x * number * h.scale * len(rest)
    return x


def in_a_super_call(h: Holder, x: Any) -> Any:
    child = Child()
    child.scale = h.scale
    return child.times(x, by=h.rate)


def in_a_condition(h: Holder, x: Any) -> Any:
    factor = (h.scale if h.numbers[0] < h.scale <= 100.0 else 3.0) if h.scale != 7.0 else 0.0
    return x * factor if h.table and h.scale else x


def in_a_text(h: Holder, x: Any) -> Any:
    return x * float(f"{h.scale!r}") * len(f"{h.scale:>{len(h.numbers) + 5}}")


def in_a_lambda_with_defaults(h: Holder, x: Any) -> Any:
    scaled = lambda y, by=h.scale, *, plus=h.rate: y * by + plus  # noqa: E731
    return scaled(x)


WAYS = [value for name, value in sorted(globals().items()) if name.startswith(("in_", "after_"))]


@pytest.mark.parametrize("kind", [Holder, Child])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_numbers_are_read_where_they_lie(way: Callable[[Holder, Any], Any], kind: type[Holder]) -> None:
    holder = kind()
    check_change(lambda x: way(holder, x), lambda: setattr(holder, "scale", 4.0))


def test_function_with_long_instructions() -> None:
    """More than 255 names and constants: instructions have prefixes, each with an event in 3.12."""
    sums = [f"total = total + holder.n{i} * {i + 0.5}" for i in range(300)]
    body = [
        "total = 0.0",
        *sums,
        "if holder.n299 > 1e9:",
        *[f"    {line}" for line in sums],
        "return x * total",
    ]
    namespace: dict[str, Any] = {}
    exec("def long(holder, x):\n    " + "\n    ".join(body), namespace)
    holder = Holder()
    for number in range(300):
        setattr(holder, f"n{number}", 1.0)
    check_change(lambda x: namespace["long"](holder, x), lambda: setattr(holder, "n298", 3.0))


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


@pytest.mark.parametrize(
    "module", [argparse, asyncio.tasks, inspect, json.decoder, tarfile, torch.nn.modules.module]
)
def test_value_stack_is_understood(module: Any) -> None:
    """Loops, handlers, generators, coroutines, comprehensions and `with` as others write them."""
    found = list(codes_in(compile(inspect.getsource(module), module.__name__, "exec")))
    depths = [(_witness.check_code(code), code.co_stacksize) for code in found]
    assert len(depths) > 3
    assert all(deepest <= size for deepest, size in depths)
    if sys.version_info >= (3, 12):  # before, frames keep their own
        assert sum(deepest >= size - 1 for deepest, size in depths) > 0.9 * len(depths)
    with pytest.raises(TypeError, match="code object"):
        _witness.check_code(module)  # type: ignore[arg-type]


@needs_monitoring
def test_value_stack_that_is_not_understood_is_an_error() -> None:
    code = in_a_condition.__code__
    broken = bytearray(code.co_code)
    at = next(i.offset for i in dis.get_instructions(code) if i.opname.startswith("LOAD_FAST"))
    broken[at : at + 2] = bytes((dis.opmap["POP_TOP"], 0))
    with pytest.raises(RuntimeError, match="the value stack of <code object in_a_condition"):
        _witness.check_code(code.replace(co_code=bytes(broken)))


# -- other tools -----------------------------------------------------------------------------------------


def test_traced_thread_is_recorded_with_the_reason() -> None:
    step = captured(lambda x: x * 2)
    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: None)
    try:
        with pytest.warns(lazystep.LazyStepWarning, match=r"traces this thread \(sys.settrace\)"):
            for _ in range(NUM_CALLS):
                assert step(torch.ones(2)).tolist() == [2.0, 2.0]
    finally:
        sys.settrace(before)
    assert step.num_replayed == 0
    for _ in range(NUM_CALLS):
        assert step(torch.ones(2)).tolist() == [2.0, 2.0]
    assert step.num_replayed >= NUM_CALLS - 2


@contextlib.contextmanager
def tools(*ids: int) -> Iterator[Any]:
    monitoring: Any = getattr(sys, "monitoring")  # noqa: B009
    for tool in ids:
        monitoring.use_tool_id(tool, f"tool {tool}")
    try:
        yield monitoring
    finally:
        for tool in ids:
            monitoring.set_events(tool, 0)
            monitoring.free_tool_id(tool)


@needs_monitoring
@pytest.mark.parametrize(
    ("ids", "reason"),
    [((0,), "tool 0, is at work"), ((1,), "tool 1, is at work"), ((2, 3, 4, 5), "all ids of sys.monitoring")],
)
def test_tools_that_leave_no_room_are_the_reason(ids: tuple[int, ...], reason: str) -> None:
    step = captured(lambda x: x * 2)
    with tools(*ids):
        with pytest.warns(lazystep.LazyStepWarning, match=reason):
            for _ in range(NUM_CALLS):
                assert step(torch.ones(2)).tolist() == [2.0, 2.0]
        with pytest.raises(CaptureError, match=reason):
            captured(lambda x: x * 2, fullgraph=True)(torch.ones(2))
    assert step.num_replayed == 0


@needs_monitoring
def test_tool_beside_the_witness_sees_its_events_and_the_witness_its_own() -> None:
    holder = Holder()
    seen: list[str] = []
    with tools(2) as monitoring:
        for name in ("PY_START", "LINE", "INSTRUCTION"):
            event = getattr(monitoring.events, name)
            monitoring.register_callback(2, event, lambda code, where, name=name: seen.append(name))
        events = monitoring.events
        monitoring.set_events(2, events.PY_START | events.LINE | events.INSTRUCTION)
        try:
            check_change(lambda x: in_a_comprehension(holder, x), lambda: setattr(holder, "scale", 4.0))
        finally:
            monitoring.set_events(2, 0)
            for name in ("PY_START", "LINE", "INSTRUCTION"):
                monitoring.register_callback(2, getattr(events, name), None)
        assert monitoring.get_tool(5) is None, "the witness has given its id back"
    assert {"PY_START", "LINE", "INSTRUCTION"} <= set(seen)


@needs_monitoring
def test_nothing_is_left_after_a_call_that_raises() -> None:
    def fail(x: Any) -> Any:
        raise ValueError(x.shape)

    with pytest.raises(ValueError, match="Size"):
        captured(fail)(torch.ones(2))
    monitoring: Any = getattr(sys, "monitoring")  # noqa: B009
    assert [monitoring.get_tool(tool) for tool in range(6)] == [None] * 6
    for tool in range(2, 6):
        assert monitoring.register_callback(tool, monitoring.events.INSTRUCTION, None) is None
        monitoring.use_tool_id(tool, "asks")
        assert monitoring.get_events(tool) == 0
        assert monitoring.get_local_events(tool, fail.__code__) == 0
        monitoring.free_tool_id(tool)


def test_code_of_the_step_in_another_thread_is_none_of_the_call() -> None:
    holder, other = Holder(), Holder()
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            in_a_comprehension(other, 1.0)  # the same code, and no ops

    thread = threading.Thread(target=work)
    thread.start()
    try:
        check_change(lambda x: in_a_comprehension(holder, x), lambda: setattr(holder, "scale", 4.0))
    finally:
        is_over.set()
        thread.join(30)
    assert not thread.is_alive()


# -- versions of dicts -----------------------------------------------------------------------------------


class Plain:
    def __init__(self) -> None:
        self.a = self.b = 1.0


def set_often(owner: Any, value: Any) -> None:
    for _ in range(100):  # until the interpreter has an instruction for just this
        owner.a = value


CHANGES: dict[str, Callable[[Any, dict[str, Any]], object]] = {
    "attribute": lambda o, d: setattr(o, "a", 2.0),
    "hot attribute": lambda o, d: set_often(o, 2.0),
    "object.__setattr__": lambda o, d: object.__setattr__(o, "a", 2.0),
    "item": lambda o, d: d.__setitem__("a", 2.0),
    "update": lambda o, d: d.update(a=2.0),
    "merge": lambda o, d: d.__ior__({"a": 2.0}),
    "deleted attribute": lambda o, d: delattr(o, "a"),
    "pop": lambda o, d: d.pop("a"),
    "clear": lambda o, d: d.clear(),
    "popitem": lambda o, d: [d.popitem() for _ in list(d)],
    "new dict": lambda o, d: (d.clear(), d.setdefault("a", 2.0)),
    "many": lambda o, d: d.update({f"n{i}": i for i in range(100)} | {"a": 2.0}),
}


@pytest.mark.parametrize("num_attributes", [0, 5, 60])
@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_each_change_of_a_dict_is_seen(change: Callable[[Any, Any], object], num_attributes: int) -> None:
    """`num_attributes`: few are kept in the object itself, from 3.13 on, and many in the dict."""
    owner = Plain()
    for number in range(num_attributes):
        setattr(owner, f"more{number}", number)
    names = owner.__dict__
    value = names["a"]
    # A row whose value is needed, and one that stands for itself, in a group.
    plan = Plan([(0, 1, True, -1, names, "a", value), (0, 1, False, -1, names, "a", value)])
    group = Plan([(0, 1, False, -1, names, "a", value)])
    for _ in range(3):
        assert plan.read() == [value]
        assert group.read() == []
    change(owner, names)
    assert plan.read() == 0
    assert group.read() == 0
