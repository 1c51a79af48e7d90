"""The barrier: cut the recording, look its program up, queue it, go on.

Wires record, compile and execute together; they do not know each other. Everything that makes a
recording run goes through `Runtime.flush`: `mark_step`, reads that need values, and the automatic
barrier of a recording that has grown too long.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from . import metrics, timeline
from .compile.programs import ProgramCache, Variant
from .config import settings
from .errors import LazyStepError, StepError
from .execute.executor import Executor, report_dropped
from .execute.run import Cell, Run, list_of_scalars
from .history import History
from .notices import give_notices, print_notices
from .openmp import release_pool
from .program.program import Program
from .record import device
from .record.assemble import assemble
from .record.handle import Handle
from .record.recorder import Cut, KnownRecording, Layout, Written
from .record.snapshot import preserve_snapshots
from .record.source import user_line
from .step_closures import DeviceContext, check_device, get_device_context, report_at_exit
from .tiers import TieredExecutable, Tiers, wait_for_builds


class CutProgram(NamedTuple):
    """A program that is about to be queued, with what it gets and what it makes."""

    known: KnownRecording
    variant: Variant[TieredExecutable]
    inputs: list[Handle]
    scalars: list[Any]
    outputs: list[Handle | None]


class Runtime:
    """The lazy device's state: one recorder, one program cache, one executor."""

    def __init__(self) -> None:
        self.recorder = device.make_recorder()
        self.programs: ProgramCache[KnownRecording, TieredExecutable] = ProgramCache()
        self.executor = Executor()
        self.tiers = Tiers()
        self.history = History()
        self.num_steps = 0
        self.last_program: Program | None = None
        self.is_forked = False
        # Told of every program that is cut, before it is queued: capture looks at it and may set scalars.
        self.on_cut: Callable[[CutProgram], None] | None = None
        self.recorder.synchronize = self.synchronize
        self.recorder.synchronize_all = self.synchronize_all
        self.recorder.on_full = self._automatic_barrier
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._after_fork)
        device.register(self.recorder)

    # -- barriers ------------------------------------------------------------------------------

    def flush(self, context: DeviceContext | None = None) -> Run | None:
        """Queue everything that has been recorded. Waits only for a place among the steps in flight.

        With a context this is the end of a step, and its closures see their values as of now.
        Waiting happens without the lock; cutting and queueing happen in one piece under it, so
        that programs run in the order in which they were recorded, whichever thread cuts them.
        """
        if self.is_forked:
            raise device.fork_error()
        while True:
            with self.recorder.lock:
                if self.executor.has_room() or not self.recorder.num_entries:
                    run = self._cut_and_submit()
                    if context is not None:
                        context.end_step()
                    return run
            self.executor.wait_for_room()

    def _cut_and_submit(self) -> Run | None:
        cut = self.recorder.cut()
        if cut is None:
            return None
        profile = timeline.active
        start = time.perf_counter() if profile is not None else 0.0
        variant = self._find_program(cut)
        self.recorder.guess_next(cut.known)
        # Asked for once: the native recorder makes them, or hands them over, at that moment.
        inputs, scalars, outputs = cut.inputs, cut.scalars, cut.cells(variant.outputs)
        if self.on_cut is not None:
            scalars = list_of_scalars(scalars)
            self.on_cut(CutProgram(cut.known, variant, inputs, scalars, outputs))
        self.num_steps += 1
        self.last_program = variant.executable.program
        run = Run(
            variant.executable,
            inputs,
            scalars,
            outputs,
            self.num_steps,
            _State(cut.written, variant.executable.program),
        )
        metrics.count("programs_recorded")
        metrics.count("instructions_recorded", cut.num_instructions)
        metrics.add_seconds("recording", time.perf_counter() - cut.started)
        cut.commit(run)
        release_pool()
        self.executor.submit(run)
        if profile is not None:
            args = {"step": run.step, "program": variant.executable.number}
            profile.add("record", "recording", cut.started, start, instructions=cut.num_instructions, **args)
            profile.add("barrier", "barrier", start, time.perf_counter(), **args)
        return run

    def _find_program(self, cut: Cut) -> Variant[TieredExecutable]:
        outputs = cut.outputs
        variant = self.programs.find(cut.known, outputs)
        if variant is not None:
            metrics.count("cache_hits")
            self.history.repeated()
            return variant
        metrics.count("cache_misses")
        program = assemble(cut.known.entries, cut.known.sources, outputs)
        variant = Variant(outputs, TieredExecutable(program, self.tiers))
        self.history.appeared(variant.executable)
        self.programs.add(cut.known, variant, settings.program_cache_size)
        return variant

    def remembered_programs(self) -> list[TieredExecutable]:
        """The programs of the process, in the order in which they appeared; the last ones, of many."""
        with self.recorder.lock:
            return self.history.programs()

    def layout_of(self, variant: Variant[TieredExecutable]) -> Layout:
        """The memory of a known program, for `replay`."""
        program = variant.executable.program
        outputs = [program.values[value] for value in variant.outputs]
        return self.recorder.layout(
            [program.values[value].storage for value in program.inputs],
            [(type_, number, program.storages[number].nbytes) for type_, number in outputs],
            variant.executable.written_storages,
        )

    def replay(
        self,
        variant: Variant[TieredExecutable],
        layout: Layout,
        inputs: list[Handle],
        scalars: list[Any],
        context: DeviceContext,
        prepare: Callable[[Sequence[Handle]], None],
    ) -> None:
        """Queue a known program on these inputs, as the whole of a step, without a recording.

        `prepare` gets the handles of the outputs before the step ends, to hand them to closures.
        Waits only for a place among the steps in flight.
        """
        if self.is_forked:
            raise device.fork_error()
        while True:
            with self.recorder.lock:
                if self.executor.has_room():
                    self._submit_replay(variant, layout, inputs, scalars, context, prepare)
                    return
            self.executor.wait_for_room()

    def _submit_replay(
        self,
        variant: Variant[TieredExecutable],
        layout: Layout,
        inputs: list[Handle],
        scalars: list[Any],
        context: DeviceContext,
        prepare: Callable[[Sequence[Handle]], None],
    ) -> None:
        profile = timeline.active
        start = time.perf_counter() if profile is not None else 0.0
        program = variant.executable.program
        bound = self.recorder.bind(layout, inputs)
        self.num_steps += 1
        self.last_program = program
        state = _State(bound.written, program)
        run = Run(variant.executable, bound.inputs, scalars, bound.outputs, self.num_steps, state)
        bound.commit(run)
        prepare(bound.outputs)
        context.end_step()
        metrics.count("programs_replayed")
        release_pool()
        self.executor.submit(run)
        if profile is not None:
            args = {"step": run.step, "program": variant.executable.number}
            profile.add("barrier", "barrier", start, time.perf_counter(), **args)

    def _automatic_barrier(self) -> None:
        metrics.count("automatic_barriers")
        self.flush()

    # -- reads ---------------------------------------------------------------------------------

    def synchronize(self, handles: Sequence[Handle]) -> None:
        """Run what is recorded if one of these values depends on it, and wait for the values.

        Waits for the steps that make or write them, not for the steps queued behind those.
        Raises the error of a step that failed to make them or left them half updated.
        """
        if self.is_forked:
            raise device.fork_error()
        with self.recorder.lock:
            is_pending = any(self.recorder.is_pending(h) for h in handles)
        if is_pending:
            self.flush()
        start = time.perf_counter()
        for handle in handles:
            for run in (handle.run, handle.storage.run):
                if run is not None:
                    run.wait()
        metrics.add_seconds("waiting", time.perf_counter() - start)
        error = _find_error(handles)
        if error is not None:
            self._forget_failure(error)
            raise _again(error)

    def synchronize_all(self) -> None:
        """Run what is recorded and wait until the executor is idle. Raises what failed."""
        self.flush()
        self.executor.wait_idle()
        self.raise_failures()

    def _forget_failure(self, error: LazyStepError) -> None:
        """A failure that a read reports is not reported again by the next barrier."""
        rest = [e for e in self.executor.take_failures() if e is not error]
        self.executor.put_back(rest)

    def raise_failures(self) -> None:
        """Raise what has failed in the background since the last call; the first, with the rest as notes."""
        failures = self.executor.take_failures()
        if failures:
            for other in failures[1:]:
                failures[0].add_note(f"also: {other}")
            raise failures[0]

    # -- the process ---------------------------------------------------------------------------

    def _after_fork(self) -> None:
        self.is_forked = True
        device.refuse_in_forked_child()

    def _at_exit(self) -> None:
        if self.is_forked:
            return
        context = get_device_context()
        self.tiers.close()
        try:
            report_dropped(self.executor.close(settings.exit_timeout))
            dropped = context.close(settings.exit_timeout)
            failures = [*self.executor.take_failures(), *context.async_handler.take_failures()]
            report_at_exit(dropped, failures)
            print_notices()
        except KeyboardInterrupt:
            return
        if failures:
            # An exit handler can't change the exit status in any other way. Handlers that were
            # registered before lazystep was imported do not run then: the run has failed anyway.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


class _State:
    """The storages that a run writes: what must be kept of them before, and told of them after a failure."""

    def __init__(self, written: Written, program: Program) -> None:
        self._written = written
        self._program = program

    def find_error(self, cells: Sequence[Cell]) -> LazyStepError | None:
        """See `StateOwner.find_error`."""
        return _find_error(cells)

    def before_run(self) -> None:
        """Copy what snapshots still need."""
        preserve_snapshots(self._written.with_snapshots())

    def on_failure(self, error: LazyStepError, position: int) -> None:
        """Mark what was half updated: written by an instruction that has run or has begun to."""
        for number, first_write in self._program.storage_writes().items():
            storage = self._written.get(number)
            if first_write <= position and storage is not None:
                damage = StepError(
                    f"this tensor was left half updated by a failed step ({error}). "
                    "Overwrite it as a whole (load_state_dict, copy_, zero_) or make it anew before going on."
                )
                damage.__cause__ = error
                storage.error = damage


def _find_error(cells: Sequence[Any]) -> LazyStepError | None:
    """The failure that one of these values inherits."""
    # A native recording knows which of its inputs need a look; in the steady state none does.
    suspects = getattr(cells, "suspects", None)
    handles: Sequence[Handle] = cells if suspects is None else suspects()
    for handle in handles:
        if handle.storage.error is not None:
            return handle.storage.error
        if handle.tensor is None and handle.run is not None and handle.run.error is not None:
            return handle.run.error
    return None


def _again(error: LazyStepError) -> LazyStepError:
    # A fresh object per raise: tracebacks pile up on an exception that is raised again and again.
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy


runtime = Runtime()


# -- the step API ------------------------------------------------------------------------------


def mark_step(device: str = "", wait: bool = False) -> None:
    """End the step: queue everything recorded since the last barrier as one program.

    Returns as soon as the program is queued; waits only if `max_in_flight` steps are queued
    already, or with `wait=True` until this step has run. Raises what failed in the background
    since the last barrier.

        loss.backward(); opt.step(); opt.zero_grad()
        lazystep.mark_step()
    """
    check_device(device)
    context = get_device_context(device)
    run = runtime.flush(context)
    if wait and run is not None:
        run.wait()
    context.run_closures()
    runtime.raise_failures()
    context.async_failures()
    give_notices(stacklevel=2)


def run_step_closures() -> DeviceContext:
    """Run the closures added since the last barrier: hand the async ones over, then run the sync ones.

    `mark_step` does this after its barrier. Called by itself it is the end of the step as far as
    closures go: what is recorded is queued first, so that their tensors have values. Waits for what sync
    closures read, and for a place in a full queue of async ones.

        lazystep.add_step_closure(log, (loss,))
        lazystep.run_step_closures()
    """
    context = get_device_context()
    runtime.flush(context)
    context.run_closures()
    context.async_failures()
    return context


def wait_device_ops(devices: Any = None) -> None:
    """Block until every queued step has run. Does not end the current step. Raises what failed.

        lazystep.mark_step()
        lazystep.wait_device_ops()          # now the clock shows what the steps took

    Materializes nothing that a barrier has not queued.
    """
    for name in [devices] if isinstance(devices, (str, torch.device)) else devices or ():
        check_device(name)
    runtime.executor.wait_idle()
    runtime.raise_failures()


def wait_for_compile(timeout: float | None = None) -> bool:
    """Block until every build that has been asked for is ready: from then on those steps run natively.

    For benchmarks and short jobs; a training loop has no need to call it. Waits for queued steps first,
    since they ask for builds. False if `timeout` seconds were not enough (setting `build_timeout` if
    it is None); a build that fails ends the wait too. Raises what failed in queued steps.

        for _ in range(5): train_step()
        lazystep.wait_for_compile()
    """
    runtime.executor.wait_idle()
    runtime.raise_failures()
    is_idle = wait_for_builds(runtime.tiers, settings.build_timeout if timeout is None else timeout)
    give_notices(stacklevel=2)
    return is_idle


def sync_multi(tensors: Sequence[torch.Tensor], devices: Sequence[Any] = ()) -> None:
    """Compute these tensors now: run what they need, in recorded order, and wait for it.

    The recording is cut here: everything recorded so far runs, as one program that is looked up in
    the cache like a step's. Tensors that have their values already cost nothing. Not a barrier: closures
    still wait for theirs.

        lazystep.sync_multi([loss, accuracy])       # one wait for both
    """
    for name in devices:
        check_device(name)
    handles = [handle_of(t) for t in tensors]
    metrics.count_synchronization("sync_multi", user_line())
    runtime.synchronize(handles)


def handle_of(tensor: torch.Tensor) -> Handle:
    """The handle of a lazy tensor; `ValueError` for any other."""
    handle = device.find_handle(tensor)
    if handle is None:
        kind = f"a tensor on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f'expected tensors on the lazy device, got {kind}; .to("lazy") moves a tensor there')
    return handle


def to_cpu(tensors: Any, devices: Any = None) -> Any:
    """The same structure with every lazy tensor as a CPU tensor of its own. Synchronizes once.

    Takes any nesting of lists, tuples and dicts; what is not a lazy tensor passes through. Cuts the
    recording if it makes one of them.

        numbers = lazystep.to_cpu({"loss": loss, "norms": norms, "step": 3})
    """
    for name in devices or ():
        check_device(name)
    lazy = [t for t in pytree.tree_leaves(tensors) if device.is_lazy(t)]
    if lazy:
        metrics.count_synchronization("to_cpu", user_line())
        runtime.synchronize([handle_of(t) for t in lazy])

    def move(leaf: Any) -> Any:
        return leaf.detach().cpu() if device.is_lazy(leaf) else leaf

    return pytree.tree_map(move, tensors)


def save(tensors: Any, *args: Any, **kwargs: Any) -> None:
    """`torch.save` of CPU tensors: the file loads anywhere, without lazystep.

    Takes what `torch.save` takes. Tensors that share memory still share it in the file. Synchronizes
    once, for all tensors together.

        lazystep.save({"model": model.state_dict(), "opt": opt.state_dict()}, "checkpoint.pt")
        model.load_state_dict(torch.load("checkpoint.pt")["model"])
    """
    lazy = [t for t in pytree.tree_leaves(tensors) if device.is_lazy(t)]
    if lazy:
        metrics.count_synchronization("save", user_line())
        runtime.synchronize([handle_of(t) for t in lazy])
    torch.save(tensors, *args, **kwargs)
