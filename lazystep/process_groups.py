"""Process groups for the collectives of steps.

Steps have a group of their own beside each group of the user's, with the same ranks. The executor thread uses
it and no other thread does. So the collectives of queued steps never meet those that the training thread
starts meanwhile: on one group both would mix on the wire, and gloo would abort the process.

A program names its group by a text. The name is made from the name of the user's group, which is the same on
all ranks and in the next run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from .errors import CollectiveError, LazyStepError
from .extensions import RUNNER

_PREFIX = "lazystep:"


class StepGroup:
    """Gloo groups for steps, with the ranks of a group of the user's."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Connects to the other ranks, which must do the same: blocks, at most for the group's time-out."""
        self.name = f"{_PREFIX}{group.group_name}"
        self.rank = group.rank()
        self.size = group.size()
        self.timeout = timeout_of(group)
        self.store: Store = PrefixStore(f"{self.name}/", group.get_group_store())
        # Any: the methods of gloo groups are those of a C++ base, which torch's annotations do not know.
        self.backend: Any = self._connect("steps/")
        # For messages of the training thread, such as the order of buckets.
        self.messages: Any = self._connect("messages/")
        # The backend as the kernels of collectives know it. Has the number of the collectives that all ranks
        # have agreed on last, negative for none: see tiers/agreement.
        self.connected: Any = RUNNER.load().Group(self.name, self.backend, self.timeout.total_seconds())
        # After a failed collective gloo's connections are of no use.
        self.failure = ""
        self.num_agreements = 0  # how often the ranks have had to agree
        self.num_models = 0  # that have compared their shapes
        self.num_sharded = 0  # optimizers, see distributed/sharded

    def fail(self, reason: str) -> None:
        """Refuse further collectives. The first reason counts."""
        self.failure = self.failure or reason
        self.connected.agreed = -1  # the next run asks, and is told

    def finish(self, message: Any, what: str) -> None:
        """Wait for a message between training threads; `what`: its content, in words."""
        try:
            message.wait()
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank} exchanges {what} with the other ranks of {self.name!r}, which failed: "
                f"{str(error).partition(chr(10))[0]}. Another rank has ended, hangs, or has not come to this "
                f"place within {self.timeout.total_seconds():g} s. {self.failure}".rstrip()
            ) from error

    def _connect(self, prefix: str) -> dist.ProcessGroupGloo:
        # Made directly: `dist.new_group` has to be called on all ranks of the world.
        store = PrefixStore(prefix, self.store)
        return dist.ProcessGroupGloo(store, self.rank, self.size, timeout=self.timeout)


def step_group(group: dist.ProcessGroup | None) -> StepGroup:
    """The group for steps beside `group`; None: the default group. Collective and blocking the first time."""
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise LazyStepError(
                "a collective on lazy tensors needs a process group: call dist.init_process_group first"
            )
    found = _groups.get(group)
    if found is None:
        name = f"{_PREFIX}{group.group_name}"
        _end_former(name)
        found = _groups[group] = _by_name[name] = StepGroup(group)
    return found


def _end_former(name: str) -> None:
    """Let nothing run in a new group that was recorded for a destroyed one of the same name.

    Blocks for a step that is running, at most for the time-out of the former group.
    """
    if name in _names:
        former = _by_name.get(name)
        if former is not None:
            former.fail("It has been destroyed, and made anew. Run lazystep.wait_device_ops() before.")
        for drain in drains:
            drain()
    _names.add(name)


def find_group(name: str) -> StepGroup:
    """The group that an instruction names."""
    found = _by_name.get(name)
    if found is None:
        raise LazyStepError(
            f"the step communicates in the process group {name!r}, which has been destroyed. "
            "Destroy process groups after lazystep.wait_device_ops()."
        )
    return found


def group_of_one() -> Any:
    """A gloo group of this rank alone, to learn what gloo takes without the other ranks."""
    return dist.ProcessGroupGloo(HashStore(), 0, 1, timeout=dist.constants.default_pg_timeout)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The time-out of a group; torch's default if the backend does not expose it."""
    try:
        found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        found = dist.constants.default_pg_timeout
    return found


# A step group lives as long as the user's group.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, StepGroup] = weakref.WeakKeyDictionary()
_by_name: weakref.WeakValueDictionary[str, StepGroup] = weakref.WeakValueDictionary()
_names: set[str] = set()  # of all groups so far
# The runtime's: each runs what is recorded and queued, and keeps what fails for the next barrier.
drains: list[Callable[[], None]] = []
