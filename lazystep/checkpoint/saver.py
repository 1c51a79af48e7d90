"""`save_every`: the state as of a call, written by a worker thread.

The training thread takes the state apart: for a lazy tensor a snapshot, which copies only if a later step is
about to write the tensor before the worker has read it; for a CPU tensor a copy. The rest is small. Nothing
waits for a value.
"""

from __future__ import annotations

import atexit
import os
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .. import metrics
from ..closure import AsyncClosureHandler
from ..config import settings
from ..errors import CheckpointError
from ..notices import notice
from ..record import observer
from ..record.handle import Handle
from ..record.snapshot import Snapshot
from ..record.source import user_line
from ..record.tensor import find_handle
from ..runtime import runtime
from .directory import Directory
from .files import Files
from .ranks import Ranks, ranks_of
from .restore import shapes_of
from .tensor_file import TensorKind, bytes_of, check
from .tree import take_apart


class _Tensors:
    """The tensors of a state, each once: tied ones have one name."""

    def __init__(self) -> None:
        self.kinds: dict[str, TensorKind] = {}
        self._values: dict[str, Snapshot | torch.Tensor] = {}
        self._names: dict[Any, str] = {}
        # So that no other value gets the identity of one: some are made for this call and freed after it.
        self._held: list[Handle | torch.Tensor] = []

    def store(self, place: str, tensor: torch.Tensor) -> str:
        kind = check(place, tensor)
        handle = find_handle(tensor)
        # Tensor objects may be wrappers made for this call; the value behind them is what is tied.
        identity = (
            handle
            if handle is not None
            else (tensor.data_ptr(), tensor.dtype, *tensor.shape, *tensor.stride())
        )
        known = self._names.get(identity)
        if known is not None and (handle is not None or tensor.numel()):
            return known
        name = place.removeprefix(".")
        while name in self.kinds:  # {"a.b": x, "a": {"b": y}} and {1: x, "1": y} have two values at one place
            name += "~"
        self.kinds[name] = kind
        self._values[name] = Snapshot(handle) if handle is not None else tensor.detach().clone()
        self._names[identity] = name
        self._held.append(handle if handle is not None else tensor)
        return name

    def seal(self) -> None:
        """All are stored: what told them apart is freed."""
        self._names.clear()
        self._held.clear()

    def values(self) -> Iterator[memoryview]:
        """The bytes of each tensor, in the order of the names. Waits for the steps that make them."""
        while self._values:
            name = next(iter(self._values))
            value = self._values.pop(name)  # its memory is free when it is written
            yield bytes_of(_take(value) if isinstance(value, Snapshot) else value)


def _take(snapshot: Snapshot) -> torch.Tensor:
    value = snapshot.take()
    if snapshot.error is not None:  # the value is that before the failed step: not the state of this one
        raise snapshot.error
    return value


def _check(name: str, thing: Any) -> None:
    """Raise `CheckpointError` for an object that could not be restored."""
    has_both = all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict"))
    if not has_both and not isinstance(thing, (torch.Tensor, torch.Generator)):
        raise CheckpointError(
            f"state[{name!r}] is a {type(thing).__name__}: expected an object with state_dict() and "
            "load_state_dict(), a tensor or a torch.Generator. Pass numbers to the call: save(step, epoch=3)."
        )


def _state_of(thing: Any) -> Any:
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    return thing if isinstance(thing, torch.Tensor) else thing.state_dict()


def _random_state() -> dict[str, Any]:
    """The generators of torch, Python and, if it is loaded, NumPy. The lazy device draws from torch's."""
    numpy = sys.modules.get("numpy")
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=True)
    return state


class Saver:
    """Writes the state in every N-th step. `save_every` makes one.

    with lazystep.checkpoint.save_every("checkpoints", {"model": model}, every=50) as save:
        save(step)
    """

    def __init__(
        self,
        directory: Directory,
        state: Mapping[str, Any],
        every: int,
        max_pending: int,
        ranks: Ranks | None = None,
    ) -> None:
        self._directory = directory
        self._state = dict(state)
        self._every = every
        self._ranks = ranks
        self._num_saves = 0
        self._handler = AsyncClosureHandler(max_pending)
        self._failure: CheckpointError | None = None
        for name, thing in self._state.items():
            _check(name, thing)
        atexit.register(self._at_exit)

    def __call__(self, step: int, **extra: Any) -> None:
        """In every N-th step, save the state as it is now, with what is in `extra`: numbers, strings, lists.

        Cuts the recording if something is recorded: call it at the end of the step. Does not wait for
        values. Waits only if `max_pending` checkpoints are queued already. A checkpoint that could not be
        written is a warning at the next barrier, and the error of `close`.

            save(step, epoch=epoch, position=loader_position)
        """
        if step % self._every == 0:
            self.now(step, **extra)

    def now(self, step: int, **extra: Any) -> None:
        """Save the state in this step, whatever its number is. Otherwise as a call."""
        if observer.current() is not None:
            raise CheckpointError(
                f"a checkpoint inside a @lazystep.step function, at {user_line(2)}: replays would not "
                "take it. Call it after the step function."
            )
        if not isinstance(step, (int, np.integer)) or step < 0:
            raise CheckpointError(
                f"step = {step!r}: expected an int, 0 or more. A checkpoint is named by it."
            )
        step = int(step)
        runtime.flush()
        tensors = _Tensors()
        try:
            form = take_apart({**self._states(), "random": _random_state(), "extra": extra}, tensors.store)
        except RecursionError as error:
            raise CheckpointError(
                "the state is nested too deeply for a checkpoint, or contains itself"
            ) from error
        tensors.seal()
        number, self._num_saves = self._num_saves, self._num_saves + 1

        def write_checkpoint() -> None:
            self._write(step, number, tensors, form)

        metrics.count("checkpoints_queued")
        self._handler.put(write_checkpoint)

    def _states(self) -> dict[str, Any]:
        """What this rank saves. Of several ranks each has its part of sharded state, and rank 0 the rest."""
        optimizers = {n: x for n, x in self._state.items() if isinstance(x, torch.optim.Optimizer)}
        shapes = {name: shapes_of(optimizer) for name, optimizer in optimizers.items()}
        if self._ranks is None:
            state = {name: _state_of(thing) for name, thing in self._state.items()}
            return {"state": state, "shapes": shapes}
        shards: dict[str, Any] = {
            n: getattr(thing, "_lazystep_shards", None) for n, thing in self._state.items()
        }
        state = {
            name: _state_of(thing) if shards[name] is None else shards[name].local_state(thing)
            for name, thing in self._state.items()
            if shards[name] is not None or self._ranks.rank == 0
        }
        return {
            "state": state,
            "shapes": shapes,
            "sharded": [name for name in shards if shards[name] is not None],
        }

    def _write(self, step: int, number: int, tensors: _Tensors, form: Any) -> None:
        try:
            self._directory.write(step, tensors.kinds, tensors.values(), form, self._ranks, number)
        except Exception as error:
            failure = error
            if not isinstance(failure, CheckpointError):  # a step failed, so there are no values to write
                failure = CheckpointError(
                    f"{self._directory.root}: the checkpoint of step {step} was not written: {error}"
                )
                failure.__cause__ = error
            self._failure = failure
            metrics.count("checkpoints_failed")
            notice(f"checkpoint of step {step} in {self._directory.root}", f"{failure} Training goes on.")
        else:
            self._failure = None
            metrics.count("checkpoints_written")

    def flush(self, timeout: float | None = None) -> None:
        """Block until every queued checkpoint is committed. Raises `CheckpointError` if the last is not."""
        self._handler.flush(timeout)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Block until every queued checkpoint is committed, and end the worker. Raises as `flush`."""
        try:
            self.flush()
        finally:
            self._handler.close(0.0)
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        for name in self._handler.close(settings.exit_timeout):
            print(f"lazystep: {name} was dropped at exit: a checkpoint is not written", file=sys.stderr)

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as unwritten:
            if error is None:
                raise
            # What has ended the block is what its caller looks for.
            error.add_note(f"and: {unwritten}")


def save_every(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    every: int,
    keep: int = 3,
    *,
    max_pending: int = 1,
    process_group: dist.ProcessGroup | None = None,
    files: Files | None = None,
) -> Saver:
    """Save `state` in every N-th step to a directory, off the training thread, and keep the newest `keep`.

    The newest are those of the highest steps, whichever saver has written them. Those of later steps that an
    earlier run has left stay until the training has passed them. A step behind `keep` later ones that came
    since is refused: see [Note: keep] in directory.py.

    `state`: names to models, optimizers, schedules, scalers (anything with `state_dict` and
    `load_state_dict`), tensors and generators. The random generators of torch, Python and NumPy are saved
    with it. At most `max_pending` checkpoints wait behind the one that is being written; then a call waits.

        save = lazystep.checkpoint.save_every("checkpoints", {"model": model, "opt": opt}, every=50)
        save(step, epoch=epoch)
        save.close()

    `process_group`: all its ranks write one checkpoint, in a directory that all of them see. Each writes its
    part of sharded optimizer state, without gathering it; rank 0 writes the rest and commits when all parts
    are on the disk. All ranks must call `save` in the same steps. Blocks here until rank 0 has called it.

    Makes the directory. Does not synchronize.
    """
    if every < 1 or keep < 1:
        raise ValueError(f"every = {every}, keep = {keep}: expected at least 1")
    # Absolute: the program may change its directory while the worker writes.
    directory = Directory(Path(path).absolute(), keep, files or Files())
    ranks = ranks_of(process_group) if process_group is not None else None
    return Saver(directory, state, every, max_pending, ranks)
