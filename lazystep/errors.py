"""Every error that lazystep raises by itself: one root, a few kinds.

A message says what happened, which op, at which line of the user's code it was recorded, and
what to do about it.
"""

from __future__ import annotations


class LazyStepError(RuntimeError):
    """The root of all errors below: `except lazystep.LazyStepError` catches each of them."""


class ConfigError(LazyStepError, ValueError):
    """A setting has a value that it can't take. The message names the setting and its variable."""


class UnsupportedError(LazyStepError):
    """Not supported: lazystep says so rather than computing something else."""


class DeviceMismatchError(LazyStepError):
    """Tensors of the lazy device and of another one met in an op that does not mix them.

    Example: `lazy_weight + torch.ones(3)`. Fix: `lazy_weight + torch.ones(3).to("lazy")`.
    """


class StepError(LazyStepError):
    """A step failed on the executor thread. `__cause__` is the error of the op itself.

    Raised once from the next barrier, and from every read of a tensor that the failed step
    should have produced or has left half updated.
    """


class ClosureError(LazyStepError):
    """An async closure raised. `__cause__` is its exception; the message names it, its step and where
    it was added. Raised once, from the next barrier, flush or exit."""


class QueueFullError(LazyStepError):
    """The queue of async closures is full and its policy is to raise. Nothing was queued."""


class WaitTimeoutError(LazyStepError, TimeoutError):
    """Waiting for the executor took longer than the setting `wait_timeout` allows."""


class ForkError(LazyStepError):
    """A lazy tensor was used in a forked child, which has no executor thread."""


class OverlapError(LazyStepError):
    """An optimizer that overlaps with backward was used in a way that plain DDP would answer differently,
    or an update failed. The parameters may be half updated: forward and `step()` raise until model and
    optimizer have been reloaded."""
