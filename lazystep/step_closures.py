"""Step closures: logs, metrics, plots and checkpoints that run after the barrier of their step.

A closure is added while its step is recorded, and runs after the step's barrier: on the training
thread, or with `run_async=True` on the worker, off it. Its tensor arguments are as of that barrier,
also when it runs ten steps later. A sync closure gets the lazy tensors themselves; an async one gets
CPU tensors, so that nothing it does with them is recorded into somebody else's step.

A closure that captures lazy tensors from around it, instead of taking them as arguments, sees
whatever value they have when it runs; that is warned about where it can be seen.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch.utils import _pytree as pytree

from . import metrics
from .closure import AsyncClosureHandler, ClosureHandler, WhenFull
from .config import settings
from .errors import LazyStepError
from .record.device import find_handle
from .record.handle import Handle
from .record.snapshot import Snapshot
from .record.source import user_line

F = TypeVar("F", bound=Callable[..., Any])


class StepClosure:
    """A closure with its arguments, and where it was added."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, where: str) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.where = where
        self.step = 0

    @property
    def description(self) -> str:
        """For messages."""
        name = getattr(self.function, "__qualname__", repr(self.function))
        return f"closure {name} of step {self.step}, added at {self.where},"

    def __call__(self) -> None:
        """Run, with the values that were frozen at the barrier."""
        args, kwargs = pytree.tree_map(_take, (self.args, self.kwargs))
        self.function(*args, **kwargs)

    def freeze(self) -> None:
        """Replace lazy tensors by snapshots: what they are now is what the closure will see."""
        self.args, self.kwargs = pytree.tree_map(_freeze, (self.args, self.kwargs))

    def handles(self) -> list[Handle]:
        """The lazy tensors among the arguments."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [h for leaf in leaves if (h := find_handle(leaf)) is not None]


def _freeze(leaf: Any) -> Any:
    handle = find_handle(leaf)
    return leaf if handle is None else Snapshot(handle)


def _take(leaf: Any) -> Any:
    return leaf.take() if type(leaf) is Snapshot else leaf


class Throttle:
    """Lets a closure run in every N-th step that adds it."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._num_steps = -1
        self._last_step = -1

    def is_due(self, step: int) -> bool:
        """Whether it is this step's turn. Counts the step once, however often it asks."""
        if step != self._last_step:
            self._last_step = step
            self._num_steps += 1
        return self._num_steps % self._every == 0


class Added(NamedTuple):
    """A call that adds a closure to the step: what a captured step does again at each replay."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    run_async: bool
    where: str
    throttle: Throttle | None


class DeviceContext:
    """What belongs to one device: the closures of the step that is being recorded, and their handlers."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.step = 0  # barriers crossed so far
        self.sync_handler = ClosureHandler()
        self._async_handler: AsyncClosureHandler | None = None
        self._lock = threading.Lock()
        self._sync: list[StepClosure] = []
        self._async: list[StepClosure] = []
        # Closures of ended steps, for `run_closures`: their values are frozen already.
        self._ended: list[tuple[list[StepClosure], list[StepClosure]]] = []
        # While a step is captured: what it adds, also when a throttle holds it back this time.
        self.log: list[Added] | None = None

    def __repr__(self) -> str:
        return f"DeviceContext({self.device!r})"

    @property
    def async_handler(self) -> AsyncClosureHandler:
        """The handler of async closures, made at first need from the settings."""
        with self._lock:
            if self._async_handler is None:
                when_full = WhenFull(settings.async_queue_policy)
                self._async_handler = AsyncClosureHandler(settings.max_async_queue, when_full)
            return self._async_handler

    def add(self, closure: StepClosure, run_async: bool) -> None:
        """Keep a closure for the end of the step."""
        with self._lock:
            (self._async if run_async else self._sync).append(closure)

    def add_now(self, added: Added) -> None:
        """Do what `add_step_closure` was asked to, unless a throttle holds it back."""
        if self.log is not None:
            self.log.append(added)
        if added.throttle is None or added.throttle.is_due(self.step):
            self.add(StepClosure(added.function, added.args, added.kwargs, added.where), added.run_async)

    def take(self) -> tuple[list[StepClosure], list[StepClosure]]:
        """The async and the sync closures added since the last call."""
        with self._lock:
            taken = self._async, self._sync
            self._async, self._sync = [], []
        return taken

    def end_step(self) -> None:
        """Freeze what this step's async closures will see. Called by the barrier, under its lock, so
        that no other thread's step comes between."""
        async_closures, sync_closures = self.take()
        self.step += 1
        for closure in async_closures + sync_closures:
            closure.step = self.step
        for closure in async_closures:
            closure.freeze()
        with self._lock:
            self._ended.append((async_closures, sync_closures))

    def run_closures(self) -> None:
        """Hand the async closures of ended steps over, then run the sync ones. Call after the barrier.

        A sync closure's exception leaves from here, after those behind it have run.
        """
        with self._lock:
            ended, self._ended = self._ended, []
        sync_closures = [closure for _, closures in ended for closure in closures]
        for closure in [closure for closures, _ in ended for closure in closures]:
            self.async_handler.put(closure)
        metrics.count("closures_run_sync", len(sync_closures))
        self.sync_handler(sync_closures)

    def async_failures(self) -> None:
        """Raise what async closures have raised since the last call."""
        if self._async_handler is not None:
            self._async_handler.raise_failures()

    def num_pending(self) -> int:
        """Async closures that wait or run."""
        handler = self._async_handler
        return 0 if handler is None else handler.num_waiting + (handler._running is not None)

    def close(self, timeout: float) -> list[str]:
        """Drain the async closures within `timeout` seconds; name what did not run."""
        handler = self._async_handler
        dropped = handler.close(timeout) if handler is not None else []
        rest = [closure for closures in self.take() for closure in closures]
        for closure in rest:
            closure.step = self.step + 1
        return dropped + [f"{closure.description} whose step never reached its barrier," for closure in rest]


_contexts = {"lazy:0": DeviceContext("lazy:0")}


def check_device(device: Any) -> None:
    """Raise `ValueError` for anything but the lazy device, or nothing, which means it."""
    name = str(device) if device is not None else ""
    if name not in ("", "lazy", "lazy:0"):
        raise ValueError(f"there is no device {name!r} here; expected 'lazy', 'lazy:0' or nothing")


def get_device_context(device: Any = None) -> DeviceContext:
    """The context of a device; of the lazy device if none is named. Does not synchronize.

    For example:

        lazystep.get_device_context().step      # barriers crossed so far
    """
    check_device(device)
    return _contexts["lazy:0"]


def add_step_closure(
    closure: Callable[..., Any],
    args: Sequence[Any] = (),
    run_async: bool = False,
    *,
    kwargs: Mapping[str, Any] | None = None,
    device: Any = None,
) -> None:
    """Run `closure(*args, **kwargs)` after the barrier of the current step.

    Tensors in the arguments, at any depth, are computed by the step itself and are as of its
    barrier. With `run_async=True` the closure runs on the worker and gets CPU tensors; the training
    thread goes on. Its exception is then raised at the next barrier.

        lazystep.add_step_closure(log, (step, loss), run_async=True)

    Does not synchronize; a full queue makes the barrier wait, not this call.
    """
    if not callable(closure):
        raise TypeError(f"expected something to call, got {type(closure).__name__}")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise TypeError(
            f"args must be a sequence of arguments, got {type(args).__name__}; write (x,) for one"
        )
    _warn_of_captured_tensors(closure)
    added = Added(closure, tuple(args), dict(kwargs or {}), run_async, user_line(2), None)
    get_device_context(device).add_now(added)


def flush_step_closures(timeout: float | None = None) -> None:
    """Block until every async closure that a barrier has handed over has run, then raise what failed.

    Closures of the step that is being recorded are not included: they wait for its barrier. Raises
    `WaitTimeoutError` after `timeout` seconds, naming the closure that is running and where it is.

        lazystep.mark_step()
        lazystep.flush_step_closures(timeout=30)        # at the end of training, or before a report
    """
    get_device_context().async_handler.flush(timeout)


def step_closure(run_async: bool = False, every: int = 1) -> Callable[[F], F]:
    """Make a function a step closure: calling it adds it to the step, in every N-th step that calls it.

        @lazystep.step_closure(run_async=True, every=100)
        def log(step, loss):
            print(step, loss.item())

        log(step, loss)   # in the step: costs nothing in 99 of 100 steps

    The call does not synchronize. The function gets the values of its step: on the worker as CPU tensors,
    without it as lazy tensors, on the training thread, in `mark_step`.
    """
    if every < 1:
        raise ValueError(f"every = {every}: expected at least 1")

    def decorate(function: F) -> F:
        throttle = Throttle(every)

        @functools.wraps(function)
        def add(*args: Any, **kwargs: Any) -> None:
            get_device_context().add_now(Added(function, args, kwargs, run_async, user_line(2), throttle))

        return add  # type: ignore[return-value]

    return decorate


_warned: set[Any] = set()


def _warn_of_captured_tensors(closure: Callable[..., Any]) -> None:
    """Warn, once per function, of lazy tensors that are captured rather than passed."""
    code = getattr(closure, "__code__", None)
    if code is None or not code.co_freevars or code in _warned:
        return
    for name, cell in zip(code.co_freevars, closure.__closure__ or (), strict=False):
        try:
            captured = find_handle(cell.cell_contents)
        except ValueError:  # not bound yet
            continue
        if captured is not None:
            _warned.add(code)
            warnings.warn(
                f"closure {closure.__qualname__} captures the lazy tensor {name!r}: it will see the value of "
                "the moment it runs, not of its step, and reading it cuts the step that is being recorded "
                "then. Pass it in args.",
                UserWarning,
                stacklevel=3,
            )
            return


def report_at_exit(dropped: list[str], failures: Sequence[LazyStepError]) -> None:
    """Print what the end of the process cut off or nobody has looked at."""
    for name in dropped:
        print(f"lazystep: {name} was dropped at exit", file=sys.stderr)
    for failure in failures:
        print(f"lazystep: nobody looked at this failure: {failure}", file=sys.stderr)
