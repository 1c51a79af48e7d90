"""Step functions made of parts: what holds a value, the value, how code reaches and uses it, what changes.

A `Case` is one combination. `Case.source` writes it down as an ordinary Python module with a step function,
the changes between its calls, and a function that looks at what the step has left behind. `check` runs the
module twice: eagerly on the CPU, and captured on the lazy device. Every call must agree bit for bit.

The parts are templates in the tables of `generated_parts/`.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import itertools
import linecache
import os
import re
import struct
import sys
import textwrap
import types
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

import lazystep

from .generated_parts import FRAMES, HOLDERS, PRELUDE, REACHES, VALUES, Frame, Holder, Reach, Value

T = TypeVar("T")

NUM_CALLS = 14
MAX_EVENTS = 2

# -- changes -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Change:
    """Something that happens to the holder or its value, in the step or between two calls of it."""

    kind: str
    code: str = ""  # an expression or a statement with `v`
    option: int = 0  # which option of the value

    def __repr__(self) -> str:
        return f"{self.kind} {self.code or self.option or ''}".strip()


@dataclasses.dataclass(frozen=True)
class Inside:
    """A change in the step itself."""

    change: Change
    is_first: bool = False  # before the value is used
    calls: tuple[int, ...] = ()  # an argument asks for the change in these calls; empty: in all calls


@dataclasses.dataclass(frozen=True)
class Event:
    """A change before a call."""

    call: int
    change: Change


# -- cases -------------------------------------------------------------------------------------------

_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Case:
    """One combination of all parts."""

    holder: Holder
    value: Value
    use: str
    reach: Reach = REACHES[0]
    frame: Frame = FRAMES[0]
    inside: Inside | None = None
    events: tuple[Event, ...] = ()
    second: Holder | None = None
    first_option: int = 0
    in_function: bool = False  # whether all names are variables of a function, not of a module
    is_returned: bool = False  # whether the step also returns the value
    is_looked_at: bool = True  # whether results and state are read after each call, not only at the end

    # -- templates -----------------------------------------------------------------------------------

    def _fill(self, template: str, number: int = 0, new: str = "") -> str:
        """A template with the names of one of the two holders."""
        holder = self.holders[number]
        words = {
            "READ": holder.look or holder.read,
            "OWNER": holder.owner,
            "ATTR": holder.attr,
            "CONTAINER": holder.container,
            "KEY": holder.key,
            "MEMBERS": holder.members,
        }
        # The names of attributes also occur with an underscore before them.
        text = re.sub(rf"(?<![A-Za-z0-9])(_?)({'|'.join(words)})\b", lambda m: m[1] + words[m[2]], template)
        values = {"INIT": self.value.options[self.first_option], "NEW": new}
        text = re.sub(r"\b(INIT|NEW)\b", lambda m: values[m[1]], text)
        return re.sub(r"(?<=\w)@", "" if number == 0 else "2", text)

    @property
    def holders(self) -> tuple[Holder, ...]:
        return (self.holder,) if self.second is None else (self.holder, self.second)

    def _option(self, change: Change) -> str:
        return self.value.options[change.option]

    def _write(self, number: int, new: str) -> str:
        """Statements that put a new value into a holder."""
        holder = self.holders[number]
        text = holder.write or f"{holder.read} = NEW"
        return self._renew(text, new) if number == 0 else self._fill(text, number, new)

    def _renew(self, text: str, new: str) -> str:
        """Statements that change the first holder; what the way to the value has kept is forgotten."""
        return self._fill(f"{text}\n{self.reach.after}", 0, new).strip()

    def _read(self, number: int) -> str:
        return self._fill("READ", number)

    def _change(self, change: Change) -> str:
        """A change as statements."""
        return _CHANGES[change.kind](self, change)

    def _scoped(self, text: str) -> str:
        """The body of a function, with declarations of the holders' names that it binds."""
        nodes = ast.walk(ast.parse(text))
        bound = {
            node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
        }
        kept = {self._fill(name, number) for number, one in enumerate(self.holders) for name in one.assigns}
        if not bound & kept:
            return text
        return f"{'nonlocal' if self.in_function else 'global'} {', '.join(sorted(bound & kept))}\n{text}"

    # -- source --------------------------------------------------------------------------------------

    def source(self, device: str) -> str:
        """The case as a Python module for a device."""
        parts = [self._fill(holder.setup, number) for number, holder in enumerate(self.holders)]
        parts.append(self._fill(self.reach.setup))
        fetch = self._fill(self.reach.read.replace("READ", self.holder.read))
        if self.frame.body:
            parts.append(_function_source("use", "x", f"v = {fetch}\nreturn {self.use}"))
            parts.append(self.frame.setup)
        parts.append(self._step_source(fetch))
        for number, event in enumerate(self.events):
            comment = f"# before call {event.call}: {event.change!r}\n"
            parts.append(
                comment + _function_source(f"change{number}", "", self._scoped(self._change(event.change)))
            )
        passed = [self._fill(holder.argument, n) for n, holder in enumerate(self.holders) if holder.argument]
        parts.append(_function_source("arguments", "", f"return [{', '.join(passed)}]"))
        for number in range(len(self.holders)):
            seen = f"{self._read(number)}, {self._fill(self.holders[number].traces, number)}".removesuffix(
                ", "
            )
            parts.append(_function_source(f"look{number}", "", f"return {seen}"))
        text = "\n\n".join(part for part in parts if part.strip())
        if self.in_function:
            text = _function_source("make", "", f"{text}\n\nreturn locals()")
        return f"{PRELUDE.format(device=device)}\n\n\n{text}\n"

    def _step_source(self, fetch: str) -> str:
        results = ["y"]
        lines = [self.frame.body or f"v = {fetch}\ny = {self.use}"]
        if self.second is not None:
            use = re.sub(r"\bv\b", "w", self.use)
            lines.append(f"w = {self._fill(self.second.read, 1)}\nz = {use}")
            results.append("z")
        lines += [self._fill(holder.action, n) for n, holder in enumerate(self.holders) if holder.action]
        parameters = ["x"]
        if self.inside is not None:
            change = self._change(self.inside.change)
            if self.inside.calls:
                parameters.append("asked")
                change = f"if asked:\n{textwrap.indent(change, '    ')}"
            lines.insert(0 if self.inside.is_first else len(lines), change)
        parameters += [
            self._fill(holder.signature, n) for n, holder in enumerate(self.holders) if holder.signature
        ]
        results = [f"{name}.detach()" for name in results]
        if self.is_returned:
            results.append(self._fill(self.holder.read))
        lines.append(f"return {', '.join(results)}")
        return _function_source("step", ", ".join(parameters), self._scoped("\n".join(lines)))

    def __str__(self) -> str:
        source = self.source("lazy").partition("def norm():")[2].partition("\n\n\n")[2]
        inside = "" if self.inside is None else f"; in the step: {self.inside.change!r}"
        between = "".join(f"; before call {event.call}: {event.change!r}" for event in self.events)
        title = f"{self.holder}, {self.value}, {self.reach}, {self.frame}{inside}{between}"
        return f"{title}\n\n{textwrap.indent(source, '    ')}"

    __repr__ = __str__

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis writes a case."""
        printer.text(f"\n{self}")


def _function_source(name: str, parameters: str, body: str) -> str:
    return f"def {name}({parameters}):\n{textwrap.indent(body, '    ')}"


# How each kind of change is written.
_CHANGES: dict[str, Callable[[Case, Change], str]] = {
    "assign": lambda case, change: case._write(0, case._option(change)),
    "mutate": lambda case, change: f"v = {case._read(0)}\n{change.code}",
    "advance": lambda case, change: f"v = {case._read(0)}\n{case._write(0, change.code)}",
    "augment": lambda case, change: f"{case._read(0)} {change.code}",
    "replace": lambda case, change: case._renew(case.holder.replace, case._option(change)),
    "copy": lambda case, change: f"v = {case._read(0)}\n{case._renew(case.holder.replace, 'v')}",
    "grow": lambda case, change: case._renew(change.code, case._option(change)),
    "remove": lambda case, change: case._renew(case.holder.remove or "del READ", ""),
    "raise": lambda case, change: "raise ArithmeticError",
    "swap": lambda case, change: (
        f"v, w = {case._read(0)}, {case._read(1)}\n{case._write(0, 'w')}\n{case._write(1, 'v')}"
    ),
    "alias": lambda case, change: f"v = {case._read(0)}\n{case._write(1, 'v')}",
    "assign second": lambda case, change: case._write(1, case._option(change)),
    "mutate second": lambda case, change: f"v = {case._read(1)}\n{change.code}",
}


def changes(holder: Holder, value: Value, second: Holder | None, is_inside: bool) -> list[Change]:
    """All changes of a case."""
    others = range(1, len(value.options))
    found = [Change("assign", option=option) for option in (*others, 0)]
    found += [Change("mutate", code) for code in value.mutations]
    found += [
        Change("advance", code) for code in value.advances if is_inside or not re.search(r"\bx\b", code)
    ]
    if "number" in value.traits and holder.is_target:
        found += [Change("augment", code) for code in ("+= 1", "-= 1", "*= 2")]
    if holder.replace:
        found += [Change("copy"), *(Change("replace", option=option) for option in others)]
    found += [Change("grow", code, option) for code in holder.grow for option in (1, 0)]
    if holder.remove or holder.is_target:
        found += [Change("remove")]
    if is_inside:
        found += [Change("raise")]
    if second is not None:
        found += [Change("swap"), Change("alias"), *(Change("assign second", option=o) for o in others)]
        found += [Change("mutate second", code) for code in value.mutations]
    return found


def _pick(draw: st.DrawFn, what: str, rows: Sequence[T]) -> T:
    """One of the rows.

    The name of the choice is a part of what is drawn: hypothesis spends most examples on repeating a choice
    in another one that looks the same, and here no choice looks like another.
    """
    return rows[draw(st.sampled_from([(what, number) for number in range(len(rows))]))[1]]


@st.composite
def cases(draw: st.DrawFn, holder: Holder | None = None) -> Case:
    """Any case, or any with this holder."""
    pick = functools.partial(_pick, draw)
    if holder is None:
        holder = pick("holder", HOLDERS)
    value = pick("value", [value for value in VALUES if holder.takes(value)])
    second = None
    if pick("second", (False, False, False, True)):
        second = pick("second holder", [one for one in HOLDERS if one.takes(value) and not one.signature])
    inside = None
    if pick("inside", (False, False, True)):
        inside = Inside(
            pick("change inside", changes(holder, value, second, is_inside=True)),
            pick("first", (False, True)),
            pick("asked", ((), (), (6,), (5, 9), (3, 4, 5))),
        )
    events = []
    for number in range(pick("events", range(MAX_EVENTS + 1))):
        call = pick(f"call {number}", (5, 6, 3, 4, 7, 8, 9, 2, 10, 1, 0))
        change = pick(f"change {number}", changes(holder, value, second, is_inside=False))
        events.append(Event(call, change))
    return Case(
        holder,
        value,
        pick("use", value.uses),
        pick("reach", [reach for reach in REACHES if reach.fits(holder)]),
        pick("frame", FRAMES[:1] if holder.signature else FRAMES),
        inside,
        tuple(sorted(events, key=lambda event: event.call)),
        second,
        first_option=pick("option", range(len(value.options))),
        in_function=pick("scope", (False, True)),
        # Of tensors and containers a replay returns new ones.
        is_returned=pick("returned", (False, False, False, "plain" in value.traits)),
        is_looked_at=pick("looked at", (True, True, False)),
    )


# -- running -----------------------------------------------------------------------------------------


class Twin:
    """A case that runs on one device."""

    def __init__(self, case: Case, device: str, is_captured: bool) -> None:
        self.case = case
        self.device = device
        source = case.source(device)
        # A name like that of a file here: code of the user's project, and with lines to show.
        self._file = str(Path(__file__).with_name(f"generated_step_{next(_numbers)}.py"))
        linecache.cache[self._file] = len(source), None, source.splitlines(keepends=True), self._file
        module = types.ModuleType(Path(self._file).stem)
        self._module = module
        sys.modules[module.__name__] = module
        names = module.__dict__
        exec(compile(source, self._file, "exec"), names)
        if case.in_function:
            names = names["make"]()
        self.names = names
        self.step: Any = names["step"]
        if is_captured:
            self.step = lazystep.step(audit_every=0)(self.step)

    def calls(self) -> Iterator[tuple[str, Any]]:
        """Everything that can be observed, with its place in the run."""
        late: list[tuple[str, Any]] = []
        for call in range(NUM_CALLS):
            for number, event in enumerate(self.case.events):
                if event.call == call:
                    yield f"change before call {call}", _outcome(self.names[f"change{number}"])
            x = (torch.tensor([-1.0, 0.5, 2.0]) + call % 5).to(self.device)
            inside = self.case.inside
            arguments = [x, call in inside.calls] if inside is not None and inside.calls else [x]
            arguments += self.names["arguments"]()
            result = _outcome(functools.partial(self.step, *arguments))
            if self.case.is_looked_at:
                yield f"result of call {call}", described(result)
                yield f"state after call {call}", self.state()
                yield f"argument after call {call}", described(x)
            else:
                late.append((f"result of call {call}, read at the end", result))
        yield "state at the end", self.state()
        for place, result in late:
            yield place, described(result)

    def state(self) -> Any:
        """What is in the holders, whether they hold the same, and where the random numbers are."""
        held = [_outcome(self.names[f"look{number}"]) for number in range(len(self.case.holders))]
        same = held[0] is held[-1] if not isinstance(held[0], bool | int | float | str | tuple) else None
        return [*map(described, held), same, zlib.crc32(torch.get_rng_state().numpy())]

    def close(self) -> None:
        linecache.cache.pop(self._file, None)
        sys.modules.pop(self._module.__name__, None)


@dataclasses.dataclass(frozen=True)
class Raised:
    """The type of an exception, in the place of a result."""

    kind: str


def _outcome(function: Callable[[], Any]) -> Any:
    """What a function returns, or the type of what it raises."""
    try:
        return function()
    except lazystep.StepError as error:
        # An error that depends on values comes later than eager's, with eager's as its cause.
        return Raised(type(error.__cause__ or error).__name__)
    except Exception as error:
        return Raised(type(error).__name__)


def described(value: Any) -> Any:
    """A value as plain data that is equal only if the value is equal bit for bit."""
    for kinds, describe in _DESCRIPTIONS:
        if isinstance(value, kinds):
            return describe(value)
    scale = getattr(value, "scale", None)  # of the objects in the prelude
    return type(value).__name__, getattr(value, "__name__", ""), None if scale is None else described(scale)


def _describe_tensor(tensor: torch.Tensor) -> Any:
    plain = tensor.detach().cpu().contiguous()
    grad = tensor.grad if tensor.is_leaf else None
    return (
        type(tensor).__name__,
        str(tensor.dtype),
        tuple(tensor.shape),
        # For the reader, and as text, because a NaN is not equal to itself. The bits are compared, too.
        repr(plain.tolist()),
        plain.numpy().tobytes(),
        None if grad is None else _describe_tensor(grad),
    )


def _describe_module(module: nn.Module) -> Any:
    return (
        type(module).__name__,
        [one.training for one in module.modules()],
        [(name, described(one)) for name, one in module.named_parameters()],
        [(name, described(one)) for name, one in module.named_buffers()],
        [len(one._forward_hooks) + len(one._forward_pre_hooks) for one in module.modules()],
    )


_DESCRIPTIONS: list[tuple[Any, Callable[[Any], Any]]] = [
    (Raised, lambda raised: raised),
    (torch.Tensor, _describe_tensor),
    (nn.Module, _describe_module),
    (torch.Generator, lambda generator: ("Generator", zlib.crc32(generator.get_state().numpy()))),
    (enum.Enum, lambda member: (type(member).__name__, member.name)),
    (float, lambda number: (type(number).__name__, struct.pack("d", number), repr(number))),
    ((bool, int, str, torch.dtype, type(None)), lambda value: (type(value).__name__, repr(value))),
    (dict, lambda items: [(described(key), described(one)) for key, one in items.items()]),
    ((set, frozenset), lambda members: sorted(map(repr, map(described, members)))),
    ((list, tuple), lambda members: [type(members).__name__, *map(described, members)]),
    (functools.partial, lambda partial: ("partial", described(partial.args), described(partial.keywords))),
    (np.ndarray, lambda array: (str(array.dtype), repr(array.tolist()), array.tobytes())),
]


class Outcome:
    """What became of the calls on the lazy device."""

    def __init__(self, step: Any, num_raised: int) -> None:
        self.num_replayed: int = step.num_replayed
        self.num_raised = num_raised
        self.explanation: str = step.explain()


def observe(case: Case, device: str, is_captured: bool = False) -> tuple[list[tuple[str, Any]], Any]:
    """Run a case on a device. Returns what was observed, and the step."""
    environ = dict(os.environ)
    torch.manual_seed(0)
    twin = Twin(case, device, is_captured)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lazystep.LazyStepWarning)
            return list(twin.calls()), twin.step
    finally:
        twin.close()
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        for name in [name for name in sys.modules if name.startswith("held_module")]:
            del sys.modules[name]


def check(case: Case) -> Outcome:
    """Run a case eagerly, and captured on the lazy device; compare everything that can be observed."""
    wanted, _ = observe(case, "cpu")
    got, step = observe(case, "lazy", is_captured=True)
    _compare(case, wanted, got, step.explain())
    num_raised = sum(place.startswith("result") and isinstance(want, Raised) for place, want in wanted)
    return Outcome(step, num_raised)


def check_uncaptured(case: Case) -> None:
    """The same without capture: a difference is one of the device, or of this generator."""
    wanted, _ = observe(case, "cpu")
    got, _ = observe(case, "lazy")
    _compare(case, wanted, got, "not captured")


def _compare(case: Case, wanted: list[tuple[str, Any]], got: list[tuple[str, Any]], explanation: str) -> None:
    for (place, want), (_, have) in zip(wanted, got, strict=True):
        if want != have:
            raise AssertionError(
                f"{place} differs from eager's\neager: {_shortened(want)}\nlazy:  {_shortened(have)}\n"
                f"{explanation}\n\n{case}"
            )


def _shortened(value: Any) -> str:
    """Plain data without the bits that repeat it."""
    return re.sub(r", b'[^']*'|, b\"[^\"]*\"|b'[^']*', ", "", repr(value))[:600]
