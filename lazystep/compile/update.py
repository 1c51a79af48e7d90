"""Updates: the elementwise arithmetic at the end of a step, as one node of the graph for all parameters.

Inductor makes a loop for each parameter of an optimizer's update, and most of a build is spent on these
loops. So the instructions of an update are taken out of the lowering, whether an optimizer has recorded them
parameter by parameter or over lists of tensors, and become one call of the op `lazystep::update`, whose
kernel interprets them (`execute/update.h`).

An instruction belongs to an update if it is elementwise arithmetic in float32 or float64 over tensors of one
layout, and writes memory that exists before the step, or makes a temporary that only such instructions read.
An update is closed where another instruction reads or overwrites its memory. A step may have several updates.
Small updates are left to Inductor, which fuses them with their surroundings.

In a data-parallel step an update is taken apart by bucket: each parameter is updated before the first launch
or wait that follows its last operation. A gradient is a part of a larger memory there, its bucket, which an
update reads and never writes.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..program.collectives import is_effect
from ..program.program import Arg, Instruction, Program, Ref, ScalarRef
from ..program.signature import Signature
from ..program.types import TensorType
from .scalars import base_name, bind, is_foreach

# Operations, with the numbers of `Operation` in execute/update.h.
_OPERATIONS = (
    *("copy", "fill", "add", "add_number", "add_scaled", "sub", "rsub_number", "mul"),
    *("mul_number", "div", "div_number", "sqrt", "neg", "abs", "reciprocal"),
    *("maximum", "minimum", "clamp_min", "clamp_max", "addcmul", "addcdiv", "lerp", "sign"),
)
_CODES = {name: number for number, name in enumerate(_OPERATIONS)}
_UNARY = frozenset({"sqrt", "neg", "abs", "reciprocal", "sign"})
_WITH_NUMBER = {"add": "add_number", "mul": "mul_number", "div": "div_number"}
_PAIRS = frozenset({"add", "sub", "mul", "div", "maximum", "minimum"})
# A group of fewer operations is left to Inductor.
MIN_OPERATIONS = 16
# Limits of the kernel.
_MAX_TENSORS, _MAX_TEMPORARIES = 48, 16


Place = int | tuple[int, TensorType]


class Operation(NamedTuple):
    """One operation on the elements of a lane: `result = name(operands, number)`. All are values."""

    name: str
    result: int
    operands: tuple[int, ...]
    number: Arg = None  # a ScalarRef, a literal, or a Ref of a tensor with one element


@dataclasses.dataclass
class Update:
    """Instructions that run as one node, right before the instruction at `before`."""

    positions: list[int]
    operations: list[Operation]
    before: int
    origins: list[int] = dataclasses.field(default_factory=list)  # the position of each operation


def find_updates(program: Program, signature: Signature) -> list[Update]:
    """The updates of a program, in order."""
    # The storages that the library takes as they are, and not as a flat tensor.
    whole = {argument.storage for argument in signature.arguments if not argument.is_flat}
    operations = {
        position: found
        for position, instruction in enumerate(program.instructions)
        if (found := _operations(program, whole, instruction))
    }
    # A lane does not know that a part changes with the whole.
    made = {program.values[o.result].storage for found in operations.values() for o in found}
    for position, found in list(operations.items()):
        places = [place_of(program, value) for operation in found for value in operation.operands]
        if any(isinstance(place, tuple) and place[0] in made for place in places):
            del operations[position]
    while True:
        chosen = _choose(program, operations)
        updates = _group(program, operations, chosen)
        too_early = _cut_temporaries(program, updates)
        if not too_early:
            break
        for position in too_early:
            del operations[position]
    large = [u for u in updates if len(u.operations) >= MIN_OPERATIONS and _fits_kernel(program, u)]
    return [part for update in large for part in _by_bucket(program, update)]


def _by_bucket(program: Program, update: Update) -> list[Update]:
    """The update in parts, each before the first launch or wait behind its last operation."""
    effects = [n for n, instruction in enumerate(program.instructions) if is_effect(instruction)]
    ends: dict[int, int] = {}  # by lane: where its last operation was recorded
    lane_of = {id(o): n for n, lane in enumerate(_split(program, update.operations)) for o in lane}
    for operation, origin in zip(update.operations, update.origins, strict=True):
        ends[lane_of[id(operation)]] = origin
    parts: dict[int, Update] = {}
    for operation, origin in zip(update.operations, update.origins, strict=True):
        following = bisect.bisect(effects, ends[lane_of[id(operation)]])
        before = min(effects[following], update.before) if following < len(effects) else update.before
        part = parts.setdefault(before, Update(update.positions, [], before))
        part.operations.append(operation)
        part.origins.append(origin)
    return [parts[before] for before in sorted(parts)]


def _choose(program: Program, operations: Mapping[int, Sequence[Operation]]) -> set[int]:
    """The positions of the instructions that belong to updates."""
    # Storages of temporaries that an instruction outside of updates reads later, or that are outputs.
    read_outside = {program.values[value].storage for value in program.outputs}
    read_inside: set[int] = set()
    chosen = set()
    for position in range(len(program.instructions) - 1, -1, -1):
        instruction = program.instructions[position]
        storages = {program.values[value].storage for value in instruction.reads()}
        if position in operations:
            made = {program.values[o.result].storage for o in operations[position]}
            temporary = {s for s in made if not program.storages[s].is_input}
            if temporary.isdisjoint(read_outside) and temporary <= read_inside:
                chosen.add(position)
                read_inside |= storages
                continue
        read_outside |= storages
    return chosen


def _group(program: Program, operations: Mapping[int, Sequence[Operation]], chosen: set[int]) -> list[Update]:
    updates = []
    update = Update([], [], 0)
    reads: set[int] = set()
    writes: set[int] = set()

    def close(before: int) -> None:
        nonlocal update, reads, writes
        if update.positions:
            update.before = before
            updates.append(update)
        update, reads, writes = Update([], [], 0), set(), set()

    def storage(value: int) -> int:
        return program.values[value].storage

    for position, instruction in enumerate(program.instructions):
        touched = {storage(value) for value in instruction.reads()}
        if position not in chosen:
            written = {storage(value) for value in instruction.writes}
            if touched & writes or written & (reads | writes):
                close(position)
            continue
        numbers = {storage(o.number.value) for o in operations[position] if type(o.number) is Ref}
        if numbers & writes:  # a number is read once, before the update begins
            close(position)
        update.positions.append(position)
        update.operations += operations[position]
        update.origins += [position] * len(operations[position])
        reads |= touched
        writes |= {storage(o.result) for o in operations[position]}
    close(len(program.instructions))
    return updates


def _cut_temporaries(program: Program, updates: Sequence[Update]) -> set[int]:
    """The positions of instructions whose temporaries a later update would read: they must stay outside."""
    maker: dict[int, tuple[int, set[int]]] = {}
    found: set[int] = set()
    for number, update in enumerate(updates):
        for position in update.positions:
            instruction = program.instructions[position]
            for value in instruction.reads():
                storage = program.values[value].storage
                if storage in maker and maker[storage][0] != number:
                    found |= maker[storage][1]
            for value in (*instruction.defines(), *instruction.writes):
                storage = program.values[value].storage
                if not program.storages[storage].is_input:
                    if storage not in maker or maker[storage][0] != number:
                        maker[storage] = (number, set())
                    maker[storage][1].add(position)
    return found


# -- the operations of an instruction ---------------------------------------------------------------


def _operations(program: Program, whole: set[int], instruction: Instruction) -> list[Operation]:
    """The instruction as operations of the kernel; empty if it is none."""
    if instruction.rebinds or not instruction.op.startswith("aten."):
        return []
    name = base_name(instruction.op)
    calls = list(_calls(instruction, name))
    results: list[int | None] = list(instruction.results)
    if instruction.writes:
        results = [_value(call.pop("out", call.get("self"))) for call in calls]
        if set(instruction.writes) != set(results):
            return []
    if not calls or len(results) != len(calls) or len(set(results)) != len(results):
        return []
    found = []
    for call, result in zip(calls, results, strict=True):
        operations = [] if result is None else _operation(program, name, call, result)
        if not operations:
            return []
        found += operations
    for operation in found:
        values = (operation.result, *operation.operands)
        is_made = [not program.storages[program.values[value].storage].is_input for value in values]
        if operation.name == "add" and all(is_made):
            # Parts of a gradient are summed where they are made: an update would keep all parts to the end.
            return []
        if not _is_plain(program, operation.result, whole):
            return []
        if any(not _is_plain(program, v, whole) and not _is_part(program, v) for v in operation.operands):
            return []
        if len({layout_of(program.values[value].type) for value in values}) != 1:
            return []
        if type(operation.number) is Ref and not _is_plain(program, operation.number.value, whole):
            return []
    return found


def _calls(instruction: Instruction, name: str) -> Iterator[dict[str, Arg]]:
    """The arguments by name: of the op itself, or of the plain op for each element of the lists."""
    bound = bind(instruction.op, instruction.args, dict(instruction.kwargs))
    if not is_foreach(instruction.op):
        yield bound
        return
    renames = {"scalar": "number", "scalars": "number", "tensors1": "end"}
    if name in ("addcmul", "addcdiv"):
        renames |= {"scalar": "value", "scalars": "value"}
    lists = {renames.get(key, key): arg for key, arg in bound.items()}
    if type(lists["self"]) is not tuple:
        return
    for index in range(len(lists["self"])):
        yield {
            key: arg[index] if type(arg) is tuple and index < len(arg) else arg for key, arg in lists.items()
        }


def _operation(program: Program, name: str, call: dict[str, Arg], result: int) -> list[Operation]:
    """The operations of one call of a plain op."""
    call = dict(call)
    target = _value(call.pop("self", None))
    if target is None:
        return []
    call.pop("non_blocking", None)
    if name in _UNARY and not call:
        return [Operation(name, result, (target,))]
    if name == "zero" and not call:
        return [Operation("fill", result, (), 0.0)]
    if name == "fill" and set(call) == {"value"} and _is_number(call["value"]):
        return [Operation("fill", result, (), call["value"])]
    if name == "copy" and set(call) == {"src"} and type(call["src"]) is Ref:
        return [Operation("copy", result, (call["src"].value,))]
    if name == "lerp" and set(call) == {"end", "weight"} and _is_number(call["weight"]):
        return [Operation("lerp", result, (target, call["end"].value), call["weight"])]
    if name in ("addcmul", "addcdiv"):
        first, second = _value(call.get("tensor1")), _value(call.get("tensor2"))
        value = call.get("value", 1)
        if first is None or second is None or not _is_number(value):
            return []
        return [Operation(name, result, (target, first, second), value)]
    if name in ("clamp", "clamp_min", "clamp_max"):
        return _clamp(name, call, result, target)
    if name not in _PAIRS or not set(call) <= {"other", "alpha", "number", "rounding_mode"}:
        return []
    if call.get("rounding_mode") is not None:
        return []
    other, alpha = call.get("other", call.get("number")), call.get("alpha", 1)
    is_alone = type(alpha) in (int, float) and alpha == 1
    if type(other) is Ref and not _is_single(program, other, target):
        if is_alone:
            return [Operation(name, result, (target, other.value))]
        if name == "add" and _is_number(alpha):
            return [Operation("add_scaled", result, (target, other.value), alpha)]
        return []
    if (
        name in _WITH_NUMBER
        and _is_number(other, or_tensor=True)
        and type(alpha) in (int, float)
        and alpha == 1
    ):
        return [Operation(_WITH_NUMBER[name], result, (target,), other)]
    return []


def _clamp(name: str, call: dict[str, Arg], result: int, target: int) -> list[Operation]:
    low = call.get("min", call.get("number") if name == "clamp_min" else None)
    high = call.get("max", call.get("number") if name == "clamp_max" else None)
    found: list[Operation] = []
    for operation, bound in (("clamp_min", low), ("clamp_max", high)):
        if bound is not None:
            if not _is_number(bound):
                return []
            found.append(Operation(operation, result, (result if found else target,), bound))
    return found


def _value(arg: Arg) -> int | None:
    return arg.value if type(arg) is Ref else None


def _is_number(arg: Arg, or_tensor: bool = False) -> bool:
    return type(arg) in (ScalarRef, int, float) or (or_tensor and type(arg) is Ref)


def _is_single(program: Program, other: Ref, target: int) -> bool:
    """Whether an operand is a tensor without dimensions beside one with dimensions: a number, in effect."""
    type_ = program.values[other.value].type
    return type_.shape == () and program.values[target].type.shape != () and type_.dtype.is_floating_point


def layout_of(type_: TensorType) -> tuple[Any, ...]:
    """The data type, the shape and the strides, for comparison."""
    # The stride of a dimension of size 1 makes no difference.
    strides = tuple(s for n, s in zip(type_.shape, type_.stride, strict=True) if n != 1)
    return type_.dtype, type_.shape, strides


def _is_plain(program: Program, value: int, whole: set[int]) -> bool:
    return _is_known(program.values[value].type) and is_whole(program, value, whole)


def is_whole(program: Program, value: int, whole: set[int]) -> bool:
    """Whether a value is the whole of its memory, and dense. `whole`: see `find_updates`."""
    type_, storage = program.values[value]
    if type_.layout is not torch.strided or type_.offset or type_.extent != program.storages[storage].nbytes:
        return False
    size = type_.dtype.itemsize
    for length in type_.shape:
        size *= length
    return size == type_.extent and (storage in whole or not program.storages[storage].is_input)


def _is_known(type_: TensorType) -> bool:
    """Whether the kernel can take such a tensor: real numbers, at places that do not vary in a family."""
    is_real = type_.dtype in (torch.float32, torch.float64) and type_.layout is torch.strided
    numbers = (*type_.shape, *type_.stride, type_.offset)
    return is_real and not (type_.conj or type_.neg) and all(type(number) is int for number in numbers)


def _is_part(program: Program, value: int) -> bool:
    """Whether a value is a dense part of a memory that the step makes: a gradient in its bucket."""
    type_, storage = program.values[value]
    if program.storages[storage].is_input or not _is_known(type_):
        return False
    size = type_.dtype.itemsize * math.prod(type_.shape)
    return size == type_.extent - type_.offset * type_.dtype.itemsize


def place_of(program: Program, value: int) -> Place:
    """What a lane knows a value by: its storage, or the part of a storage that it is."""
    type_, storage = program.values[value]
    if type_.offset or type_.extent != program.storages[storage].nbytes:
        return storage, type_
    return storage


# -- the code of an update --------------------------------------------------------------------------


class Lanes(NamedTuple):
    """An update as the op takes it: the values whose memory it writes and reads, and its code."""

    written: tuple[int, ...]
    read: tuple[int, ...]
    code: str


def lanes_of(program: Program, update: Update, signature: Signature, fixed: Mapping[int, Any]) -> Lanes:
    """The operations of an update, sorted into lanes. See execute/update.h for the code."""
    lanes = _split(program, update.operations)
    written: dict[Place, int] = {}  # place to value
    read: dict[Place, int] = {}
    for lane in lanes:
        made: set[Place] = set()
        for operation in lane:
            for value in operation.operands:
                place = place_of(program, value)
                if place not in made:
                    read.setdefault(place, value)
            made.add(place_of(program, operation.result))
            if program.storages[program.values[operation.result].storage].is_input:
                written.setdefault(program.values[operation.result].storage, operation.result)
            if type(operation.number) is Ref:
                number = operation.number.value
                read.setdefault(place_of(program, number), number)
    for place in written:
        read.pop(place, None)
    index_of = {place: index for index, place in enumerate((*written, *read))}
    kinds: dict[str, int] = {}
    texts = []
    for lane in lanes:
        kind, tensors, numbers = _encode(program, lane)
        number_texts = [number_text(program, n, signature, fixed, index_of) for n in numbers]
        indices = [str(index_of[place]) for place in tensors]
        texts.append(" ".join([str(kinds.setdefault(kind, len(kinds))), *indices, *number_texts]))
    code = "\n".join([str(len(kinds)), *kinds, str(len(texts)), *texts])
    return Lanes(tuple(written.values()), tuple(read.values()), code)


def _split(program: Program, operations: Sequence[Operation]) -> list[list[Operation]]:
    """The operations by lane: those that share memory, directly or through others."""
    root: dict[Place, Place] = {}

    def find(place: Place) -> Place:
        root.setdefault(place, place)
        while root[place] != place:
            root[place] = root[root[place]]
            place = root[place]
        return place

    for operation in operations:
        first = find(place_of(program, operation.result))
        for value in operation.operands:
            root[find(place_of(program, value))] = first
    lanes: dict[Place, list[Operation]] = {}
    for operation in operations:
        lanes.setdefault(find(place_of(program, operation.result)), []).append(operation)
    return list(lanes.values())


def _fits_kernel(program: Program, update: Update) -> bool:
    for lane in _split(program, update.operations):
        layouts = {layout_of(program.values[v].type) for o in lane for v in (o.result, *o.operands)}
        if len(layouts) != 1:
            return False
        tensors, num_temporaries = _slots(program, lane)
        if len(tensors) > _MAX_TENSORS or num_temporaries > _MAX_TEMPORARIES:
            return False
    return True


def _slots(program: Program, lane: Sequence[Operation]) -> tuple[dict[Place, int], int]:
    """The tensors of a lane, numbered, by place; and how many temporaries it has."""
    tensors: dict[Place, int] = {}
    temporaries: set[Place] = set()
    for operation in lane:
        for value in operation.operands:
            place = place_of(program, value)
            if place not in temporaries:
                tensors.setdefault(place, len(tensors))
        storage = program.values[operation.result].storage
        if program.storages[storage].is_input:
            tensors.setdefault(storage, len(tensors))
        else:
            temporaries.add(storage)
    return tensors, len(temporaries)


def _encode(program: Program, lane: Sequence[Operation]) -> tuple[str, list[Place], list[Arg]]:
    """The kind of a lane as text, its tensors by place, and its numbers."""
    tensors, num_temporaries = _slots(program, lane)
    slots = dict(tensors)  # where a place's elements are now: in its tensor, or in a temporary
    temporaries: dict[int, int] = {}
    numbers: list[Arg] = []
    steps = []
    for operation in lane:
        operands = [slots[place_of(program, value)] for value in operation.operands]
        storage = program.values[operation.result].storage
        if program.storages[storage].is_input:
            result = slots[storage]
        else:
            # Also for a tensor from outside, such as a gradient that is clipped: only this update reads the
            # new value.
            temporary = temporaries.setdefault(storage, len(temporaries))
            result = slots[storage] = len(tensors) + temporary
        number = 0
        if operation.number is not None:
            number = len(numbers)
            numbers.append(operation.number)
        operands += [result] * (3 - len(operands))
        steps.append(" ".join(map(str, (_CODES[operation.name], result, *operands, number))))
    is_double = program.values[lane[0].result].type.dtype is torch.float64
    head = (int(is_double), len(tensors), num_temporaries, len(numbers), len(steps))
    return " ".join([*map(str, head), *steps]), list(tensors), numbers


def number_text(
    program: Program,
    number: Arg,
    signature: Signature,
    fixed: Mapping[int, Any],
    index_of: Mapping[Place, int],
) -> str:
    """The source of a number: 0 and 1 are the vectors of free scalars, 2 is a tensor, 3 a literal."""
    if type(number) is Ref:
        return f"2 {index_of[place_of(program, number.value)]}"
    if type(number) is ScalarRef:
        if number.slot in signature.floats:
            return f"0 {signature.floats.index(number.slot)}"
        if number.slot in signature.ints:
            return f"1 {signature.ints.index(number.slot)}"
        number = fixed[number.slot]
    return f"3 {float(number).hex()}"


# -- in the graph -----------------------------------------------------------------------------------


def write_in_place(graph: torch.fx.GraphModule) -> None:
    """Turn each op that returns a list of new tensors, `lazystep::updated`, into the op that writes it.

    Tracing needs the first: functionalization knows nothing of ops that write lists. The second copies
    nothing.
    """
    own = torch.ops.lazystep
    _write_in_place(graph, own.updated.default, own.update.default)
    _write_in_place(graph, own.optimized_natively.default, own.optimize_natively.default)


def _write_in_place(graph: torch.fx.GraphModule, functional: Any, in_place: Any) -> None:
    for node in graph.graph.find_nodes(op="call_function", target=functional):
        written = list(node.args[0])
        order = {other: number for number, other in enumerate(graph.graph.nodes)}
        for tensor in written:
            _keep_old_value(graph.graph, tensor, node, order)
        with graph.graph.inserting_before(node):
            new = graph.graph.call_function(in_place, node.args)
            new.meta["val"] = None
            new.meta["eager_input_vals"] = torch.fx.map_arg((node.args, {}), lambda n: n.meta["val"])
        for item in list(node.users):
            tensor = written[item.args[1]]
            item.replace_all_uses_with(tensor)
            graph.graph.erase_node(item)
            # Functionalization stores the new value by `copy`, and `copy_` at the end of the graph.
            for op in (torch.ops.aten.copy.default, torch.ops.aten.copy_.default):
                for user in list(tensor.users):
                    if user.target is op and user.args[:2] == (tensor, tensor):
                        user.replace_all_uses_with(tensor)
                        graph.graph.erase_node(user)
        graph.graph.erase_node(node)


def _keep_old_value(graph: Any, tensor: Any, node: Any, order: Mapping[Any, int]) -> None:
    """Give later readers of a tensor's old value a copy. Eager's steps have none; a rewritten graph might."""
    aliases, later = [tensor], []
    for alias in aliases:
        for user in alias.users:
            if order[user] <= order[node]:
                if user is not node and getattr(user.target, "is_view", False):
                    aliases.append(user)
            elif not (alias is tensor and _is_own_copy(user, tensor)):
                later.append((alias, user))
    for alias, user in later:
        with graph.inserting_before(node):
            copy = graph.call_function(torch.ops.aten.clone.default, (alias,))
            copy.meta["val"] = alias.meta["val"]
        user.replace_input_with(alias, copy)


def _is_own_copy(user: Any, tensor: Any) -> bool:
    """Whether a node overwrites the tensor without reading it."""
    copies = (torch.ops.aten.copy.default, torch.ops.aten.copy_.default)
    return user.target in copies and user.args[0] is tensor and user.args[1] is not tensor
