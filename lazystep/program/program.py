"""A program: the instructions of a step, over values. Pure data, without tensors or handles.

`record` assembles a `Program` from a recording; `compile` and `execute` receive it. A program says which op
runs on which values, in which storage each value lives, which values are inputs, and which are outputs. Ops
are kept as they were recorded, including views and in-place ops, so running the instructions in order on real
tensors has eager's semantics.

`verify.verify` checks the invariants.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from . import own_ops, updates  # noqa: F401 - `resolve_op` finds them
from .types import TensorType


class Ref(NamedTuple):
    """An argument that is a value of the program."""

    value: int


class ScalarRef(NamedTuple):
    """An argument that is a Python number. Each run passes its value, so a new value needs no new program."""

    slot: int


# Ops on lists of tensors, which they take element by element: foreach ops and fused optimizers.
LIST_OPS = ("aten._foreach_", "aten._fused_")

# A Python number of a step: a learning rate, a step count.
Number = float | int | complex

# An argument: Ref, ScalarRef, a literal (None, bool, int, str, dtype, ...) or a tuple of arguments.
Arg = Any


class Value(NamedTuple):
    """A tensor of the program: its type, and the storage that it is a view of."""

    type: TensorType
    storage: int


class Storage(NamedTuple):
    """A piece of memory that values live in. An input storage exists before the program runs."""

    nbytes: int
    is_input: bool


class Source(NamedTuple):
    """A line of the user's code. The line number is computed only when it is printed."""

    code: Any  # types.CodeType: kept instead of a frame, which would keep the user's locals alive
    lasti: int

    def __str__(self) -> str:
        return _resolve(self.code, self.lasti)


@functools.lru_cache(maxsize=4096)
def _resolve(code: Any, lasti: int) -> str:
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= lasti < end and number is not None:
            line = number
    return f"{code.co_filename}:{line} in {code.co_name}"


class _Fields(NamedTuple):
    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    results: tuple[int | None, ...]
    writes: tuple[int, ...]
    rebinds: tuple[tuple[int, int], ...]
    source: Source | None


class Instruction(_Fields):
    """A call of one op.

    `results` has the value of each tensor that the op returns, in flattened order. It is None for an
    undefined tensor, and the argument's own value if the op returns an argument. `writes` are the values
    whose memory the op writes. `rebinds` is for an op that changes an argument's metadata (`t_`, `resize_`,
    an `out=` of another size): it maps the argument to the value that the argument becomes. The op then runs
    on an alias of the argument.

    What follows from these fields is found once and kept: the passes over a new program all ask for it, and
    programs that differ in sizes share many instructions, among them those with the longest lists.
    """

    _reads: tuple[int, ...]
    _defines: tuple[int, ...]
    _slots: frozenset[int]
    # Of other modules, which find them as slowly: `serialize`, and `family.skeleton`.
    text: str
    form: tuple[str, tuple[int, ...]]

    def reads(self) -> tuple[int, ...]:
        """The values among the arguments, in order, including repetitions."""
        try:
            return self._reads
        except AttributeError:
            found: list[int] = []
            _add_refs(self.args, found)
            for _, arg in self.kwargs:
                _add_refs((arg,), found)
            self._reads = tuple(found)
            return self._reads

    def defines(self) -> tuple[int, ...]:
        """The values that this instruction makes."""
        try:
            return self._defines
        except AttributeError:
            arguments = set(self.reads())
            made = [value for value in self.results if value is not None and value not in arguments]
            made += [value for _, value in self.rebinds if value not in self.results]
            self._defines = tuple(made)
            return self._defines

    def slots(self) -> frozenset[int]:
        """The scalar slots among the arguments."""
        try:
            return self._slots
        except AttributeError:
            args = (*self.args, *(arg for _, arg in self.kwargs))
            self._slots = frozenset([slot for arg in args for slot in slots_of(arg)])
            return self._slots

    @property
    def is_torchs(self) -> bool:
        """Whether the op is one of torch's own: its result depends on its arguments alone."""
        return self.op.partition(".")[0] in ("aten", "prims")

    @property
    def where(self) -> str:
        """The user's line, for messages."""
        return str(self.source) if self.source is not None else "an unknown line"

    @property
    def label(self) -> str:
        """The op and the user's line, for messages."""
        return f"{self.op} at {self.where}"


def _add_refs(args: tuple[Arg, ...], found: list[int]) -> None:
    for arg in args:
        if type(arg) is Ref:
            found.append(arg.value)
        elif type(arg) is tuple:
            _add_refs(arg, found)


def slots_of(arg: Arg) -> Iterator[int]:
    """The scalar slots in an argument."""
    if type(arg) is ScalarRef:
        yield arg.slot
    elif type(arg) is tuple:
        for a in arg:
            yield from slots_of(a)


def map_args(arg: Arg, change: Callable[[Arg], Arg]) -> Arg:
    """`arg` with `change` applied to every leaf: references, scalars and literals."""
    return tuple(map_args(a, change) for a in arg) if type(arg) is tuple else change(arg)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The program of a step. `str(program)` is Python-like text."""

    values: Mapping[int, Value]
    storages: tuple[Storage, ...]
    inputs: tuple[int, ...]
    scalars: tuple[type, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]

    def __str__(self) -> str:
        from .printer import to_text

        return to_text(self)

    def used_slots(self) -> set[int]:
        """The scalar slots that instructions use. After pruning, some slots may be unused."""
        return {slot for instruction in self.instructions for slot in instruction.slots()}

    def maker_of(self, value: int) -> str:
        """The op and line of the instruction that makes a value, for messages."""
        return _label(i for i in self.instructions if value in i.defines())

    def user_of(self, value: int) -> str:
        """The op and line of the first instruction that takes a value, for messages."""
        return _label(i for i in self.instructions if value in i.reads())

    def user_of_slot(self, slot: int) -> str:
        """The op and line of the first instruction that takes a scalar, for messages."""
        return _label(i for i in self.instructions if slot in i.slots())

    def storage_writes(self) -> dict[int, int]:
        """For each input storage that is written, the position of the first instruction that writes it."""
        first: dict[int, int] = {}
        for position, instruction in enumerate(self.instructions):
            for value in instruction.writes:
                storage = self.values[value].storage
                if self.storages[storage].is_input:
                    first.setdefault(storage, position)
        return first


def _label(found: Iterator[Instruction]) -> str:
    first = next(found, None)
    return "no instruction" if first is None else first.label


@functools.cache
def resolve_op(name: str) -> Callable[..., Any]:
    """The torch op with this name, such as `aten.add.Tensor`."""
    namespace, packet, overload = name.split(".")
    op: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return op
