"""`@lazystep.step`: an ordinary step function that is recorded until two calls agree, and then replayed."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any, Generic, ParamSpec, TypeVar, overload

from .. import metrics
from ..barrier import finish_step
from ..errors import CaptureError
from ..program.difference import first_difference
from ..record import observer
from ..record._recorder import num_entries, take_arguments
from ..record.handle import Handle
from ..record.tensor import find_handle
from ..runtime import runtime
from ..step_closures import DeviceContext, lazy_context
from ._places import is_same
from .arguments import (
    Kind,
    MovedArguments,
    Structure,
    differ_in_sizes,
    kind_difference,
    kind_of,
    take_apart,
)
from .given_containers import GivenContainers
from .notes import Notes, warn
from .outline import Evidence, Outline
from .place_finder import STEPS_KEY
from .places import Places
from .recipes import NotReplayableError, UnsettledError
from .recorded import RecordedCall
from .replay import Replay
from .witness import obstacle

P = ParamSpec("P")
R = TypeVar("R")

_MAX_CHANGES = 12
_MAX_NEW_SIZES = 24  # calls in a row, each with a size that no earlier call had
_MAX_RECENT = 4
_MAX_SKIPPED = 64  # calls between two tries to capture a step that could not be captured
_MAX_PLACES = 20_000
_MAX_KINDS = 16  # without a capture; of those that differ in sizes, as many as captures are kept
_MAX_OUTLINES = 8


class _Captures:
    """The calls whose arguments have the same structure, types and plain values."""

    def __init__(self, changed: str) -> None:
        """`changed`: how these arguments differ from those of the kind before."""
        self.changed = changed
        # The last calls that might agree with the next one: gradient accumulation alternates between two.
        self.recent: list[RecordedCall] = []
        self.replays: list[Replay] = []
        self.has_recorded = False
        # Other kinds differ in more than sizes, or a capture from one call was not confirmed.
        self.needs_two_calls = False
        self.num_changed = 0  # recordings in a row that found something changed
        self.num_unused = 0  # captures in a row that were made while the last one had not been used
        self.num_disturbed = 0  # recordings in a row during which another thread recorded
        self.num_unsettled = 0  # recordings in a row that could neither be captured nor refused
        self.num_refused = 0  # recordings in a row that were refused
        self.num_imports = 0  # recordings that imported modules, and were not captured for some reason
        self.num_to_skip = 0  # calls that are recorded without a witness
        self.needed_new_argument = False  # the last witnessed call: see `LastingReads`
        self._last_arguments: list[Callable[[], Handle | None]] = []  # of the last witnessed call

    def new_arguments(self, leaves: list[Any]) -> set[Handle]:
        """The arguments of a witnessed call that the last one did not have."""
        arguments = {handle for leaf in leaves if (handle := find_handle(leaf)) is not None}
        before = {handle for find in self._last_arguments if (handle := find()) is not None}
        self._last_arguments = [handle.weakly() for handle in arguments]
        return arguments - before


class _BoundSteps(dict[int, "Step[..., Any]"]):
    """The steps of an object, one for each step method, kept in the object's `__dict__`.

    A copy of the object, or an unpickled one, begins without any.
    """

    def __reduce__(self) -> Any:
        return _BoundSteps, ()

    def __deepcopy__(self, memo: Any) -> Any:
        return _BoundSteps()

    def __copy__(self) -> Any:
        return _BoundSteps()


class Step(Generic[P, R]):
    """A captured step function, made by `lazystep.step`. Call it like the function itself.

    `num_recorded` and `num_replayed` count the calls; `explain()` says why calls were not replayed.

        loss = train_step(x)
        print(train_step.num_replayed, train_step.explain())
    """

    def __init__(
        self, function: Callable[P, R], fullgraph: bool, audit_every: int | None, max_captures: int
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._fullgraph = fullgraph
        self._audit_every = audit_every
        self._max_captures = max_captures
        self._bound: dict[int, tuple[Any, Step[..., Any]]] = {}  # of objects without a `__dict__`
        self._captures: dict[Kind, _Captures] = {}
        # Of all kinds: a call of a new kind mostly reads and writes where the others do.
        self._places = Places()
        self._outlines: list[Outline] = []  # of calls that did different things, the last used ones first
        self._num_new_kinds = 0  # calls in a row whose arguments had a new kind
        self._num_useless = 0  # captures in a row that were dropped and had hardly been used
        self._notes = Notes()
        # The inputs of the program that the last call has recorded, and which of them it writes.
        self._last_program: tuple[list[Handle], list[bool]] | None = None
        self.num_recorded = 0
        self.num_replayed = 0

    def __get__(self, owner: Any, kind: type | None = None) -> Step[..., R]:
        """The step as a method: each object has its own captures."""
        if owner is None:
            return self
        names = getattr(owner, "__dict__", None)
        if not isinstance(names, dict):
            # The object is kept alive, so that no other object gets its id.
            if id(owner) not in self._bound:
                self._bound[id(owner)] = owner, self._bind(owner)
            return self._bound[id(owner)][1]
        steps = names.get(STEPS_KEY)
        if steps is None:
            steps = names[STEPS_KEY] = _BoundSteps()
        if id(self) not in steps:
            steps[id(self)] = self._bind(owner)
        return steps[id(self)]

    def _bind(self, owner: Any) -> Step[..., R]:
        return Step(self._function.__get__(owner), self._fullgraph, self._audit_every, self._max_captures)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Record or replay one step and queue it. Does not wait for values. Raises as `mark_step` does."""
        if observer.anywhere() is not None:
            if observer.current() is not None:  # inside another captured step, which records it
                return self._call_inside(args, kwargs)
            observer.wait_for_other_threads()
        structure: Structure
        taken = None if kwargs else take_arguments(args)
        if taken is not None:  # most steps are called like this
            (leaves, kind), structure = taken, len(args)
        else:
            leaves, structure = take_apart(args, kwargs)
            kind = kind_of(leaves, structure)
        if num_entries() or runtime.recorder.is_forked:
            runtime.flush()
        captures = self._captures.get(kind)
        if captures is None:
            captures = self._captures_of_new(kind)
        else:
            self._num_new_kinds = 0
        result: R
        moved: MovedArguments | None = None
        for replay in captures.replays:
            values = replay.guards.hold()
            if values is None or (replay.lasting and replay.changed_value(leaves, values)):
                continue
            if self._is_audit_due(replay):
                predicted = replay.predict(leaves, values)
                if predicted is None:
                    continue  # this call is not one for the capture, so that it can't tell of it
                moved = MovedArguments(args, kwargs, leaves, structure)
                given = GivenContainers(args, kwargs)
                result = self._audit(captures, replay, predicted, leaves, structure, given, lazy_context)
                break
            is_done, result = replay.run(leaves, values, lazy_context)
            if is_done:
                self.num_replayed += 1
                replay.last_call = self.num_recorded + self.num_replayed
                break
        else:
            moved = MovedArguments(args, kwargs, leaves, structure)
            given = GivenContainers(args, kwargs)
            try:
                result = self._record(captures, leaves, structure, given, lazy_context)
            except Exception as error:
                moved.explain(error)
                raise
        finish_step(lazy_context)
        if moved is not None and self._last_program is not None:
            (inputs, written), self._last_program = self._last_program, None
            moved.check(self._name, inputs, written)
        return result

    def _call_inside(self, args: Sequence[Any], kwargs: dict[str, Any]) -> R:
        """The call as a part of another step, which is being recorded."""
        inner = GivenContainers(args, kwargs)
        try:
            own_args, own_kwargs = inner.fill(*take_apart(args, kwargs))
            return self._function(*own_args, **own_kwargs)
        finally:
            inner.take_back()

    def _captures_of_new(self, kind: Kind) -> _Captures:
        """Captures for calls of a new kind. Of the kinds without a replay, the oldest are forgotten."""
        self._num_new_kinds += 1
        last = next(reversed(self._captures), None)
        changed = "" if last is None else kind_difference(last, kind)
        # Sizes that vary come again in the end; each has a capture.
        has_sizes = any(differ_in_sizes(one, kind) for one in islice(reversed(self._captures), _MAX_KINDS))
        if self._num_new_kinds == (_MAX_NEW_SIZES if has_sizes else _MAX_CHANGES):
            self._fall_back(f"{changed} in each call")
        idle = [key for key, one in self._captures.items() if not one.replays]
        if len(idle) >= (max(_MAX_KINDS, self._max_captures) if has_sizes else _MAX_KINDS):
            del self._captures[idle[0]]
        captures = self._captures[kind] = _Captures(changed)
        captures.needs_two_calls = not has_sizes
        # A witness costs more than a recording. It does not pay where captures go before they are used.
        captures.num_to_skip = min(self._num_useless, _MAX_SKIPPED)
        return captures

    # -- recording -----------------------------------------------------------------------------------

    def _record(
        self,
        captures: _Captures,
        leaves: list[Any],
        structure: Structure,
        given: GivenContainers,
        context: DeviceContext,
    ) -> R:
        changed = captures.replays[0].difference(leaves) if captures.replays else ""
        hindrance = obstacle()
        is_witnessed = not hindrance and not captures.num_to_skip
        new_arguments = captures.new_arguments(leaves) if is_witnessed else None
        call = self._record_once(leaves, structure, given, context, is_witnessed, new_arguments)
        result: R = call.result
        call.drop_tensors()
        if hindrance:
            self._fall_back(hindrance)
        elif not is_witnessed:
            captures.num_to_skip -= 1
        elif call.disturbance:
            self._note(f"recorded, not captured: {call.disturbance}")
            captures.num_disturbed += 1
            if captures.num_disturbed == _MAX_NEW_SIZES and not captures.replays:
                self._refuse(captures, call.disturbance)
        elif call.reason:
            captures.recent.clear()
            # A first call may fill caches and create state. A side effect that also happens in the second
            # call happens in every call.
            needs_another = call.lasting.needs_new_argument and not captures.needed_new_argument
            if call.has_imported:
                captures.num_imports += 1
                needs_another |= captures.num_imports < _MAX_CHANGES
            if captures.has_recorded and not needs_another:
                self._refuse(captures, call.reason)
            elif captures.has_recorded:
                self._note(f"recorded, not captured yet: {call.reason}")
            captures.has_recorded = True
        else:
            captures.has_recorded = True
            self._try_to_capture(captures, call, changed)
        if not call.disturbance:
            captures.num_disturbed = 0
        if is_witnessed:
            captures.needed_new_argument = call.lasting.needs_new_argument
        return result

    def _try_to_capture(self, captures: _Captures, call: RecordedCall, changed: str) -> None:
        """Make a capture of this call and an earlier one that agrees with it."""
        last = captures.recent[0] if captures.recent else None
        unsettled = "two calls must agree, and this was the first" if last is None else ""
        if last is not None and not call.is_complete:
            unsettled = f"it reads or writes {call.new_places[0].name} for the first time"
        changed_since = "" if last is None else call.difference(last)
        if changed_since:
            unsettled = f"{changed_since} changes between calls"
        if not captures.replays and self._capture_like_another(captures, call):
            return
        earlier = next((one for one in captures.recent if _agree(one, call)), None)
        if earlier is not None and call.is_complete:
            try:
                replay = Replay(earlier, call)
                is_unused = bool(captures.replays) and captures.replays[0].num_replays == 0
                captures.num_unused = captures.num_unused + 1 if is_unused else 0
                if captures.num_unused == _MAX_NEW_SIZES:
                    captures.num_unused = 0
                    reason = changed or call.numbers_compared()
                    self._refuse(captures, f"{reason} changes between calls; make it an argument of the step")
                    return
                self._add_capture(captures, replay, changed)
                self._remember(call)
                self._testify(replay)
                return
            except UnsettledError as error:
                unsettled = unsettled or str(error)
            except NotReplayableError as error:
                if not changed_since:  # otherwise the next call may be like this one
                    captures.recent.clear()
                    self._refuse(captures, str(error))
                    return
        captures.recent.insert(0, call)
        del captures.recent[_MAX_RECENT:]
        self._remember(call)
        if len(self._places) > _MAX_PLACES:
            self._forget_calls()
        captures.num_unsettled += 1
        self._note(f"recorded, not captured yet: {unsettled or 'no earlier call did the same'}")
        if captures.num_unsettled == _MAX_CHANGES:
            captures.num_unsettled = 0
            reason = unsettled or "no two calls do the same"
            self._refuse(captures, f"{reason}; make what varies an argument of the step")

    def _capture_like_another(self, captures: _Captures, call: RecordedCall) -> bool:
        """Make a capture of this call alone, if an earlier call of another kind differs in sizes only."""
        if captures.recent or captures.needs_two_calls or not call.is_complete:
            return False
        for number, outline in enumerate(self._outlines):
            if outline.is_like(call):
                try:
                    replay = Replay(outline, call)
                except NotReplayableError:
                    return False  # what varies with the sizes may be the same in the next call of this kind
                self._outlines.insert(0, self._outlines.pop(number))
                self._add_capture(captures, replay, "")
                if replay.is_confirmed:
                    replay.audits.skip_early()
                    metrics.count("captures_foretold")
                metrics.count("captures_from_one_call")
                return True
        return False

    def _remember(self, call: RecordedCall) -> None:
        if call.program is not None:
            alike = [outline for outline in self._outlines if outline.is_like(call)]
            others = [outline for outline in self._outlines if outline not in alike]
            evidence = alike[0].evidence if alike else Evidence()
            self._outlines = [Outline(call, evidence), *others[: _MAX_OUTLINES - 1]]

    def _testify(self, replay: Replay) -> None:
        """Two calls agreed on this capture. Calls with other sizes may rely on it."""
        outline = next((one for one in self._outlines if one.is_of(replay.variant)), None)
        if outline is not None:
            replay.testify(outline.evidence)

    def _forget_calls(self) -> None:
        """Let go of everything that is known of earlier calls, but for the captures."""
        for captures in self._captures.values():
            captures.recent.clear()
        self._outlines.clear()
        self._places = Places()

    def _add_capture(self, captures: _Captures, replay: Replay, changed: str) -> None:
        captures.num_unsettled = captures.num_refused = 0
        if changed:
            captures.num_changed += 1
            if captures.num_changed == _MAX_CHANGES:
                captures.num_changed = 0
                self._refuse(captures, f"{changed} changes between calls; make it an argument of the step")
                return
        replay.last_call = self.num_recorded + self.num_replayed
        captures.replays.insert(0, replay)
        self._drop_oldest_capture()
        captures.recent.clear()  # they keep the tensors of their steps alive
        metrics.count("captures")
        if changed:
            self._note(f"captured anew: {changed}")
        else:
            self._note(
                f"captured for other arguments: {captures.changed}" if captures.changed else "captured"
            )

    def _refuse(self, captures: _Captures, reason: str) -> None:
        """Record the next calls without a witness, which costs much, and try again later."""
        captures.num_refused += 1
        captures.num_to_skip = min(2**captures.num_refused, _MAX_SKIPPED)
        self._fall_back(reason)

    def _drop_oldest_capture(self) -> None:
        """Make room for a new capture. The least recently used one goes."""
        found = [(replay, captures) for captures in self._captures.values() for replay in captures.replays]
        if len(found) <= self._max_captures:
            return
        replay, captures = min(found, key=lambda one: one[0].last_call)
        captures.replays.remove(replay)
        self._num_useless = self._num_useless + 1 if replay.num_replays < 2 else 0
        metrics.count("captures_dropped")
        text = (
            f"more than {self._max_captures} captures (max_captures): the least recently used one is dropped"
        )
        self._note(text)
        self._notes.warn_once(text, f"{self._name} has {text}")

    @property
    def _name(self) -> str:
        return getattr(self._function, "__qualname__", repr(self._function))

    def _record_once(
        self,
        leaves: list[Any],
        structure: Structure,
        given: GivenContainers,
        context: DeviceContext,
        is_witnessed: bool,
        new_arguments: Collection[Handle] | None,
    ) -> RecordedCall:
        self.num_recorded += 1
        metrics.count("step_calls_recorded")
        call = RecordedCall(
            self._function, leaves, structure, given, context, self._places, is_witnessed, new_arguments
        )
        if call.program is not None:
            executable = call.program.variant.executable
            storages = [executable.program.values[value].storage for value in executable.program.inputs]
            written = [storage in executable.written_storages for storage in storages]
            self._last_program = call.program.inputs, written
        return call

    def _fall_back(self, reason: str) -> None:
        message = f"{self._name} is recorded in each call, not replayed: {reason}"
        self._note(f"not replayed: {reason}")
        metrics.count("captures_refused")
        if self._fullgraph:
            raise CaptureError(message)
        self._notes.warn_once(reason, message)

    def _note(self, text: str) -> None:
        self._notes.add(self._name, text)

    # -- audits --------------------------------------------------------------------------------------

    def _is_audit_due(self, replay: Replay) -> bool:
        if not replay.is_confirmed:
            return True
        if self._audit_every is not None:
            return self._audit_every > 0 and (replay.num_runs + 1) % self._audit_every == 0
        return replay.audits.is_due(replay.num_replays)

    def _audit(
        self,
        captures: _Captures,
        replay: Replay,
        predicted: list[Any],
        leaves: list[Any],
        structure: Structure,
        given: GivenContainers,
        context: DeviceContext,
    ) -> R:
        """Record the call, which always gives the right result, and compare it with the replay.

        `predicted`: the numbers that the replay would have used.
        """
        start = time.perf_counter()
        # Whatever it reads is right in this call; `changed_value` has looked whether a replay may rest on it.
        call = self._record_once(leaves, structure, given, context, is_witnessed=False, new_arguments=())
        metrics.count("captures_audited")
        result: R = call.result
        difference = "" if call.disturbance else _audit_difference(replay, call, predicted)
        if not (difference or replay.is_confirmed):
            difference = call.disturbance or replay.confirm(call)
        if difference:
            captures.replays.remove(replay)
            if not replay.is_confirmed:
                captures.needs_two_calls = True
                self._note(f"captured from one call, and not confirmed by the next: {difference}")
                return result
            self._forget_calls()
            for one in self._captures.values():
                for other in one.replays:
                    other.audits.make_due(other.num_replays)  # what has changed unseen may concern it as well
            metrics.count("captures_outdated")
            message = (
                f"{self._name} does something else than when it was captured: {difference}. "
                f"Numbers of its last {replay.audits.num_since} replays may be wrong. It is captured anew"
            )
            self._note(message)
            if self._fullgraph:
                raise CaptureError(message)
            warn(message)
        elif not replay.is_confirmed:
            self._testify(replay)
        seconds = time.perf_counter() - start  # with the comparison
        replay.end_audit(seconds)
        return result

    # -- inspection ----------------------------------------------------------------------------------

    def explain(self) -> str:
        """How often the step was recorded and replayed, how many captures exist, and why, as text."""
        num_captures = sum(len(c.replays) for c in self._captures.values())
        rows = [
            f"{self._name}: recorded {self.num_recorded} times, replayed {self.num_replayed} times, "
            f"{num_captures} capture{'' if num_captures == 1 else 's'}"
        ]
        rows += [f"  {reason}" for reason in self._notes.texts()]
        for _, bound in self._bound.values():
            rows.append(bound.explain())
        return "\n".join(rows)


@overload
def step(function: Callable[P, R]) -> Step[P, R]: ...


@overload
def step(
    function: None = None, *, fullgraph: bool = False, audit_every: int | None = None, max_captures: int = 64
) -> Callable[[Callable[P, R]], Step[P, R]]: ...


def step(
    function: Callable[P, R] | None = None,
    *,
    fullgraph: bool = False,
    audit_every: int | None = None,
    max_captures: int = 64,
) -> Step[P, R] | Callable[[Callable[P, R]], Step[P, R]]:
    """Capture a step function once and replay it without running its Python.

        @lazystep.step
        def train_step(x, y):
            loss = loss_fn(model(x), y)
            loss.backward(); opt.step(); opt.zero_grad()
            return loss

    There is a barrier before and after each call. Calls are recorded until two calls in a row agree. From
    then on, a call reads its inputs and state, computes its numbers and queues the program. A call returns
    when its step is queued and its sync closures have run; it blocks while too many steps are in flight.

    - Tensor and float arguments are inputs (CPU tensors are moved to the lazy device). Other arguments are
      compared. A new value, shape or mode needs another capture; the last used `max_captures` are kept.
    - Parameters, buffers, optimizer state and hyperparameters are read from their current places. So
      schedulers, `load_state_dict` and edits between calls take effect.
    - Closures run at each replay. Returned tensors are new in each call.

    A step that can't be replayed is recorded in every call, and one warning says why. Examples are a step
    that reads a value, uses a number or tensor that changes in an unknown way, or grows a list. With
    `fullgraph=True` this is an error.

    Other side effects of the step's Python do not happen at a replay. An audit finds them: it records the
    call and compares. `audit_every=N` audits every N-th call, and 0 never audits. The default audits early,
    then steadily for at most 1 % of the time.
    """

    def decorate(function: Callable[P, R]) -> Step[P, R]:
        return Step(function, fullgraph, audit_every, max_captures)

    return decorate if function is None else decorate(function)


def _agree(earlier: RecordedCall, call: RecordedCall) -> bool:
    if earlier.program is None or call.program is None:
        return False
    return earlier.program.known is call.program.known and (
        earlier.program.variant.outputs == call.program.variant.outputs
    )


def _audit_difference(replay: Replay, call: RecordedCall, predicted: list[Any]) -> str:
    if call.reason:
        return call.reason
    assert call.program is not None
    if call.program.known is not replay.known:
        old = replay.variant.executable.program
        return first_difference(old, call.program.variant.executable.program) or "it takes other inputs"
    if call.rewinds != replay.rewinds:
        return "it goes back to another state of a random generator"
    actual = [value for value, _ in call.scalars]
    used = replay.variant.executable.program.used_slots()
    for slot in sorted(used):
        if not is_same(predicted[slot], actual[slot]):
            return f"a number is {actual[slot]!r}, a replay would have used {predicted[slot]!r}"
    return ""
