"""A captured step: its program, where a replay finds the inputs, and where it puts the outputs.

A `Replay` is made from two recorded calls that agree. Every input of the program must be explained: it is an
argument, a place, a random draw or a constant that both calls have made. Every number must be explained too:
it is the same in both calls, or computed from sources that a replay can read again. Whatever the call leaves
behind must be something that a replay can make. Anything unexplained is a reason not to replay; it is never
frozen.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils import _pytree as pytree

from .. import timeline
from ..interrupts import uninterrupted
from ..record.handle import Handle, Handles, Memory, adopt_host_tensor
from ..record.tensor import find_handle, find_handles, have_handles, retype, wrap
from ..runtime import runtime
from ..step_closures import Added, DeviceContext
from ._places import is_same
from .op_numbers import COUNT_TYPES, Count
from .places import MISSING, Kind, Place
from .recorded import Effect, RecordedCall, describe_change, sources_in
from .surroundings import TensorFacts
from .traced import SOURCES, Expression, Writer, is_traced, plain
from .values import CONTAINERS, describe, is_simple


class NotReplayableError(Exception):
    """Two calls do not make a replay; the message says which input, number or result is unexplained."""


class UnsettledError(NotReplayableError):
    """The two calls do not agree yet; the next call may agree."""


# Makes a leaf of the result, or of a closure's arguments, at a replay.
Recipe = Callable[["_Context"], Any]


class _Context:
    """The values that recipes of a running replay read."""

    __slots__ = ("before", "leaves", "numbers", "outputs", "tensors")

    def __init__(self, leaves: Sequence[Any], numbers: Sequence[Any], before: Sequence[Any]) -> None:
        self.leaves = leaves
        self.numbers = numbers
        self.before = before  # what `Guards.hold` has found
        self.outputs: Handles[Handle]
        self.tensors: dict[int, Any] = {}

    def output(self, position: int, key: int, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        # Leaves that were one object in the recorded call, with this key, become one object again.
        if key not in self.tensors:
            self.tensors[key] = make(wrap(self.outputs[position]))
        return self.tensors[key]


class _Recipes:
    """Finds a recipe for each leaf of a recorded call's results, effects and closure arguments."""

    def __init__(self, call: RecordedCall, expressions: list[Expression]) -> None:
        assert call.program is not None
        self._made = {h: n for n, h in enumerate(call.program.outputs) if h is not None}
        # Tensors that existed when the call began, by identity and by handle: the argument or place of each.
        self._tensors: dict[int, int | Place] = {}
        self._values: dict[Handle, int | Place] = {}
        self._is_outside: Callable[[Any], bool] = call.is_outside
        self._as_left: Callable[[Any], Any] = call.as_left
        for number, leaf in enumerate(call.leaves):
            self._add(leaf, number)
        for place in call.witness.reads:
            self._add(call.before[place].value, place)
        # Places that recipes read. State can move from place to place, so all are read when a replay begins,
        # before any place is overwritten.
        self.positions: dict[Place, int] = {}  # filled when the guards are made
        self._expressions = expressions  # the replay's list: numbers among the leaves are added to it

    def _add(self, tensor: Any, source: int | Place) -> None:
        if isinstance(tensor, torch.Tensor):
            self._tensors.setdefault(id(tensor), source)
            handle = find_handle(tensor)
            if handle is not None:
                self._values.setdefault(handle, source)

    def _take(self, source: int | Place) -> Recipe:
        if isinstance(source, int):
            return lambda context: context.leaves[source]
        return lambda context: context.before[self.positions[source]]

    def finish(self, positions: Mapping[Place, int]) -> None:
        """All recipes are found. They keep none of the call's tensors alive."""
        self.positions.update(positions)
        self._made.clear()
        self._values.clear()
        self._is_outside = self._as_left = bool  # the methods of the call would keep it alive

    def is_made(self, value: Any) -> bool:
        """Whether the step itself made this tensor."""
        handle = find_handle(value)
        return handle is not None and handle in self._made

    def position_of(self, value: Any) -> int:
        """Which output of the program this tensor is."""
        handle = find_handle(value)
        assert handle is not None
        return self._made[handle]

    def find(self, old: Any, new: Any, what: str) -> Recipe:
        """The recipe for the leaf `new`; `old` is the same leaf in the earlier call."""
        handle = find_handle(new)
        if handle is not None and handle in self._made:
            position, key, make = self._made[handle], id(new), _kind_of_tensor(new)
            return lambda context: context.output(position, key, make)
        if id(new) in self._tensors:
            return self._take(self._tensors[id(new)])
        if isinstance(new, torch.Tensor):
            if handle in self._values and not new.requires_grad:
                # Another tensor object with the same value, such as `detach` returns.
                same = self._take(self._values[handle])
                return lambda context: _another_tensor(same(context))
            if old is new:
                return lambda context: new
            raise NotReplayableError(
                f"it {what} a tensor that the step did not make, another one in each call; make it an "
                "argument of the step, or make it inside with an op on the lazy device"
            )
        if is_traced(new):
            self._expressions.append(new.expression)
            index = len(self._expressions) - 1
            return lambda context: context.numbers[index]
        if old is new or (type(old) is type(new) and _same(old, new)):
            return lambda context: new
        raise NotReplayableError(f"it {what} {old!r} in one call and {new!r} in the next")

    def keep(self, new: Any) -> Recipe:
        """The recipe for what the call leaves in a place: also containers, made anew in each replay."""
        if isinstance(new, torch.Tensor) or is_traced(new):
            return self.find(new if self._is_outside(new) else None, new, "keeps")
        if new is MISSING or (is_simple(new) and not _has_traced(new)) or self._is_outside(new):
            return lambda context: new
        if type(new) is list or (isinstance(new, tuple) and not isinstance(new, torch.Size)):
            parts = [self.keep(part) for part in self._as_left(new)]
            if hasattr(new, "_fields"):
                make = type(new)
                return lambda context: make(*[part(context) for part in parts])
            kind = type(new)
            return lambda context: kind([part(context) for part in parts])
        if type(new) in (dict, collections.OrderedDict):
            items = [(key, self.keep(part)) for key, part in self._as_left(new).items()]
            mapping = type(new)
            return lambda context: mapping([(key, part(context)) for key, part in items])
        raise NotReplayableError(f"it keeps {describe(new)}, which a replay can't make")


class Replay:
    """Does what a recorded call did, without its Python. `guards` must hold before each `run`."""

    def __init__(self, earlier: RecordedCall, call: RecordedCall) -> None:
        """Raises `NotReplayableError` if the two calls do not explain every input, number and result."""
        assert earlier.program is not None
        assert call.program is not None
        self.num_runs = 0  # replays and audits
        self.num_replays = 0
        self.last_call = 0  # the number of the step's call that used it last
        self.next_audit = 1
        self.num_since_audit = 0
        self._interval = 0  # between two steady audits
        self._audited_at = time.perf_counter()
        self.known = call.program.known
        self.variant = call.program.variant
        self._program = self.variant.executable.program
        # At offset zero: inputs may begin anywhere in their memory.
        self._types = [self._program.values[value].type.at(0) for value in self._program.inputs]
        self._expressions: list[Expression] = []
        places = self._bind_inputs(earlier, call)
        self._find_scalars(earlier, call)
        for number, (position, expression, dtype) in enumerate(self._moved_counts):
            self._expressions.append(expression)
            self._moved_counts[number] = position, len(self._expressions) - 1, dtype
        recipes = self._find_outputs(earlier, call)
        followed = self._followed(call)
        self.guards = call.make_guards(followed)
        recipes.finish(self.guards.outputs)
        self._find_positions(places)
        self._evaluate = self._write(call)
        self._layout = runtime.layout_of(self.variant)

    # -- binding -------------------------------------------------------------------------------------

    def _bind_inputs(self, earlier: RecordedCall, call: RecordedCall) -> dict[int, Place]:
        """Find for every input of the program where a replay reads it. Returns the places, by position."""
        assert earlier.program is not None
        assert call.program is not None
        if len(earlier.draws) != len(call.draws):
            raise UnsettledError("it draws another number of random tensors in each call")
        # Positions of the inputs, by kind.
        found: dict[int, Place] = {}
        self._arguments: list[tuple[int, int]] = []
        self._constants: list[tuple[int, Handle]] = []
        # Tensors that each replay makes anew: random draws, in their recorded order, and constants that the
        # step overwrites. A draw that no instruction uses still advances the generator; its position is -1.
        self._fresh: list[tuple[int, Callable[[], torch.Tensor]]] = [(-1, d.again) for d in call.draws]
        # Counts that the step moves to the lazy device: the position, the number, the type.
        self._moved_counts: list[tuple[int, Any, torch.dtype]] = []
        drawn_at = {draw.handle: n for n, draw in enumerate(call.draws)}
        arguments = {h: n for n, v in enumerate(call.leaves) if (h := find_handle(v)) is not None}
        places: dict[Handle, list[Place]] = {}
        for place in call.witness.reads:
            facts = call.before[place].detail
            if isinstance(facts, TensorFacts) and facts.handle is not None:
                places.setdefault(facts.handle, []).append(place)
        # Other places of the same value. The step may read the value there, so these must stay the same.
        self._twins_of: list[tuple[int, Place]] = []
        lasting = []
        for position, now in enumerate(call.program.inputs):
            lasting.append(now)
            there = places.get(now, [])
            if now in arguments:
                self._arguments.append((position, arguments[now]))
                self._twins_of += [(position, place) for place in there]
            elif there:
                found[position] = there[0]
                self._twins_of += [(position, place) for place in there[1:]]
            elif now in call.moved_counts:
                self._moved_counts.append((position, call.moved_counts[now], now.type.dtype))
                lasting.pop()
            elif now in drawn_at:
                self._fresh[drawn_at[now]] = position, call.draws[drawn_at[now]].again
                lasting.pop()
            else:
                constant = self._constant(earlier, call, position)
                if self._is_lasting(position):
                    self._constants.append((position, adopt_host_tensor(constant)))
                else:
                    self._fresh.append((position, constant.clone))
                    lasting.pop()
        self._pattern = self._memory_pattern(lasting)
        # Arguments whose place in memory the step has asked for.
        self._exact = [
            (number, handle.type)
            for number, leaf in enumerate(call.leaves)
            if (handle := find_handle(leaf)) is not None and handle.memory in call.witness.placed
        ]
        return found

    def _find_positions(self, places: Mapping[int, Place]) -> None:
        """Where the lazy tensors are among the values that the guards read."""
        outputs, names = self.guards.outputs, self.guards.names
        by_place = {names[outputs[place]]: position for position, place in places.items()}
        # All lazy tensors that the step has met: inputs, and tensors that it has only looked at.
        self._tensors: list[int] = []
        self._input_of: list[int] = []  # the input that each of them is, or -1
        self._met_types: list[Any] = []
        for number, type_ in zip(self.guards.tensor_positions, self.guards.types_of(), strict=True):
            if type_ is not None:
                self._tensors.append(number)
                self._input_of.append(by_place.get(names[number], -1))
                self._met_types.append(type_)
        # The guards see to it that one tensor in two places stays one.
        mine = {position: outputs[place] for position, place in places.items()}
        twins = {(position, outputs[place]) for position, place in self._twins_of}
        self._twins = [(position, number) for position, number in twins if mine.get(position) != number]
        self._retypes_at = [(outputs[place], position) for place, position in self._retypes]
        self._last_met: list[Handle] = []  # handles of these tensors at the last replay
        # Those of inputs, and the constants, by position; empty before any replay.
        self._last_handles: list[Handle | None] = []
        self._state_memories: set[Memory] = set()

    def _constant(self, earlier: RecordedCall, call: RecordedCall, position: int) -> torch.Tensor:
        """A copy of the tensor that both calls have made on the CPU with the same values."""
        assert call.program is not None
        before, now = earlier.constants.get(position), call.constants.get(position)
        user = self._program.user_of(self._program.inputs[position])
        if self._program.inputs[position] not in {v for i in self._program.instructions for v in i.reads()}:
            raise NotReplayableError(
                "an op takes a place in the memory of a slice, such as as_strided with an offset, or resizes "
                "it, or looks at it as elements of another size; give the step a tensor of its own: x.clone()"
            )
        if earlier.program is not None and earlier.program.inputs[position] == call.program.inputs[position]:
            raise NotReplayableError(
                f"the tensor taken by {user} is kept where lazystep can't see it; make it an argument of the "
                "step, or keep it in an attribute, a variable or a container"
            )
        if before is None or now is None or before.dtype != now.dtype or not torch.equal(before, now):
            raise NotReplayableError(
                f"the tensor taken by {user} is another one in each call; make it an argument of the step"
            )
        memory = call.program.inputs[position].memory
        if sum(handle.memory == memory for handle in call.program.inputs) > 1:
            raise NotReplayableError(f"the tensor taken by {user} shares memory; make it an argument")
        return now.clone()

    def _is_lasting(self, position: int) -> bool:
        """Whether the input keeps its values: the step does not write it, and no output shares its memory."""
        storage = self._program.values[self._program.inputs[position]].storage
        is_output = any(self._program.values[value].storage == storage for value in self.variant.outputs)
        return not is_output and storage not in self.variant.executable.written_storages

    def _memory_pattern(self, handles: Sequence[Handle]) -> list[tuple[int, Any]]:
        """For each input the first that shares its memory, and how far it is from that one, in bytes.

        An empty list if no inputs share memory. Elements of different sizes are told by their place.
        """
        memories = [handle.memory for handle in handles]
        if len(set(memories)) == len(memories):
            return []
        first: dict[Memory, int] = {}
        pattern = []
        for number, (memory, handle) in enumerate(zip(memories, handles, strict=True)):
            one = handles[first.setdefault(memory, number)]
            sizes = handle.type.dtype.itemsize, one.type.dtype.itemsize
            places = handle.type.offset * sizes[0], one.type.offset * sizes[1]
            pattern.append((first[memory], places[0] - places[1] if sizes[0] == sizes[1] else places))
        return pattern

    def _find_scalars(self, earlier: RecordedCall, call: RecordedCall) -> None:
        """Check that every scalar is the same in both calls, or computed from traced numbers."""
        pairs = zip(earlier.scalars, call.scalars, strict=True)
        used = self._program.used_slots()
        for slot, ((old_value, old), (value, expression)) in enumerate(pairs):
            if expression is not None and expression == old:
                self._expressions.append(expression)
            elif (expression is not None or old is not None) and slot in used:
                raise UnsettledError("a number was computed in another way")
            elif slot not in used or is_same(value, old_value):
                self._expressions.append(value)
            else:
                raise NotReplayableError(
                    f"the number in {self._program.user_of_slot(slot)} was {old_value!r} and then {value!r}, "
                    "and a replay can't compute it; only numbers that go from an argument into ops can vary"
                )

    # -- outputs ---------------------------------------------------------------------------------------

    def _find_outputs(self, earlier: RecordedCall, call: RecordedCall) -> _Recipes:
        recipes = _Recipes(call, self._expressions)
        if earlier.result_spec != call.result_spec:
            raise UnsettledError("it returns another structure in each call")
        pairs = zip(earlier.result_leaves, call.result_leaves, strict=True)
        self._results = [recipes.find(old, new, "returns") for old, new in pairs]
        self._result_spec = call.result_spec
        self._rebinds: list[tuple[Place, Recipe]] = []
        self._retypes: list[tuple[Place, int]] = []
        replaced: set[Place] = set()  # places with a container that the call has made
        for effect in call.effects:
            if not _is_below(effect.place, replaced):
                self._add_effect(effect, call, recipes, replaced)
        if len(earlier.added) != len(call.added):
            raise UnsettledError("it adds another number of closures in each call")
        self._closures = [
            self._closure(old, new, recipes) for old, new in zip(earlier.added, call.added, strict=True)
        ]
        return recipes

    def _add_effect(
        self, effect: Effect, call: RecordedCall, recipes: _Recipes, replaced: set[Place]
    ) -> None:
        place, before, after = effect
        value = after.value
        is_changed = before.value is value and before.detail != after.detail
        if isinstance(value, torch.Tensor) and is_changed and id(value) in call.counts:
            return  # followed, or refused already
        if isinstance(value, torch.Tensor) and is_changed:
            old, new = before.detail, after.detail
            if old.flags != new.flags or new.handle is None or place not in call.witness.reads:
                raise NotReplayableError(describe_change(effect))
            if not recipes.is_made(value):
                raise NotReplayableError(f"it points {place.name} to memory that the step did not make")
            self._retypes.append((place, recipes.position_of(value)))
            return
        if is_changed:
            if isinstance(value, dict) and before.detail[0] is after.detail[0]:
                written = {p.key for p in call.witness.writes if p.container is place or p.container is value}
                changed = set(before.detail[1]) ^ set(after.detail[1])
                if changed and changed <= written:
                    return  # each of these items is an effect of its own
            raise NotReplayableError(describe_change(effect))
        if id(before.value) in call.counts and before.value is not value:
            raise NotReplayableError(describe_change(effect))
        try:
            self._rebinds.append((place, recipes.keep(value)))
        except NotReplayableError as error:
            raise NotReplayableError(f"in {place.name} {error}") from None
        if isinstance(value, CONTAINERS):
            replaced.add(place)

    def _followed(self, call: RecordedCall) -> set[Place]:
        """Places of numbers that a replay reads: all that were read as numbers and need not stay the same."""
        found: set[Any] = set()
        for expression in (*call.expressions(), *self._expressions):
            sources_in(expression, found)
        for place in call.witness.reads:
            if type(call.before[place].value) in (int, float) and place in call.witness.numbers:
                found.add(("place", place))
        return {source[1] for source in found if source[0] == "place"} - call.pinned_places()

    def _closure(
        self, old: Added, new: Added, recipes: _Recipes
    ) -> tuple[Added, list[Recipe], pytree.TreeSpec]:
        same_code = getattr(old.function, "__code__", old.function) is getattr(
            new.function, "__code__", new.function
        )
        old_leaves, old_spec = pytree.tree_flatten((old.args, dict(old.kwargs)))
        leaves, spec = pytree.tree_flatten((new.args, dict(new.kwargs)))
        if not same_code or old_spec != spec or old.throttle is not new.throttle:
            raise NotReplayableError(f"the closure added at {new.where} is another one in each call")
        for cell in getattr(new.function, "__closure__", None) or ():
            if recipes.is_made(Place(cell, None, Kind.CELL, "").get()):
                raise NotReplayableError(
                    f"the closure added at {new.where} captures a tensor of the step; pass it in args"
                )
        try:
            found = [recipes.find(a, b, "passes") for a, b in zip(old_leaves, leaves, strict=True)]
        except NotReplayableError as error:
            raise NotReplayableError(f"the closure added at {new.where}: {error}") from None
        return new._replace(args=(), kwargs={}), found, spec

    # -- numbers ---------------------------------------------------------------------------------------

    def _write(self, call: RecordedCall) -> Callable[[Any, Any], list[Any] | None]:
        """Write the function that computes all numbers of a replay and advances the counts of optimizers."""
        used: set[Any] = set()
        for expression in (*call.expressions(), *self._expressions):
            sources_in(expression, used)
        counts = {
            count.source: count for count in call.counts.values() if count.is_changed or count.source in used
        }
        arrays = {source: f"a{n}" for n, source in enumerate(counts)}
        names: dict[str, Any] = {"_float32": lambda x: float(np.float32(x)), "_float64": float}
        for source, count in counts.items():
            # A memoryview is the fastest way to a single number in a tensor's memory.
            names[arrays[source]] = memoryview(count.tensor.numpy().reshape(1))  # type: ignore[arg-type]
        outputs = self.guards.outputs

        def read(source: Expression) -> str:
            if source[0] == "argument":
                return f"arguments[{source[1]}]"
            return f"places[{outputs[source[1]]}]" if source[0] == "place" else f"{arrays[source]}[0]"

        writer = Writer(read, names)
        groups = _merge_counts(counts)
        stands_for = {source: first for first, others in groups.items() for source in others}
        for first, others in groups.items():
            if others:
                # Counts that were equal are read once; the replay is refused if they differ.
                names_of = [arrays[source] for source in (first, *others)]
                writer.line(f"counts = [a[0] for a in ({', '.join(names_of)},)]")
                writer.line(f"if counts.count(counts[0]) != {len(names_of)}: return None")
        # A pinned place is compared with the other places: its number is a literal.
        stands_for |= {("place", place): call.before[place].value for place in call.pinned_places()}
        memo: dict[Expression, Expression] = {}
        for (symbol, left, right), expected in call.trace.guards.items():
            left, right = _rename(left, stands_for, memo), _rename(right, stands_for, memo)
            if isinstance(left, tuple) or isinstance(right, tuple):
                writer.guard(symbol, left, right, expected)
        self._expressions = [_rename(e, stands_for, memo) for e in self._expressions]
        epilogue = []
        for first, others in groups.items():
            if counts[first].is_changed:
                value = writer.emit(_rename(counts[first].expression, stands_for, memo))
                targets = [arrays[source] for source in (first, *others)]
                epilogue.append(f"for a in ({', '.join(targets)},): a[0] = {value}")
        self._host_state = [names[array] for array in arrays.values()]
        return writer.finish(self._expressions, epilogue)

    def predict(self, leaves: Sequence[Any], values: Sequence[Any]) -> list[Any] | str:
        """The scalars that a replay would use, without advancing any count; or why a replay would refuse."""
        before = [number[0] for number in self._host_state]
        try:
            numbers = self._evaluate(leaves, values)
            refusal = "a comparison of numbers comes out differently, or equal step counts have diverged"
        except (ArithmeticError, ValueError) as error:
            numbers = None
            refusal = f"arithmetic on its numbers fails ({type(error).__name__}: {error})"
        for number, value in zip(self._host_state, before, strict=True):
            number[0] = value
        return refusal if numbers is None else numbers[: len(self._program.scalars)]

    def plan_next_audit(self, seconds: float, early: int, share: float, least: int) -> None:
        """After an audit that took `seconds`: audits come after 1, 2, 4, ... `early` replays, then steadily.

        A steady audit takes at most `share` of the time that the replays since the last one took.
        """
        self.num_runs += 1
        now = time.perf_counter()
        since, self._audited_at = now - self._audited_at, now
        if self.next_audit < early:
            self.next_audit *= 2
            return
        replay_seconds = max(since - seconds, 1e-6) / max(self.num_since_audit, 1)
        self._interval = max(least, self._interval, round(seconds / (share * replay_seconds)))
        self.next_audit = self.num_replays + self._interval

    # -- running ---------------------------------------------------------------------------------------

    def run(self, leaves: Sequence[Any], values: list[Any], context: DeviceContext) -> tuple[bool, Any]:
        """Queue the step. Returns (False, None), with nothing changed, if inputs or numbers don't fit.

        `values`: what `guards.hold` has returned. Blocks only while too many steps are in flight.
        """
        profile = timeline.active
        start = time.perf_counter() if profile is not None else 0.0
        handles = self._inputs(leaves, values)
        if handles is None:
            return False, None
        made: _Context | None = None
        while made is None:
            # From the first count that advances to the last place that is rebound: no half step is left.
            with uninterrupted():
                with runtime.recorder.lock:
                    if runtime.executor.has_room():
                        made = self._queue(leaves, values, handles, context)
                        if made is None:
                            return False, None
                if made is not None:
                    self._rebind(made)
            if made is None:
                runtime.executor.wait_for_room()
        if profile is not None:
            profile.add("replay", "recording", start, time.perf_counter())
        results = [recipe(made) for recipe in self._results]
        if self._result_spec.is_leaf():  # fast path: most steps return one tensor
            return True, results[0]
        return True, pytree.tree_unflatten(results, self._result_spec)

    def _queue(
        self, leaves: Sequence[Any], values: list[Any], handles: list[Handle | None], context: DeviceContext
    ) -> _Context | None:
        """Compute the numbers, draw, queue the program. None, with nothing changed, if numbers don't fit."""
        # A draw may run out of memory. Nothing else here fails.
        before = [number[0] for number in self._host_state] if self._fresh else ()
        try:
            numbers = self._evaluate(leaves, values)
        except (ArithmeticError, ValueError):
            return None  # recorded instead: the function may handle the error
        if numbers is None:
            return None
        made = _Context(leaves, numbers, values)
        is_queued = False

        def add_closures(outputs: Handles[Handle]) -> None:
            nonlocal is_queued
            is_queued = True
            made.outputs = outputs
            for added, recipes, spec in self._closures:
                args, kwargs = pytree.tree_unflatten([recipe(made) for recipe in recipes], spec)
                context.add_now(added._replace(args=args, kwargs=kwargs))

        try:
            for position, make in self._fresh:
                tensor = make()
                if position >= 0:
                    handles[position] = adopt_host_tensor(tensor)
            for position, number, dtype in self._moved_counts:
                handles[position] = adopt_host_tensor(torch.tensor(numbers[number], dtype=dtype))
            scalars = numbers[: len(self._program.scalars)]
            inputs = cast("list[Handle]", handles)  # every position is filled now
            runtime.replay(self.variant, self._layout, inputs, scalars, context, add_closures)
        except BaseException:
            if not is_queued:  # then the counts are those of the step before
                for number, value in zip(self._host_state, before, strict=False):
                    number[0] = value
            raise
        self.num_runs += 1
        self.num_replays += 1
        self.num_since_audit += 1
        return made

    def _rebind(self, made: _Context) -> None:
        """Leave behind what the call left behind: new tensors, counters, containers."""
        new = [(place, recipe(made)) for place, recipe in self._rebinds]
        for number, position in self._retypes_at:
            retype(made.before[number], made.outputs[position])
        for place, value in new:
            place.set(value)

    def _inputs(self, leaves: Sequence[Any], values: list[Any]) -> list[Handle | None] | None:
        """The handles of all inputs except fresh ones; None if types or memory sharing have changed."""
        tensors = [values[number] for number in self._tensors]
        is_same_state = bool(self._last_handles) and have_handles(tensors, self._last_met)
        handles = self._last_handles.copy() if is_same_state else self._read_state(tensors)
        if handles is None:
            return None  # a place holds no lazy tensor, or one of another type
        for position, number in self._arguments:
            handles[position] = find_handle(leaves[number])
        for number, type_ in self._exact:
            handle = find_handle(leaves[number])
            if handle is None or handle.type is not type_:
                return None
        for position, number in self._twins:
            if find_handle(values[number]) != handles[position]:
                return None
        if not (is_same_state and self._arguments_are_apart(handles)):
            types = zip(handles, self._types, strict=True)
            if any(handle is not None and handle.type.at(0) is not type_ for handle, type_ in types):
                return None
            if self._memory_pattern([h for h in handles if h is not None]) != self._pattern:
                return None
            # Remembered only after all checks passed: a refused state must be checked again next time.
            self._last_met = cast("list[Handle]", find_handles(tensors))
            self._last_handles = handles.copy()
            for position, _ in self._arguments:
                self._last_handles[position] = None
            self._state_memories = {h.memory for h in self._last_handles if h is not None}
        return handles

    def _read_state(self, tensors: list[Any]) -> list[Handle | None] | None:
        """The handles of state and constants, by position; None if a tensor is not what it was."""
        handles: list[Handle | None] = [None] * len(self._types)
        for handle, type_, position in zip(
            find_handles(tensors), self._met_types, self._input_of, strict=True
        ):
            if handle is None or handle.type is not type_:
                return None
            if position >= 0:
                handles[position] = handle
        for position, handle in self._constants:
            handles[position] = handle
        return handles

    def _arguments_are_apart(self, handles: list[Handle | None]) -> bool:
        """Whether no argument shares memory with another argument or with state, which is the usual case.

        Then nothing else has to be compared: the types of arguments are part of the kind that selected this
        replay.
        """
        arguments = [handles[position] for position, _ in self._arguments]
        memories = [handle.memory for handle in arguments if handle is not None]
        is_apart = len(set(memories)) == len(memories) and self._state_memories.isdisjoint(memories)
        return is_apart and not self._pattern


def _kind_of_tensor(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that turns a plain tensor into the same sort: a parameter, a leaf, or a plain result."""
    if isinstance(tensor, torch.nn.Parameter):
        wants_gradient = tensor.requires_grad
        return lambda made: torch.nn.Parameter(made, wants_gradient)
    if tensor.requires_grad and tensor.is_leaf:
        return torch.Tensor.requires_grad_
    return lambda made: made


def _another_tensor(tensor: Any) -> Any:
    handle = find_handle(tensor)
    return tensor if handle is None else wrap(handle)


def _merge_counts(counts: Mapping[Any, Count]) -> dict[Any, list[Any]]:
    """Counts that were equal and change alike: the first of each group, and those that it stands for."""
    groups: dict[Any, list[Any]] = {}
    for source, count in counts.items():
        alike = _rename(count.expression, {source: ("count", None)}, {})
        key = count.before, COUNT_TYPES[count.tensor.dtype], alike
        groups.setdefault(key, []).append(source)
    return {sources[0]: sources[1:] for sources in groups.values()}


def _is_below(place: Place, others: set[Place]) -> bool:
    """Whether a place is inside the container of one of the others."""
    container = place.container
    while type(container) is Place:
        if container in others:
            return True
        container = container.container
    return False


def _has_traced(value: Any) -> bool:
    return any(map(_has_traced, value)) if isinstance(value, tuple) else is_traced(value)


def _rename(expression: Expression, names: Mapping[Any, Any], memo: dict[Any, Any]) -> Expression:
    if not isinstance(expression, tuple):
        return expression
    if expression not in memo:
        if expression[0] in SOURCES:
            memo[expression] = names.get(expression, expression)
        else:
            memo[expression] = (expression[0], *(_rename(e, names, memo) for e in expression[1:]))
    return memo[expression]


def _same(a: Any, b: Any) -> bool:
    try:
        return is_same(plain(a), plain(b)) or bool(a == b)
    except Exception:
        return False
