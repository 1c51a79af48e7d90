"""The signature of a native library: the tensors that it takes, and where its outputs are found.

A library takes tensors and knows nothing of storages. So the signature says for each input storage which
tensor is passed, and for each output where to find it after the run:

- If one dense input covers a storage, this input is passed. A storage with several views, or with a view that
  has gaps, is passed once, as a flat tensor that holds all views, and the library takes the views inside. So
  overlapping views are right by construction.
- An output in an input storage is not returned: the library has written the storage, and the output is a
  view of it. If several outputs share a new storage, the first value of that storage is returned, once.
- Scalars that may vary are passed in two vectors, one of float64 and one of int64. The other scalars are
  fixed: their values are part of the library.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false

from .program import Program
from .types import TensorType, tensor_type


class NotCallableError(ValueError):
    """A native library can't take or return a tensor of the program. The message says which tensor."""


class Argument(NamedTuple):
    """A tensor that is passed: an input as it is, or a flat tensor from the start of its storage."""

    position: int  # among the program's inputs
    type: TensorType
    storage: int
    is_flat: bool


class Where(enum.Enum):
    """Where an output is found after the run."""

    RETURNED = "returned"  # a returned tensor itself
    VIEW = "view"  # a view of a returned tensor
    ARGUMENT = "argument"  # a view of the memory that an argument stands for


class Output(NamedTuple):
    """An output of the program. `number` is the index of a returned tensor or of an argument."""

    where: Where
    number: int
    type: TensorType


@dataclasses.dataclass(frozen=True)
class Signature:
    """The signature of a library. `returned` are the values that the library returns, in order."""

    arguments: tuple[Argument, ...]
    returned: tuple[int, ...]
    outputs: tuple[Output, ...]
    floats: tuple[int, ...]
    ints: tuple[int, ...]
    fixed: tuple[int, ...]
    written: tuple[int, ...]  # numbers of the arguments whose memory the program writes


def signature_of(program: Program, fixed: Collection[int]) -> Signature:
    """The signature of a program whose scalar slots `fixed` are constants of the library."""
    used = {value for instruction in program.instructions for value in instruction.reads()}
    used |= set(program.outputs)
    arguments = _arguments(program, used)
    number_of = {argument.storage: number for number, argument in enumerate(arguments)}
    returned: dict[int, int] = {}
    outputs = []
    first = _first_values(program)
    shared = _shared_storages(program)
    for value in program.outputs:
        type_, storage = program.values[value]
        _check(program, value)
        if program.storages[storage].is_input:
            if storage not in number_of:
                raise NotCallableError(f"the result %{value} lives in an input that nothing uses")
            outputs.append(Output(Where.ARGUMENT, number_of[storage], type_))
            continue
        root = value
        if storage in shared or type_.offset or not _is_dense(type_):
            root = first[storage]
            root_type = program.values[root].type
            _check(program, root)
            covers = root_type.offset == 0 and _is_dense(root_type) and root_type.extent >= type_.extent
            if not covers or root_type.dtype != type_.dtype:
                raise NotCallableError(
                    f"the result of {program.maker_of(value)} is a view of memory that no value covers"
                )
        number = returned.setdefault(root, len(returned))
        where = Where.RETURNED if root == value else Where.VIEW
        outputs.append(Output(where, number, type_))
    writes = program.storage_writes()
    slots = sorted(program.used_slots() - set(fixed))
    return Signature(
        arguments=arguments,
        returned=tuple(returned),
        outputs=tuple(outputs),
        floats=tuple(slot for slot in slots if program.scalars[slot] is float),
        ints=tuple(slot for slot in slots if program.scalars[slot] is int),
        fixed=tuple(sorted(fixed)),
        written=tuple(number for number, a in enumerate(arguments) if a.storage in writes),
    )


def _arguments(program: Program, used: set[int]) -> tuple[Argument, ...]:
    views: dict[int, list[tuple[int, TensorType]]] = {}
    for position, value in enumerate(program.inputs):
        if value in used:
            type_, storage = program.values[value]
            _check(program, value)
            views.setdefault(storage, []).append((position, type_))
    arguments = []
    for storage, inputs in views.items():
        position, type_ = inputs[0]
        if len(inputs) == 1 and type_.offset == 0 and _is_dense(type_):
            arguments.append(Argument(position, type_, storage, False))
            continue
        if any(t.dtype != type_.dtype for _, t in inputs):
            user = program.user_of(program.inputs[position])
            raise NotCallableError(f"the memory of the tensor taken by {user} is seen as several data types")
        # As much as is seen: an input may lie at the end of a memory that is larger than what is behind it.
        nbytes = max(value.type.extent for value in program.values.values() if value.storage == storage)
        size = (-(-nbytes // type_.dtype.itemsize),)
        arguments.append(Argument(position, tensor_type(type_.dtype, size, (1,)), storage, True))
    return tuple(arguments)


def _check(program: Program, value: int) -> None:
    type_ = program.values[value].type
    if type_.layout is not torch.strided:
        problem = "sparse"
    elif type_.conj or type_.neg:
        problem = "conjugate or negated lazily"
    elif type_.dtype.is_complex:
        # Inductor generates no code for complex numbers: the library would only call torch's kernels.
        problem = "complex"
    else:
        return
    is_input = value in program.inputs
    which = (
        f"tensor taken by {program.user_of(value)}" if is_input else f"result of {program.maker_of(value)}"
    )
    raise NotCallableError(f"the {which} is {problem}: {type_}")


def _first_values(program: Program) -> dict[int, int]:
    """The first value in each storage that the program makes."""
    first: dict[int, int] = {}
    for instruction in program.instructions:
        for value in instruction.defines():
            first.setdefault(program.values[value].storage, value)
    return first


def _shared_storages(program: Program) -> set[int]:
    """The storages that hold more than one output."""
    counts = Counter(program.values[value].storage for value in program.outputs)
    return {storage for storage, count in counts.items() if count > 1}


@functools.lru_cache(maxsize=4096)
def _is_dense(type_: TensorType) -> bool:
    """Whether the elements fill memory without gaps or overlaps, in any order of dimensions."""
    stand_in = torch.empty_strided(type_.shape, type_.stride, device="meta")
    return bool(is_non_overlapping_and_dense_or_false(stand_in))
