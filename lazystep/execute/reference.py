"""The reference executable: runs a program's instructions one by one on CPU tensors.

The results equal eager bit for bit, since the same kernels run in the same order with the same aliasing.

The first run interprets the instructions, and compares the layout of each result with the inferred layout.
From the second run on, the program runs as one generated Python function: straight-line code over local
variables, each deleted at its last use. So a step costs one call per op and no bookkeeping. A program that
runs once is never translated.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch

from .. import metrics
from ..config import settings
from ..extensions import RUNNER
from ..program.program import Arg, Instruction, Program, Ref, ScalarRef, resolve_op
from ..program.types import TensorType, type_of
from .executable import InstructionError

_make_operation = RUNNER.load().operation
# torch's own method. The one of `torch.Tensor` looks first whether the tensor is lazy.
_storage_of = torch._C.TensorBase.untyped_storage

# The results to repair: (position of the instruction, number of the result) to whether it must be copied.
Repairs = dict[tuple[int, int], bool]


class ReferenceExecutable:
    """Runs a program op by op. See `Executable`."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._last_uses = _last_uses(program)
        # Results whose layout differs from the inferred layout.
        self._repairs: Repairs = {}
        self._function: Callable[..., list[torch.Tensor]] | None = None
        self._lines: list[int] = []
        self._has_run = False

    def run(self, inputs: list[torch.Tensor], scalars: Sequence[Any]) -> list[torch.Tensor]:
        """See `Executable.run`."""
        # No autograd, version counters or view tracking: the program alone decides what happens.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            if not self._has_run:
                outputs = self._interpret(inputs, scalars)
                self._has_run = True
                return outputs
            if self._function is None:
                self._function, self._lines = _translate(self.program, self._last_uses, self._repairs)
            try:
                outputs = self._function(inputs, scalars)
            except Exception as error:
                raise InstructionError(self._failed_position(error)) from _without_frames(error)
            return outputs

    def _failed_position(self, error: Exception) -> int:
        traceback = error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == _GENERATED:
                return self._lines[traceback.tb_lineno]
            traceback = traceback.tb_next
        return 0

    def _interpret(self, inputs: list[torch.Tensor], scalars: Sequence[Any]) -> list[torch.Tensor]:
        program = self.program
        tensors: dict[int, torch.Tensor] = dict(zip(program.inputs, inputs, strict=True))
        inputs.clear()
        for value in self._last_uses[-1]:
            del tensors[value]
        for position, instruction in enumerate(program.instructions):
            try:
                # A separate function, so that no local of this frame keeps a tensor past its last use.
                repaired = _run_instruction(program, instruction, tensors, scalars)
            except Exception as error:
                raise InstructionError(position) from _without_frames(error)
            self._repairs.update({(position, number): copies for number, copies in repaired.items()})
            for value in self._last_uses[position]:
                del tensors[value]
        return [tensors[value] for value in program.outputs]


def _run_instruction(
    program: Program, instruction: Instruction, tensors: dict[int, torch.Tensor], scalars: Sequence[Any]
) -> dict[int, bool]:
    """Run one instruction on `tensors`. Returns the results that needed a repair, and whether by a copy."""
    aliases = {argument: tensors[argument].detach() for argument, _ in instruction.rebinds}

    def fill(arg: Arg) -> Any:
        if type(arg) is Ref:
            return aliases[arg.value] if arg.value in aliases else tensors[arg.value]
        if type(arg) is ScalarRef:
            return scalars[arg.slot]
        return [fill(a) for a in arg] if type(arg) is tuple else arg

    args = [fill(a) for a in instruction.args]
    kwargs = {name: fill(arg) for name, arg in instruction.kwargs}
    out = _operation(instruction.op)(*args, **kwargs)
    flat = list(out) if isinstance(out, (tuple, list)) else [out]
    repaired = {}
    arguments = set(instruction.reads())
    memory: dict[int, set[int]] | None = None
    all_memory: set[int] = set()
    for number, (value, tensor) in enumerate(zip(instruction.results, flat, strict=False)):
        if value is None or value in arguments:
            continue
        if settings.check_layouts:
            if memory is None:  # once, because ops on lists have many arguments and many results
                memory = _memory_of(program, arguments, tensors)
                all_memory = set().union(*memory.values())
            declared, storage = program.values[value]
            shared = memory.get(storage, set())
            others = all_memory - shared if shared else all_memory
            if needs_repair(instruction.op, declared, tensor, shared, others):
                copies = tensor.untyped_storage()._cdata in others
                tensor = relayout(tensor, declared, copies)
                repaired[number] = copies
                metrics.count("layout_repairs")
                metrics.count(f"layout_repairs:{instruction.op}")
        tensors[value] = tensor
    for argument, value in instruction.rebinds:
        tensors[value] = settle(aliases[argument], program.values[value].type)
    return repaired


def _memory_of(
    program: Program, arguments: set[int], tensors: dict[int, torch.Tensor]
) -> dict[int, set[int]]:
    """The memory of the arguments, by their storage in the program."""
    found: dict[int, set[int]] = {}
    for argument in arguments:
        held = found.setdefault(program.values[argument].storage, set())
        held.add(_storage_of(tensors[argument])._cdata)
    return found


def needs_repair(
    op: str, declared: TensorType, tensor: torch.Tensor, shared: set[int], others: set[int]
) -> bool:
    """Whether the result of an op needs a new layout to match the inferred type.

    Raises if a new layout would not help: for another shape or data type, for a new tensor where a view was
    inferred, and for a view of other elements.
    """
    actual = type_of(tensor)
    if actual.shape != declared.shape or actual.dtype != declared.dtype:
        raise AssertionError(
            f"{op} returned {actual} where {declared} was inferred; please report this as a bug of lazystep"
        )
    storage = _storage_of(tensor)._cdata
    if shared and storage not in shared:
        raise AssertionError(
            f"{op} returned a new tensor where a view was inferred; please report this as a bug of lazystep"
        )
    if shared and not _same_elements(actual, declared):
        raise AssertionError(
            f"{op} returned the view {actual} where {declared} was inferred; "
            "please report this as a bug of lazystep"
        )
    return actual is not declared or storage in others


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


def settle(tensor: torch.Tensor, declared: TensorType) -> torch.Tensor:
    """Give an argument that an op has resized its inferred layout, in the argument's own memory."""
    if type_of(tensor) is not declared:
        if tuple(tensor.shape) != declared.shape:
            raise AssertionError(
                f"an argument was resized to {list(tensor.shape)} where {declared} was inferred; "
                "please report this as a bug of lazystep"
            )
        copy = tensor.clone()
        tensor.as_strided_(declared.shape, declared.stride, declared.offset).copy_(copy)
    return tensor


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


_GENERATED = "<lazystep reference program>"


def _translate(
    program: Program, last_uses: dict[int, list[int]], repairs: Repairs
) -> tuple[Callable[..., Any], list[int]]:
    """The program as a Python function, and for each line of it the position of its instruction."""
    names: dict[str, Any] = {
        "_relayout": relayout,
        "_settle": settle,
        "_detach": _operation("aten.detach.default"),
    }
    ops: dict[str, str] = {}
    lines = ["def step(inputs, s):"]
    positions = [0, 0]

    def emit(line: str, position: int) -> None:
        lines.append(" " + line)
        positions.append(position)

    def literal(arg: Arg) -> str:
        if arg is None or type(arg) in (bool, str):
            return repr(arg)
        # By its place and not by its value: programs that differ in sizes only have the same text.
        name = f"c{len(names)}"
        names[name] = arg
        return name

    def text(arg: Arg, aliased: dict[int, str]) -> str:
        if type(arg) is Ref:
            return aliased.get(arg.value, f"v{arg.value}")
        if type(arg) is ScalarRef:
            return f"s[{arg.slot}]"
        if type(arg) is tuple:
            return f"[{', '.join(text(a, aliased) for a in arg)}]"
        return literal(arg)

    if program.inputs:
        emit(f"{', '.join(f'v{v}' for v in program.inputs)}, = inputs", 0)
    emit("inputs.clear()", 0)
    if last_uses[-1]:
        emit(f"del {', '.join(f'v{v}' for v in last_uses[-1])}", 0)
    for position, instruction in enumerate(program.instructions):
        if instruction.op not in ops:
            ops[instruction.op] = f"op{len(ops)}"
            names[ops[instruction.op]] = _operation(instruction.op)
        aliased = {}
        for argument, value in instruction.rebinds:
            emit(f"v{value} = _detach(v{argument})", position)
            aliased[argument] = f"v{value}"
        args = [text(a, aliased) for a in instruction.args]
        args += [f"{name}={text(a, aliased)}" for name, a in instruction.kwargs]
        call = f"{ops[instruction.op]}({', '.join(args)})"
        arguments = set(instruction.reads())
        targets = [f"v{v}" if v is not None and v not in arguments else "_" for v in instruction.results]
        dead = [f"v{v}" for v in last_uses[position]]
        if all(target == "_" for target in targets):
            emit(call, position)
        elif _returns_one(instruction.op):
            emit(f"{targets[0]} = {call}", position)
        else:
            emit(f"{', '.join(targets)}, = {call}", position)
            dead += ["_"] if "_" in targets else []
        for _, value in instruction.rebinds:
            emit(f"_settle(v{value}, {literal(program.values[value].type)})", position)
        for number, target in enumerate(targets):
            if (position, number) in repairs:
                result = instruction.results[number]
                assert result is not None
                declared = literal(program.values[result].type)
                emit(f"{target} = _relayout({target}, {declared}, {repairs[position, number]})", position)
        if dead:
            emit(f"del {', '.join(dead)}", position)
    emit(f"return [{', '.join(f'v{v}' for v in program.outputs)}]", len(program.instructions))
    exec(_compile("\n".join(lines)), names)
    return names["step"], positions


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> CodeType:
    return compile(source, _GENERATED, "exec")


@functools.cache
def _operation(op: str) -> Callable[..., Any]:
    """The op as a function without a Python frame around it, whose kernel may warn: see operation.h."""
    schema = operator.attrgetter("_schema")(resolve_op(op))
    found: Callable[..., Any] = _make_operation(schema.name, schema.overload_name)
    return found


@functools.cache
def _returns_one(op: str) -> bool:
    returns = operator.attrgetter("_schema.returns")(resolve_op(op))
    return len(returns) == 1 and returns[0].type.kind() != "ListType"
