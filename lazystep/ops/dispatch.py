"""What the recorder asks of Python: everything about an op that its kernel in C++ does not do by itself.

The kernel (record/src/kernel.cpp) catches an op, looks up its decision and records it. It comes here for a
call that is new (`decide`), for a call that is not recorded (`run_now`), for an op with a handler and for
tensors of other devices (`run_handler`), and for the user's line of a new instruction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import metrics
from ..config import settings
from ..decide.decide import check_numbers, decide
from ..decide.decision import Action, Decision, Operand
from ..decide.facts import OpFacts
from ..decide.stand_ins import call, make_all
from ..eager import serial_dispatch
from ..errors import UnsupportedError
from ..program.own_ops import HISTC_OF_INTEGERS
from ..program.program import Source
from ..program.types import TensorType
from ..record import _recorder
from ..record._recorder import Mode
from ..record.handle import Handle
from ..record.recorder import Recorder
from ..record.source import user_line, user_source
from ..record.tensor import find_handle, is_lazy
from . import collectives, copies, drawn_by_value, draws  # noqa: F401 - their handlers
from .cpu_branch import KERNELS, TAKEN_APART, run_composite, run_explicit_composite
from .draws import draw
from .facade import FACADE_KERNELS
from .handlers import handler_of, handles
from .host import run_on_host
from .mixed import run_mixed

_aten = torch.ops.aten

# Ops for which C++ does the common case of the handler.
_MODES = {
    _aten.detach.default: Mode.DETACH,
    _aten.alias.default: Mode.DETACH,
    _aten.copy_.default: Mode.OVERWRITE,
    _aten.zero_.default: Mode.OVERWRITE,
    _aten.fill_.Scalar: Mode.OVERWRITE,
    _aten._to_copy.default: Mode.TO_COPY,
    _aten.empty.memory_format: Mode.EMPTY,
    _aten.empty_strided.default: Mode.EMPTY,
    _aten.empty_like.default: Mode.EMPTY,
}


class OpDispatch:
    """See `Dispatch` in record/_recorder.pyi. One per process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._facts: dict[Any, OpFacts] = {}
        self._is_used = False

    def facts_of(self, func: Any) -> OpFacts:
        """What the schema of an op says."""
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = OpFacts(func)
        return facts

    def traits(self, func: Any) -> tuple[Mode, list[bool], bool, bool, bool, bool]:
        """See `Dispatch.traits`."""
        facts = self.facts_of(func)
        is_taken_apart = func in COMPOSITES or func in TAKEN_APART or facts.is_composite
        usual = Mode.HANDLER if handler_of(func) else Mode.COMPOSITE if is_taken_apart else Mode.RECORD
        mode = _MODES.get(func, usual)
        takes_number = [i in facts.number_positions for i in range(len(func._schema.arguments))]
        is_writing, needs_nbytes = bool(facts.writes), facts.needs_nbytes
        return mode, takes_number, facts.float_literals, is_writing, needs_nbytes, facts.is_absolute

    def decide(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Decision:
        """See `Dispatch.decide`. Raises eager's error, with the op and the user's line in a note."""
        if not self._is_used:
            self._is_used = True
            self._recorder.barrier.on_first_op()
        if func is _aten.histc.default and _is_integral(args[0].dtype):
            func = HISTC_OF_INTEGERS
        facts = self.facts_of(func)
        with _operands_of(facts, args, kwargs) as (taken, taken_kwargs):
            if facts.has_out:
                return _decide_out(facts, taken, taken_kwargs, list(_lazy_in([*args, *kwargs.values()])))
            return decide(facts, taken, taken_kwargs)

    def check_numbers(self, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `Dispatch.check_numbers`. Raises as `decide` does."""
        facts = self.facts_of(decision.func)
        with _operands_of(facts, args, kwargs) as (taken, taken_kwargs):
            check_numbers(facts, decision, taken, taken_kwargs)

    def refuse_view(self, func: Any) -> None:
        """See `Dispatch.refuse_view`."""
        raise stale_view(func, "an operand")

    def run_now(self, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Dispatch.run_now`."""
        if decision.action is Action.DRAW:
            return draw(decision.func, args, kwargs)
        return run_on_host(self._recorder, decision.func, args, kwargs, decision.reason)

    def run_handler(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Dispatch.run_handler`."""
        # An object that a program can't hold, such as a storage, is the case that `run_mixed` leaves.
        return self._run(func, args, kwargs, "argument that can't be recorded")

    def run_sparse(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Dispatch.run_sparse`."""
        return self._run(func, args, kwargs, "sparse tensor")

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> Any:
        handler = handler_of(func)
        if handler is not None:
            return handler(self._recorder, func, args, kwargs)
        kernel = COMPOSITES.get(func)
        if kernel is not None:
            return kernel(*args, **kwargs)
        if func in TAKEN_APART:
            return run_explicit_composite(func, args, kwargs)
        if self.facts_of(func).is_composite:
            # Composites arrive whole under inference mode only. Eager runs their parts.
            if "sparse_compressed" in func._schema.name:  # ends in a constructor with a fixed list of devices
                return run_on_host(self._recorder, func, args, kwargs, "sparse tensor")
            return run_composite(func, args, kwargs)
        return run_mixed(self._recorder, func, args, kwargs, reason)

    def source(self) -> Source | None:
        """See `Dispatch.source`."""
        return user_source(2) if settings.source_lines else None

    def on_full(self) -> None:
        """See `Dispatch.on_full`."""
        self._recorder.barrier.on_full()

    def count_draw(self) -> None:
        """See `Dispatch.count_draw`."""
        metrics.count("random_draws")

    def refuse(self) -> None:
        """See `Dispatch.refuse`."""
        self._recorder.check_fork()

    def refuse_autocast(self) -> None:
        """See `Dispatch.refuse_autocast`."""
        raise UnsupportedError(
            f"an op on lazy tensors at {user_line()}: autocast was switched on for CPU tensors alone, by a "
            "function of torch that was imported before lazystep or that is private. Lazy tensors would not "
            'be cast. Use `with torch.autocast("lazy")` or torch.set_autocast_enabled("lazy", True).'
        )


# Composites that take CPU's branch. torch calls them above autograd. Under inference mode there is no
# autograd key, and they arrive here.
COMPOSITES = KERNELS | FACADE_KERNELS


@handles(_aten._pack_padded_sequence.default)
def _pack(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Lengths and batch sizes live on the CPU on every device. The rest is made of plain ops.
    return run_explicit_composite(func, args, kwargs)


@handles(_aten.lift_fresh.default, _aten.lift.default)
def _lift(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


@contextmanager
def _operands_of(
    facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments with `Operand`s in place of lazy tensors. Adds op and line to an error of the block."""
    if facts.func is _aten.copy_.default:
        args = args[:2]  # there is nothing to block on
    elif facts.func is _aten._to_copy.default:
        kwargs.pop("non_blocking", None)
    to_operand = _Operands(facts, [*args, *kwargs.values()])
    taken = tuple(map(to_operand, args))
    taken_kwargs = {name: to_operand(arg) for name, arg in kwargs.items()}
    try:
        yield taken, taken_kwargs
    except UnsupportedError:
        raise  # has all that in its message
    except Exception as error:
        # Eager's error names neither the op nor the user's line.
        shown = [str(_shown(a)) for a in taken] + [f"{k}={_shown(v)}" for k, v in taken_kwargs.items()]
        error.add_note(
            f"lazystep: raised while recording {facts.name}({', '.join(shown)}) at {user_line()}. "
            "Eager raises this on CPU tensors, too. The op was not recorded: change its arguments there."
        )
        tensors = [arg for arg in args if is_lazy(arg)]
        if any(map(_recorder.has_changed_shape_in_place, tensors)):
            error.add_note(
                "lazystep: an operand has got another shape or other strides in place (t_, unsqueeze_). If "
                "this line uses a view that was made before that, autograd repeats the view's ops here, "
                "which eager does not. Use t() or unsqueeze(), or make the view after it."
            )
        raise


def stale_view(what: Any, which: str) -> UnsupportedError:
    """The error for a view that autograd would differentiate otherwise than eager does."""
    return UnsupportedError(
        f"{what} at {user_line()}: {which} is a view. The view, or the tensor that it is a view of, has got "
        "another shape or other strides in place since (t_, unsqueeze_, as_strided_, set_, .data = ...). Its "
        "gradient would not be eager's. Use t(), unsqueeze() or as_strided(), or make the view after it."
    )


def _decide_out(
    facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
) -> Decision:
    """Decide about an op with `out=`. Refuses a result of another shape in memory that an input shares.

    Whether eager then resizes the input, too, or raises an error, depends on whether both are one object,
    which no program tells. `tensors`: the operands, which do.
    """
    operands = list(_operands_in([*args, *kwargs.values()]))
    groups = [operand.group for operand in operands]
    is_shared = [group >= 0 and groups.count(group) > 1 for group in groups]
    error: Exception | None = None
    try:
        decision = decide(facts, args, kwargs)
        if not any(is_shared[rebind.operand] for rebind in decision.rebinds):
            return decision
    except RuntimeError as caught:
        if "single memory location" not in str(caught) or not any(is_shared):
            raise
        error = caught
    stand_ins = make_all(operands, torch.zeros)
    first: dict[int, torch.Tensor] = {}
    same = [first.setdefault(id(t), stand_in) for t, stand_in in zip(tensors, stand_ins, strict=True)]
    with serial_dispatch():
        call(facts.func, same, args, kwargs)  # raises what eager raises
    raise UnsupportedError(
        f"{facts.name} at {user_line()}: the tensor of out= shares its memory with an input, and it has "
        "another shape than the result or overlaps with a part of the input. Use a tensor of its own for "
        "out=, or none."
    ) from error


def _lazy_in(args: Any) -> Iterator[torch.Tensor]:
    for arg in args:
        if is_lazy(arg):
            yield arg
        elif type(arg) in (list, tuple):
            yield from _lazy_in(arg)


def _operands_in(args: Any) -> Iterator[Operand]:
    for arg in args:
        if type(arg) is Operand:
            yield arg
        elif type(arg) is list:
            yield from _operands_in(arg)


class _Operands:
    """Replaces lazy tensors by `Operand`s, numbered by the memory that they share if the op writes.

    An operand is given at offset zero, those that share memory as seen from the first of them in memory, as
    in the key of the call. See [Note: offsets] in record/src/recorder.h.
    """

    def __init__(self, facts: OpFacts, args: list[Any]) -> None:
        leaves = [leaf for arg in args for leaf in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        handles = [handle for leaf in leaves if (handle := find_handle(leaf)) is not None]
        memories = [handle.memory for handle in handles]
        is_shared = bool(facts.writes) and len(set(memories)) < len(memories)
        groups = [memories.index(memory) for memory in memories] if is_shared else [-1] * len(memories)
        self._operands = iter(
            [
                Operand(type_, memory.nbytes, group)
                for type_, memory, group in zip(
                    _types_of(facts, handles, groups), memories, groups, strict=True
                )
            ]
        )

    def __call__(self, arg: Any) -> Any:
        if find_handle(arg) is not None:
            return next(self._operands)
        return [self(a) for a in arg] if type(arg) in (list, tuple) else arg


def _types_of(facts: OpFacts, handles: Sequence[Handle], groups: Sequence[int]) -> list[TensorType]:
    types = [handle.type for handle in handles]
    if facts.is_absolute:
        return types
    found = []
    for type_, group in zip(types, groups, strict=True):
        least = type_.offset
        for other, other_group in zip(types, groups, strict=True):
            if group >= 0 and group == other_group:
                is_alike = other.dtype.itemsize == type_.dtype.itemsize
                least = min(least, other.offset if is_alike else 0)
        found.append(type_.at(type_.offset - least))
    return found


def _is_integral(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _shown(arg: Any) -> Any:
    """An argument as a message shows it: a lazy tensor by its type."""
    if type(arg) is Operand:
        return arg.type
    return [_shown(a) for a in arg] if type(arg) is list else arg
