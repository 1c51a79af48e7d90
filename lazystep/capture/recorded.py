"""One recorded call of a step function: its inputs, random draws, numbers, rebound places and results.

The function runs as it would without capture, on lazy tensors; only its numbers are replaced by traced
numbers. `Step` compares a recorded call with an earlier one. If the two agree, it makes a `Replay` from them.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

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
from .arguments import Structure, put_together
from .guards import Guards
from .reach import Reach
from .traced import Expression, Pins, Trace, Traced, traced_math, true_value, untagged

_DISTURBED = "another thread recorded ops or ended a step during the call"


class RecordedProgram(NamedTuple):
    """The program of a recorded call, with the handles that went into its run and came out of it."""

    known: KnownRecording
    variant: Variant
    inputs: list[Handle]
    outputs: list[Handle | None]


class _Phase(enum.Enum):
    """Which program a cut of the recording ends."""

    BEFORE = "before"  # a program of other threads
    RUNNING = "running"  # a part of the step: its function waits for a value, or another thread ends a step
    SETTLED = "settled"  # the step's own program: its function has returned
    AFTER = "after"  # a program of other threads


class HostState:
    """A number that an optimizer keeps in a CPU tensor, such as a step count or a running product."""

    def __init__(self, tensor: torch.Tensor, name: tuple[Any, ...]) -> None:
        self.tensor = tensor
        self.name = name
        self.before = tensor.item()
        self.factor: Traced | None = None

    def read(self, trace: Trace) -> float:
        """The number's current value, traced. If a tagged factor went into the tensor, repair the tensor."""
        now = self.tensor.item()
        if now not in (self.before, self.before + 1):
            self._find_factor(trace)
            now = self.tensor.item()
        return trace.source(now, *self.name)

    def _find_factor(self, trace: Trace) -> None:
        if self.factor is not None:
            return
        now = self.tensor.item()
        for number in trace.numbers():
            if torch.tensor(self.before, dtype=self.tensor.dtype).mul_(number.tag).item() == now:
                self.factor = number
                self.tensor.copy_(torch.tensor(self.before, dtype=self.tensor.dtype).mul_(number.true))
                return

    def rule(self, trace: Trace) -> tuple[str, Expression] | None:
        """How a replay updates the number: ("same" | "next" | "scale", factor); None if unknown."""
        now = self.tensor.item()
        if self.factor is None and now == self.before:
            return "same", 1.0
        if self.factor is None and now == self.before + 1:
            return "next", 1.0
        self._find_factor(trace)
        return None if self.factor is None else ("scale", self.factor.expression)


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
        met: weakref.WeakSet[torch.optim.Optimizer],
        closures: set[CodeType],
    ) -> None:
        self.reason = ""
        self.leaves = leaves
        self.trace = Trace()
        self.program: RecordedProgram | None = None
        self.scalars: list[tuple[Any, Expression]] = []  # true values, and expressions where known
        self.constants: dict[int, torch.Tensor] = {}
        self._function = function
        self._context = context
        self._roots = [leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, int, float, str))]
        self._closures = closures
        self.reach = Reach(function, self._roots, closures)
        # An optimizer without state creates it in this call, and may store hyperparameters there. A traced
        # number must not end up in the state, so this optimizer is not traced yet.
        self._traced_optimizers = [o in met or bool(o.state) for o in self.reach.optimizers]
        self.is_settling = not all(self._traced_optimizers)
        met.update(self.reach.optimizers)
        self.host_state = self._find_host_state()
        self.before = [place.get() for place in self.reach.tensors]
        self._handles_before = {h for v in self.before if (h := find_handle(v)) is not None}
        self.guards = Guards(self.reach, self.host_state)
        self._cuts: list[str] = []
        self._is_cut_elsewhere = False
        # Why this call can't be compared with others. Unlike `reason`, it says nothing of the next call.
        self.disturbance = ""
        self._phase = _Phase.BEFORE
        self.draws: list[Draw] = []
        self.added: list[Added] = []
        self.result: Any = None
        self._run(structure)

    # -- running ------------------------------------------------------------------------------------

    def _run(self, structure: Structure) -> None:
        try:
            with observing(self) as is_observed:
                if is_observed:
                    self._run_observed(structure)
                else:
                    self._run_unobserved(structure)
        finally:
            functions = [added.function for added in self.added]
            self._closures |= {f.__code__ for f in functions if hasattr(f, "__code__")}
        if not self.disturbance:
            self._find_lost_outputs()

    def _run_unobserved(self, structure: Structure) -> None:
        """Another thread's call is being observed: this one runs as it is, and nothing is learned from it."""
        args, kwargs = put_together(self.leaves, structure)
        self.disturbance = _DISTURBED
        self.result = self._function(*args, **kwargs)
        runtime.flush(self._context)

    def _run_observed(self, structure: Structure) -> None:
        runtime.flush()  # ops that other threads have recorded until now are in another program
        num_foreign = _recorder.num_foreign_ops()
        self._phase = _Phase.RUNNING
        traced = [
            self.trace.source(leaf, "argument", number) if type(leaf) is float else leaf
            for number, leaf in enumerate(self.leaves)
        ]
        args, kwargs = put_together(traced, structure)
        waits_before = {(reason, line): count for reason, line, count in metrics.synchronizations()}
        own = [g for g in self.reach.generators if isinstance(g, torch.Generator) and g.device.type == "cpu"]
        streams = {generator: generator.get_state() for generator in (torch.default_generator, *own)}
        self._call(args, kwargs)
        for reason, line, count in metrics.synchronizations():
            if count > waits_before.get((reason, line), 0):
                way_out = "read it after the call, or in a closure"
                self._refuse(f"it waits for a value ({reason}) at {line}; {way_out}")
        if self._cuts:
            self._refuse(f"it ends a step at {self._cuts[0]}; the call has its own barriers")
        self._settle()
        if not self.reason and not self._draws_explain(streams):
            self._refuse("it draws random numbers on the CPU; draw them on the lazy device")
        runtime.flush(self._context)
        if self.program is None:
            self._refuse("it records nothing")
        elif self.reach.reason:
            self._refuse(self.reach.reason)
        if self._is_cut_elsewhere or _recorder.num_foreign_ops() != num_foreign:
            self.disturbance = _DISTURBED

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        try:
            with (
                traced_math(self.reach.held),
                self._traced_groups(),
                self._traced_state(),
                Pins(self.host_state),
            ):
                self.result = self._function(*args, **kwargs)
        finally:
            # Replace traced numbers that the call has stored: nobody else may read a tagged double.
            seen: set[int] = set()
            for container in (*self.reach.sizes, *self.reach.fields):
                untagged(container, seen)
            for place in (*self.reach.simple, *self.reach.tensors, *self.reach.held):
                value = place.get()
                true = untagged(value, seen)
                if true is not value:
                    place.set(true)

    # -- what the observer of a step is told: see `StepObserver` ---------------------------------------

    def on_draw(self, draw: Draw) -> None:
        """Keep a draw: a replay repeats it."""
        self.draws.append(draw)

    def on_host_copy(self, handle: Handle) -> None:
        """Forget the allocation of memory that the host has filled with values."""
        self.draws = [draw for draw in self.draws if draw.handle is not handle]

    def on_closure(self, added: Added) -> None:
        """Keep an added closure, also one that its throttle skips this time."""
        self.added.append(added)

    def on_cut(self, cut: Cut, outputs: Handles[Handle | None], scalars: list[Number]) -> list[Number]:
        """Keep the step's own program, and put true values in the place of tagged numbers."""
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
        true = [value if one is None else one.true for value, one in zip(scalars, found, strict=True)]
        for value, one in zip(true, found, strict=True):
            self.scalars.append((value, None if one is None else one.expression))
        return true

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or reason

    # -- numbers -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _traced_groups(self) -> Iterator[None]:
        """For the time of the call, make the hyperparameters of every reachable optimizer traced numbers."""
        injected = []
        for number, optimizer in enumerate(self.reach.optimizers):
            for position, group in enumerate(
                optimizer.param_groups if self._traced_optimizers[number] else ()
            ):
                for key, value in list(group.items()):
                    traced = self._trace_hyperparameter(value, number, position, key)
                    if traced is not None:
                        group[key] = traced
                        injected.append((group, key, value, traced))
        try:
            yield
        finally:
            for group, key, value, traced in injected:
                if group.get(key) is not traced:
                    self._refuse(f"it changes the optimizer's {key!r} itself; step the scheduler outside")
                    group[key] = pytree.tree_map(true_value, group.get(key))
                else:
                    group[key] = value

    def _trace_hyperparameter(self, value: Any, *name: Any) -> Any:
        if type(value) is float:
            return self.trace.source(value, "group", *name, None)
        if type(value) is tuple and value and all(type(v) is float for v in value):
            return tuple(self.trace.source(v, "group", *name, k) for k, v in enumerate(value))
        return None

    def _find_host_state(self) -> dict[int, HostState]:
        found = {}
        for number, optimizer in enumerate(self.reach.optimizers):
            for position, state in enumerate(optimizer.state.values()):
                for key, value in state.items():
                    is_number = isinstance(value, torch.Tensor) and value.dim() == 0
                    if is_number and value.device.type == "cpu" and value.dtype.is_floating_point:
                        found[id(value)] = HostState(value, ("state", number, position, key))
        return found

    @contextlib.contextmanager
    def _traced_state(self) -> Iterator[None]:
        """For the time of the call, replace the function with which torch's optimizers read step counts."""

        def get_value(x: Any) -> Any:
            state = self.host_state.get(id(x))
            if state is not None:
                return state.read(self.trace)
            return x.item() if isinstance(x, torch.Tensor) else x

        patched = []
        for name, module in list(sys.modules.items()):
            if name.startswith("torch.optim.") and hasattr(module, "_get_value"):
                patched.append((module.__dict__, module.__dict__["_get_value"]))
                module.__dict__["_get_value"] = get_value
        try:
            yield
        finally:
            for names, original in patched:
                names["_get_value"] = original

    # -- after the call ----------------------------------------------------------------------------

    def _settle(self) -> None:
        """Compare places and numbers with the start of the call, before the barrier decides the outputs."""
        self.after = [place.get() for place in self.reach.tensors]
        changed = self.guards.find_side_effect()
        if changed:
            self._refuse(changed)
        self.rules = {key: state.rule(self.trace) for key, state in self.host_state.items()}
        for key, rule in self.rules.items():
            if rule is None:
                self._refuse(
                    f"it changes the optimizer's {self.host_state[key].name[-1]!r} in an unknown way"
                )
        self.result_leaves, self.result_spec = pytree.tree_flatten(self.result)
        if any(type(leaf) is Traced for leaf in self.result_leaves):
            self.result = pytree.tree_unflatten(map(true_value, self.result_leaves), self.result_spec)
        self._phase = _Phase.SETTLED

    def _draws_explain(self, streams: Mapping[torch.Generator, torch.Tensor]) -> bool:
        """Whether repeating the recorded draws moves all generators from `streams` to their current state."""
        drawn_from = {draw.generator for draw in self.draws if draw.generator is not None}
        now = {generator: generator.get_state() for generator in streams.keys() | drawn_from}
        try:
            for generator, state in streams.items():
                generator.set_state(state)
            for draw in self.draws:
                draw.again()
            return all(torch.equal(generator.get_state(), now[generator]) for generator in streams)
        finally:
            for generator, state in now.items():
                generator.set_state(state)

    def owned_handles(self) -> set[Handle]:
        """The values that a replay can deliver: results, arguments of closures, and tensors in places."""
        leaves = list(self.result_leaves)
        for added in self.added:
            leaves += pytree.tree_leaves((added.args, added.kwargs))
        leaves += self.after
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
        now = Reach(self._function, self._roots, self._closures)
        held = {h for place in now.tensors if (h := find_handle(place.get())) is not None}
        for position, reference in lost:
            handle = reference()
            if handle is not None and handle in held:
                # This call has created state, such as an optimizer's. The next call finds it in a place.
                self.is_settling = True
            elif handle is not None:
                value = self.program.variant.outputs[position]
                maker = self.program.variant.executable.program.maker_of(value)
                has_graph = any(isinstance(r, torch.Tensor) and r.requires_grad for r in self.result_leaves)
                self._refuse(
                    f"what it returns carries a graph, which holds the result of {maker}: call backward "
                    "inside, or compute it under torch.no_grad()"
                    if has_graph
                    else f"the result of {maker} is kept where a replay can't put a new one"
                )

    def drop_tensors(self) -> None:
        """Release the result, which no later call is compared with."""
        self.result = None
