"""The lazy device's state: one recorder, one program cache, one executor, and what connects them.

Wires record, tiers and execute together; they do not know each other. Everything that makes a recording run
goes through `Runtime.flush`: `mark_step`, reads that need values, and the automatic barrier of a recording
that has grown too long. A captured step goes through `Runtime.replay`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch

from . import metrics, process_groups, timeline
from .config import settings
from .errors import mark_reported, report
from .execute.executor import Executor, report_dropped
from .execute.run import Run
from .execute.threads import prepare_exit
from .interrupts import uninterrupted
from .notices import print_notices
from .openmp import release_pool
from .program.program import Number, Program
from .ready import Ready
from .record import _recorder, observer
from .record._recorder import Binding, Cut, Layout, State
from .record.assemble import assemble
from .record.handle import Handle, Handles
from .record.recorder import Recorder
from .record.written import WrittenMemory, find_error, find_unreported
from .step_closures import DeviceContext, get_device_context, report_at_exit
from .tiers.history import History
from .tiers.program_cache import ProgramCache, Variant
from .tiers.tiered import TieredExecutable, Tiers


class Runtime:
    """One per process. Every method may be called from any thread."""

    def __init__(self) -> None:
        self.recorder: Recorder = Recorder(self)
        self.programs = ProgramCache()
        # Inside an observed call the witness would take what a step does for what the call does.
        self.executor = Executor(lambda: observer.current() is None)
        self.tiers = Tiers()
        self.history = History()
        self.num_steps = 0
        self.last_program: Program | None = None
        process_groups.drains.append(self.drain)
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self.recorder.refuse_after_fork)

    def on_first_op(self) -> None:
        """Start the process that builds, unless libraries of earlier runs may do. Never waits."""
        if settings.tier == "auto":
            self.tiers.builder.prepare(torch.get_num_threads(), if_cache_is_empty=True)

    # -- barriers ------------------------------------------------------------------------------

    def flush(self, context: DeviceContext | None = None) -> Run | None:
        """Queue everything that has been recorded. Waits only for a place among the steps in flight.

        With a context this is the end of a step, and its closures see the present values.
        Waiting happens without the lock. Cutting and queueing happen in one piece under it, so that programs
        run in the order in which they were recorded, whichever thread cuts them.
        """
        self.recorder.check_fork()
        if context is None and not self.recorder.num_entries:
            return None  # the barrier before a replay has nothing to do
        while True:
            with self.recorder.lock, uninterrupted():  # waiting for the lock can be interrupted
                if self.executor.has_room() or not self.recorder.num_entries:
                    run = self._cut_and_submit()
                    if context is not None:
                        context.end_step()
                    return run
            self.executor.wait_for_room()

    def _cut_and_submit(self) -> Run | None:
        cut = _recorder.cut()
        if cut is None:
            return None
        profile = timeline.active
        start = time.perf_counter() if profile is not None else 0.0
        variant = self._find_program(cut)
        _recorder.guess_next(cut.known)
        outputs = cut.handles_of(variant.outputs)
        scalars = cut.scalars.tolist
        watching = observer.anywhere()
        if watching is not None:
            scalars = watching.on_cut(cut, outputs, scalars()).copy
        run = self._make_run(variant, cut, outputs, scalars)
        metrics.count("programs_recorded")
        metrics.count("instructions_recorded", cut.num_instructions)
        metrics.add_seconds("recording", time.perf_counter() - cut.started)
        self._submit(run, cut)
        if profile is not None:
            args = {"step": run.step, "program": variant.executable.number}
            profile.add("record", "recording", cut.started, start, instructions=cut.num_instructions, **args)
            profile.add("barrier", "barrier", start, time.perf_counter(), **args)
        return run

    def _find_program(self, cut: Cut) -> Variant:
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

    def _make_run(
        self,
        variant: Variant,
        source: Cut | Binding,
        outputs: Handles[Handle] | Handles[Handle | None],
        scalars: Callable[[], list[Number]],
    ) -> Run:
        self.num_steps += 1
        self.last_program = program = variant.executable.program
        memory = WrittenMemory(source.inputs, source.written, program)
        return Run(variant.executable, source.inputs, scalars, outputs, self.num_steps, memory)

    def _submit(
        self, run: Run, source: Cut | Binding, make_ready: Callable[[Binding], Ready | None] | None = None
    ) -> None:
        """Tell handles which run computes them, and queue the run: both or neither."""
        source.commit(run)
        if not self.executor.expects_wait:
            release_pool()  # the executor needs one
        try:
            if make_ready is not None and self.executor.takes_ready:
                assert isinstance(source, Binding)
                run.ready = make_ready(source)
            self.executor.submit(run)
        except BaseException as error:  # no memory for a thread, say: nothing may wait for this run
            run.abandon(f"it could not be queued: {error!r}")
            raise

    def remembered_programs(self) -> list[TieredExecutable]:
        """The programs of the process in order of appearance; the last ones if there are many."""
        with self.recorder.lock:
            return self.history.programs()

    # -- replays -------------------------------------------------------------------------------

    def layout_of(self, variant: Variant) -> Layout:
        """The storages of a known program, for the `State` of a replay."""
        program = variant.executable.program
        outputs = [program.values[value] for value in variant.outputs]
        return Layout(
            [program.values[value].storage for value in program.inputs],
            [(type_, number, program.storages[number].nbytes) for type_, number in outputs],
            variant.executable.written_storages,
        )

    def replay(
        self,
        variant: Variant,
        state: State,
        given: list[tuple[int, Handle]],
        scalars: Callable[[], list[Number]],
        make_ready: Callable[[Binding], Ready | None],
        context: DeviceContext,
        add_closures: Callable[[Handles[Handle]], None],
    ) -> None:
        """Queue a known program on this state and these inputs, as the whole of a step, without a recording.

        `make_ready` is asked whether the run may go without Python. `add_closures` gets the handles of the
        outputs when the program is queued. Needs the recorder's lock,
        room among the steps in flight, and `uninterrupted`: nothing of the user's runs before the program is
        queued.
        """
        profile = timeline.active
        start = time.perf_counter() if profile is not None else 0.0
        binding = Binding(state, given)
        run = self._make_run(variant, binding, binding.outputs, scalars)
        run.num_failed = self.executor.num_failed
        self._submit(run, binding, make_ready)
        metrics.count("programs_replayed")
        try:
            add_closures(binding.outputs)
        finally:
            context.end_step(threading.get_ident())
        if profile is not None:
            args = {"step": run.step, "program": variant.executable.number}
            profile.add("barrier", "barrier", start, time.perf_counter(), **args)

    # -- reads, and the recorder's questions: see `Barrier` --------------------------------------

    def on_full(self) -> None:
        """Queue a recording that has reached its largest size."""
        metrics.count("automatic_barriers")
        self.flush()

    def synchronize(self, handles: Sequence[Handle]) -> None:
        """Run what is recorded if one of these values depends on it, and wait for the values.

        Waits for the steps that make or write them, not for the steps queued behind those.
        Raises the error of a step that failed to make them or left them half updated. A step that failed
        before it wrote them has left them as they were: that is raised once, here or at a barrier.
        """
        self.recorder.check_fork()
        with self.recorder.lock:
            is_pending = any(map(_recorder.is_pending, handles))
        if is_pending:
            self.flush()
        start = time.perf_counter()
        for handle in handles:
            for run in (handle.run, handle.memory.run):
                if run is not None:
                    run.wait()
        metrics.add_seconds("waiting", time.perf_counter() - start)
        error = find_error(handles) or find_unreported(handles)
        if error is not None:
            raise report(error)

    def synchronize_all(self) -> None:
        """Run what is recorded and wait until the executor is idle. Raises what failed."""
        self.flush()
        self.executor.wait_idle()
        self.raise_failures()

    def drain(self) -> None:
        """Run what is recorded and wait until the executor is idle. Failures stay for the next barrier."""
        self.flush()
        self.executor.wait_idle()

    def raise_failures(self) -> None:
        """Raise what has failed in the background since the last call: the first, with the rest as notes."""
        failures = self.executor.take_failures()
        if failures:
            for failure in failures:
                mark_reported(failure)
            for other in failures[1:]:
                failures[0].add_note(f"also: {other}")
            raise failures[0]

    # -- the end of the process ------------------------------------------------------------------

    def _at_exit(self) -> None:
        if self.recorder.is_forked:
            return
        context = get_device_context()
        try:
            self.tiers.close()
            report_dropped(self.executor.close(settings.exit_timeout))
            dropped = context.close(settings.exit_timeout)
            failures = [*self.executor.take_failures(), *context.async_handler.take_failures()]
            report_at_exit(dropped, failures)
            print_notices()
        except KeyboardInterrupt:
            return
        finally:
            prepare_exit(any(thread.name.startswith("lazystep-") for thread in threading.enumerate()))
        if failures:
            # An exit handler can't change the exit status in any other way. Handlers that were
            # registered before lazystep was imported do not run then: the run has failed anyway.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


runtime: Runtime = Runtime()
