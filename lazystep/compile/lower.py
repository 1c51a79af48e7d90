"""Lowering: turns a program into an FX graph without mutation, which Inductor compiles.

The instructions run once, in order, on fake tensors with eager's aliasing, under torch's functionalization.
Functionalization replaces in-place ops by plain ops, and writes each mutated input back once, at the end;
Inductor then updates the buffer in place. The program's `Signature` gives the order of inputs, outputs and
scalars.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ..program.collectives import is_effect, is_launch, operand_of, sequence_of
from ..program.own_ops import LSTM_LAYER, LSTM_LAYERS, LSTM_WORKSPACE
from ..program.program import Arg, Instruction, Program, Ref, ScalarRef, resolve_op
from ..program.signature import Signature
from ..program.types import TensorType
from ..program.updates import UPDATE
from .bias import add_biases_late
from .bounds import CHECKED, NEVER_NEGATIVE, refuse_negative
from .collectives import drop_copies
from .fused import FUSED, whole_call
from .grad_scaling import GRAD_SCALING
from .inductor import decompositions
from .scalars import FreeScalar, base_name, bind, call_with_scalars, expand_foreach, run_plain
from .update import Lanes, Update, find_updates, lanes_of, write_in_place

_DECOMPOSED = FUSED | GRAD_SCALING | CHECKED
# Ops that return their argument: each would cost a copy after functionalization.
_TRANSPARENT = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class LoweringError(Exception):
    """An instruction can't be lowered. `position` is its index in the program; the cause is torch's error."""

    def __init__(self, op: str, position: int, error: Exception) -> None:
        super().__init__(f"{op}: {type(error).__name__}: {error}")
        self.position = position


def lower(
    program: Program, signature: Signature, fixed: Mapping[int, Any]
) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """The graph of the program, and fake example inputs for it."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = example_inputs(signature)
    return trace(program, signature, fixed, inputs, mode), inputs


def example_inputs(signature: Signature) -> list[torch.Tensor]:
    """Tensors like those that the library takes. Call it under a fake tensor mode."""
    types = [argument.type for argument in signature.arguments]
    inputs = [torch.empty_strided(type_.shape, type_.stride, dtype=type_.dtype) for type_ in types]
    if signature.floats:
        inputs.append(torch.empty(len(signature.floats), dtype=torch.float64))
    if signature.ints:
        inputs.append(torch.empty(len(signature.ints), dtype=torch.int64))
    return inputs


def trace(
    program: Program,
    signature: Signature,
    fixed: Mapping[int, Any],
    inputs: Sequence[torch.Tensor],
    mode: FakeTensorMode,
) -> torch.fx.GraphModule:
    """The graph of the program on these fake inputs. Inputs behind those of the signature are not used."""

    def step(*flat: torch.Tensor) -> list[torch.Tensor]:
        return _Interpreter(program, signature, fixed, flat).run()

    functional = torch.func.functionalize(step, remove="mutations")
    with mode, torch.no_grad():
        graph = make_fx(
            functional,
            decomposition_table=dict(decompositions()),
            tracing_mode="fake",
            _allow_non_fake_inputs=True,
        )(*inputs)
    _drop_aliases(graph)
    drop_copies(graph)
    write_in_place(graph)
    add_biases_late(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


class _Interpreter:
    """Runs the instructions on functional fake tensors."""

    def __init__(
        self,
        program: Program,
        signature: Signature,
        fixed: Mapping[int, Any],
        flat: Sequence[torch.Tensor],
    ) -> None:
        self._program = program
        self._signature = signature
        self._fixed = fixed
        self._returned = signature.returned
        self._tensors: dict[int, torch.Tensor] = {}
        arguments, rest = flat[: len(signature.arguments)], list(flat[len(signature.arguments) :])
        memory = {}
        for argument, tensor in zip(signature.arguments, arguments, strict=True):
            memory[argument.storage] = (tensor, argument.is_flat)
        for value in program.inputs:
            type_, storage = program.values[value]
            if storage not in memory:
                continue  # no instruction uses this input
            tensor, is_flat = memory[storage]
            if is_flat:
                tensor = tensor.as_strided(type_.shape, type_.stride, type_.offset)
            self._tensors[value] = tensor
        self._scalars: dict[int, Any] = dict(fixed)
        self._vectors: dict[type, torch.Tensor] = {}
        for slots, kind in ((signature.floats, float), (signature.ints, int)):
            if slots:
                vector = self._vectors[kind] = rest.pop(0)
                self._scalars |= {slot: FreeScalar(vector, n, kind) for n, slot in enumerate(slots)}
        self._sequence = iter(sequence_of(program))
        self._order: torch.Tensor | None = None  # written by each launch and wait: see `collectives`
        # By the number of a launch: its result and its operand, until the wait.
        self._launched: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def run(self) -> list[torch.Tensor]:
        """Run every instruction, and return the tensors that the signature returns."""
        updates = find_updates(self._program, self._signature)
        due: dict[int, list[Update]] = {}
        for update in updates:
            due.setdefault(update.before, []).append(update)
        updating = {position for update in updates for position in update.positions}
        for position, instruction in enumerate(self._program.instructions):
            try:
                for update in due.get(position, ()):
                    self._run_update(update)
                if position in updating:
                    continue
                call = whole_call(self._program, position, self._signature, self._fixed)
                if call is not None:
                    self._run_lanes(call)
                else:
                    self._run_instruction(instruction)
            except Exception as error:
                raise LoweringError(instruction.op, position, error) from error
        for update in due.get(len(self._program.instructions), ()):
            self._run_update(update)
        return [self._tensors[value] for value in self._returned]

    def _run_update(self, update: Update) -> None:
        self._run_lanes(lanes_of(self._program, update, self._signature, self._fixed))

    def _run_lanes(self, lanes: Lanes) -> None:
        written = [self._tensors[value] for value in lanes.written]
        # Never empty: AOTInductor calls no op with an empty list of tensors.
        read = [self._tensors[value] for value in lanes.read] or [torch.zeros(1)]
        floats, ints = self._vectors.get(float), self._vectors.get(int)
        new = torch.ops.lazystep.updated.default(written, read, floats, ints, lanes.code)
        for tensor, value in zip(written, new, strict=True):
            tensor.copy_(value)

    def _communicate(self, instruction: Instruction) -> None:
        number, _, what = next(self._sequence)
        if self._order is None:
            self._order = torch.zeros(1, dtype=torch.int64)
        target = self._tensors[instruction.args[0].value]
        if is_launch(instruction):
            value = operand_of(instruction)
            operand = None if value == instruction.args[0].value else self._tensors[value]
            launched = torch.ops.lazystep.launched.default(self._order, target, operand, what)
            self._order, result = launched
            self._launched[number] = result, operand
        else:
            result, operand = self._launched.pop(number)
            self._order, result = torch.ops.lazystep.waited.default(self._order, result, operand, what)
            target.copy_(result)

    def _optimize(
        self, written: list[Any], read: list[Any], skip: Any, numbers: list[Any], call: str
    ) -> None:
        """An optimizer's update under a `GradScaler`: the library calls torch's function for it."""
        sources = [(n.kind.__name__, n.index) if type(n) is FreeScalar else ("fixed", n) for n in numbers]
        new = torch.ops.lazystep.optimized_natively.default(
            written,
            read,
            torch.zeros(()) if skip is None else skip,
            self._vectors.get(float),
            self._vectors.get(int),
            json.dumps([call, sources]),
        )
        for tensor, value in zip(written, new, strict=True):
            tensor.copy_(value)

    def _run_instruction(self, instruction: Instruction) -> None:
        if is_effect(instruction):
            self._communicate(instruction)
            return
        args = [self._fill(arg) for arg in instruction.args]
        kwargs = {name: self._fill(arg) for name, arg in instruction.kwargs}
        if instruction.op == UPDATE:
            self._optimize(*args, **kwargs)
            return
        if instruction.rebinds:
            ((_, rebound),) = instruction.rebinds
            self._tensors[rebound] = _view_form(instruction.op)(*args, **kwargs)
            return
        out = self._call(instruction, args, kwargs)
        flat = list(out) if isinstance(out, (tuple, list)) else [out]
        arguments = set(instruction.reads())
        for number, (value, tensor) in enumerate(zip(instruction.results, flat, strict=False)):
            if value is None or value in arguments:
                continue
            if instruction.op == LSTM_LAYER and number == LSTM_WORKSPACE:
                if value in self._returned:
                    raise NotImplementedError("the step ends between an LSTM and its backward")
                self._tensors[value] = tensor
                continue
            declared, storage = self._program.values[value]
            if hints(tensor.shape) != declared.shape or tensor.dtype != declared.dtype:
                raise TypeError(f"gives {list(tensor.shape)} {tensor.dtype}, recorded was {declared}")
            is_view = any(self._program.values[a].storage == storage for a in arguments)
            if not is_view:
                tensor = _with_strides(tensor, declared)
            self._tensors[value] = tensor

    def _call(self, instruction: Instruction, args: list[Any], kwargs: dict[str, Any]) -> Any:
        fused = _DECOMPOSED.get(base_name(instruction.op))
        if fused is not None:
            return fused(**bind(instruction.op, args, kwargs))
        results = [v for v in instruction.results if v is not None]
        has_free = any(_has_free(arg) for arg in (*args, *kwargs.values()))
        if has_free:
            elements = expand_foreach(instruction.op, args, kwargs)
            if elements is not None:
                name, in_place = base_name(instruction.op), bool(instruction.writes)
                values = results or [a.value for a in instruction.args[0]]
                dtypes = [self._program.values[v].type.dtype for v in values]
                return [run_plain(name, e, in_place, d) for e, d in zip(elements, dtypes, strict=True)]
            return call_with_scalars(instruction, args, kwargs, self._program.values[results[0]].type.dtype)
        if instruction.op in LSTM_LAYERS:
            layer, place = LSTM_LAYERS[instruction.op]
            if args.pop(place):
                raise NotImplementedError("an LSTM over a packed sequence")
            return layer(*args, **kwargs)
        if instruction.op == "aten.native_batch_norm.default":
            return _batch_norm(*args)
        if instruction.op == "aten.constant_pad_nd.default" and is_symbolic((*args[0].shape, *args[1])):
            return _pad(*args, **kwargs)
        if base_name(instruction.op) in NEVER_NEGATIVE:
            args[2] = refuse_negative(args[2])
        return resolve_op(instruction.op)(*args, **kwargs)

    def _fill(self, arg: Arg) -> Any:
        if type(arg) is Ref:
            return self._tensors[arg.value]
        if type(arg) is ScalarRef:
            return self._scalars[arg.slot]
        return [self._fill(a) for a in arg] if type(arg) is tuple else arg


# In-place ops that only change the argument's shape or strides: the argument becomes a view of itself.
_VIEW_FORMS = frozenset({"squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_"})


def _view_form(op: str) -> Callable[..., Any]:
    namespace, packet, overload = op.split(".")
    if packet not in _VIEW_FORMS:
        raise NotImplementedError("the op changes the size of an argument in place")
    return resolve_op(f"{namespace}.{packet.removesuffix('_')}.{overload}")


def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, *rest: Any) -> Any:
    """Batch norm through ops whose schema declares that they write the running statistics.

    The schema of the recorded op does not declare this write. Under autocast, the input may be of a lower
    type than weights and statistics. CPU's kernel then computes in float32, and so do we: torch's
    decomposition would round the saved statistics to the input's type.
    """
    is_mixed = any(t is not None and t.dtype != x.dtype for t in (weight, bias, mean, variance))
    y = x.float() if is_mixed else x
    if mean is None:
        out, *saved = torch.ops.aten._native_batch_norm_legit.no_stats(y, weight, bias, *rest)
    else:
        out, *saved = torch.ops.aten._native_batch_norm_legit.default(y, weight, bias, mean, variance, *rest)
    return out.to(x.dtype), *saved


def _pad(x: torch.Tensor, pads: Sequence[Any], value: Any = 0) -> torch.Tensor:
    """`constant_pad_nd` with symbolic sizes, which torch's kernel does not take. Guards the pads' signs."""
    for number in range(len(pads) // 2):
        dim = x.dim() - 1 - number
        before, after = pads[2 * number], pads[2 * number + 1]
        start = -before if before < 0 else 0
        end = x.shape[dim] + (after if after < 0 else 0)
        parts = [x.narrow(dim, start, end - start)]
        for where, size in ((0, before), (2, after)):
            if size > 0:
                shape = [size if d == dim else x.shape[d] for d in range(x.dim())]
                parts.insert(where, x.new_full(shape, value))
        x = torch.cat(parts, dim)
    return x


def _has_free(arg: Any) -> bool:
    return type(arg) is FreeScalar or (isinstance(arg, list) and any(_has_free(a) for a in arg))


def hints(numbers: Sequence[Any]) -> tuple[int, ...]:
    """Sizes or strides as ints: symbolic ones as they are in the member that is traced, without a guard."""
    return tuple(n.node.hint if isinstance(n, torch.SymInt) else n for n in numbers)


def is_symbolic(numbers: Sequence[Any]) -> bool:
    """Whether one of the sizes or strides is symbolic. To compare it would add a guard."""
    return any(isinstance(n, torch.SymInt) for n in numbers)


def _with_strides(tensor: torch.Tensor, declared: TensorType) -> torch.Tensor:
    """The tensor in the recorded layout, copied if necessary: a later `view` or an output relies on it."""
    strides = zip(declared.shape, hints(tensor.stride()), declared.stride, strict=True)
    if all(n == 1 or s == t for n, s, t in strides) or 0 in declared.shape:
        return tensor
    if not is_symbolic(tensor.shape):
        copy = torch.empty_strided(declared.shape, declared.stride, dtype=declared.dtype)
        return copy.copy_(tensor)
    # With symbolic sizes the recorded strides say only the order of the dimensions.
    order = sorted(range(tensor.dim()), key=lambda dim: (-declared.stride[dim], dim))
    dense = 1
    for dim in reversed(order):
        if declared.shape[dim] != 1 and declared.stride[dim] != dense:
            raise NotImplementedError(f"a result with gaps in its memory: {declared}")
        dense *= declared.shape[dim]
    return torch.empty_permuted(tensor.shape, order, dtype=declared.dtype).copy_(tensor)


def _drop_aliases(graph: torch.fx.GraphModule) -> None:
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in _TRANSPARENT:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
