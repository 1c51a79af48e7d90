"""Step closures: logs, metrics, plots and checkpoints that run after the barrier of their step.

A closure is added while its step is recorded, and runs after the step's barrier: on the training thread, or
with `run_async=True` on a worker thread. Its tensor arguments have the values of that barrier, even if the
closure runs ten steps later. A sync closure gets the lazy tensors themselves. An async closure gets CPU
tensors, so that its ops are not recorded into a later step.

A closure can also capture lazy tensors from the surrounding function instead of taking them as arguments.
Such a closure sees the values at the time it runs; `add_step_closure` warns if it can see the capture.
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
from .record import observer
from .record.snapshot import Snapshot
from .record.source import user_line
from .record.tensor import find_handle

F = TypeVar("F", bound=Callable[..., Any])


class StepClosure:
    """A closure, its arguments, and the line that added it."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, where: str) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.where = where
        self.thread = threading.get_ident()
        self.step = 0

    @property
    def description(self) -> str:
        """The closure's name, step and line, for messages."""
        name = getattr(self.function, "__qualname__", repr(self.function))
        return f"closure {name} of step {self.step}, added at {self.where},"

    def __call__(self) -> None:
        """Run the closure. An async closure waits here for the values frozen at the barrier."""
        args, kwargs = pytree.tree_map(_take, (self.args, self.kwargs))
        self.function(*args, **kwargs)

    def freeze(self) -> None:
        """Replace lazy tensors by snapshots, so that the closure sees their present values."""
        self.args, self.kwargs = pytree.tree_map(_freeze, (self.args, self.kwargs))


def _freeze(leaf: Any) -> Any:
    handle = find_handle(leaf)
    return leaf if handle is None else Snapshot(handle)


def _take(leaf: Any) -> Any:
    return leaf.take() if type(leaf) is Snapshot else leaf


class Throttle:
    """Lets a closure run only in every N-th step that adds it."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._num_steps = -1
        self._last_step = -1

    def is_due(self, step: int) -> bool:
        """Whether the closure runs in this step. A step counts once, however often this is called."""
        if step != self._last_step:
            self._last_step = step
            self._num_steps += 1
        return self._num_steps % self._every == 0


class Added(NamedTuple):
    """A call that adds a closure to the step. A captured step repeats this call at each replay."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    run_async: bool
    where: str
    throttle: Throttle | None


class DeviceContext:
    """The state of one device: the closures of the step that is being recorded, and their handlers."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.step = 0  # barriers crossed so far
        self.sync_handler = ClosureHandler()
        self.started_handler: AsyncClosureHandler | None = None  # of async closures, once one was added
        self._lock = threading.Lock()
        self._sync: list[StepClosure] = []
        self._async: list[StepClosure] = []
        # Closures of ended steps, for `run_closures`. The async ones are already frozen.
        self.ended: list[tuple[list[StepClosure], list[StepClosure]]] = []
        # Async closures of ended steps that are not queued yet.
        self.held: list[StepClosure] = []
        self._is_queueing = False  # a thread is queueing them

    def __repr__(self) -> str:
        return f"DeviceContext({self.device!r})"

    @property
    def async_handler(self) -> AsyncClosureHandler:
        """The handler of async closures, made at first use from the settings."""
        with self._lock:
            if self.started_handler is None:
                when_full = WhenFull(settings.async_queue_policy)
                self.started_handler = AsyncClosureHandler(settings.max_async_queue, when_full)
            return self.started_handler

    def add(self, closure: StepClosure, run_async: bool) -> None:
        """Keep a closure for the end of the step."""
        with self._lock:
            (self._async if run_async else self._sync).append(closure)

    def add_now(self, added: Added) -> None:
        """Add a closure to the current step, unless its throttle skips this step."""
        watching = observer.current()
        if watching is not None:
            watching.on_closure(added)
        if added.throttle is None or added.throttle.is_due(self.step):
            self.add(StepClosure(added.function, added.args, added.kwargs, added.where), added.run_async)

    def take(self, thread: int | None = None) -> tuple[list[StepClosure], list[StepClosure]]:
        """The async and the sync closures that wait for the end of the step; of one thread, if given."""

        def is_wanted(closure: StepClosure) -> bool:
            return thread is None or closure.thread == thread

        with self._lock:
            taken = list(filter(is_wanted, self._async)), list(filter(is_wanted, self._sync))
            self._async = [closure for closure in self._async if not is_wanted(closure)]
            self._sync = [closure for closure in self._sync if not is_wanted(closure)]
        return taken

    def end_step(self, thread: int | None = None) -> None:
        """Freeze the arguments of this step's async closures; of those that `thread` added, if it is given.

        The barrier calls this under its lock, so that no step of another thread comes between. A replay has
        not run what other threads have recorded, so it ends the step for the closures of its own thread.
        """
        if not (self._async or self._sync):  # as in most steps: a replay has no microseconds for empty lists
            self.step += 1
            return
        async_closures, sync_closures = self.take(thread)
        self.step += 1
        for closure in async_closures + sync_closures:
            closure.step = self.step
        for closure in async_closures:
            closure.freeze()
        with self._lock:
            self.ended.append((async_closures, sync_closures))

    def run_closures(self) -> None:
        """Queue the async closures of ended steps, then run the sync closures. Call after the barrier.

        If an earlier async closure has failed, this barrier raises the error (`async_failures`), and the new
        async closures are kept for the next barrier or flush.

        If a sync closure raises, the remaining ones still run, and then its exception is raised here. Blocks
        while the async queue is full and its policy is to wait.
        """
        if not (self.ended or self.held):
            return
        with self._lock:
            ended, self.ended = self.ended, []
        sync_closures = [closure for _, closures in ended for closure in closures]
        with self._lock:
            self.held += [closure for closures, _ in ended for closure in closures]
        handler = self.started_handler
        if handler is None or not handler.has_failures:
            self._queue_held()
        metrics.count("closures_run_sync", len(sync_closures))
        self.sync_handler(sync_closures)

    def _queue_held(self) -> None:
        """Queue the async closures of ended steps. One thread at a time does so, for all, in their order."""
        with self._lock:
            if self._is_queueing:
                return
            self._is_queueing = True
        try:
            while True:
                with self._lock:
                    if not self.held:
                        self._is_queueing = False
                        return
                    closure = self.held.pop(0)
                self.async_handler.put(closure)
        except BaseException:
            self._is_queueing = False
            raise

    def flush(self, timeout: float | None) -> None:
        """See `flush_step_closures`."""
        self._queue_held()
        self.async_handler.flush(timeout)

    def async_failures(self) -> None:
        """Raise the errors of async closures since the last call. Does not wait."""
        if self.started_handler is not None:
            self.started_handler.raise_failures()

    def num_pending(self) -> int:
        """The number of async closures of ended steps that have not finished."""
        handler = self.started_handler
        queued = 0 if handler is None else handler.num_waiting + (handler._running is not None)
        return queued + len(self.held)

    def close(self, timeout: float) -> list[str]:
        """Wait up to `timeout` seconds for async closures. Returns the names of closures that did not run."""
        handler = self.started_handler
        # Not `_queue_held`, which may wait for a place in the queue for longer than the timeout.
        while self.held and handler is not None and handler.num_waiting < handler.max_queue_size:
            handler.put(self.held.pop(0))
        dropped = handler.close(timeout) if handler is not None else []
        dropped += [closure.description for closure in self.held]
        rest = [closure for closures in self.take() for closure in closures]
        for closure in rest:
            closure.step = self.step + 1
        return dropped + [f"{closure.description} whose step never reached its barrier," for closure in rest]


lazy_context = DeviceContext("lazy:0")


def check_device(device: Any) -> None:
    """Raise `ValueError` unless `device` is the lazy device or None, which means the lazy device."""
    name = str(device) if device is not None else ""
    if name not in ("", "lazy", "lazy:0"):
        raise ValueError(f"there is no device {name!r} here; expected 'lazy', 'lazy:0' or nothing")


def get_device_context(device: Any = None) -> DeviceContext:
    """The context of a device, by default of the lazy device. Does not synchronize.

    For example:

        lazystep.get_device_context().step      # barriers crossed so far
    """
    check_device(device)
    return lazy_context


def add_step_closure(
    closure: Callable[..., Any],
    args: Sequence[Any] = (),
    run_async: bool = False,
    *,
    kwargs: Mapping[str, Any] | None = None,
    device: Any = None,
) -> None:
    """Run `closure(*args, **kwargs)` after the barrier of the current step.

    Tensors in the arguments, at any depth, have their values as of the barrier; the step itself computes
    them. By default the closure runs on the training thread, in `mark_step`, and gets the lazy tensors. With
    `run_async=True` it runs on the worker thread and gets CPU tensors, while the training thread goes on; its
    exception is raised at the next barrier.

        lazystep.add_step_closure(log, (step, loss), run_async=True)

    Does not synchronize. If the queue of async closures is full, the barrier waits, not this call.
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
    """Block until the async closures of all ended steps have run, then raise their errors.

    Closures of the step that is being recorded are not included: they run after its barrier. Raises
    `WaitTimeoutError` after `timeout` seconds (default: the setting `wait_timeout`); the message names the
    running closure and the line that it is at.

        lazystep.mark_step()
        lazystep.flush_step_closures(timeout=30)        # at the end of training, or before a report
    """
    get_device_context().flush(timeout)


def step_closure(run_async: bool = False, every: int = 1) -> Callable[[F], F]:
    """Make a function a step closure: a call adds it to the current step, in every N-th step that calls it.

        @lazystep.step_closure(run_async=True, every=100)
        def log(step, loss):
            print(step, loss.item())

        log(step, loss)   # in the step: costs nothing in 99 of 100 steps

    The call does not synchronize. The function runs after the barrier with the values of its step. With
    `run_async=True` it runs on the worker thread and gets CPU tensors; otherwise it runs on the training
    thread, in `mark_step`, and gets lazy tensors.
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
    """Warn, once per function, if a closure captures lazy tensors instead of taking them as arguments."""
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
    """Print the closures that did not run before exit, and the failures that were never raised."""
    for name in dropped:
        print(f"lazystep: {name} was dropped at exit", file=sys.stderr)
    for failure in failures:
        print(f"lazystep: nobody looked at this failure: {failure}", file=sys.stderr)
