"""The recorder: the extension that is built from src/. One per process.

Everything here may be called from any thread. See [Note: locks] in src/recorder.h.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from ..decide.decision import Decision
from ..errors import LazyStepError
from ..program.program import Number, Source
from ..program.types import TensorType
from .assemble import Entry
from .handle import PendingRun
from .snapshot import Snapshot

torch_version: str

# -- handles and tensors

class Memory:
    """Memory that one or more handles are views of: the runtime side of a program's `Storage`."""

    nbytes: int
    # Set when a failed step has left it half updated.
    error: LazyStepError | None
    # The last queued step that makes or writes it: a read waits for that step.
    run: PendingRun | None
    # Who still needs the value that it has now, before the next write.
    snapshots: Sequence[Snapshot]
    # What `data_ptr` shows; 0 as long as nobody has asked. See device/storage.py.
    address: int
    def __init__(self, nbytes: int) -> None: ...

class Handle:
    """The runtime side of a program's `Value`: its type, its memory and, once computed, its real tensor."""

    tensor: torch.Tensor | None
    # The queued step that computes it; None for a value that came from the host.
    run: PendingRun | None
    # `empty` has allocated it and nothing has been recorded with it, so the host may still fill it.
    pristine: bool
    def __init__(self, type: TensorType, memory: Memory) -> None: ...
    @property
    def type(self) -> TensorType: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def is_alone(self) -> bool:
        """Whether nothing but the Python object that asks holds the value and its memory."""

    def weakly(self) -> Callable[[], Handle | None]:
        """A function that returns this handle as long as its value is alive, and None after that."""

_H = TypeVar("_H", bound=Handle | None, covariant=True)

class Handles(Generic[_H]):
    """The inputs or outputs of a run, in program order.

    Outputs are `Handles[Handle | None]`: None for an output that nothing uses any more.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, position: int) -> _H: ...
    def __iter__(self) -> Iterator[_H]: ...
    def tensors(self) -> list[torch.Tensor]:
        """The real tensor of each. Every one must have been computed."""

    def deliver(self, tensors: list[torch.Tensor]) -> None:
        """Give each handle its tensor."""

    def suspects(self) -> list[Handle]:
        """The handles that an earlier failure may concern. In the steady state there are none."""

def is_lazy(obj: object) -> bool: ...
def has_changed_shape_in_place(tensor: torch.Tensor) -> bool: ...
def is_stale_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view whose gradient would not be eager's. See [Note: stale views]."""

def find_handle(obj: object) -> Handle | None: ...
def find_handles(objects: list[Any]) -> list[Handle | None]: ...
def have_handles(objects: list[Any], handles: list[Handle]) -> bool: ...
def gradient_flags(tensors: list[torch.Tensor]) -> bytes: ...
def wrap(handle: Handle) -> torch.Tensor: ...
def retype(tensor: torch.Tensor, handle: Handle) -> None: ...

# -- recordings

class KnownRecording:
    """The entries and source lines of a recording: the key of its program. Compared by identity."""

    @property
    def entries(self) -> list[Entry]: ...
    @property
    def sources(self) -> list[Source | None]: ...

class Scalars:
    """The numbers of a recording."""

    def tolist(self) -> list[Number]: ...

class Written:
    """The memory that a run writes, by its storage number in the program."""

    def with_snapshots(self) -> list[Memory]: ...
    def get(self, number: int) -> Memory | None: ...

class Cut:
    """A finished recording, with the handles that were alive at the barrier."""

    @property
    def known(self) -> KnownRecording: ...
    @property
    def inputs(self) -> Handles[Handle]: ...
    @property
    def scalars(self) -> Scalars: ...
    @property
    def written(self) -> Written: ...
    @property
    def outputs(self) -> tuple[int, ...]:
        """The numbers of the values that were alive at the barrier."""

    @property
    def num_instructions(self) -> int: ...
    @property
    def started(self) -> float: ...
    def handles_of(self, values: tuple[int, ...]) -> Handles[Handle | None]:
        """The live handles of these values, None for a value that has died."""

    def commit(self, run: PendingRun) -> None:
        """Tell the handles and their memory which run makes and writes them."""

class Layout:
    """The storages of a program: those of its inputs and outputs, and those that it writes."""

    def __init__(
        self, inputs: list[int], outputs: list[tuple[TensorType, int, int]], written: Sequence[int]
    ) -> None: ...

class Binding:
    """A known program on given inputs, without a recording. Has what a `Cut` has for a recorded one."""

    def __init__(self, layout: Layout, inputs: list[Handle]) -> None: ...
    @property
    def inputs(self) -> Handles[Handle]: ...
    @property
    def outputs(self) -> Handles[Handle]: ...
    @property
    def written(self) -> Written: ...
    def commit(self, run: PendingRun) -> None: ...

def num_entries() -> int: ...
def num_lookups() -> int: ...
def num_alive() -> tuple[int, int]: ...
def num_calls_to_python() -> int: ...
def set_max_entries(limit: int) -> None: ...
def is_pending(handle: Handle) -> bool:
    """Whether the current recording has to run before this value can be read."""

def index_in_current(handle: Handle) -> int:
    """The number of a value that the current recording makes; -1 for any other value."""

def cut() -> Cut | None:
    """End the current recording and start the next; None if nothing was recorded. Needs `Recorder.lock`."""

def peek() -> KnownRecording:
    """The current recording as one that is known, without ending it. Needs `Recorder.lock`."""

def guess_next(known: KnownRecording) -> None:
    """Tell which recording has just ended, so that the next one can be guessed."""

# -- registration

class Mode:
    """What the kernel does with an op before it looks up a decision, or instead. See src/kernel.h."""

    RECORD: Mode
    HANDLER: Mode
    DETACH: Mode
    OVERWRITE: Mode
    EMPTY: Mode
    TO_COPY: Mode

class Dispatch(Protocol):
    """What the kernel asks of Python."""

    def traits(self, func: Any) -> tuple[Mode, list[bool], bool, bool, bool, bool]:
        """The op's mode, which arguments take numbers, and `float_literals`, `writes`, `needs_nbytes`,
        `is_absolute`."""

    def decide(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Decision:
        """What to do with a call whose key is new."""

    def check_numbers(self, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise if the op does not take numbers of this kind. See [Note: numbers] in src/decision.h."""

    def refuse_view(self, func: Any) -> None:
        """Raise, because an operand is a stale view. See [Note: stale views] in src/kernel.cpp."""

    def run_now(self, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that is not recorded: a draw, or an op that needs values."""

    def run_handler(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that has a handler, or one that has no key: it takes tensors of other devices."""

    def run_sparse(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call with a sparse tensor, which no program can hold. Not called by the kernel."""

    def source(self) -> Source | None:
        """The user's line."""

    def on_full(self) -> None:
        """The recording has reached its largest size."""

    def count_draw(self) -> None:
        """The kernel has drawn random numbers: count it."""

    def refuse(self) -> None:
        """Raise, because this is a forked child."""

def install(dispatch: Dispatch, set_num_threads: int) -> None: ...
def installed() -> Dispatch: ...
def register_kernel(name: str, overload: str) -> None: ...
def register_sparse_kernel(name: str, overload: str) -> None: ...
def register_fallback() -> None: ...

# -- observed calls: see the note of that name in src/recorder.h

def begin_observed_call() -> None: ...
def end_observed_call() -> None: ...
def is_in_observed_call() -> bool: ...
def num_foreign_ops() -> int: ...
def refuse() -> None: ...
