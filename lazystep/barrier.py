"""The barrier: `mark_step` ends a step, and so does the end of a captured call."""

from __future__ import annotations

from . import notices
from .errors import report
from .runtime import runtime
from .step_closures import DeviceContext, check_device, get_device_context


def mark_step(device: str = "", wait: bool = False) -> None:
    """End the step: queue everything recorded since the last barrier as one program.

    Returns as soon as the program is queued; waits only if `max_in_flight` steps are queued
    already, or with `wait=True` until this step and all before it have run. Raises what failed in the
    background since the last barrier.

        loss.backward(); opt.step(); opt.zero_grad()
        lazystep.mark_step()
    """
    check_device(device)
    context = get_device_context(device)
    run = runtime.flush(context)
    if wait and run is not None:
        run.wait()
    elif wait:
        runtime.executor.wait_idle()  # an empty step, behind those that are queued
    finish_step(context)
    if wait and run is not None and run.error is not None and not run.error.is_reported:
        # The run has ended, and the executor may not have told of its failure yet.
        raise report(run.error)


def finish_step(context: DeviceContext) -> None:
    """Do what follows the queueing of a step: run its closures, raise what failed, give notices."""
    # Each is asked for before the call that would look: a replay comes here, mostly with nothing to do.
    if context.ended or context.held:
        context.run_closures()
    if runtime.executor.failures:
        runtime.raise_failures()
    if context.started_handler is not None:
        context.async_failures()
    if notices.waiting:
        notices.give_notices()


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
