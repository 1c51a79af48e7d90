"""The demo's live progress, from async closures: a rich bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import importlib.util
import sys
import time
from types import TracebackType
from typing import Any

from .. import metrics
from ..runtime import runtime
from ..step_closures import add_step_closure, get_device_context

_PLAIN_SECONDS = 5.0


class Display:
    """Shows loss, steps per second, tier and queues. `show` adds an async closure and does not wait."""

    def __init__(self, seconds: float, num_steps: int | None) -> None:
        self._seconds, self._num_steps = seconds, num_steps
        self._start = self._last_time = self._last_line = time.monotonic()
        self._last_step = 0
        self._native = 0
        self._bar: Any = None
        if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._task = self._bar.add_task("", total=1.0)

    def show(self, step: int, loss: Any) -> None:
        """Show this step after it has run. Does not wait."""
        add_step_closure(self._show, (step, loss), run_async=True)

    def _show(self, step: int, loss: Any) -> None:
        now = time.monotonic()
        is_due = self._bar is not None or now - self._last_line >= _PLAIN_SECONDS or step == 1
        if not is_due or now == self._last_time:
            return
        rate = (step - self._last_step) / (now - self._last_time)
        native = int(metrics.counter_value("native_executions"))
        tier = "native" if native > self._native else "reference"
        self._native, self._last_step, self._last_time = native, step, now
        closures = get_device_context().num_pending()
        text = (
            f"step {step:5d}  loss {loss.item():.3f}  {rate:5.1f} steps/s  {tier:<9}  "
            f"{runtime.executor.num_in_flight} steps and {closures} closures queued"
        )
        if self._bar is None:
            self._last_line = now
            print(f"{now - self._start:4.0f} s  {text}", flush=True)
            return
        done = max((now - self._start) / self._seconds, step / self._num_steps if self._num_steps else 0.0)
        self._bar.update(self._task, description=text, completed=done)

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
