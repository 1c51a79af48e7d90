"""A captured step: its program, where a replay finds the inputs, and where it puts the outputs.

A `Replay` is made from two recorded calls that agree. Every input of the program must be explained: it is an
argument, a place, a random draw or a constant. Every number must be explained too: it is the same in both
calls, or computed from sources that a replay can read again. Anything unexplained is a reason not to replay;
it is never frozen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils import _pytree as pytree

from .. import timeline
from ..interrupts import uninterrupted
from ..record.handle import Handle, Handles, Memory, adopt_host_tensor
from ..record.tensor import find_handle, find_handles, have_handles, wrap
from ..runtime import runtime
from ..step_closures import Added, DeviceContext
from .places import Place
from .recorded import HostState, RecordedCall
from .traced import SOURCES, Expression, Traced, Writer, true_value


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
        self.before = before  # values of `_read_before` at the start of the call
        self.outputs: Handles[Handle]
        self.tensors: dict[int, Any] = {}

    def output(self, position: int, key: int, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        # Leaves that were one object in the recorded call, with this key, become one object again.
        if key not in self.tensors:
            self.tensors[key] = make(wrap(self.outputs[position]))
        return self.tensors[key]


class _Recipes:
    """Finds a recipe for each leaf of a recorded call's results, rebound places and closure arguments."""

    def __init__(self, call: RecordedCall, expressions: list[Expression]) -> None:
        assert call.program is not None
        self._made = {h: n for n, h in enumerate(call.program.outputs) if h is not None}
        # Tensors that existed when the call began, by identity and by handle: the argument or place of each.
        self._tensors: dict[int, int | Place] = {}
        self._values: dict[Handle, int | Place] = {}
        for number, leaf in enumerate(call.leaves):
            self._add(leaf, number)
        for place, value in zip(call.reach.tensors, call.before, strict=True):
            self._add(value, place)
        # Places to read when a replay begins. State can move from place to place, so it is read before any
        # place is overwritten.
        self.places: list[Place] = []
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
        self.places.append(source)
        index = len(self.places) - 1
        return lambda context: context.before[index]

    def is_made(self, value: Any) -> bool:
        """Whether the step itself made this tensor."""
        handle = find_handle(value)
        return handle is not None and handle in self._made

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
            if old is new or (old is None and handle is None):
                return lambda context: new
            raise NotReplayableError(
                f"it {what} a tensor that the step did not make, another one in each call; make it an "
                "argument of the step, or make it inside with an op on the lazy device"
            )
        if type(new) is Traced:
            self._expressions.append(new.expression)
            index = len(self._expressions) - 1
            return lambda context: context.numbers[index]
        if old is new or what == "keeps" or (type(old) is type(new) and _same(old, new)):
            return lambda context: new
        raise NotReplayableError(f"it {what} {old!r} in one call and {new!r} in the next")


class Replay:
    """Does what a recorded call did, without its Python. `guards` must hold before each `run`."""

    def __init__(self, earlier: RecordedCall, call: RecordedCall) -> None:
        """Raises `NotReplayableError` if the two calls do not explain every input, number and result."""
        assert earlier.program is not None
        assert call.program is not None
        self.num_runs = 0
        self.last_call = 0  # the number of the step's call that used it last
        self.known = call.program.known
        self.variant = call.program.variant
        self.guards = call.guards
        self._program = self.variant.executable.program
        self._types = [self._program.values[value].type for value in self._program.inputs]
        self._expressions: list[Expression] = []
        self._bind_inputs(earlier, call)
        self._find_scalars(earlier, call)
        self._find_outputs(earlier, call)
        self._evaluate = self._write(call)
        self._layout = runtime.layout_of(self.variant)

    # -- binding -------------------------------------------------------------------------------------

    def _bind_inputs(self, earlier: RecordedCall, call: RecordedCall) -> None:
        """Find for every input of the program where a replay reads it."""
        assert earlier.program is not None
        assert call.program is not None
        if len(earlier.draws) != len(call.draws):
            raise NotReplayableError("it draws another number of random tensors in each call")
        # Positions of the inputs, by kind.
        self._items: list[tuple[int, Any, Any]] = []  # places `container[key]`, the fastest to read
        self._slots: list[tuple[int, Place]] = []
        self._arguments: list[tuple[int, int]] = []
        self._constants: list[tuple[int, Handle]] = []
        # Tensors that each replay makes anew: random draws, in their recorded order, and constants that the
        # step overwrites. A draw that no instruction uses still advances the generator; its position is -1.
        self._fresh: list[tuple[int, Callable[[], torch.Tensor]]] = [(-1, d.again) for d in call.draws]
        drawn_at = {draw.handle: n for n, draw in enumerate(call.draws)}
        arguments = {h: n for n, v in enumerate(call.leaves) if (h := find_handle(v)) is not None}
        places: dict[Handle, Place] = {}
        for place, value in zip(call.reach.tensors, call.before, strict=True):
            if (handle := find_handle(value)) is not None:
                places.setdefault(handle, place)
        # Other places of the same value. The step may read the value there, so these must stay the same.
        self._twins: list[tuple[int, Place]] = []
        twins: dict[Handle, list[Place]] = {}
        for place, value in zip(call.reach.tensors, call.before, strict=True):
            handle = find_handle(value)
            if handle is not None and (handle in arguments or places[handle] is not place):
                twins.setdefault(handle, []).append(place)
        lasting = []
        for position, now in enumerate(call.program.inputs):
            lasting.append(now)
            self._twins += [(position, place) for place in twins.get(now, ())]
            if now in arguments:
                self._arguments.append((position, arguments[now]))
            elif now in places:
                place = places[now]
                if place.kind == "item":
                    self._items.append((position, place.container, place.key))
                else:
                    self._slots.append((position, place))
            elif now in drawn_at:
                self._fresh[drawn_at[now]] = position, call.draws[drawn_at[now]].again
                lasting.pop()
            elif earlier.program.inputs[position] == now:
                self._constants.append((position, now))
            else:
                constant = self._constant(earlier, call, position)
                if self._is_lasting(position):
                    self._constants.append((position, adopt_host_tensor(constant)))
                else:
                    self._fresh.append((position, constant.clone))
                    lasting.pop()
        self._state_positions = [n for n, _, _ in self._items] + [n for n, _ in self._slots]
        self._pattern = self._memory_pattern(lasting)
        self._last_state: list[Handle] = []  # the state's handles at the last replay
        self._last_handles: list[
            Handle | None
        ] = []  # those and the constants, by position; empty before any replay
        self._state_memories: set[Memory] = set()

    def _constant(self, earlier: RecordedCall, call: RecordedCall, position: int) -> torch.Tensor:
        """A copy of the tensor that both calls have made on the CPU with the same values."""
        assert call.program is not None
        before, now = earlier.constants.get(position), call.constants.get(position)
        user = self._program.user_of(self._program.inputs[position])
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

    def _memory_pattern(self, handles: Sequence[Handle]) -> list[int]:
        """A number per input, equal for inputs that share memory; an empty list if none do."""
        memories = [handle.memory for handle in handles]
        if len(set(memories)) == len(memories):
            return []
        first: dict[Memory, int] = {}
        return [first.setdefault(memory, len(first)) for memory in memories]

    def _find_scalars(self, earlier: RecordedCall, call: RecordedCall) -> None:
        """Check that every scalar is the same in both calls, or computed from traced numbers."""
        pairs = zip(earlier.scalars, call.scalars, strict=True)
        used = self._program.used_slots()
        for slot, ((old_value, old), (value, expression)) in enumerate(pairs):
            if expression is not None and expression == old:
                self._expressions.append(expression)
            elif (expression is not None or old is not None) and slot in used:
                raise UnsettledError("a number was computed in another way")
            elif slot not in used or (type(value) is type(old_value) and _same(value, old_value)):
                self._expressions.append(value)
            else:
                raise NotReplayableError(
                    f"the number in {self._program.user_of_slot(slot)} was {old_value!r} and then {value!r}, "
                    "and a replay can't compute it; only numbers that go from an argument into ops can vary"
                )

    # -- outputs ---------------------------------------------------------------------------------------

    def _find_outputs(self, earlier: RecordedCall, call: RecordedCall) -> None:
        recipes = _Recipes(call, self._expressions)
        self._read_before = recipes.places
        if earlier.result_spec != call.result_spec:
            raise NotReplayableError("it returns another structure in each call")
        pairs = zip(earlier.result_leaves, call.result_leaves, strict=True)
        self._results = [recipes.find(old, new, "returns") for old, new in pairs]
        self._result_spec = call.result_spec
        self._rebinds: list[tuple[Place, Recipe]] = []
        for place, before, after in zip(call.reach.tensors, call.before, call.after, strict=True):
            if before is not after:
                try:
                    self._rebinds.append((place, recipes.find(None, after, "keeps")))
                except NotReplayableError as error:
                    raise NotReplayableError(f"in {place.key or 'a variable'!r} {error}") from None
        if len(earlier.added) != len(call.added):
            raise NotReplayableError("it adds another number of closures in each call")
        self._closures = [
            self._closure(old, new, recipes) for old, new in zip(earlier.added, call.added, strict=True)
        ]

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
            if recipes.is_made(Place(cell, None, "cell").get()):
                raise NotReplayableError(
                    f"the closure added at {new.where} captures a tensor of the step; pass it in args"
                )
        try:
            found = [recipes.find(a, b, "passes") for a, b in zip(old_leaves, leaves, strict=True)]
        except NotReplayableError as error:
            raise NotReplayableError(f"the closure added at {new.where}: {error}") from None
        return new._replace(args=(), kwargs={}), found, spec

    # -- numbers ---------------------------------------------------------------------------------------

    def _write(self, call: RecordedCall) -> Callable[[Any], list[Any] | None]:
        """Write the function that computes all numbers of a replay and advances the optimizers' counts."""
        optimizers = call.reach.optimizers
        names: dict[str, Any] = {f"o{n}": optimizer for n, optimizer in enumerate(optimizers)}
        states = {state.name: (state, call.rules[key]) for key, state in call.host_state.items()}
        arrays = {name: f"a{n}" for n, name in enumerate(states)}
        for name, (state, _) in states.items():
            # A memoryview is the fastest way to a single number in a tensor's memory.
            names[arrays[name]] = memoryview(state.tensor.numpy().reshape(1))  # type: ignore[arg-type]
        names |= {"float32": np.float32, "float64": np.float64}

        def read(source: Expression) -> str:
            if source[0] == "argument":
                return f"arguments[{source[1]}]"
            if source[0] == "group":
                _, number, position, key, index = source
                code = f"o{number}.param_groups[{position}][{key!r}]"
                return code if index is None else f"{code}[{index}]"
            state, rule = states[source]
            assert rule is not None
            array = arrays[source]
            if rule[0] == "same":
                return f"{array}[0]"
            if rule[0] == "next":
                return f"{array}[0] + 1.0"
            kind = str(state.tensor.dtype).removeprefix("torch.")
            factor = writer.emit(_rename(rule[1], stands_for, memo))
            return f"float({kind}({array}[0]) * {kind}({factor}))"

        writer = Writer(read, names)
        merged = _merge_counters(states)
        for first, others in merged.items():
            # Counts that were equal are read once; the replay is refused if they differ.
            names_of = [arrays[name] for name in (first, *others)]
            writer.line(f"counts = [a[0] for a in ({', '.join(names_of)},)]")
            writer.line(f"if counts.count(counts[0]) != {len(names_of)}: return None")
        stands_for = {name: first for first, others in merged.items() for name in others}
        memo: dict[Expression, Expression] = {}
        for (symbol, left, right), expected in call.trace.guards.items():
            writer.guard(symbol, _rename(left, stands_for, memo), _rename(right, stands_for, memo), expected)
        self._expressions = [_rename(e, stands_for, memo) for e in self._expressions]
        counters = []
        epilogue = []
        for name, (_, rule) in states.items():
            assert rule is not None
            if rule[0] == "next":
                counters.append(arrays[name])
            elif rule[0] == "scale":
                epilogue.append(f"{arrays[name]}[0] = {writer.emit(name)}")
        if counters:
            epilogue.append(f"for a in ({', '.join(counters)},): a[0] += 1.0")
        self._host_state = [names[array] for array in arrays.values()]
        return writer.finish(self._expressions, epilogue)

    def predict(self, leaves: Sequence[Any]) -> list[Any] | str:
        """The scalars that a replay would use, without advancing any count; or why a replay would refuse."""
        before = [number[0] for number in self._host_state]
        try:
            numbers = self._evaluate(leaves)
            refusal = "a comparison of numbers comes out differently, or equal step counts have diverged"
        except (ArithmeticError, ValueError) as error:
            numbers = None
            refusal = f"arithmetic on its numbers fails ({type(error).__name__}: {error})"
        for number, value in zip(self._host_state, before, strict=True):
            number[0] = value
        return refusal if numbers is None else numbers[: len(self._program.scalars)]

    # -- running ---------------------------------------------------------------------------------------

    def run(self, leaves: Sequence[Any], context: DeviceContext) -> tuple[bool, Any]:
        """Queue the step. Returns (False, None), with nothing changed, if inputs or numbers don't fit.

        Blocks only while too many steps are in flight.
        """
        profile = timeline.active
        start = time.perf_counter() if profile is not None else 0.0
        handles = self._inputs(leaves)
        if handles is None:
            return False, None
        made: _Context | None = None
        while made is None:
            # From the first count that advances to the last place that is rebound: no half step is left.
            with uninterrupted():
                with runtime.recorder.lock:
                    if runtime.executor.has_room():
                        made = self._queue(leaves, handles, context)
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
        self, leaves: Sequence[Any], handles: list[Handle | None], context: DeviceContext
    ) -> _Context | None:
        """Compute the numbers, draw, queue the program. None, with nothing changed, if numbers don't fit."""
        # A draw may run out of memory. Nothing else here fails.
        before = [number[0] for number in self._host_state] if self._fresh else ()
        try:
            numbers = self._evaluate(leaves)
        except (ArithmeticError, ValueError):
            return None  # recorded instead: the function may handle the error
        if numbers is None:
            return None
        made = _Context(leaves, numbers, [place.get() for place in self._read_before])

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
            scalars = numbers[: len(self._program.scalars)]
            inputs = cast("list[Handle]", handles)  # every position is filled now
            runtime.replay(self.variant, self._layout, inputs, scalars, context, add_closures)
        except BaseException:
            if not is_queued:  # then the counts are those of the step before
                for number, value in zip(self._host_state, before, strict=False):
                    number[0] = value
            raise
        self.num_runs += 1
        return made

    def _rebind(self, made: _Context) -> None:
        """Put new tensors into their places. One that refuses does not keep the others from theirs."""
        first: BaseException | None = None
        for place, recipe in self._rebinds:
            try:
                place.set(recipe(made))
            except BaseException as error:  # of the user's `__setattr__`
                first = first or error
        if first is not None:
            raise first

    def _inputs(self, leaves: Sequence[Any]) -> list[Handle | None] | None:
        """The handles of all inputs except fresh ones; None if types or memory sharing have changed."""
        try:
            tensors = [container[key] for _, container, key in self._items]
        except (KeyError, IndexError):
            return None  # a place no longer exists
        tensors += [place.get() for _, place in self._slots]
        is_same_state = bool(self._last_handles) and have_handles(tensors, self._last_state)
        handles = self._last_handles.copy() if is_same_state else self._read_state(tensors)
        if handles is None:
            return None  # a place no longer holds a lazy tensor
        for position, number in self._arguments:
            handles[position] = find_handle(leaves[number])
        for position, place in self._twins:
            if find_handle(place.get()) != handles[position]:
                return None
        if not (is_same_state and self._arguments_are_apart(handles)):
            types = zip(handles, self._types, strict=True)
            if any(handle is not None and handle.type is not type_ for handle, type_ in types):
                return None
            if self._memory_pattern([h for h in handles if h is not None]) != self._pattern:
                return None
            # Remembered only after all checks passed: a refused state must be checked again next time.
            state = [handles[position] for position in self._state_positions]
            self._last_state = cast("list[Handle]", state)
            self._last_handles = handles.copy()
            for position, _ in self._arguments:
                self._last_handles[position] = None
            self._state_memories = {h.memory for h in self._last_handles if h is not None}
        return handles

    def _read_state(self, tensors: list[Any]) -> list[Handle | None] | None:
        """The handles of state and constants, by position; None if a place holds no lazy tensor."""
        state = find_handles(tensors)
        if None in state:
            return None
        handles: list[Handle | None] = [None] * len(self._types)
        for position, handle in zip(self._state_positions, state, strict=True):
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


def _merge_counters(states: Mapping[Any, tuple[HostState, Any]]) -> dict[Any, list[Any]]:
    """Step counts that were equal: the first count of each group, and the others that it stands for."""
    groups: dict[Any, list[Any]] = {}
    for name, (state, rule) in states.items():
        if rule[0] == "next":
            groups.setdefault((state.before, state.tensor.dtype), []).append(name)
    return {names[0]: names[1:] for names in groups.values() if len(names) > 1}


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
        return bool(true_value(a) == true_value(b))
    except Exception:
        return False
