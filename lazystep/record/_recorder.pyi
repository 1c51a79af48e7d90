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

def peek_operands() -> tuple[Handles[Handle], list[Number]]:
    """The inputs and the numbers of the current recording, so far. Needs `Recorder.lock`."""

def guess_next(known: KnownRecording) -> None:
    """Tell which recording has just ended, so that the next one can be guessed."""

# -- replays

def plain_modes() -> int:
    """torch's modes as one number; -1 if one of them is an object, such as a torch function mode."""

def settings_and_keys() -> tuple[int, int, int]:
    """The settings of the process and of this thread, and the included and excluded dispatch keys."""

def take_arguments(arguments: tuple[Any, ...]) -> tuple[list[Any], tuple[Any, ...]] | None:
    """The leaves of a call and their kind, as capture/arguments.py finds them; None if some are not plain."""

class TensorFlags:
    """The gradient flags that tensors had when a step was captured; `ignored` are bits that do not count."""

    def __init__(self, positions: list[int], flags: bytes, ignored: bytes) -> None: ...
    def hold(self, values: list[Any]) -> bool:
        """Whether the tensors at these positions have the same flags now."""

class Layout:
    """The storages of a program: those of its inputs and outputs, and those that it writes."""

    def __init__(
        self, inputs: list[int], outputs: list[tuple[TensorType, int, int]], written: Sequence[int]
    ) -> None: ...

class State:
    """The lazy tensors that a captured step finds in places, with the handles of the last replay.

    `tensors` are positions among the values that a replay reads. `arguments` are pairs of the position of an
    input and the number of the leaf that it is.
    """

    def __init__(self, layout: Layout, tensors: list[int], arguments: list[tuple[int, int]]) -> None: ...
    def given(self, values: list[Any], leaves: list[Any]) -> list[tuple[int, Handle]] | None:
        """The inputs that are arguments, with their positions, if nothing else needs a closer look.

        None unless all tensors have the handles that were remembered, and no argument shares memory.
        """

    def remember(self, values: list[Any], inputs: list[Handle | None]) -> None:
        """The state fits: these are its handles, None for inputs that each replay has its own of."""

    def tensors(self) -> list[torch.Tensor | None] | None:
        """The tensors of the remembered handles, None for inputs that each replay has its own of.

        None instead of the list if a tensor is not there yet, begins in the middle of its memory, or was left
        half updated by a failed step.
        """

class Bound:
    """What replays on the same state have in common. Compared by identity."""

class BoundInputs:
    """The inputs of a replay: those that all replays share, and its own."""

    def tensors(self) -> list[torch.Tensor]:
        """The real tensor of each, in program order. Every one must have been computed."""

    def suspects(self) -> list[Handle]:
        """The handles that an earlier failure may concern. In the steady state there are none."""

class Binding:
    """A known program on the remembered state and given inputs, without a recording. Like a `Cut`."""

    def __init__(self, state: State, given: list[tuple[int, Handle]]) -> None: ...
    @property
    def inputs(self) -> BoundInputs: ...
    @property
    def outputs(self) -> Handles[Handle]: ...
    @property
    def written(self) -> Written: ...
    @property
    def bound(self) -> Bound: ...
    def own_tensors(self) -> list[torch.Tensor] | None:
        """The tensors of the given inputs, in their order, if nothing has to be done before the run.

        None if one is not there yet, if a snapshot needs a value that the run overwrites, or if an input was
        left half updated by a failed step. Call it after `commit`: a later snapshot waits for the run.
        """
    def commit(self, run: PendingRun) -> None:
        """Tell the handles and their memory which run makes and writes them."""

class Counts:
    """Numbers in CPU tensors of one element, all equal: the step counts of an optimizer."""

    def __init__(self, tensors: list[torch.Tensor]) -> None: ...
    def read(self) -> Number | None:
        """The number; None if they differ, or one of the tensors has become another kind of tensor."""

    def write(self, number: Number) -> None: ...

# -- registration

class Mode:
    """What the kernel does with an op before it looks up a decision, or instead. See src/kernel.h."""

    RECORD: Mode
    HANDLER: Mode
    COMPOSITE: Mode
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

    def refuse_autocast(self) -> None:
        """Raise, because autocast is on for CPU tensors and off for lazy ones."""

def install(dispatch: Dispatch, set_num_threads: int) -> None: ...
def installed() -> Dispatch: ...
def register_kernel(name: str, overload: str) -> None: ...
def register_sparse_kernel(name: str, overload: str) -> None: ...
def register_fallback() -> None: ...

# -- autocast: see src/autocast.h

class CastTo:
    """Which type the floating operands of an op are cast to."""

    LOWER: CastTo
    PROMOTE: CastTo
    FIXED: CastTo

def register_cast_fallback() -> None: ...
def include_casts(is_on: bool) -> None: ...
def register_cast(name: str, overload: str, to: CastTo, fixed: torch.dtype) -> None: ...
def cast_to_lower(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the type of autocast. The cast of a leaf that requires gradients is kept, as in eager."""

def clear_casts() -> None: ...
def num_casts() -> int: ...
def casts_around() -> int: ...

# -- observed calls: see the note of that name in src/recorder.h

def begin_observed_call() -> None: ...
def end_observed_call() -> None: ...
def is_in_observed_call() -> bool: ...
def num_foreign_ops() -> int: ...
def refuse() -> None: ...
