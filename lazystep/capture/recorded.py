"""One recorded call of a step function: what it read, wrote, drew, computed and returned.

The function runs as it would without capture, on lazy tensors; a witness looks on. `Step` compares a recorded
call with an earlier one. If the two agree, it makes a `Replay` from them.

The first call shows which places the step reads. The next call begins with a look at all of them: only a call
whose places were all known before it began (`is_complete`) can be captured.
"""

from __future__ import annotations

import collections
import enum
import gc
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from types import MemberDescriptorType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from .. import metrics
from ..program.program import Number
from ..record import _recorder
from ..record._recorder import Cut, KnownRecording
from ..record.handle import Handle, Handles
from ..record.observer import Draw, current, observing
from ..record.source import user_line
from ..record.tensor import find_handle
from ..runtime import runtime
from ..step_closures import Added, DeviceContext
from ..tiers.program_cache import Variant
from ._places import is_same
from .arguments import Structure, put_together
from .guards import Guards, ambient
from .lasting import LastingReads
from .op_numbers import COUNT_TYPES, Count, OpNumbers
from .places import Kind, Place, Places
from .surroundings import Found, Surroundings, TensorFacts, are_same
from .traced import SOURCES, Expression, Trace, is_traced, plain
from .values import CONTAINERS, GENERATORS, describe, is_simple, state_of_generator
from .witness import Witness

_DISTURBED = "another thread recorded ops or ended a step during the call"
_WAY_OUT = "which a replay would not; do that outside"


class RecordedProgram(NamedTuple):
    """The program of a recorded call, with the handles that went into its run and came out of it."""

    known: KnownRecording
    variant: Variant
    inputs: list[Handle]
    outputs: list[Handle | None]


class Effect(NamedTuple):
    """A place that holds something else after the call than before."""

    place: Place
    before: Found
    after: Found


class _Phase(enum.Enum):
    """Which program a cut of the recording ends."""

    BEFORE = "before"  # a program of other threads
    RUNNING = "running"  # a part of the step: its function waits for a value, or another thread ends a step
    SETTLED = "settled"  # the step's own program: its function has returned
    AFTER = "after"  # a program of other threads


class RecordedCall:
    """Runs a function once and keeps everything that a replay needs to know about the call.

    `reason` says why this call can't be replayed, or is empty. The result of the call is right in any case.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        leaves: list[Any],
        structure: Structure,
        context: DeviceContext,
        places: Places,
        is_witnessed: bool = True,
        may_last: Callable[[Handle], bool] | None = None,
    ) -> None:
        """`is_witnessed`: look at what the call reads and writes. Otherwise only its program is of use.

        `may_last`: whether the value of a tensor from outside may rest, if the call reads it. None: no value.
        """
        self.reason = ""
        self.is_witnessed = is_witnessed
        self.leaves = leaves
        self.trace = Trace()
        package = (getattr(function, "__module__", None) or "").partition(".")[0]
        self.program: RecordedProgram | None = None
        self.scalars: list[tuple[Any, Expression]] = []  # true values, and expressions where known
        self.constants: dict[int, torch.Tensor] = {}
        self.moved_counts: dict[Handle, Expression] = {}
        self.effects: list[Effect] = []
        self._function = function
        self._context = context
        self.before = Surroundings(places if is_witnessed else ())
        self.witness = Witness(places, self.before, self.trace, package)
        self.after = Surroundings(())
        places = places if is_witnessed else Places()
        self._ambient = ambient()
        self._handles_before = {
            found.detail.handle
            for place in places
            if isinstance((found := self.before[place]).detail, TensorFacts)
            and found.detail.handle is not None
        }
        self.counts = self._find_counts(places)
        self._random = [state_of_generator(generator) for generator in self._host_generators(places)]
        self._generators = self._host_generators(places)
        self._cuts: list[str] = []
        self._is_cut_elsewhere = False
        # Why this call can't be compared with others. Unlike `reason`, it says nothing of the next call.
        self.disturbance = ""
        self._phase = _Phase.BEFORE
        self.draws: list[Draw] = []
        self._may_last = may_last
        self.lasting = LastingReads(self._is_lasting, lambda number: self.trace.find(number) is not None)
        self.added: list[Added] = []
        self.result: Any = None
        self._outside: list[Any] = []
        # Lists and dicts with traced numbers inside, by id, each with a copy of what it was.
        self._traced_copies: dict[int, tuple[Any, Any]] = {}
        self.new_places: list[Place] = []  # that were not known before the call
        self._run(structure, places)

    @property
    def is_complete(self) -> bool:
        """Whether all places that the call has read or written were known before it began."""
        return not self.new_places

    def _find_counts(self, places: Places) -> dict[int, Count]:
        counts: dict[int, Count] = {}
        for place in places:
            value = self.before[place].value
            if (
                isinstance(value, torch.Tensor)
                and value.device.type == "cpu"
                and value.dim() == 0
                and value.dtype in COUNT_TYPES
                and value.layout is torch.strided
                and not (value.requires_grad or value.is_inference())
            ):
                counts.setdefault(id(value), Count(value, place))
        return counts

    def _host_generators(self, places: Places) -> list[Any]:
        found = {id(g): g for place in places for g in (self.before[place].value,) if _is_host_generator(g)}
        return [random, np.random, *found.values()]

    # -- running ------------------------------------------------------------------------------------

    def _run(self, structure: Structure, places: Places) -> None:
        with observing(self) as is_observed:
            if is_observed:
                self._run_observed(structure, places)
            else:
                self._run_unobserved(structure)
        if not self.disturbance and self.is_witnessed and self.is_complete:
            self._find_lost_outputs()
        self.witness.release()

    def _run_unobserved(self, structure: Structure) -> None:
        """Another thread's call is being observed: this one runs as it is, and nothing is learned from it."""
        args, kwargs = put_together(self.leaves, structure)
        self.disturbance = _DISTURBED
        self.result = self._function(*args, **kwargs)
        runtime.flush(self._context)

    def _run_observed(self, structure: Structure, places: Places) -> None:
        runtime.flush()  # ops that other threads have recorded until now are in another program
        num_foreign = _recorder.num_foreign_ops()
        self._phase = _Phase.RUNNING
        traced = [
            self.trace.number(leaf, ("argument", number))
            if type(leaf) is float and self.is_witnessed
            else leaf
            for number, leaf in enumerate(self.leaves)
        ]
        args, kwargs = put_together(traced, structure)
        waits_before = {(reason, line): count for reason, line, count in metrics.synchronizations()}
        streams = self._streams(places)
        try:
            self._call(tuple(args), kwargs)
        except BaseException:
            runtime.flush()  # what is recorded has tags in it, and only this object knows the numbers
            raise
        for reason, line, count in metrics.synchronizations():
            if count > waits_before.get((reason, line), 0):
                way_out = "read it after the call, or in a closure"
                self._refuse(f"it waits for a value ({reason}) at {line}; {way_out}")
        if self._cuts:
            self._refuse(f"it ends a step at {self._cuts[0]}; the call has its own barriers")
        self._settle(streams)
        runtime.flush(self._context)
        if self.program is None:
            self._refuse("it records nothing")
        if self._is_cut_elsewhere or _recorder.num_foreign_ops() != num_foreign:
            self.disturbance = _DISTURBED

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self.is_witnessed:
            self.result = self._function(*args, **kwargs)
            return
        roots = [leaf for leaf in self.leaves if not is_simple(leaf)]
        try:
            numbers = OpNumbers(self.trace, self.counts)
            self.moved_counts = numbers.moved
            with numbers:
                self.result = self.witness.run(self._function, args, dict(kwargs), roots)
            self.after = self._look_after()
        finally:
            self._put_plain_numbers()

    def _look_after(self) -> Surroundings:
        """What is in all places now. The gradients of leaves are places that backward writes."""
        witness = self.witness
        # A comprehension, because a name would keep the last tensor alive.
        places = [where for one, where in witness.tensors.values() if one.is_leaf and one.requires_grad]
        for place in places:
            grad = witness.places.at(place, "grad", Kind.GRAD, f"the gradient of {place.name}")
            witness.reads.setdefault(grad)
        witness.release_tensors()
        used = {**witness.reads, **witness.writes}
        self.new_places = [place for place in used if place not in self.before]
        return Surroundings(used)

    def _put_plain_numbers(self) -> None:
        """Replace traced numbers that the call has stored: others may ask for the type of a number."""
        for kind, owner, key in self.witness.numbers_stored:
            _put_plain(kind, owner, key)
        for place in {**self.witness.writes, **self.witness.structures}:
            value = place.get()
            made = _untraced(value, self._traced_copies)
            if made is not value:
                place.set(made)

    # -- what the observer of a step is told: see `StepObserver` ---------------------------------------

    def on_draw(self, draw: Draw) -> None:
        """Keep a draw: a replay repeats it."""
        self.draws.append(draw)

    def on_host_copy(self, handle: Handle) -> None:
        """Forget the allocation of memory that the host has filled with values."""
        self.draws = [draw for draw in self.draws if draw.handle is not handle]

    def on_attributes(self, tensor: torch.Tensor) -> None:
        """Compare the attributes of a tensor that our own code reads, unseen by the witness."""
        if self.is_witnessed:
            self.witness.copied(tensor)

    def on_address(self) -> None:
        """Don't capture this call: arguments have another address each time."""
        self._refuse(f"it asks for the address of a tensor at {user_line(2)}; do that outside")

    def on_read(self, handle: Handle) -> torch.Tensor | None:
        """Give the call a value that lasts, so that it need not end its program."""
        return None if self._may_last is None else self.lasting.read(handle)

    def _is_lasting(self, handle: Handle) -> bool:
        is_drawn = any(draw.handle is handle for draw in self.draws) or handle in self.moved_counts
        return not is_drawn and self._may_last is not None and self._may_last(handle)

    def on_closure(self, added: Added) -> None:
        """Keep an added closure, also one that its throttle skips this time."""
        self.added.append(added)

    def on_exchange(self, reason: str) -> None:
        """Don't capture a call that needs an answer of other ranks."""
        self.reason = self.reason or reason

    def on_cut(self, cut: Cut, outputs: Handles[Handle | None], scalars: list[Number]) -> list[Number]:
        """Keep the step's own program, and put true values in the place of tags."""
        if self._phase in (_Phase.BEFORE, _Phase.AFTER):
            return scalars  # ops of other threads
        if current() is not self:
            self._is_cut_elsewhere = True
        elif self._phase is _Phase.SETTLED:
            self._phase = _Phase.AFTER
            variant = runtime.programs.find(cut.known, cut.outputs)
            assert variant is not None, "the barrier has just found it"
            self.program = RecordedProgram(cut.known, variant, list(cut.inputs), list(outputs))
            for position, handle in enumerate(self.program.inputs):
                if handle.run is None and handle.tensor is not None and handle not in self._handles_before:
                    self.constants[position] = handle.tensor.clone()
        else:
            self._cuts.append(user_line(2))
        found = [self.trace.find(value) for value in scalars]
        true = [value if one is None else plain(one) for value, one in zip(scalars, found, strict=True)]
        for value, one in zip(true, found, strict=True):
            self.scalars.append((value, None if one is None else one.expression))
        return true

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or reason

    # -- after the call ----------------------------------------------------------------------------

    def _settle(self, streams: Mapping[torch.Generator, torch.Tensor]) -> None:
        """Compare places and numbers with the start of the call, before the barrier decides the outputs."""
        if self.witness.reason:
            self._refuse(self.witness.reason)
        self._find_effects()
        for count in self.counts.values():
            if count.is_lost:
                self._refuse(f"it changes {count.place.name}, a CPU tensor, in an unknown way")
        if [state_of_generator(generator) for generator in self._generators] != self._random:
            self._refuse(
                "it draws random numbers with Python or NumPy; draw them on the lazy device, or pass them "
                "as arguments"
            )
        for value in self.lasting.found.values():
            if _recorder.is_pending(value.handle):
                self._refuse(f"it reads a value at {value.line}, and then changes it; read it after the call")
        if not self.reason:
            self._check_draws(streams)
        self.result_leaves, self.result_spec = pytree.tree_flatten(self.result, is_leaf=_is_size)
        self._phase = _Phase.SETTLED
        if any(map(is_traced, self.result_leaves)):
            self.result = pytree.tree_unflatten(map(plain, self.result_leaves), self.result_spec)

    def _note_outside(self, value: Any) -> None:
        """Remember which objects that the call leaves behind were there before it."""
        if self.witness.is_outside(value):
            self._outside.append(value)
        elif isinstance(value, (list, tuple, dict)):
            for part in value.values() if isinstance(value, dict) else value:
                self._note_outside(part)

    def as_left(self, container: Any) -> Any:
        """A list or dict as the call has left it: with its traced numbers."""
        return self._traced_copies.get(id(container), (None, container))[1]

    def is_outside(self, value: Any) -> bool:
        """Whether something that the call has left behind was there before it."""
        return any(value is one for one in self._outside)

    def _find_effects(self) -> None:
        for place in {**self.witness.reads, **self.witness.writes}:
            if place not in self.before or place in self.witness.shallow:
                continue
            before, after = self.before[place], self.after[place]
            # The same value again: no effect if the place is compared, so that it is there anyway.
            is_compared = (
                place in self.witness.reads and place not in self.witness.numbers | self.witness.present
            )
            is_put = (
                place in self.witness.writes and not is_compared and not isinstance(after.value, CONTAINERS)
            )
            if not is_traced_source(after.value, place) and (is_put or not are_same(before, after)):
                self.effects.append(Effect(place, before, after))
                self._note_outside(after.value)
                if before.value is after.value and isinstance(before.value, (list, collections.deque)):
                    self._refuse(describe_change(self.effects[-1]))  # a new item is a new place in each call

    def _streams(self, places: Places) -> dict[torch.Generator, torch.Tensor]:
        known = {torch.default_generator: None}
        for place in places:
            value = self.before[place].value
            if isinstance(value, torch.Generator) and value.device.type == "cpu":
                known[value] = None
        return {generator: generator.get_state() for generator in known}

    def _check_draws(self, streams: Mapping[torch.Generator, torch.Tensor]) -> None:
        """Refuse if repeating the recorded draws does not move all generators as the call did."""
        drawn_from = {draw.generator for draw in self.draws if draw.generator is not None}
        for generator in drawn_from - streams.keys():
            if not self.witness.is_outside(generator):
                self._refuse(
                    "it draws from a torch.Generator that it makes itself, and a replay would go on with its "
                    "stream; make the generator outside"
                )
        now = {generator: generator.get_state() for generator in streams.keys() | drawn_from}
        try:
            for generator, state in streams.items():
                generator.set_state(state)
            for draw in self.draws:
                draw.again()
            if not all(torch.equal(generator.get_state(), now[generator]) for generator in streams):
                self._refuse(
                    "it draws random numbers on the CPU, or seeds a generator; draw them on the lazy device, "
                    "and seed outside"
                )
        finally:
            for generator, state in now.items():
                generator.set_state(state)

    def owned_handles(self) -> set[Handle]:
        """The values that a replay can deliver: results, arguments of closures, and tensors in places."""
        leaves = list(self.result_leaves)
        for added in self.added:
            leaves += pytree.tree_leaves((added.args, added.kwargs))
        for place in {**self.witness.reads, **self.witness.writes}:
            leaves += _leaves_of(self.after[place].value)
        return {h for leaf in leaves if (h := find_handle(leaf)) is not None}

    def _find_lost_outputs(self) -> None:
        if self.program is None or self.reason:
            return
        owned = self.owned_handles()
        lost = [
            (position, handle.weakly())
            for position, handle in enumerate(self.program.outputs)
            if handle is not None and handle not in owned
        ]
        if not lost:
            return
        for position, _ in lost:
            self.program.outputs[position] = None
        gc.collect()  # only a reference cycle may be holding the value
        for position, reference in lost:
            if reference() is not None:
                _wait_for_maker(reference)  # the queued step holds its outputs, too
            if reference() is None:
                continue
            value = self.program.variant.outputs[position]
            maker = self.program.variant.executable.program.maker_of(value)
            has_graph = any(isinstance(r, torch.Tensor) and r.requires_grad for r in self.result_leaves)
            self._refuse(
                f"what it returns carries a graph, which holds the result of {maker}: call backward "
                "inside, or compute it under torch.no_grad()"
                if has_graph
                else f"the result of {maker} is kept where a replay can't put a new one"
            )

    # -- for a replay ------------------------------------------------------------------------------

    def expressions(self) -> Iterator[Expression]:
        """All expressions that a replay evaluates, but for those of its results."""
        yield from (expression for _, expression in self.scalars if expression is not None)
        for symbol, left, right in self.trace.guards:
            if symbol != "same" or left[0] != "place":
                yield from (left, right)
        yield from (count.expression for count in self.counts.values() if count.is_changed)

    def pinned_places(self) -> set[Place]:
        """Places of numbers that must stay the same."""
        pinned = {left[1] for symbol, left, _ in self.trace.guards if symbol == "same" and left[0] == "place"}
        return pinned | (self.witness.pinned & self.witness.numbers)

    def make_guards(self, followed: set[Place]) -> Guards:
        """The conditions for replays of this call. `followed`: places whose numbers a replay reads."""
        counts = {key for key, count in self.counts.items()}
        return Guards(self.witness, self.before, followed, counts, self._ambient)

    def difference(self, earlier: RecordedCall) -> str:
        """What this call has found changed since an earlier one, with both values; empty if nothing."""
        for place in self.witness.reads:
            if (
                place not in self.before
                or place in self.witness.numbers
                or id(self.before[place].value) in self.counts
            ):
                continue
            known = earlier.before if place in earlier.before else earlier.after
            if place in known:
                old, new = known[place], self.before[place]
                old = old._replace(value=plain(old.value))
                if _is_other(old, new, place in self.witness.structures):
                    return f"{place.name} from {describe_found(old)} to {describe_found(new)}"
        pinned = self.pinned_places()
        for place in self.witness.numbers & pinned:
            known = earlier.before if place in earlier.before else earlier.after
            if (
                place in self.before
                and place in known
                and not is_same(known[place].value, self.before[place].value)
            ):
                return f"{place.name} from {known[place].value!r} to {self.before[place].value!r}"
        return ""

    def drop_tensors(self) -> None:
        """Release the result, which no later call is compared with."""
        self.result = None


def _wait_for_maker(reference: Callable[[], Handle | None]) -> None:
    """Block until the step that makes a value has run or failed."""
    handle = reference()
    run = None if handle is None else handle.run
    del handle
    if run is not None:
        run.wait()


def _is_other(old: Found, new: Found, is_structure: bool) -> bool:
    """Whether a place that is compared before a replay holds something else."""
    a, b = old.detail, new.detail
    if isinstance(a, TensorFacts) and isinstance(b, TensorFacts):
        types = [None if facts.handle is None else facts.handle.type for facts in (a, b)]
        return types[0] is not types[1] or a.flags != b.flags or a.version != b.version
    if isinstance(old.value, CONTAINERS) and isinstance(new.value, CONTAINERS):
        return type(old.value) is not type(new.value) or (is_structure and a != b)
    return not are_same(old, new)


def describe_found(found: Found) -> str:
    """What was in a place, in a message."""
    if isinstance(found.detail, TensorFacts) and found.detail.handle is not None:
        return f"a tensor {found.detail.handle.type}"
    if isinstance(found.value, CONTAINERS):
        detail = found.detail[1]
        return f"a {type(found.value).__name__} of {detail if type(detail) is int else len(detail)}"
    return describe(plain(found.value))


def sources_in(expression: Expression, found: set[Any]) -> None:
    """Collect the sources of an expression."""
    if isinstance(expression, tuple):
        if expression[0] in SOURCES:
            found.add(expression)
        else:
            for part in expression[1:]:
                sources_in(part, found)


def is_traced_source(value: Any, place: Place) -> bool:
    """Whether a number is the one that was in this place when the call began."""
    return is_traced(value) and value.expression == ("place", place)


def describe_change(effect: Effect) -> str:
    """An effect in a message."""
    before, after = effect.before.value, effect.after.value
    if isinstance(before, CONTAINERS) and before is after:
        old, new = (
            detail[1] if type(detail[1]) is int else len(detail[1])
            for detail in (effect.before.detail, effect.after.detail)
        )
        kind = type(before).__name__
        what = (
            f"the length of a {kind}, {effect.place.name}, from {old} to {new}" if old != new else f"a {kind}"
        )
        return f"it changes {what}, {_WAY_OUT}"
    if isinstance(before, torch.Tensor) and before is after:
        if effect.before.detail.version is not None:
            return f"it changes {effect.place.name}, a CPU tensor, {_WAY_OUT}"
        return f"it changes requires_grad or hooks of {effect.place.name}, {_WAY_OUT}"
    if before is after:
        return f"it changes what is in {effect.place.name}, a {type(before).__name__}, {_WAY_OUT}"
    return f"it changes {effect.place.name} from {describe(before)} to {describe(plain(after))}, {_WAY_OUT}"


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)  # pytree would make a tuple of it


def _is_host_generator(value: Any) -> bool:
    return isinstance(value, GENERATORS) and not isinstance(value, torch.Generator)


def _leaves_of(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    return pytree.tree_leaves(value) if isinstance(value, (list, tuple, dict)) else []


def _put_plain(kind: int, owner: Any, key: Any) -> None:
    """Put the plain number where a traced one was stored, if it is still there."""
    if kind == 3:
        place = Place(owner, None, Kind.CELL, "")
    elif kind == 0:
        if isinstance(owner, type):
            place = Place(owner, key, Kind.CLASS, "")
        else:
            slot = inspect.getattr_static(type(owner), key, None)
            names = getattr(owner, "__dict__", {})
            is_slot = isinstance(slot, MemberDescriptorType)
            place = Place(owner, slot, Kind.SLOT, "") if is_slot else Place(names, key, Kind.ITEM, "")
    else:
        place = Place(owner, key, Kind.ITEM, "")
    value = place.get()
    if is_traced(value):
        place.set(plain(value))


def _untraced(value: Any, seen: dict[int, tuple[Any, Any]]) -> Any:
    """`value` with plain numbers in place of traced ones. Lists and dicts are changed in place, each once.

    `seen` gets each of them by its id, and a copy of what it was.
    """
    if is_traced(value):
        return plain(value)
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        elements = [_untraced(element, seen) for element in value]
        if all(a is b for a, b in zip(elements, value, strict=True)):
            return value
        return type(value)(*elements) if hasattr(value, "_fields") else type(value)(elements)
    if isinstance(value, (dict, list)) and id(value) not in seen:
        seen[id(value)] = value, value.copy()
        for key, element in list(value.items() if isinstance(value, dict) else enumerate(value)):
            made = _untraced(element, seen)
            if made is not element:
                value[key] = made
    return value
