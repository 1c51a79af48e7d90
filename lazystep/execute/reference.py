"""The reference executable: runs a program's instructions one by one on CPU tensors.

The results equal eager bit for bit, since the same kernels run in the same order with the same aliasing.

C++ calls the ops one after the other without the interpreter lock (op_sequence.h), and frees each value after
its last use. It compares each result with what was inferred for it. Python mends a result that differs.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from .. import metrics
from ..extensions import RUNNER
from ..program.program import Arg, Program, Ref, ScalarRef, map_args, resolve_op
from ..program.types import TensorType, type_of
from .executable import InstructionError

_extension = RUNNER.load()


class ReferenceExecutable:
    """Runs a program op by op. See `Executable`."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._sequence: Any = None  # an `OpSequence`, from the first run on

    def run(self, inputs: list[torch.Tensor], scalars: Sequence[Any]) -> list[torch.Tensor]:
        """See `Executable.run`."""
        if self._sequence is None:
            self._sequence = _translate(self.program)
        try:
            # No autograd, version counters or view tracking: the program alone decides what happens.
            with torch._C._AutoDispatchBelowADInplaceOrView():
                outputs: list[torch.Tensor] = self._sequence.run(inputs, scalars)
        except Exception as error:
            none_started = not self._sequence.has_begun
            failure = InstructionError(self._sequence.position, none_started=none_started)
            raise failure from _without_frames(error)
        return outputs


def _translate(program: Program) -> Any:
    """The program as an `OpSequence`, whose registers are the program's values."""
    last_uses = _last_uses(program)
    num_registers = max(program.values, default=-1) + 1
    sequence = _extension.OpSequence(
        Ref, ScalarRef, num_registers, program.inputs, program.outputs, last_uses[-1]
    )
    for position, instruction in enumerate(program.instructions):
        aliased = dict(instruction.rebinds)
        for argument, alias in instruction.rebinds:
            detach = _name("aten.detach.default")
            sequence.add_op(position, *detach, [Ref(argument)], {}, [alias], [argument], [])
        args = [_with_aliases(arg, aliased) for arg in instruction.args]
        kwargs = {name: _with_aliases(arg, aliased) for name, arg in instruction.kwargs}
        reads = set(instruction.reads())
        results = [-1 if value is None or value in reads else value for value in instruction.results]
        sequence.add_op(
            position, *_name(instruction.op), args, kwargs, results, list(reads), last_uses[position]
        )
        rebound = set(aliased.values())
        for value in instruction.defines():
            declared, storage = program.values[value]
            viewed = [argument for argument in reads if program.values[argument].storage == storage]
            mend = functools.partial(_settle, declared)
            if value not in rebound:
                mend = functools.partial(_mend, instruction.op, declared, bool(viewed))
            is_flipped = declared.conj, declared.neg
            sequence.expect(
                value,
                declared.dtype,
                declared.shape,
                declared.stride,
                declared.offset,
                *is_flipped,
                viewed,
                mend,
            )
    return sequence


def _mend(
    op: str, declared: TensorType, views: bool, tensor: torch.Tensor, is_view: bool, is_shared: bool
) -> torch.Tensor:
    """A result with its inferred layout, in memory that no argument has unless it is inferred as a view.

    Raises if a new layout would not help: for another shape or data type, for a new tensor where a view was
    inferred, and for a view of other elements.
    """
    actual = type_of(tensor)
    if actual.shape != declared.shape or actual.dtype != declared.dtype:
        problem = f"returned {actual} where {declared} was inferred"
    elif views and not is_view:
        problem = "returned a new tensor where a view was inferred"
    elif views and not _same_elements(actual, declared):
        problem = f"returned the view {actual} where {declared} was inferred"
    else:
        metrics.count("layout_repairs")
        metrics.count(f"layout_repairs:{op}")
        return relayout(tensor, declared, copies=is_shared and not views)
    raise AssertionError(f"{op} {problem}; please report this as a bug of lazystep")


def _settle(declared: TensorType, tensor: torch.Tensor, is_view: bool, is_shared: bool) -> torch.Tensor:
    """An argument that an op has resized, with its inferred layout in the argument's own memory."""
    if tuple(tensor.shape) != declared.shape:
        raise AssertionError(
            f"an argument was resized to {list(tensor.shape)} where {declared} was inferred; "
            "please report this as a bug of lazystep"
        )
    copy = tensor.clone()
    return tensor.as_strided_(declared.shape, declared.stride, declared.offset).copy_(copy)


def _same_elements(a: TensorType, b: TensorType) -> bool:
    """Whether two types of the same shape reach the same elements.

    The stride of a dimension of size 1 makes no difference.
    """
    if 0 in a.shape:
        return True
    strides = zip(a.shape, a.stride, b.stride, strict=True)
    same_strides = all(n == 1 or s == t for n, s, t in strides)
    return same_strides and (a.offset, a.conj, a.neg) == (b.offset, b.conj, b.neg)


def relayout(tensor: torch.Tensor, declared: TensorType, copies: bool) -> torch.Tensor:
    """`tensor` with the declared strides.

    A view if the elements are in the right places and `copies` is False; else a copy.
    """
    if not copies and _same_elements(type_of(tensor), declared):
        return tensor.as_strided(declared.shape, declared.stride, declared.offset)
    flat = torch.empty(declared.extent // declared.dtype.itemsize, dtype=declared.dtype)
    copy = flat.as_strided(declared.shape, declared.stride, declared.offset)
    if declared.conj:
        torch._C._set_conj(copy, True)
    if declared.neg:
        torch._C._set_neg(copy, True)
    return copy.copy_(tensor)


def _without_frames(error: Exception) -> Exception:
    # The frames keep every live tensor of the step. They must go, above all after running out of memory.
    return error.with_traceback(None)


def _last_uses(program: Program) -> dict[int, list[int]]:
    """For each instruction, the values that are last used there; -1 for inputs that are never used."""
    last = dict.fromkeys(program.inputs, -1)
    for position, instruction in enumerate(program.instructions):
        for value in instruction.reads():
            last[value] = position
        for value in instruction.defines():
            last[value] = position
    dies: dict[int, list[int]] = {position: [] for position in range(-1, len(program.instructions))}
    outputs = set(program.outputs)
    for value, position in last.items():
        if value not in outputs:
            dies[position].append(value)
    return dies


def _with_aliases(arg: Arg, aliased: dict[int, int]) -> Arg:
    """The argument with the aliases of arguments that the op changes."""
    if not aliased:
        return arg
    return map_args(arg, lambda a: Ref(aliased.get(a.value, a.value)) if type(a) is Ref else a)


@functools.cache
def _name(op: str) -> tuple[str, str]:
    """The op's name and overload, as the dispatcher has them."""
    schema = operator.attrgetter("_schema")(resolve_op(op))
    return schema.name, schema.overload_name
