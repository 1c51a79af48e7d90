"""What `untyped_storage()` of a lazy tensor returns: an identity, a size, and a copy of the bytes on demand.

Packages that save weights ask a tensor's storage which tensors share memory: safetensors compares
`untyped_storage().data_ptr()` and `nbytes()`, and then the areas that `tensor.data_ptr()` gives. So every
memory gets an address of its own, and `data_ptr` is this address plus the tensor's offset. Tied weights and
views have the same storage; two tensors of the same size have not.

No byte lies at these addresses. They have bits set that no address of a process has, so code that takes one
for a pointer is stopped by the processor, and never reads memory while the executor writes it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, NoReturn

import torch

from .. import metrics
from ..errors import UnsupportedError
from ..record import _recorder, observer
from ..record.handle import Handle, Memory, PendingRun
from ..record.recorder import Recorder
from ..record.snapshot import Snapshot
from ..record.source import user_line
from ..record.tensor import DEVICE

# Beyond the user's part of the address space: on x86-64 57 bits, on ARM 52 bits and 8 that are ignored.
_FIRST_ADDRESS = 0x6C6F << 48
_ALIGNMENT = 64  # as torch's allocator: code that looks at `data_ptr() % 16` sees what it sees in eager

_lock = threading.Lock()
_next_address = _FIRST_ADDRESS


def _tell(asked: str) -> None:
    watching = observer.current()
    if watching is not None:
        watching.on_storage(asked)


def address_of(memory: Memory) -> int:
    """The address that stands for a memory. No other memory ever gets it."""
    _tell("the address of a tensor")
    global _next_address
    with _lock:
        if memory.address == 0:
            memory.address = _next_address
            _next_address += (memory.nbytes // _ALIGNMENT + 1) * _ALIGNMENT
        return memory.address


class LazyStorage:
    """The memory of lazy tensors. Equal for tensors that share memory; holds the memory alive.

    `data_ptr`, `nbytes` and comparisons do not synchronize. `cpu`, `tolist` and `bytes(...)` wait for the
    step that makes or last writes the memory, and copy it.
    """

    __slots__ = ("_handle", "_recorder")

    def __init__(self, handle: Handle, recorder: Recorder) -> None:
        self._handle = handle
        self._recorder = recorder

    @property
    def device(self) -> torch.device:
        """The lazy device."""
        return DEVICE

    @property
    def _cdata(self) -> int:
        # Code that compares storages by `_cdata` gets an identity, too.
        return address_of(self._handle.memory)

    @property
    def is_cuda(self) -> bool:
        """False."""
        return False

    def data_ptr(self) -> int:
        """A number that stands for this memory, 0 for no bytes. There is nothing to read at this address."""
        return self._cdata if self.nbytes() else 0

    def nbytes(self) -> int:
        """The size in bytes."""
        _tell("the size of a tensor's storage")  # which says more than the tensor's own size
        return self._handle.memory.nbytes

    size = __len__ = nbytes

    def element_size(self) -> int:
        """1, as of every untyped storage."""
        return 1

    def is_shared(self) -> bool:
        """False: no lazy tensor is in memory that processes share."""
        return False

    is_pinned = is_shared

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LazyStorage) and self._cdata == other._cdata

    def __hash__(self) -> int:
        return hash(self._cdata)

    def __repr__(self) -> str:
        return f"LazyStorage({self.nbytes()} bytes at {self.data_ptr():#x}, device='{DEVICE}')"

    # -- bytes: each of these synchronizes -----------------------------------------------------------

    def cpu(self) -> torch.UntypedStorage:
        """A copy of the bytes. Synchronizes, counted with the user's line."""
        metrics.count_synchronization("storage", user_line())
        copied: torch.UntypedStorage = _frozen(self._recorder, self._handle).clone()
        return copied

    def tolist(self) -> list[int]:
        """The bytes as numbers. Synchronizes."""
        return list(bytes(self))

    def __bytes__(self) -> bytes:
        array: Any = torch.empty(0, dtype=torch.uint8).set_(self.cpu()).numpy()
        return bytes(array)

    # -- what needs memory ----------------------------------------------------------------------------

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise UnsupportedError(
            f"the storage of a lazy tensor can't be written, resized, shared or pickled, at {user_line(2)}: "
            "its memory belongs to the executor. Use ops on the tensor, or .cpu() for a copy of the values."
        )

    resize_ = copy_ = fill_ = share_memory_ = __setitem__ = __reduce_ex__ = _refuse


# -- copies for files ------------------------------------------------------------------------------


class _StorageSnapshot(Snapshot):
    """All bytes of the memory of a handle as of a moment, and not only those that the handle sees."""

    __slots__ = ()

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return super()._copy(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))


# The copies that somebody still holds, by the address of the memory, with the step that wrote it last.
_copies: dict[int, tuple[weakref.ref[torch.UntypedStorage], PendingRun | None]] = {}


def _frozen(recorder: Recorder, handle: Handle) -> torch.UntypedStorage:
    """A copy of the present bytes, which nobody may write. Waits for them.

    A snapshot, because another thread may queue steps that write the memory: waiting until no such step is
    queued could take for ever. One copy for all who ask while it lives and no step writes the memory.
    """
    address = address_of(handle.memory)
    while True:
        with recorder.lock:
            if not _recorder.is_pending(handle):
                run = handle.memory.run
                reference, known_run = _copies.get(address, (None, None))
                known = reference() if reference is not None and known_run is run else None
                if known is not None:
                    return known
                snapshot = _StorageSnapshot(handle)
                break
        recorder.barrier.flush()
    storage = snapshot.take().untyped_storage()
    _copies[address] = weakref.ref(storage, functools.partial(_forget, address)), run
    return storage


def _forget(address: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
    # No lock: this may run in the middle of anything.
    if _copies.get(address, (None, None))[0] is reference:
        _copies.pop(address, None)


def plain_tensor(recorder: Recorder, handle: Handle) -> torch.Tensor:
    """A CPU tensor with the values of a lazy one, in memory that no step writes. Waits for the values.

    Tensors that share memory share it here, too, as long as one of them lives and no step writes it in
    between: `torch.save` keeps all of them until the file is complete.
    """
    if handle.type.layout is not torch.strided:
        recorder.barrier.synchronize([handle])
        assert handle.tensor is not None
        return handle.tensor.detach()
    storage = _frozen(recorder, handle)
    if handle.tensor is None:  # a view that is still queued, of bytes that are known
        recorder.barrier.synchronize([handle])
    real = handle.tensor
    assert real is not None
    plain = torch.empty(0, dtype=real.dtype, device="cpu")
    plain.set_(storage, real.storage_offset(), real.size(), real.stride())
    plain = plain.conj() if real.is_conj() else plain
    return plain._neg_view() if real.is_neg() else plain
