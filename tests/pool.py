"""A pool of processes in one gloo group, reused from test to test.

`pool.run(function, *args)` calls a module-level function on each rank, with its rank's `World` first, and
returns what the ranks returned. What one of them raised is raised here, with its traceback. After a failure
the next call gets new processes: a rank of the failed call may still wait for another, or answer late.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lazystep.runtime import runtime
from lazystep.tiers.history import History


@dataclass
class World:
    """Where a function runs."""

    rank: int
    size: int
    group: dist.ProcessGroup


def raised_by(call: Callable[[], object], notes: list[str] | None = None) -> str:
    """What a call raises, as text that can be sent from its rank; its notes are added to a list."""
    try:
        call()
    except Exception as error:
        if notes is not None:
            notes += getattr(error, "__notes__", [])
        return f"{type(error).__name__}: {error}"
    return "nothing"


class RankError(Exception):
    """A function raised on a rank, or its process ended or gave no answer in time."""


class Pool:
    """Processes that wait for work. `num_ranks` may be fewer than there are: the first ones then work."""

    def __init__(self, size: int, collective_timeout: float = 60.0) -> None:
        self._size = size
        self._collective_timeout = collective_timeout
        self._open()

    def _open(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._directory = tempfile.TemporaryDirectory()
        self._has_failed = False
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, self._size, self._directory.name, self._collective_timeout)
            process = context.Process(target=_serve, args=arguments)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        self.gather(range(self._size), timeout=300)  # a busy machine takes minutes to import torch

    def run(
        self, function: Callable[..., Any], *args: Any, num_ranks: int = 2, timeout: float = 60
    ) -> list[Any]:
        """Call `function(world, *args)` on the first ranks."""
        self.start(function, *args, num_ranks=num_ranks)
        return self.gather(range(num_ranks), timeout)

    def start(self, function: Callable[..., Any], *args: Any, num_ranks: int = 2) -> None:
        """Begin a call; `gather` ends it."""
        if self._has_failed:
            self.close(patience=0)
            self._open()
        for pipe in self._pipes[:num_ranks]:
            pipe.send_bytes(pickle.dumps((function, args, num_ranks)))

    def gather(self, ranks: Any, timeout: float) -> list[Any]:
        """What these ranks returned."""
        try:
            return self._gather(ranks, timeout)
        except RankError:
            self._has_failed = True
            raise

    def _gather(self, ranks: Any, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        failures: list[str] = []
        while missing := [rank for rank in ranks if rank not in answers]:
            ready = wait([self._pipes[rank] for rank in missing], max(deadline - time.monotonic(), 0))
            if not ready:
                failures.append(f"ranks {missing}: no answer in time")
                failures += map(self._stacks, missing)
                break
            for rank in [rank for rank in missing if self._pipes[rank] in ready]:
                try:
                    ok, answers[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, ConnectionResetError) as error:
                    raise RankError(f"rank {rank}: its process has ended") from error
                if not ok:
                    failures.append(f"rank {rank}:\n{answers[rank]}")
                    deadline = min(deadline, time.monotonic() + 15)  # the others may wait for it
        if failures:
            raise RankError("\n".join(failures))
        return [answers[rank] for rank in ranks]

    def _stacks(self, rank: int) -> str:
        """Where the threads of a rank stand that gives no answer. A stopped process says nothing."""
        pid = self.processes[rank].pid
        if pid is None or not self.processes[rank].is_alive():
            return f"rank {rank}: its process has ended"
        stacks = _stacks_file(self._directory.name, rank)
        if not stacks.exists():
            return f"rank {rank}: it is still starting"
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        return f"rank {rank}:\n{stacks.read_text()}"

    def close(self, patience: float = 5) -> None:
        """End all processes."""
        for pipe in self._pipes:
            pipe.close()  # they end by themselves at the end of their input
        for process in self.processes:
            process.join(patience)
            if process.is_alive():
                process.kill()
                process.join()
        self._directory.cleanup()


def _stacks_file(directory: str, rank: int) -> Path:
    return Path(directory) / f"stacks-{rank}"


def _serve(pipe: Connection, rank: int, size: int, directory: str, collective_timeout: float) -> None:
    stacks = _stacks_file(directory, rank).open("w")
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(directory) / "store"), size)
    timeout = timedelta(seconds=collective_timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    groups = {n: dist.new_group(list(range(n)), timeout=timeout) for n in range(1, size)}
    groups[size] = dist.group.WORLD
    pipe.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            function, args, num_ranks = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        runtime.history = History()  # as for each test: one that makes many programs is none of the next
        try:
            answer = (True, function(World(rank, num_ranks, groups[num_ranks]), *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
