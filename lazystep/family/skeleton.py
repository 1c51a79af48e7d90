"""The skeleton of a program: everything but the numbers that may vary between the members of a family.

Two programs are of one family if their keys are equal: the same ops on the same values, with the same data
types, ranks and sharing of memory. The numbers that were left out are sizes, strides and offsets of inputs,
integer literals, and integer scalars that are fixed in a library. What lies between inputs and outputs
follows from these. Sizes 0 and 1 stay in the key, because ops treat them in ways of their own. So do the
collectives with all their numbers: a library must send what the other ranks expect.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..program.collectives import describe, launches_of
from ..program.program import Arg, Instruction, Number, Program, map_args
from ..program.signature import Signature


class Kind(enum.Enum):
    """What a number of a program is. Only a size can be read from an argument of a library."""

    SIZE = "size"  # of a tensor that is passed as it is, or the length of one that is passed flat
    GEOMETRY = "geometry"  # a stride; sizes, strides and offset of a view of a flat argument
    LITERAL = "literal"  # an integer among the arguments of an op
    FIXED = "fixed"  # a scalar whose value is part of the library


class Place(NamedTuple):
    """Where a number of a program is: at which input, instruction or scalar, and the how-many-eth there."""

    kind: Kind
    where: int
    which: int


class Skeleton(NamedTuple):
    """A program taken apart: the key of its family, the numbers, and where each of them is."""

    key: str
    places: tuple[Place, ...]
    numbers: tuple[int, ...]


class Layout(NamedTuple):
    """Shape, strides and offset of an input, possibly symbolic."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any


class Rewritten(NamedTuple):
    """A program's changeable parts with other numbers in place of its own."""

    layouts: Mapping[int, Layout]  # of the inputs that the library sees, by value
    lengths: Mapping[int, Any]  # of flat arguments, by storage
    instructions: tuple[Instruction, ...]
    fixed: Mapping[int, Any]


# Gets the place of a number and the number, and returns what shall stand there.
Change = Callable[[Place, int], Any]


def rewrite(program: Program, signature: Signature, fixed: Mapping[int, Number], change: Change) -> Rewritten:
    """Replace each number that may vary by what `change` returns, always in the same order."""
    layouts, lengths = _rewrite_inputs(program, signature, change)
    instructions = tuple(
        _rewrite_instruction(position, instruction, change)
        for position, instruction in enumerate(program.instructions)
    )
    return Rewritten(layouts, lengths, instructions, _rewrite_fixed(fixed, change))


def _rewrite_inputs(
    program: Program, signature: Signature, change: Change
) -> tuple[dict[int, Layout], dict[int, Any]]:
    arguments = {argument.storage: argument for argument in signature.arguments}
    layouts: dict[int, Layout] = {}
    lengths: dict[int, Any] = {}
    for position, value in enumerate(program.inputs):
        type_, storage = program.values[value]
        argument = arguments.get(storage)
        if argument is None:
            continue  # no instruction uses it
        if argument.is_flat and storage not in lengths:
            lengths[storage] = _size(argument.type.shape[0], Place(Kind.SIZE, position, -1), change)
        kind = Kind.GEOMETRY if argument.is_flat else Kind.SIZE
        shape = tuple(_size(size, Place(kind, position, dim), change) for dim, size in enumerate(type_.shape))
        rank = len(shape)
        stride = tuple(
            # The stride of a dimension of size 1 makes no difference.
            1 if size == 1 else change(Place(Kind.GEOMETRY, position, rank + dim), step)
            for dim, (size, step) in enumerate(zip(type_.shape, type_.stride, strict=True))
        )
        offset = change(Place(Kind.GEOMETRY, position, 2 * rank), type_.offset) if argument.is_flat else 0
        layouts[value] = Layout(shape, stride, offset)
    return layouts, lengths


def _rewrite_fixed(fixed: Mapping[int, Number], change: Change) -> dict[int, Any]:
    return {
        slot: change(Place(Kind.FIXED, slot, 0), number) if type(number) is int else number
        for slot, number in fixed.items()
    }


def skeleton_of(program: Program, signature: Signature, fixed: Mapping[int, Number]) -> Skeleton:
    """Take a program apart. `fixed`: the scalars whose values are part of its library."""
    places: list[Place] = []
    numbers: list[int] = []

    def take(place: Place, number: int) -> str:
        places.append(place)
        numbers.append(number)
        return "#"

    layouts, lengths = _rewrite_inputs(program, signature, take)
    texts = []
    values = program.values
    for position, instruction in enumerate(program.instructions):
        text, literals = _form_of(instruction)
        made = [
            (values[v].storage, str(values[v].type.dtype), len(values[v].type.shape))
            for v in instruction.results
            if v
        ]
        texts.append(f"{text}, {made}")
        for count, literal in enumerate(literals):
            take(Place(Kind.LITERAL, position, count), literal)
    rest = _rewrite_fixed(fixed, take)
    parts: list[Any] = [
        [(v, str(values[v].type.dtype), values[v].storage, layout) for v, layout in layouts.items()],
        sorted(lengths),
        [(a.position, a.is_flat) for a in signature.arguments],
        [(where.value, number) for where, number, _ in signature.outputs],
        signature.returned,
        signature.floats,
        signature.ints,
        [(slot, repr(number)) for slot, number in rest.items()],
        [kind.__name__ for kind in program.scalars],
        program.outputs,
        [describe(program, launch) for launch in launches_of(program)],
    ]
    text = "\n".join([repr(parts), *texts])
    return Skeleton(hashlib.sha256(text.encode()).hexdigest()[:40], tuple(places), tuple(numbers))


def _form_of(instruction: Instruction) -> tuple[str, tuple[int, ...]]:
    """An instruction without its integers, as text, and the integers. Kept: many programs have it."""
    try:
        return instruction.form
    except AttributeError:
        literals: list[int] = []
        args = _without_integers(instruction.args, literals)
        kwargs = _without_integers(instruction.kwargs, literals)
        text = repr((instruction.op, args, kwargs, *instruction[3:6]))  # without its line
        instruction.form = text, tuple(literals)
        return instruction.form


def _without_integers(args: tuple[Any, ...], found: list[int]) -> tuple[Any, ...]:
    """In the order of `_rewrite_instruction`."""
    rest = []
    for arg in args:
        if type(arg) is int:
            found.append(arg)
            arg = "#"
        elif type(arg) is tuple:
            arg = _without_integers(arg, found)
        rest.append(arg)
    return tuple(rest)


def substitute(
    program: Program, signature: Signature, fixed: Mapping[int, Number], numbers: Sequence[Any]
) -> Rewritten:
    """The program's parts with `numbers` in place of its own, in the order of `Skeleton.numbers`."""
    rest = iter(numbers)
    return rewrite(program, signature, fixed, lambda place, number: next(rest))


def _size(size: int, place: Place, change: Change) -> Any:
    return size if size in (0, 1) else change(place, size)


def _rewrite_instruction(position: int, instruction: Instruction, change: Change) -> Instruction:
    count = -1

    def literal(arg: Arg) -> Any:
        nonlocal count
        if type(arg) is not int:
            return arg
        count += 1
        return change(Place(Kind.LITERAL, position, count), arg)

    args = tuple(map_args(arg, literal) for arg in instruction.args)
    kwargs = tuple((name, map_args(arg, literal)) for name, arg in instruction.kwargs)
    return instruction._replace(args=args, kwargs=kwargs)
