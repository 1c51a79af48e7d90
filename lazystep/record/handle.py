"""The runtime side of a value: a `Handle` per tensor value, a `Storage` per group of aliases.

A handle is what a lazy tensor stands for. It is made while recording, and gets its real CPU tensor
when the step that computes it has run. Whether a value is still wanted is the lifetime of its
handle: the handle, not the tensor object, tells the recording when it dies, because tensor objects
can be swapped (`torch.utils.swap_tensors`) and revived by autograd.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..errors import LazyStepError
from ..program.types import TensorType, type_of

if TYPE_CHECKING:
    from .recorder import Recording
    from .snapshot import Snapshot


class PendingRun(Protocol):
    """A queued step, as far as the recorder needs to know it."""

    def wait(self) -> None:
        """Block until the step has run or failed; raise after the setting `wait_timeout`."""

    @property
    def is_finished(self) -> bool:
        """Whether the step has run or failed."""

    @property
    def error(self) -> LazyStepError | None:
        """Why the step failed, once it has run."""


class Storage:
    """Memory that one or more handles are views of.

    `writer`: the recording that has recorded a write into it; reading then needs a barrier first.
    `run`: the last queued step that makes or writes it; reading then has to wait for that step.
    `error`: set when a failed step left it half updated.
    `recording` and `number`: its number in the recording that uses it now.
    `snapshots`: who still needs the value it has now, before the next write.
    """

    __slots__ = ("error", "nbytes", "number", "recording", "run", "snapshots", "writer")

    def __init__(self, nbytes: int, recording: Recording | None = None, number: int = -1) -> None:
        """Made by `recording`, as its storage `number`; by nobody for memory that came from the host."""
        self.nbytes = nbytes
        self.writer = self.recording = recording
        self.number = number
        self.run: PendingRun | None = None
        self.error: LazyStepError | None = None
        self.snapshots: Sequence[Snapshot] = ()


class Handle:
    """A tensor value: its type, its storage and, once it has been computed, its real tensor.

    `recording` and `index`: its number in the recording that made it or uses it now.
    `run`: the queued step that computes it; None for a value that came from the host.
    `pristine`: the tensor was allocated by `empty` and nothing has been recorded with it yet, so
    the host may still fill it directly.
    """

    __slots__ = ("__weakref__", "index", "pristine", "recording", "run", "storage", "tensor", "type")

    def __init__(
        self, type: TensorType, storage: Storage, recording: Recording | None = None, index: int = -1
    ) -> None:
        self.type = type
        self.storage = storage
        self.recording = recording
        self.index = index
        self.tensor: torch.Tensor | None = None
        self.run: PendingRun | None = None
        self.pristine = False

    @property
    def is_alone(self) -> bool:
        """Whether nothing but the Python object holds the value: native handles know. See `Snapshot.take`."""
        raise NotImplementedError

    def weakly(self) -> Callable[[], Handle | None]:
        """A function that returns this handle as long as its value is alive, and None after that."""
        return weakref.ref(self)

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("a handle belongs to its process and can't be pickled or copied")

    def __del__(self) -> None:
        # May run at any moment on any thread, inside the recorder's lock too: one atomic dict
        # operation, no lock. An input's index is not in `live`; then this does nothing.
        recording = self.recording
        if recording is not None:
            recording.live.pop(self.index, None)


# The classes of the front end in use: the native one has its own, with the same attributes.
_handle_class: Any = Handle
_storage_class: Any = Storage


def use_classes(handle_class: Any, storage_class: Any) -> None:
    """Make handles and storages of these classes from now on. Once per process, before any is made."""
    global _handle_class, _storage_class
    _handle_class, _storage_class = handle_class, storage_class


def handle_of_host_tensor(tensor: torch.Tensor, storage: Storage | None = None) -> Handle:
    """A handle whose value is known already. Takes over `tensor`, which nobody else may write."""
    type_ = type_of(tensor)
    if storage is None:
        storage = _storage_class(tensor.untyped_storage().nbytes() if type_.layout is torch.strided else 0)
    handle: Handle = _handle_class(type_, storage)
    handle.tensor = tensor
    return handle


LiveHandles = dict[int, "weakref.ref[Handle]"]
