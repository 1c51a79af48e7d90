"""The decision core: what an op does, from the metadata of its arguments alone.

Receives an op and its arguments, with an `Operand` in place of every lazy tensor; answers with a
`Decision`: plain data that a front end may remember for ever under the same key. Nothing here knows
tensor classes, recordings or values: a front end only catches the call, looks the decision up and
does what it says.

Inference runs the op on fake CPU tensors. Where the op is small enough it also runs once on real
zeros: that gives the strides of the real kernel, and finds ops that have no kernel for the data
type, while the user's line is still on the stack.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from ..program.program import Arg, Ref, ScalarRef
from ..program.types import TensorType, type_of
from .host import eager_dispatch, serial_dispatch
from .trial import is_cheap, work_of

# Ops that move at most this many bytes are tried out on real zeros when first met.
_PROBE_BYTES = 1 << 18
# Ops whose inferred shapes are wrong on the CPU: tried out whatever their size. Embedding bags touch little
# of their operands when every index is zero; the LSTM layer, whose workspace is inferred as empty, runs once.
_ALWAYS_PROBED = (
    "aten._embedding_bag.default",
    "aten._embedding_bag_forward_only.default",
    "aten.mkldnn_rnn_layer.default",
)


class Action(enum.Enum):
    """What the front end does with an op."""

    RECORD = "record"  # append an instruction
    DRAW = "draw"  # random numbers that depend on no value: draw on the host now, in eager's order
    HOST = "host"  # the result depends on values: run on the host now, which synchronizes


class Operand(NamedTuple):
    """What the decision core sees of a lazy tensor."""

    type: TensorType
    nbytes: int  # of its storage
    group: int = -1  # operands with the same number share a storage; -1: not known, or none does


class Result(NamedTuple):
    """A tensor that the op returns.

    `same`: number of the operand that is returned itself, or -1.
    `alias`: number of the operand whose storage it shares; below zero, a new storage: results with
    the same negative number share it.
    """

    type: TensorType
    same: int
    alias: int
    nbytes: int


class Rebind(NamedTuple):
    """An operand whose metadata the op changes, and what it becomes."""

    operand: int
    type: TensorType
    alias: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Decision:
    """What an op does. Compared by identity: one per op, argument metadata and literal arguments."""

    action: Action
    op: str
    func: Any
    reason: str = ""
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    scalar_types: tuple[type, ...] = ()
    results: tuple[Result | None, ...] = ()
    structure: Any = None  # "one", "tuple" or "list": how the op returns its results
    writes: tuple[int, ...] = ()
    rebinds: tuple[Rebind, ...] = ()
    # Derived by `finish`, for the recorder: type, alias and nbytes of every value that the op makes.
    made: tuple[tuple[TensorType, int, int], ...] = ()
    num_storages: int = 0

    def finish(self) -> None:
        """Derive what recording needs from the results and rebinds."""
        new = [(r.type, r.alias, r.nbytes) for r in self.results if r is not None and r.same < 0]
        new += [(r.type, r.alias, r.nbytes) for r in self.rebinds]
        self.made = tuple(new)
        self.num_storages = -min([alias for _, alias, _ in new if alias < 0], default=0)

    @property
    def num_made(self) -> int:
        """How many values the op makes."""
        return len(self.made)


class OpFacts:
    """What the schema of an op says, read once."""

    __slots__ = (
        "float_literals",
        "func",
        "has_out",
        "is_composite",
        "is_quantizing",
        "is_random",
        "name",
        "needs_nbytes",
        "number_names",
        "number_positions",
        "work",
        "writes",
    )

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.func = func
        self.name = op_name(func)
        numbers = [(i, a.name) for i, a in enumerate(schema.arguments) if _takes_number(a.type)]
        # Python numbers in these places are operands, not structure: they vary without a new key.
        self.number_positions = frozenset(i for i, _ in numbers)
        self.number_names = frozenset(name for _, name in numbers)
        self.writes = frozenset(
            a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
        )
        # Writes results into tensors that were handed in for it, and gives them the right size.
        self.has_out = any(a.name in self.writes and a.kwarg_only for a in schema.arguments)
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        packet = schema.name.partition("::")[2]
        # The size of the result depends on the numbers themselves.
        self.float_literals = packet in ("arange", "range")
        # The result depends on the size of the storage behind the tensor.
        self.needs_nbytes = packet in ("as_strided", "as_strided_", "resize_", "resize", "set_", "set")
        # Makes quantized tensors, which inference knows nothing of. Fake quantization makes floats.
        self.is_quantizing = "quantize_per_" in packet and "fake_quantize" not in packet
        self.is_composite = is_composite(func) is True
        self.work = work_of(func)


def is_composite(func: Any) -> bool | None:
    """Whether CPU tensors see the op's parts only. None: other devices do, the CPU has a kernel for it.

    By C++ kernels alone: Python decompositions are for compilers and take other steps than eager.
    """
    name = func._schema.name
    if not name.startswith("aten::"):
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if not has_kernel(func.name(), "CompositeImplicitAutograd"):
        return False
    return None if has_kernel(func.name(), "CPU") else True


def op_name(func: Any) -> str:
    """`aten.add.Tensor` for `torch.ops.aten.add.Tensor`."""
    return str(func)


def _takes_number(schema_type: Any) -> bool:
    kind = schema_type.kind()
    if kind in ("OptionalType", "ListType"):
        element = schema_type.getElementType()
        # A list of tensors never holds numbers; a list of numbers (foreach) does.
        return bool(element.kind() == "NumberType" or (kind == "OptionalType" and _takes_number(element)))
    return kind in ("NumberType", "TensorType", "FloatType")


# Draws whose numbers depend on no tensor's values: only on its type, and on numbers.
_VALUE_FREE_DRAWS = frozenset(
    f"aten.{packet}.{overload}"
    for packet, overloads in {
        "bernoulli_": "float",
        "bernoulli": "p",
        "uniform_": "default",
        "uniform": "default",
        "normal_": "default",
        "normal_functional": "default",
        "normal": "float_float",
        "exponential_": "default",
        "exponential": "default",
        "geometric_": "default",
        "geometric": "default",
        "cauchy_": "default",
        "cauchy": "default",
        "log_normal_": "default",
        "log_normal": "default",
        "random_": "default from to",
        "random": "default from to",
        "rand": "default generator",
        "randn": "default generator",
        "randint": "default low generator low_generator",
        "randperm": "default generator",
        "rand_like": "default generator",
        "randn_like": "default generator",
        "randint_like": "default low_dtype generator low_generator_dtype",
    }.items()
    for overload in overloads.split()
)

_VALUE_FREE_ERROR = re.compile(r"not implemented for|scalar type|dtype|data type|unsupported operation")

_fake_mode = FakeTensorMode()
_inferring = threading.local()


def _is_not_inferring(record: logging.LogRecord) -> bool:
    return not getattr(_inferring, "active", False)


# Inference failing is normal here: eager then says whether it is an error and which one.
logging.getLogger("torch._subclasses.fake_tensor").addFilter(_is_not_inferring)


def decide(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Decision:
    """What `facts.func` does with these arguments, each lazy tensor given as an `Operand`.

    Raises what eager raises for arguments that the op does not take.
    """
    func = facts.func
    if facts.is_random and not _draws_nothing(facts.name, args):
        if facts.name in _VALUE_FREE_DRAWS:
            return Decision(Action.DRAW, facts.name, func)
        return Decision(Action.HOST, facts.name, func, "random op that reads values")
    if not any(_is_tensor_type(r.type) for r in func._schema.returns) and not facts.writes:
        return Decision(Action.HOST, facts.name, func, _host_reason(facts.name))
    if any(type_.layout is not torch.strided for type_ in _operand_types([*args, *kwargs.values()])):
        return Decision(Action.HOST, facts.name, func, "sparse tensor")

    if facts.is_quantizing:
        return Decision(Action.HOST, facts.name, func, "quantized tensor")

    template = _Template(facts)
    template_args = tuple(template.build(a, i in facts.number_positions) for i, a in enumerate(args))
    template_kwargs = tuple((k, template.build(v, k in facts.number_names)) for k, v in kwargs.items())
    decision = Decision(
        Action.RECORD,
        facts.name,
        func,
        args=template_args,
        kwargs=template_kwargs,
        scalar_types=tuple(template.scalar_types),
    )
    operands = template.operands
    if is_cheap(facts.work, [o.type for o in operands], sum(o.nbytes for o in operands)):
        decision.writes = tuple(_written_operands(facts, args, kwargs))
        with contextlib.suppress(NotImplementedError):  # results of another kind: inference says which
            if _try_out(decision, operands, args, kwargs):
                decision.finish()
                return decision
    _inferring.active = True
    try:
        with eager_dispatch(), _fake_mode:
            _infer(decision, facts, operands, args, kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return Decision(Action.HOST, facts.name, func, "shape depends on values")
    except (UnsupportedOperatorException, UnsupportedFakeTensorException, NotImplementedError):
        return Decision(Action.HOST, facts.name, func, "no shape inference for the op")
    except Exception:
        # Eager decides what is an error and which one. If it accepts the call, inference was wrong.
        with eager_dispatch():
            _call(func, [_zeros(o) for o in operands], args, kwargs)
        return Decision(Action.HOST, facts.name, func, "no shape inference for the op")
    finally:
        _inferring.active = False
    _probe(decision, facts, operands, args, kwargs)
    decision.finish()
    return decision


def _draws_nothing(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an op that is tagged as random is not, with these arguments."""
    if name == "aten._scaled_dot_product_flash_attention_for_cpu.default":
        return len(args) < 4 or args[3] == 0.0  # its dropout, which the CPU kernel does not have
    # aten.rrelu_with_noise(self, noise, lower, upper, training)
    return name.startswith("aten.rrelu_with_noise") and not any(arg is True for arg in args)


def _host_reason(name: str) -> str:
    return "item" if name.startswith("aten._local_scalar_dense") else "value read by the op"


def _is_tensor_type(schema_type: Any) -> bool:
    return "Tensor" in str(schema_type)


def _operand_types(args: list[Any]) -> Iterator[TensorType]:
    for arg in args:
        if type(arg) is Operand:
            yield arg.type
        elif type(arg) is list:
            yield from _operand_types(arg)


class _Template:
    """Numbers the operands and scalars of a call in the order in which front ends collect them."""

    def __init__(self, facts: OpFacts) -> None:
        self.facts = facts
        self.operands: list[Operand] = []
        self.scalar_types: list[type] = []

    def build(self, arg: Any, is_number: bool) -> Arg:
        kind = type(arg)
        if kind is Operand:
            self.operands.append(arg)
            return Ref(len(self.operands) - 1)
        if kind is list or kind is tuple:
            return tuple(self.build(a, is_number) for a in arg)
        if not self.facts.float_literals and (
            kind is float or kind is complex or (kind is int and is_number)
        ):
            self.scalar_types.append(kind)
            return ScalarRef(len(self.scalar_types) - 1)
        if kind is torch.device:
            return torch.device("cpu")
        return arg


def _infer(
    decision: Decision,
    facts: OpFacts,
    operands: list[Operand],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    fakes = [_empty(o) for o in operands]
    storages = [t.untyped_storage()._cdata for t in fakes]
    out = _call(decision.func, fakes, args, kwargs)
    decision.writes = tuple(_written_operands(facts, args, kwargs))
    _describe(decision, operands, fakes, storages, out)


def _describe(
    decision: Decision, operands: list[Operand], tensors: list[torch.Tensor], storages: list[int], out: Any
) -> None:
    """Say what a call did: `tensors` were its operands, `storages` their storages before the call."""
    rebinds = []
    for k in decision.writes:
        type_, storage = type_of(tensors[k]), tensors[k].untyped_storage()
        if storage._cdata not in storages:
            raise NotImplementedError(f"{decision.op} gives an argument a storage from nowhere")
        alias = storages.index(storage._cdata) if storage._cdata != storages[k] else k
        if type_ is not operands[k].type or alias != k or storage.nbytes() > operands[k].nbytes:
            rebinds.append(Rebind(k, type_, alias, storage.nbytes()))
    decision.rebinds = tuple(rebinds)

    decision.structure = "one" if not isinstance(out, (tuple, list)) else type(out).__name__
    if decision.structure not in ("one", "list"):
        decision.structure = "tuple"  # named tuples too
    results: list[Result | None] = []
    fresh: list[int] = []
    for t in [out] if decision.structure == "one" else out:
        if t is None:
            results.append(None)
            continue
        if not isinstance(t, torch.Tensor) or t.layout is not torch.strided:
            raise NotImplementedError(f"{decision.op} returns something else than strided tensors")
        same = next((k for k, tensor in enumerate(tensors) if tensor is t), -1)
        storage = t.untyped_storage()
        if storage._cdata in storages:
            alias = storages.index(storage._cdata)
        else:
            if storage._cdata not in fresh:
                fresh.append(storage._cdata)
            alias = -1 - fresh.index(storage._cdata)
        results.append(Result(type_of(t), same, alias, storage.nbytes()))
    decision.results = tuple(results)


def _probe(
    decision: Decision,
    facts: OpFacts,
    operands: list[Operand],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Run a small aten op on zeros, or ones. What it returns is right, where inference is not."""
    if not facts.name.startswith("aten."):
        return  # a custom op may do more than compute
    nbytes = sum(o.nbytes for o in operands) + sum(r.nbytes for r in decision.results if r)
    # Inference does not see that an op reads what it writes, or writes an element twice.
    may_overlap = any(o.group >= 0 for o in operands) or any(
        0 in operands[k].type.stride for k in decision.writes
    )
    is_known_wrong = facts.has_out or facts.name in _ALWAYS_PROBED
    if nbytes > _PROBE_BYTES and not (may_overlap or is_known_wrong):
        return
    _try_out(decision, operands, args, kwargs, _VALUE_FREE_ERROR)


def _try_out(
    decision: Decision,
    operands: list[Operand],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    errors: re.Pattern[str] | None = None,
) -> bool:
    """Run an op on zeros, or ones, and say what it did; False if it takes neither. Raises `errors`."""
    for value in (0, 1):  # zero is a valid index, one a valid pivot
        tensors = _filled_sharing_storage(operands, value)
        storages = [t.untyped_storage()._cdata for t in tensors]
        try:
            with serial_dispatch():
                out = _call(decision.func, tensors, args, kwargs)
        except Exception as error:
            # It may well be a bad value (a singular matrix); what is said of types and of overlapping
            # memory does not depend on values.
            if isinstance(error, RuntimeError) and errors is not None and errors.search(str(error)):
                raise
            continue
        _describe(decision, operands, tensors, storages, out)
        return True
    return False


def _written_operands(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Numbers of the operands that the op writes: what its schema says, and what it does not."""
    writes = facts.writes
    if facts.name == "aten.native_batch_norm.default" and args[5]:
        # Updates the running statistics in training; its schema keeps silent about it.
        writes |= {"running_mean", "running_var"}
    written: list[int] = []
    number = 0
    names = [a.name for a in facts.func._schema.arguments]
    for name, arg in [*zip(names, args, strict=False), *kwargs.items()]:
        leaves = arg if isinstance(arg, (list, tuple)) and not isinstance(arg, Operand) else (arg,)
        for leaf in leaves:
            if type(leaf) is Operand:
                if name in writes:
                    written.append(number)
                number += 1
    return written


def _call(func: Any, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func` with the operands among its arguments replaced by tensors, in order."""
    remaining = iter(tensors)

    def fill(arg: Any) -> Any:
        if type(arg) is Operand:
            return next(remaining)
        if type(arg) is list or type(arg) is tuple:
            return [fill(a) for a in arg]
        return torch.device("cpu") if type(arg) is torch.device else arg

    filled = [fill(a) for a in args]
    return func(*filled, **{k: fill(v) for k, v in kwargs.items()})


def _empty(operand: Operand) -> torch.Tensor:
    return _view(operand, torch.empty)


def _zeros(operand: Operand) -> torch.Tensor:
    return _view(operand, torch.zeros)


def _filled_sharing_storage(operands: list[Operand], value: int) -> list[torch.Tensor]:
    bases: dict[int, torch.Tensor] = {}
    tensors = []
    for operand in operands:
        tensor = _view(operand, torch.ones if value else torch.zeros)
        if operand.group >= 0:
            base = bases.setdefault(operand.group, tensor)
            tensor.set_(base.untyped_storage(), operand.type.offset, operand.type.shape, operand.type.stride)
        tensors.append(tensor)
    return tensors


def _view(operand: Operand, factory: Any) -> torch.Tensor:
    type_ = operand.type
    count = -(-operand.nbytes // type_.dtype.itemsize)
    base = factory(count, dtype=type_.dtype, device="cpu")
    tensor: torch.Tensor = base.as_strided(type_.shape, type_.stride, type_.offset)
    if type_.conj:
        torch._C._set_conj(tensor, True)
    if type_.neg:
        torch._C._set_neg(tensor, True)
    return tensor
