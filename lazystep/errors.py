"""All exceptions that lazystep defines, with one root class.

A message says what happened, in which op, which line of the user's code recorded the op, and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterator


class LazyStepError(RuntimeError):
    """The base class of all lazystep errors.

    For example:

        try:
            lazystep.mark_step()
        except lazystep.LazyStepError as error:
            print(error)        # what happened, which op, which line, and what to do
    """

    # Whether the user has seen this failure: then no barrier raises it.
    is_reported = False
    # How many failures the user had seen when this one was raised; 0 if it was not.
    told_as = 0
    num_told: ClassVar[int] = 0


def report(error: LazyStepError) -> LazyStepError:
    """A copy of a kept failure, to be raised to the user. No barrier raises the failure or its causes again.

    A copy, because tracebacks pile up on an exception that is raised again and again.
    """
    mark_reported(error)
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy


def mark_reported(error: BaseException) -> None:
    """The user gets to see this failure. Its causes are told in its message."""
    LazyStepError.num_told += 1
    for cause in _with_causes(error):
        cause.is_reported = True
        cause.told_as = cause.told_as or LazyStepError.num_told


def was_told(error: LazyStepError, num_told: int) -> bool:
    """Whether the user had seen this failure, or a cause of it, when he had seen so many."""
    return any(0 < cause.told_as <= num_told for cause in _with_causes(error))


def _with_causes(error: BaseException) -> Iterator[LazyStepError]:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LazyStepError):
            yield cause
        cause = cause.__cause__


class ConfigError(LazyStepError, ValueError):
    """A setting has an invalid value. The message names the setting and its environment variable.

    Raised at import for an environment variable, and at the assignment for a field:

        lazystep.config.settings.max_in_flight = 0      # expected a number greater than 0
    """


class UnsupportedError(LazyStepError):
    """The operation is not supported. lazystep refuses it instead of computing something else.

    Raised at the user's line, before anything is recorded:

        lazy.share_memory_()        # there is no memory to show: use lazy.cpu()
    """


class DeviceMismatchError(LazyStepError):
    """An op got tensors of the lazy device and of another device, and can't mix them.

    For example:

        lazy_weight + torch.ones(3)                 # raises, at this line
        lazy_weight + torch.ones(3).to("lazy")      # the way out
    """


class StepError(LazyStepError):
    """A step failed on the executor thread. `__cause__` is the error of the op itself.

    Raised once from the next barrier, and from every read of a tensor that the failed step should have
    produced or has left half updated. A later step that needs such a tensor does not run: it raises
    its own `StepError` if it was recorded after the first one was raised.

        row = table[torch.tensor([5]).to("lazy")]   # recorded: nobody knows yet whether row 5 exists
        lazystep.mark_step(wait=True)               # raises: step 1 failed in aten.index.Tensor, ...
        model.load_state_dict(checkpoint)           # overwrites half updated tensors
    """


class CaptureError(LazyStepError):
    """A step with `fullgraph=True` can't be replayed. The message says why and what to do.

    The call itself was recorded, and its results are right. Without `fullgraph` this is a warning.

        @lazystep.step(fullgraph=True)
        def train_step(x):
            return model(x).sum().item()        # waits for a value: return the tensor
    """


class CollectiveError(LazyStepError):
    """A collective of a step failed, or ranks do not run the same collectives. The cause of a `StepError`.

    A rank has ended, hangs, is slower than the group's time-out, or has recorded another program. After a
    failed collective its process group can't be used any more:

        dist.destroy_process_group()
        dist.init_process_group("gloo")      # on all ranks; then load the last checkpoint
    """


class ClosureError(LazyStepError):
    """An async closure raised an exception, which is the `__cause__` of this error.

    The message names the closure, its step and the line that added it. The error is raised once, from the
    next barrier or flush, or printed at exit. The closures behind it still run.

        lazystep.add_step_closure(upload, (loss,), run_async=True)
        lazystep.mark_step()
        lazystep.flush_step_closures()      # raises if `upload` did
    """


class QueueFullError(LazyStepError):
    """The queue of async closures is full, and its policy is to raise. Nothing was queued.

    For example:

        lazystep.config.settings.async_queue_policy = "raise"       # the default waits for a place
    """


class WaitTimeoutError(LazyStepError, TimeoutError):
    """A wait took longer than the `timeout` of the call, or else than the setting `wait_timeout`.

    The step or closure still runs in the background. Wait again, or allow more time:

        lazystep.config.settings.wait_timeout = 7200.0
    """


class ForkError(LazyStepError):
    """A lazy tensor was used in a forked child process, which has no executor thread.

    For example:

        DataLoader(cpu_dataset, num_workers=2)      # workers get and return CPU tensors
        batch.to("lazy")                            # in the parent
    """


class OverlapError(LazyStepError):
    """An overlapped optimizer was used in a way that can't equal plain DDP, or an update failed.

    Parameters may be half updated, so forward and `step()` raise until the model and its optimizers have been
    reloaded.

        loss.backward()                                     # has already updated the parameters
        clip_grad_norm_(ddp.parameters(), 1.0)              # changes the gradients: step() raises
        overlap_optimizer(ddp, optimizer, max_norm=1.0)     # the way out
    """


class CheckpointError(LazyStepError):
    """A checkpoint could not be written, is damaged, or does not fit the state. The message names its path.

    For example, with a flipped byte in a file:

        lazystep.checkpoint.load("checkpoints/step-00000050", state)    # names the file and the one before
    """
