"""Every error that lazystep raises by itself: one root, a few kinds.

A message says what happened, which op, at which line of the user's code it was recorded, and
what to do about it.
"""

from __future__ import annotations


class LazyStepError(RuntimeError):
    """The root of all errors below.

    For example:

        try:
            lazystep.mark_step()
        except lazystep.LazyStepError as error:
            print(error)        # what happened, which op, which line, and what to do
    """


class ConfigError(LazyStepError, ValueError):
    """A setting has a value that it can't take. The message names the setting and its variable.

    Raised at import for a variable, at the assignment for a field:

        lazystep.config.settings.max_in_flight = 0      # expected a number greater than 0
    """


class UnsupportedError(LazyStepError):
    """Not supported: lazystep says so rather than computing something else.

    Raised at the line that asks for it, before anything is recorded:

        lazy.untyped_storage()      # there is no memory to show: use lazy.cpu()
    """


class DeviceMismatchError(LazyStepError):
    """Tensors of the lazy device and of another one met in an op that does not mix them.

    For example:

        lazy_weight + torch.ones(3)                 # raises, at this line
        lazy_weight + torch.ones(3).to("lazy")      # the way out
    """


class StepError(LazyStepError):
    """A step failed on the executor thread. `__cause__` is the error of the op itself.

    Raised once from the next barrier, and from every read of a tensor that the failed step
    should have produced or has left half updated.

        row = table[torch.tensor([5]).to("lazy")]   # recorded: whether 5 is a row is not known yet
        lazystep.mark_step(wait=True)               # raises: step 1 failed in aten.index.Tensor, ...
        model.load_state_dict(checkpoint)           # overwrites what was half updated
    """


class CaptureError(LazyStepError):
    """A step with `fullgraph=True` can't be replayed. The message says why and what to do.

    The call itself has been recorded and is right; without `fullgraph` this is a warning.

        @lazystep.step(fullgraph=True)
        def train_step(x):
            return model(x).sum().item()        # waits for a value: return the tensor
    """


class ClosureError(LazyStepError):
    """An async closure raised. `__cause__` is its exception; the message names it, its step and where
    it was added. Raised once, from the next barrier, flush or exit; the closures behind it still run.

        lazystep.add_step_closure(upload, (loss,), run_async=True)
        lazystep.mark_step()
        lazystep.flush_step_closures()      # raises if `upload` did
    """


class QueueFullError(LazyStepError):
    """The queue of async closures is full and its policy is to raise. Nothing was queued.

    lazystep.config.settings.async_queue_policy = "raise"       # the default waits for a place
    """


class WaitTimeoutError(LazyStepError, TimeoutError):
    """Waiting took longer than the setting `wait_timeout`, or the `timeout` of the call, allows.

    What was waited for goes on; wait again, or allow more:

        lazystep.config.settings.wait_timeout = 7200.0
    """


class ForkError(LazyStepError):
    """A lazy tensor was used in a forked child, which has no executor thread.

    For example:

        DataLoader(cpu_dataset, num_workers=2)      # workers get and return CPU tensors
        batch.to("lazy")                            # in the parent
    """


class OverlapError(LazyStepError):
    """An optimizer that overlaps with backward was used in a way that plain DDP would answer differently,
    or an update failed. The parameters may be half updated: forward and `step()` raise until model and
    optimizer have been reloaded.

        loss.backward()                                     # has updated already
        clip_grad_norm_(ddp.parameters(), 1.0)              # so step() raises
        overlap_optimizer(ddp, optimizer, max_norm=1.0)     # the way out
    """
