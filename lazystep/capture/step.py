"""`@lazystep.step`: an ordinary step function that is recorded until two calls agree, and then replayed."""

from __future__ import annotations

import functools
import re
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from types import CodeType
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch

from .. import metrics
from ..barrier import finish_step
from ..errors import CaptureError
from ..notices import LazyStepWarning
from ..program.difference import first_difference
from ..record import observer
from ..runtime import runtime
from ..step_closures import DeviceContext, get_device_context
from .arguments import Kind, Structure, kind_difference, kind_of, put_together, take_apart
from .recorded import RecordedCall
from .replay import NotReplayableError, Replay, UnsettledError

P = ParamSpec("P")
R = TypeVar("R")

_FIRST_AUDIT = 64
_AUDIT_GROWTH = 4
_MAX_CHANGES = 12
_MAX_STATES = 4
_MAX_KINDS = 16

# Captures and refusals of all steps in the process, also of deleted ones: for the report of a run.
reasons: deque[str] = deque(maxlen=64)


class _Captures:
    """The calls whose arguments have the same structure, types and plain values."""

    def __init__(self) -> None:
        # The last call for each starting state: gradient accumulation alternates between two states.
        self.recent: list[RecordedCall] = []
        self.replays: list[Replay] = []
        self.next_audit = _FIRST_AUDIT
        self.has_recorded = False
        self.num_changed = 0  # recordings in a row that began in a state not seen lately

    def remember(self, call: RecordedCall) -> tuple[RecordedCall | None, str]:
        """Keep a call. Returns the last call that began in the same state, or None and the difference."""
        changed = ""
        for position, earlier in enumerate(self.recent):
            difference = call.guards.difference(earlier.guards)
            if not difference:
                self.recent[position] = call
                return earlier, ""
            changed = changed or difference
        self.recent.insert(0, call)
        del self.recent[_MAX_STATES:]
        return None, changed


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
        self._bound: dict[int, tuple[Any, Step[..., Any]]] = {}
        self._captures: dict[Kind, _Captures] = {}
        self._num_new_kinds = 0  # calls in a row whose arguments had a new kind
        self._met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._closures: set[CodeType] = set()
        self._warned: set[str] = set()
        self._reasons: dict[str, str] = {}  # the last reason of each kind
        self.num_recorded = 0
        self.num_replayed = 0

    def __get__(self, owner: Any, kind: type | None = None) -> Step[..., R]:
        """The step as a method: each object has its own captures."""
        if owner is None:
            return self
        if id(owner) not in self._bound:
            bound: Step[..., R] = Step(
                self._function.__get__(owner), self._fullgraph, self._audit_every, self._max_captures
            )
            # The object is kept alive, so that no other object gets its id.
            self._bound[id(owner)] = owner, bound
        return self._bound[id(owner)][1]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Record or replay one step and queue it. Does not wait for values. Raises as `mark_step` does."""
        if observer.current() is not None:  # inside another captured step, which records it
            moved, moved_kwargs = put_together(*take_apart(args, kwargs))
            return self._function(*moved, **moved_kwargs)
        observer.wait_for_other_threads()
        leaves, structure = take_apart(args, kwargs)
        context = get_device_context()
        runtime.flush()
        captures = self._captures_of(kind_of(leaves, structure))
        result: R
        for replay in captures.replays:
            if not replay.guards.hold():
                continue
            if self._is_audit_due(captures, replay):
                result = self._audit(captures, replay, leaves, structure, context)
                break
            is_done, result = replay.run(leaves, context)
            if is_done:
                self.num_replayed += 1
                replay.last_call = self.num_recorded + self.num_replayed
                break
        else:
            result = self._record(captures, leaves, structure, context)
        finish_step(context)
        return result

    def _captures_of(self, kind: Kind) -> _Captures:
        """The captures for calls of this kind. Of the kinds without a replay, the oldest are forgotten."""
        captures = self._captures.get(kind)
        if captures is not None:
            self._num_new_kinds = 0
            return captures
        self._num_new_kinds += 1
        if self._num_new_kinds == _MAX_CHANGES:
            self._fall_back(f"{kind_difference(next(reversed(self._captures)), kind)} in each call")
        idle = [key for key, one in self._captures.items() if not one.replays]
        if len(idle) >= _MAX_KINDS:
            del self._captures[idle[0]]
        self._captures[kind] = _Captures()
        return self._captures[kind]

    # -- recording -----------------------------------------------------------------------------------

    def _record(
        self, captures: _Captures, leaves: list[Any], structure: Structure, context: DeviceContext
    ) -> R:
        call = self._record_once(leaves, structure, context)
        result: R = call.result
        call.drop_tensors()
        if call.disturbance:
            self._note(f"recorded, not captured: {call.disturbance}")
            return result
        if call.reason:
            captures.recent.clear()
            if captures.has_recorded:
                self._fall_back(call.reason)
            # A first call may fill caches and create state. A side effect that also happens in the second
            # call happens in every call.
            captures.has_recorded = True
            return result
        earlier, changed = captures.remember(call)
        if changed:
            captures.num_changed += 1
            if captures.num_changed == _MAX_CHANGES:
                self._fall_back(f"{changed} changes between calls; make it an argument of the step")
        elif earlier is not None and _agree(earlier, call):
            captures.num_changed = 0
            try:
                replay = Replay(earlier, call)
                replay.last_call = self.num_recorded + self.num_replayed
                captures.replays.insert(0, replay)
                self._drop_oldest_capture()
                captures.recent.remove(call)  # it keeps the tensors of its step alive
                captures.next_audit = _FIRST_AUDIT
                metrics.count("captures")
                self._note(self._why_captured(len(captures.replays)))
            except UnsettledError:
                pass
            except NotReplayableError as error:
                self._fall_back(str(error))
        return result

    def _drop_oldest_capture(self) -> None:
        """Make room for a new capture. The least recently used one goes."""
        found = [(replay, captures) for captures in self._captures.values() for replay in captures.replays]
        if len(found) <= self._max_captures:
            return
        replay, captures = min(found, key=lambda one: one[0].last_call)
        captures.replays.remove(replay)
        metrics.count("captures_dropped")
        text = (
            f"more than {self._max_captures} captures (max_captures): the least recently used one is dropped"
        )
        self._note(text)
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"{self._name} has {text}", LazyStepWarning, stacklevel=5)

    @property
    def _name(self) -> str:
        return getattr(self._function, "__qualname__", repr(self._function))

    def _record_once(self, leaves: list[Any], structure: Structure, context: DeviceContext) -> RecordedCall:
        self.num_recorded += 1
        metrics.count("step_calls_recorded")
        return RecordedCall(self._function, leaves, structure, context, self._met, self._closures)

    def _why_captured(self, number: int) -> str:
        if number > 1:
            return "captured anew: modes, flags, hooks or state around it had changed"
        return "captured" if self.num_recorded < 5 else "captured for other argument types or values"

    def _fall_back(self, reason: str) -> None:
        message = f"{self._name} is recorded in each call, not replayed: {reason}"
        self._note(f"not replayed: {reason}")
        metrics.count("captures_refused")
        if self._fullgraph:
            raise CaptureError(message)
        kind = _without_numbers(reason)
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, LazyStepWarning, stacklevel=4)

    def _note(self, text: str) -> None:
        kind = _without_numbers(text)
        if kind not in self._reasons:
            reasons.append(f"{self._name}: {text}")
        self._reasons[kind] = text

    # -- audits --------------------------------------------------------------------------------------

    def _is_audit_due(self, captures: _Captures, replay: Replay) -> bool:
        if self._audit_every is not None:
            return self._audit_every > 0 and (replay.num_runs + 1) % self._audit_every == 0
        return replay.num_runs >= captures.next_audit

    def _audit(
        self,
        captures: _Captures,
        replay: Replay,
        leaves: list[Any],
        structure: Structure,
        context: DeviceContext,
    ) -> R:
        """Record the call, which always gives the right result, and compare it with the replay."""
        predicted = replay.predict(leaves)
        call = self._record_once(leaves, structure, context)
        replay.num_runs += 1
        captures.next_audit = max(captures.next_audit, replay.num_runs) * _AUDIT_GROWTH
        metrics.count("captures_audited")
        result: R = call.result
        difference = "" if call.disturbance else _audit_difference(replay, call, predicted)
        if difference:
            captures.replays.remove(replay)
            captures.recent.clear()
            metrics.count("captures_outdated")
            message = (
                f"{self._name} does something else than when it was captured: {difference}. "
                "It is captured anew"
            )
            self._note(message)
            if self._fullgraph:
                raise CaptureError(message)
            warnings.warn(message, LazyStepWarning, stacklevel=3)
        return result

    # -- inspection ----------------------------------------------------------------------------------

    def explain(self) -> str:
        """How often the step was recorded and replayed, how many captures exist, and why, as text."""
        num_captures = sum(len(c.replays) for c in self._captures.values())
        rows = [
            f"{self._name}: recorded {self.num_recorded} times, replayed {self.num_replayed} times, "
            f"{num_captures} capture{'' if num_captures == 1 else 's'}"
        ]
        rows += [f"  {reason}" for reason in self._reasons.values()]
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
    call and compares. `audit_every=N` audits every N-th call; the default audits at growing intervals, and 0
    never audits.
    """

    def decorate(function: Callable[P, R]) -> Step[P, R]:
        return Step(function, fullgraph, audit_every, max_captures)

    return decorate if function is None else decorate(function)


def _agree(earlier: RecordedCall, call: RecordedCall) -> bool:
    if earlier.program is None or call.program is None or earlier.is_settling or call.is_settling:
        return False
    return earlier.program.known is call.program.known and (
        earlier.program.variant.outputs == call.program.variant.outputs
    )


def _audit_difference(replay: Replay, call: RecordedCall, predicted: list[Any] | str) -> str:
    if call.reason:
        return call.reason
    assert call.program is not None
    if call.program.known is not replay.known:
        old = replay.variant.executable.program
        return first_difference(old, call.program.variant.executable.program) or "it takes other inputs"
    actual = [value for value, _ in call.scalars]
    if isinstance(predicted, str):
        return predicted
    used = replay.variant.executable.program.used_slots()
    for slot in sorted(used):
        if predicted[slot] != actual[slot]:
            return f"a number is {actual[slot]!r}, a replay would have used {predicted[slot]!r}"
    return ""


def _without_numbers(text: str) -> str:
    """The text with numbers masked, since the numbers in a reason differ from call to call."""
    return re.sub(r"-?\d[\d.e+-]*", "#", text)
