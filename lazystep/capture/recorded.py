"""One recorded call of a step function: what it read, wrote, drew, computed and returned.

The function runs as it would without capture, on lazy tensors; a witness looks on. `Step` compares a recorded
call with an earlier one. If the two agree, it makes a `Replay` from them.

The first call shows which places the step reads. The next call begins with a look at all of them: only a call
whose places were all known before it began (`is_complete`) can be captured.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .. import metrics
from ..program.program import Number
from ..record import _recorder
from ..record._recorder import Cut
from ..record.handle import Handle, Handles
from ..record.observer import Draw, current, observing
from ..record.source import user_line
from ..record.tensor import find_handle
from ..runtime import runtime
from ..step_closures import Added, DeviceContext
from .arguments import Structure
from .changes import Effect, describe_change, find_difference, find_effects
from .given_containers import GivenContainers
from .guards import Guards, ambient, ambient_change
from .lasting import LastingReads
from .op_numbers import OpNumbers, find_counts
from .places import Kind, Place, Places
from .random_state import RandomState, Rewind
from .recorded_program import RecordedProgram
from .stored_numbers import StoredNumbers
from .surroundings import Surroundings, TensorFacts
from .testimony import Testimony
from .traced import Expression, Trace, is_traced, plain, sources_in
from .values import copy_of, is_simple
from .witness import Witness

_DISTURBED = "another thread recorded ops or ended a step during the call"


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
        given: GivenContainers,
        context: DeviceContext,
        places: Places,
        is_witnessed: bool = True,
        new_arguments: Collection[Handle] | None = None,
    ) -> None:
        """`is_witnessed`: look at what the call reads and writes. Otherwise only its program is of use.

        `new_arguments`: see `LastingReads`.
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
        self._given = given
        self._context = context
        self.before = Surroundings(places if is_witnessed else ())
        self.testimony = Testimony(places)
        self._witness = Witness(self.testimony, self.before, self.trace, package)
        self.after = Surroundings(())
        self._ambient = ambient()
        found = [(place, self.before[place]) for place in (places if is_witnessed else ())]
        self._handles_before = {
            there.detail.handle
            for _, there in found
            if isinstance(there.detail, TensorFacts) and there.detail.handle is not None
        }
        self.counts = find_counts((place, there.value) for place, there in found)
        self._random = RandomState(there.value for _, there in found)
        self._cuts: list[str] = []
        self._is_cut_elsewhere = False
        # Why this call can't be compared with others. Unlike `reason`, it says nothing of the next call.
        self.disturbance = ""
        self.has_imported = False  # a module for the first time, which no later call does again
        self._phase = _Phase.BEFORE
        self.draws: list[Draw] = []
        self.lasting = LastingReads(new_arguments)
        self.added: list[Added] = []
        self.result: Any = None
        self._outside: list[Any] = []
        self._numbers = StoredNumbers()
        self.new_places: list[Place] = []  # that were not known before the call
        self._run(structure)

    @property
    def is_complete(self) -> bool:
        """Whether all places that the call has read or written were known before it began."""
        return not self.new_places

    # -- running ------------------------------------------------------------------------------------

    def _run(self, structure: Structure) -> None:
        with observing(self) as is_observed:
            if is_observed:
                self._run_observed(structure)
            else:
                self._run_unobserved(structure)
        if not self.disturbance and self.is_witnessed and self.is_complete:
            self._find_lost_outputs()
        self._witness.release()

    def _run_unobserved(self, structure: Structure) -> None:
        """Another thread's call is being observed: this one runs as it is, and nothing is learned from it."""
        self.disturbance = _DISTURBED
        try:
            args, kwargs = self._given.fill(self.leaves, structure)
            self.result = self._function(*args, **kwargs)
        finally:
            self._given.take_back()
        runtime.flush(self._context)

    def _run_observed(self, structure: Structure) -> None:
        runtime.flush()  # ops that other threads have recorded until now are in another program
        num_foreign = _recorder.num_foreign_ops()
        self._phase = _Phase.RUNNING
        traced = [
            self.trace.number(leaf, ("argument", number))
            if type(leaf) is float and self.is_witnessed
            else leaf
            for number, leaf in enumerate(self.leaves)
        ]
        num_modules = len(sys.modules)
        waits_before = {(reason, line): count for reason, line, count in metrics.synchronizations()}
        self._random.begin()
        try:
            args, kwargs = self._given.fill(traced, structure)
            self._call(tuple(args), kwargs)
        except BaseException:
            runtime.flush()  # what is recorded has tags in it, and only this object knows the numbers
            raise
        self.has_imported = len(sys.modules) > num_modules
        for reason, line, count in metrics.synchronizations():
            if count > waits_before.get((reason, line), 0):
                way_out = "read it after the call, or in a closure"
                if reason == metrics.LOOKS_FOR_NAN:
                    way_out = "switch anomaly mode off (torch.autograd.set_detect_anomaly)"
                self._refuse(f"it waits for a value ({reason}) at {line}; {way_out}")
        if self._cuts:
            self._refuse(f"it ends a step at {self._cuts[0]}; the call has its own barriers")
        self._settle()
        runtime.flush(self._context)
        if self.program is None:
            self._refuse("it records nothing")
        if self._is_cut_elsewhere or _recorder.num_foreign_ops() != num_foreign:
            self.disturbance = _DISTURBED

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self.is_witnessed:
            try:
                self.result = self._function(*args, **kwargs)
            finally:
                self._given.take_back()
            return
        roots = [leaf for leaf in self.leaves if not is_simple(leaf)]
        try:
            numbers = OpNumbers(self.trace, self.counts)
            self.moved_counts = numbers.moved
            with numbers:
                self.result = self._witness.run(
                    self._function, args, dict(kwargs), roots, self._given.containers
                )
            if changed := self._given.take_back():
                self._refuse(f"it changes an argument, a {changed}, which a replay would not; change a copy")
            self.after = self._look_after()
        finally:
            self._given.take_back()
            self._numbers.put_plain(self.testimony)
            self._given.put_plain()

    def _look_after(self) -> Surroundings:
        """What is in all places now. The gradients of leaves are places that backward writes."""
        testimony = self.testimony
        for place in self._witness.places_of_leaves():
            grad = testimony.places.at(place, "grad", Kind.GRAD, f"the gradient of {place.name}")
            testimony.reads.setdefault(grad)
        self._witness.release_tensors()
        used = testimony.used_places()
        self.new_places = [place for place in used if place not in self.before]
        return Surroundings(used)

    # -- what the observer of a step is told: see `StepObserver` ---------------------------------------

    def on_draw(self, draw: Draw) -> None:
        """Keep a draw: a replay repeats it."""
        self.draws.append(self._random.noted(draw))

    def on_host_copy(self, handle: Handle) -> None:
        """Forget the allocation of memory that the host has filled with values."""
        self.draws = [draw for draw in self.draws if draw.handle is not handle]

    def on_attributes(self, tensor: torch.Tensor) -> None:
        """Compare the attributes of a tensor that our own code reads, unseen by the witness."""
        if self.is_witnessed:
            self._witness.copied(tensor)

    def on_storage(self, asked: str) -> None:
        """Don't capture this call: the storages of arguments differ where the arguments do not."""
        self._refuse(f"it asks for {asked} at {user_line(2)}; do that outside")

    def on_read(self, handle: Handle) -> torch.Tensor | None:
        """Give the call a value that lasts, so that it need not end its program."""
        return self.lasting.read(handle, self._is_drawn, self._is_traced)

    def _is_drawn(self, handle: Handle) -> bool:
        return handle in self.moved_counts or any(draw.handle == handle for draw in self.draws)

    def _is_traced(self, number: Number) -> bool:
        return self.trace.find(number) is not None

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
                    self.constants[position] = copy_of(handle.tensor)
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

    def _settle(self) -> None:
        """Compare places and numbers with the start of the call, before the barrier decides the outputs."""
        if self.testimony.reason:
            self._refuse(self.testimony.reason)
        if changed := ambient_change(self._ambient):
            self._refuse(f"it leaves {changed} behind, which a replay would not; change it back, or outside")
        for effect in find_effects(self.testimony, self.before, self.after):
            self.effects.append(effect)
            self._note_outside(effect.after.value)
            if effect.changes_list:
                self._refuse(describe_change(effect))  # a new item is a new place in each call
        for count in self.counts.values():
            if count.is_lost:
                self._refuse(f"it changes {count.place.name}, a CPU tensor, in an unknown way")
        self._refuse(self._random.find_obstacle_on_host())
        for value in self.lasting.found.values():
            if _recorder.is_pending(value.handle):
                self._refuse(f"it reads a value at {value.line}, and then changes it; read it after the call")
        if not self.reason:
            self._refuse(self._random.find_obstacle(self.draws, self._is_outside))
        self.result_leaves, self.result_spec = pytree.tree_flatten(self.result, is_leaf=_is_size)
        self._phase = _Phase.SETTLED
        if any(map(is_traced, self.result_leaves)):
            self.result = pytree.tree_unflatten(map(plain, self.result_leaves), self.result_spec)

    def _is_outside(self, generator: torch.Generator) -> bool:
        # Without a witness nobody knows. Then there is an earlier call with one that did the same.
        return not self.is_witnessed or self._witness.is_outside(generator)

    def _note_outside(self, value: Any) -> None:
        """Remember which objects that the call leaves behind were there before it."""
        if self._witness.is_outside(value):
            self._outside.append(value)
            if not is_simple(value) and not isinstance(value, torch.Tensor):
                self._witness.identified(value)  # a replay puts this very object there
        elif isinstance(value, (list, tuple, dict)):
            for part in value.values() if isinstance(value, dict) else value:
                self._note_outside(part)

    def as_left(self, container: Any) -> Any:
        """A list or dict as the call has left it: with its traced numbers."""
        return self._numbers.as_left(container)

    def is_outside(self, value: Any) -> bool:
        """Whether something that the call has left behind was there before it."""
        return any(value is one for one in self._outside)

    def _owned_handles(self) -> set[Handle]:
        """The values that a replay delivers, and those that nobody can reach after a replay.

        Delivered: results, arguments of closures, and tensors in places. In a replay they have no graph, so
        nobody can reach the leaves of graphs that backward is done with, such as a gradient penalty's input.
        Nor are they views: nobody can reach the tensor that the call has made and of which one shows a part.
        """
        assert self.program is not None
        leaves = list(self.result_leaves)
        for added in self.added:
            leaves += pytree.tree_leaves((added.args, added.kwargs))
        for place in self.testimony.used_places():
            leaves += _leaves_of(self.after[place].value)
        leaves += _leaves_of_used_graphs(leaves)
        owned = {h for leaf in leaves if (h := find_handle(leaf)) is not None}
        found_there = {handle.memory for handle in self.program.inputs}
        bases = [leaf._base for leaf in leaves if isinstance(leaf, torch.Tensor)]
        made = {h for base in bases if base is not None and (h := find_handle(base)) is not None}
        return owned | {handle for handle in made if handle.memory not in found_there}

    def _find_lost_outputs(self) -> None:
        if self.program is None or self.reason:
            return
        if maker := self.program.drop_lost_outputs(self._owned_handles()):
            has_graph = any(isinstance(r, torch.Tensor) and r.requires_grad for r in self.result_leaves)
            with_gradient = [
                number
                for number, leaf in enumerate(self.leaves)
                if isinstance(leaf, torch.Tensor) and leaf.is_leaf and leaf.grad is not None
            ]
            if has_graph:
                self._refuse(
                    f"what it returns carries a graph, which holds the result of {maker}: call backward "
                    "inside, or compute it under torch.no_grad()"
                )
            elif with_gradient:
                self._refuse(
                    f"it leaves a gradient in argument {with_gradient[0]}, where a replay can't put a new "
                    "one; differentiate by x.detach().requires_grad_() inside"
                )
            elif any(isinstance(r, torch.Tensor) and r._base is not None for r in self.result_leaves):
                self._refuse(
                    f"it returns a view of a view, which holds the result of {maker}: return it by .detach()"
                )
            else:
                self._refuse(f"the result of {maker} is kept where a replay can't put a new one")

    # -- for a replay ------------------------------------------------------------------------------

    @property
    def num_draws(self) -> int:
        """How many random tensors the call has drawn."""
        return len(self.draws)

    @property
    def rewinds(self) -> list[Rewind]:
        """Where generators of random numbers went back to an earlier state."""
        return self._random.rewinds

    def had_input(self, position: int, handle: Handle) -> bool:
        """Whether the input in this position was this very value."""
        return self.program is not None and self.program.inputs[position] == handle

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
        return pinned | (self.testimony.pinned & self.testimony.numbers)

    def numbers_compared(self) -> str:
        """The places of numbers of which a result must stay the same, in a message."""
        found: set[Expression] = set()
        for symbol, left, _ in self.trace.guards:
            if symbol == "same":
                sources_in(left, found)
        names = sorted({one[1].name if isinstance(one[1], Place) else f"argument {one[1]}" for one in found})
        return f"a number computed from {', '.join(names)}" if names else "a number"

    def make_guards(self, followed: set[Place]) -> Guards:
        """The conditions for replays of this call. `followed`: places whose numbers a replay reads."""
        counts = {key for key, count in self.counts.items()}
        return Guards(self.testimony, self.before, followed, counts, self._ambient)

    def difference(self, earlier: RecordedCall) -> str:
        """What this call has found changed since an earlier one, with both values; empty if nothing."""
        around = earlier.before, earlier.after
        return find_difference(self.testimony, self.before, around, self.pinned_places(), self.counts)

    def drop_tensors(self) -> None:
        """Release the result, which no later call is compared with."""
        self.result = None


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)  # pytree would make a tuple of it


def _leaves_of(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    return pytree.tree_leaves(value) if isinstance(value, (list, tuple, dict)) else []


def _leaves_of_used_graphs(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """The leaves behind these tensors that have a gradient, which tells of a backward, and the gradients."""
    waiting = [one.grad_fn for one in tensors if isinstance(one, torch.Tensor) and one.grad_fn is not None]
    seen = set(waiting)
    leaves: list[torch.Tensor] = []
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf.grad is not None:
            leaves += [leaf, leaf.grad]
        following = {above for above, _ in node.next_functions if above is not None} - seen
        seen |= following
        waiting += following
    return leaves
