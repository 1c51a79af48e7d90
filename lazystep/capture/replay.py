"""A captured step: its program, where a replay finds the inputs, and where it puts the outputs.

A `Replay` is made from two recorded calls that agree, or from one that agrees with the outline of a call with
other sizes. Every input of the program must be explained: it is an argument, a place, a random draw or a
constant that both calls have made. Every number must be explained too: it is the same in both calls, or
computed from sources that a replay can read again. A replay must be able to make all that the call leaves
behind. Anything unexplained is a reason not to replay; it is never frozen.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from .. import timeline
from ..interrupts import uninterrupted
from ..ready import ReadyReplays
from ..record._recorder import State
from ..record.handle import Handle, Handles, Memory, adopt_host_tensor
from ..record.tensor import find_handle, find_handles, retype
from ..runtime import runtime
from ..step_closures import Added, DeviceContext
from ._places import is_same
from .audits import AuditSchedule
from .changes import Effect, describe_change
from .evaluation import Evaluation
from .lasting import Lasting
from .outline import Evidence, Outline
from .places import Kind, Place
from .random_state import redraws
from .recipes import Context, NotReplayableError, Recipe, Recipes, UnsettledError
from .recorded import RecordedCall
from .surroundings import TensorFacts
from .traced import Expression, sources_in
from .values import CONTAINERS, copy_of


class Replay:
    """Does what a recorded call did, without its Python. `guards` must hold before each `run`."""

    def __init__(self, earlier: RecordedCall | Outline, call: RecordedCall) -> None:
        """Raises `NotReplayableError` if the two calls do not explain every input, number and result."""
        assert call.program is not None
        # A capture from one call is compared with the next call before any replay, unless its relatives
        # foretell all its numbers: see `Outline`.
        self._is_from_one_call = isinstance(earlier, Outline)
        # The constants of that call, each with its position and whose value it was.
        self._unconfirmed: list[tuple[int, Callable[[], Handle | None], torch.Tensor]] = []
        self.num_runs = 0  # replays and audits
        self.num_replays = 0
        self.last_call = 0  # the number of the step's call that used it last
        self.audits = AuditSchedule()
        self.known = call.program.known
        self.variant = call.program.variant
        self._program = self.variant.executable.program
        # At offset zero: inputs may begin anywhere in their memory.
        self._types = [self._program.values[value].type.at(0) for value in self._program.inputs]
        self._expressions: list[Expression] = []
        places, fresh = self._bind_inputs(earlier, call)
        self._find_scalars(earlier, call)
        # The inputs whose types are compared before each replay.
        self._given = {position for position, _ in self._arguments} | places.keys()
        self.is_confirmed = not isinstance(earlier, Outline) or (
            not self._unconfirmed and earlier.evidence.foretells(self._program, self._given, self._frozen)
        )
        for number, (position, expression, dtype) in enumerate(self._moved_counts):
            self._expressions.append(expression)
            self._moved_counts[number] = position, len(self._expressions) - 1, dtype
        recipes = self._find_outputs(earlier, call, fresh)
        followed = self._followed(call)
        self.guards = call.make_guards(followed)
        recipes.finish(self.guards.outputs)
        self._find_positions(places)
        self.lasting = self._find_lasting(earlier, call)
        self._numbers = Evaluation(call, self._expressions, self.guards.outputs)
        self._slots = self._numbers.positions[: len(self._program.scalars)]
        own = [position for position, _ in self._arguments]
        own += [position for position, _ in self._fresh if position >= 0]
        own += [position for position, _, _ in self._moved_counts]
        self._ready = ReadyReplays(self.variant.executable, self._state, self._slots, own)
        # Most steps return one tensor.
        self._returned = self._results[0] if self._result_spec.is_leaf() else None

    # -- binding -------------------------------------------------------------------------------------

    def _bind_inputs(
        self, earlier: RecordedCall | Outline, call: RecordedCall
    ) -> tuple[dict[int, Place], dict[Handle, int]]:
        """Find for every input of the program where a replay reads it.

        Returns the places, by position, and the values that a replay makes itself, with their number in
        `_fresh`.
        """
        assert call.program is not None
        if earlier.num_draws != call.num_draws:
            raise UnsettledError("it draws another number of random tensors in each call")
        self.rewinds = call.rewinds
        if earlier.rewinds != self.rewinds:
            raise UnsettledError("it goes back to another state of a random generator in each call")
        # Positions of the inputs, by kind.
        found: dict[int, Place] = {}
        self._arguments: list[tuple[int, int]] = []
        self._constants: list[tuple[int, Handle]] = []
        # Tensors that each replay makes anew: random draws, in their recorded order, and constants that the
        # step overwrites. A draw that no instruction uses still advances the generator; its position is -1.
        draw_again = redraws(call.draws, self.rewinds)
        self._fresh: list[tuple[int, Callable[[], torch.Tensor]]] = [(-1, again) for again in draw_again]
        # Counts that the step moves to the lazy device: the position, the number, the type.
        self._moved_counts: list[tuple[int, Any, torch.dtype]] = []
        drawn_at = {draw.handle: n for n, draw in enumerate(call.draws)}
        fresh = dict(drawn_at)
        arguments = {h: n for n, v in enumerate(call.leaves) if (h := find_handle(v)) is not None}
        places: dict[Handle, list[Place]] = {}
        for place in call.testimony.places_with_values():
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
                self._fresh[drawn_at[now]] = position, draw_again[drawn_at[now]]
                lasting.pop()
            else:
                constant = self._constant(earlier, call, position)
                if self._is_lasting(position):
                    self._constants.append((position, adopt_host_tensor(constant)))
                else:
                    fresh[now] = len(self._fresh)
                    self._fresh.append((position, functools.partial(copy_of, constant)))
                    lasting.pop()
        self._pattern = self._memory_pattern(lasting)
        # Arguments whose place in memory the step has asked for.
        self._exact = [
            (number, handle.type)
            for number, leaf in enumerate(call.leaves)
            if (handle := find_handle(leaf)) is not None and handle.memory in call.testimony.placed
        ]
        return found, fresh

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
        given = [position for position, _ in self._arguments]
        # If no inputs share memory, and none must begin at one place in it, C++ can say whether the state is
        # that of the last replay.
        self._is_plain = not (self._pattern or self._exact) and all(
            position not in given for position, _ in self._twins
        )
        self._state = State(runtime.layout_of(self.variant), self._tensors, self._arguments)

    def _find_lasting(
        self, earlier: RecordedCall | Outline, call: RecordedCall
    ) -> list[tuple[bool, int, Lasting]]:
        """The values that the call has read: whether each is of an argument, and which one or where it is."""
        found: list[tuple[bool, int, Lasting]] = []
        if isinstance(earlier, Outline):
            assert not call.lasting.found, "such a call is not like an outline"
            return found
        for handle, value in call.lasting.found.items():
            old = earlier.lasting.found.get(handle)
            argument = next((n for n, leaf in enumerate(call.leaves) if find_handle(leaf) == handle), None)
            place = next(
                (
                    place
                    for place in call.testimony.places_with_values()
                    if isinstance(facts := call.before[place].detail, TensorFacts) and facts.handle == handle
                ),
                None,
            )
            if argument is None and place is None:
                assert call.program is not None
                if handle not in call.program.inputs:
                    raise NotReplayableError(
                        f"the value read at {value.line} is of a tensor that is kept where lazystep can't "
                        "see it; make it an argument of the step, or keep it in an attribute"
                    )
                continue  # a constant: both calls have made it with the same values
            if old is None or old.run is not value.run or not value.is_current:
                raise UnsettledError(f"the value read at {value.line} changes between calls")
            if argument is not None:
                found.append((True, argument, value))
            elif place is not None:
                found.append((False, self.guards.outputs[place], value))
        return found

    def changed_value(self, leaves: Sequence[Any], values: Sequence[Any]) -> str:
        """Which value that the step has read may be another one now; empty if none. See `LastingReads`."""
        for is_argument, number, value in self.lasting:
            tensor = leaves[number] if is_argument else values[number]
            if find_handle(tensor) != value.handle or not value.is_current:
                return f"the value that is read at {value.line}"
        return ""

    def difference(self, leaves: Sequence[Any]) -> str:
        """What has changed since the capture, so that it can't be replayed; empty if nothing is known."""
        if changed := self.guards.difference():
            return changed
        values = self.guards.hold()
        return "" if values is None else self.changed_value(leaves, values)

    def _constant(self, earlier: RecordedCall | Outline, call: RecordedCall, position: int) -> torch.Tensor:
        """A copy of the tensor that both calls have made on the CPU with the same values."""
        assert call.program is not None
        before, now = earlier.constants.get(position), call.constants.get(position)
        user = self._program.user_of(self._program.inputs[position])
        is_read = call.program.inputs[position] in call.lasting.found
        used = {value for instruction in self._program.instructions for value in instruction.reads()}
        if self._program.inputs[position] not in used and not is_read:
            raise NotReplayableError(
                "an op takes a place in the memory of a slice, such as as_strided with an offset, or resizes "
                "it, or looks at it as elements of another size; give the step a tensor of its own: x.clone()"
            )
        if earlier.had_input(position, call.program.inputs[position]):
            raise NotReplayableError(
                f"the tensor taken by {user} is kept where lazystep can't see it; make it an argument of the "
                "step, or keep it in an attribute, a variable or a container"
            )
        if isinstance(earlier, Outline) and now is not None:
            self._unconfirmed.append((position, call.program.inputs[position].weakly(), now))
        elif before is None or now is None or before.dtype != now.dtype or not torch.equal(before, now):
            raise NotReplayableError(
                f"the tensor taken by {user} is another one in each call; make it an argument of the step"
            )
        assert now is not None
        memory = call.program.inputs[position].memory
        if sum(handle.memory == memory for handle in call.program.inputs) > 1:
            raise NotReplayableError(f"the tensor taken by {user} shares memory; make it an argument")
        return copy_of(now)

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

    def _find_scalars(self, earlier: RecordedCall | Outline, call: RecordedCall) -> None:
        """Check that every scalar is the same in both calls, or computed from traced numbers."""
        pairs = zip(earlier.scalars, call.scalars, strict=True)
        used = self._program.used_slots()
        # The numbers that all replays have in common.
        self._frozen = [
            value if expression is None and slot in used else None
            for slot, (value, expression) in enumerate(call.scalars)
        ]
        for slot, ((old_value, old), (value, expression)) in enumerate(pairs):
            if expression is not None and expression == old:
                self._expressions.append(expression)
            elif (expression is not None or old is not None) and slot in used:
                raise UnsettledError("a number was computed in another way")
            elif slot not in used or is_same(value, old_value) or self._is_from_one_call:
                self._expressions.append(value)  # confirmed by relatives, or by the next call of this kind
            else:
                raise NotReplayableError(
                    f"the number in {self._program.user_of_slot(slot)} was {old_value!r} and then {value!r}, "
                    "and a replay can't compute it; only numbers that go from an argument into ops can vary"
                )

    # -- outputs ---------------------------------------------------------------------------------------

    def _find_outputs(
        self, earlier: RecordedCall | Outline, call: RecordedCall, fresh: Mapping[Handle, int]
    ) -> Recipes:
        recipes = Recipes(call, self._expressions, fresh)
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

    def _add_effect(self, effect: Effect, call: RecordedCall, recipes: Recipes, replaced: set[Place]) -> None:
        place, before, after = effect
        value = after.value
        is_changed = before.value is value and before.detail != after.detail
        if isinstance(value, torch.Tensor) and is_changed and id(value) in call.counts:
            return  # followed, or refused already
        if isinstance(value, torch.Tensor) and is_changed:
            old, new = before.detail, after.detail
            if old.flags != new.flags or new.handle is None or place not in call.testimony.reads:
                raise NotReplayableError(describe_change(effect))
            if not recipes.is_made(value):
                raise NotReplayableError(f"it points {place.name} to memory that the step did not make")
            self._retypes.append((place, recipes.position_of(value)))
            return
        if is_changed:
            if isinstance(value, dict) and before.detail[0] is after.detail[0]:
                written = {
                    p.key for p in call.testimony.writes if p.container is place or p.container is value
                }
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
        for place in call.testimony.reads:
            if type(call.before[place].value) in (int, float) and place in call.testimony.numbers:
                found.add(("place", place))
        return {source[1] for source in found if source[0] == "place"} - call.pinned_places()

    def _closure(
        self, old: Added, new: Added, recipes: Recipes
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

    # -- audits ---------------------------------------------------------------------------------------

    def predict(self, leaves: list[Any], values: list[Any]) -> list[Any] | None:
        """The scalars that a replay would use, without advancing any count; None if `run` would refuse."""
        if self._find_given(leaves, values) is None:
            return None
        before = self._numbers.counts()
        try:
            numbers = self._numbers.evaluate(leaves, values)
        except (ArithmeticError, ValueError):
            numbers = None
        self._numbers.restore(before)
        return None if numbers is None else [numbers[slot] for slot in self._slots]

    def confirm(self, call: RecordedCall) -> str:
        """How the constants of the next call differ from those of the captured one; empty if they don't."""
        assert call.program is not None
        for position, find, value in self._unconfirmed:
            now = call.constants.get(position)
            is_kept = find() == call.program.inputs[position]
            if is_kept or now is None or now.dtype != value.dtype or not torch.equal(now, value):
                user = self._program.user_of(self._program.inputs[position])
                return f"the tensor taken by {user} is another one in each call"
        self._unconfirmed.clear()
        return ""

    def testify(self, evidence: Evidence) -> None:
        """Two calls agreed: they are evidence for calls with other sizes."""
        evidence.add(self._program, self._given, self._frozen)

    def end_audit(self, seconds: float) -> None:
        """An audit took `seconds`. The first one confirms a capture that was made from one call."""
        self.num_runs += 1
        self.audits.plan_next(seconds, self.num_replays, is_first=not self.is_confirmed)
        self.is_confirmed = True

    # -- running ---------------------------------------------------------------------------------------

    def run(self, leaves: list[Any], values: list[Any], context: DeviceContext) -> tuple[bool, Any]:
        """Queue the step. Returns (False, None), with nothing changed, if inputs or numbers don't fit.

        `values`: what `guards.hold` has returned. Blocks only while too many steps are in flight.
        """
        profile = timeline.active
        start = time.perf_counter() if profile is not None else 0.0
        given = self._find_given(leaves, values)
        if given is None:
            return False, None
        made: Context | None = None
        while made is None:
            # From the first count that advances to the last place that is rebound: no half step is left.
            with uninterrupted():
                with runtime.recorder.lock:
                    if runtime.executor.has_room():
                        made = self._queue(leaves, values, given, context)
                        if made is None:
                            return False, None
                if made is not None and (self._rebinds or self._retypes_at):
                    self._rebind(made)
            if made is None:
                runtime.executor.wait_for_room()
        if profile is not None:
            profile.add("replay", "recording", start, time.perf_counter())
        if self._returned is not None:
            return True, self._returned(made)
        results = [recipe(made) for recipe in self._results]
        return True, pytree.tree_unflatten(results, self._result_spec)

    def _queue(
        self, leaves: list[Any], values: list[Any], given: list[tuple[int, Handle]], context: DeviceContext
    ) -> Context | None:
        """Compute the numbers, draw, queue the program. None, with nothing changed, if numbers don't fit."""
        # A draw may run out of memory. Nothing else here fails.
        before = self._numbers.counts() if self._fresh else []
        try:
            numbers = self._numbers.evaluate(leaves, values)
        except (ArithmeticError, ValueError):
            return None  # recorded instead: the function may handle the error
        if numbers is None:
            return None
        positions = self._numbers.positions
        made = Context(leaves, lambda index: numbers[positions[index]], values)
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
                handle = adopt_host_tensor(make())
                made.fresh.append(handle)
                if position >= 0:
                    given.append((position, handle))
            for position, index, dtype in self._moved_counts:
                moved = torch.tensor(made.number(index), dtype=dtype)
                given.append((position, adopt_host_tensor(moved)))
            scalars = functools.partial(_take, numbers, self._slots)
            make_ready = functools.partial(self._ready.make, numbers)
            runtime.replay(self.variant, self._state, given, scalars, make_ready, context, add_closures)
        except BaseException:
            if not is_queued and before:  # then the counts are those of the step before
                self._numbers.restore(before)
            raise
        self.num_runs += 1
        self.num_replays += 1
        self.audits.num_since += 1
        return made

    def _rebind(self, made: Context) -> None:
        """Leave behind what the call left behind: new tensors, counters, containers."""
        new = [(place, recipe(made)) for place, recipe in self._rebinds]
        for number, position in self._retypes_at:
            retype(made.before[number], made.outputs[position])
        for place, value in new:
            place.set(value)

    def _find_given(self, leaves: list[Any], values: list[Any]) -> list[tuple[int, Handle]] | None:
        """The handles of arguments, with their positions; None if types or memory sharing have changed.

        Then `_state` has those of all other inputs except fresh ones.
        """
        given = self._state.given(values, leaves) if self._is_plain else None
        return self._look_closely(leaves, values) if given is None else given

    def _look_closely(self, leaves: list[Any], values: list[Any]) -> list[tuple[int, Handle]] | None:
        """As above, if the state is not that of the last replay, or inputs share memory."""
        handles = self._read_state([values[number] for number in self._tensors])
        if handles is None:
            return None  # a place holds no lazy tensor, or one of another type
        state = handles.copy()
        for position, number in self._arguments:
            handles[position] = find_handle(leaves[number])
        for number, type_ in self._exact:
            handle = find_handle(leaves[number])
            if handle is None or handle.type is not type_:
                return None
        for position, number in self._twins:
            if find_handle(values[number]) != handles[position]:
                return None
        types = zip(handles, self._types, strict=True)
        if any(handle is not None and handle.type.at(0) is not type_ for handle, type_ in types):
            return None
        if self._memory_pattern([h for h in handles if h is not None]) != self._pattern:
            return None
        # Remembered only after all checks passed: a refused state must be checked again next time.
        self._state.remember(values, state)
        return [(position, cast("Handle", handles[position])) for position, _ in self._arguments]

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


def _take(numbers: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    return [numbers[position] for position in positions]


def _is_below(place: Place, others: set[Place]) -> bool:
    """Whether a place is inside the container of one of the others."""
    container = place.container
    while type(container) is Place:
        if container in others:
            return True
        container = container.container
    return False
