"""The recorder: appends what front ends caught to the current recording, and cuts it at a barrier.

A recording is a list of entries. An entry is a tuple: `(decision, operand index, ...)` for an op,
`(type, storage number, nbytes)` for an input at its first use. Entries hold no values, handles or
numbers that vary, so the list of entries *is* the program's key, built while recording.

[Note: following] Training loops repeat. The recorder guesses the program that comes next from the
one that came last time, and compares each entry with the guess as it arrives. As long as they
agree, nothing else needs to be kept: no source line is looked up and no hash is computed, and at
the barrier the program is known. Where they part, the lines so far are the guess's.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..config import settings
from ..program.program import Source
from ..program.types import TensorType
from .decide import Decision
from .handle import Handle, LiveHandles, PendingRun, Storage
from .source import user_source

Entry = tuple[Any, ...]


class KnownRecording:
    """The entries and source lines of an earlier recording: the key of its program."""

    __slots__ = ("__weakref__", "entries", "follower", "sources")

    def __init__(self, entries: tuple[Entry, ...], sources: list[Source | None]) -> None:
        self.entries = entries
        self.sources = sources
        # What was recorded after this one the last time: the next guess. Weak: guesses are
        # replaced as the loop changes and must not keep old programs alive in a chain.
        self.follower: weakref.ref[KnownRecording] | None = None


class Recording:
    """What has been recorded since the last barrier."""

    __slots__ = (
        "entries",
        "guess",
        "inputs",
        "live",
        "num_storages",
        "num_values",
        "scalars",
        "sources",
        "started",
        "written",
    )

    def __init__(self, guess: KnownRecording | None) -> None:
        self.entries: list[Entry] = []
        self.scalars: list[Any] = []
        self.inputs: list[Handle] = []
        self.live: LiveHandles = {}
        self.written: list[Storage] = []
        self.num_values = 0
        self.num_storages = 0
        self.guess = guess
        self.sources: list[Source | None] = []
        self.started = 0.0

    def append(self, entry: Entry) -> None:
        """Add an entry, and compare it with the guess. See [Note: following]."""
        entries = self.entries
        guess = self.guess
        if guess is not None:
            position = len(entries)
            expected = guess.entries
            if position < len(expected) and expected[position] == entry:
                entries.append(entry)
                return
            self.guess = None
            self.sources = guess.sources[:position]
        entries.append(entry)
        self.sources.append(user_source(2) if settings.source_lines else None)

    def adopt(self, handle: Handle) -> int:
        """Make a value from before this recording an input of it."""
        storage = handle.storage
        if storage.error is not None:
            raise storage.error
        if storage.recording is not self:
            storage.recording = self
            storage.number = self.num_storages
            self.num_storages += 1
        self.append((handle.type, storage.number, storage.nbytes))
        self.inputs.append(handle)
        handle.pristine = False
        handle.index = self.num_values
        handle.recording = self
        self.num_values += 1
        return handle.index

    def release(self) -> None:
        """Let go of everything, once the barrier has taken it over: handles keep pointing here, and a
        recording that kept its inputs would tie them into a cycle."""
        self.entries = []
        self.sources = []
        self.scalars = []
        self.inputs = []
        self.written = []
        self.live = {}
        self.guess = None

    def roll_back(self, num_entries: int) -> None:
        """Forget the entries after the first `num_entries`: an interrupted op left them half made."""
        kept = self.entries[:num_entries]
        inputs = [entry for entry in kept if type(entry[0]) is TensorType]
        decisions = [entry[0] for entry in kept if type(entry[0]) is not TensorType]
        self.num_values = len(inputs) + sum(d.num_made for d in decisions)
        for handle in self.inputs[len(inputs) :]:
            handle.recording = None
            if all(handle.storage is not other.storage for other in self.inputs[: len(inputs)]):
                handle.storage.recording = None
        self.num_storages = len({entry[1] for entry in inputs}) + sum(d.num_storages for d in decisions)
        del self.entries[num_entries:], self.sources[num_entries:], self.inputs[len(inputs) :]
        del self.scalars[sum(len(d.scalar_types) for d in decisions) :]
        for index in [i for i in self.live.copy() if i >= self.num_values]:
            self.live.pop(index, None)


class Written:
    """The storages that a recording writes, under their numbers there: the next one numbers them anew."""

    __slots__ = ("_storages",)

    def __init__(self, storages: Mapping[int, Storage]) -> None:
        self._storages = storages

    def with_snapshots(self) -> list[Storage]:
        """Those whose present value somebody still wants."""
        return [storage for storage in self._storages.values() if storage.snapshots]

    def get(self, number: int) -> Storage | None:
        """The storage that had this number."""
        return self._storages.get(number)


class Cut:
    """A finished recording, with the handles that were alive at the barrier.

    `known` is its key, `inputs` and `scalars` what goes into its run, `outputs` the indices of the
    values that are alive, `written` the storages that it writes.
    """

    __slots__ = (
        "_live",
        "_recording",
        "inputs",
        "known",
        "num_instructions",
        "outputs",
        "scalars",
        "started",
        "written",
    )

    def __init__(self, recording: Recording, known: KnownRecording, live: list[tuple[int, Handle]]) -> None:
        self._recording = recording
        self._live = live
        self.known = known
        self.inputs = recording.inputs
        self.scalars = recording.scalars
        self.outputs = tuple(index for index, _ in live)
        self.written = Written({storage.number: storage for storage in recording.written})
        self.started = recording.started
        self.num_instructions = len(recording.entries) - len(recording.inputs)

    def cells(self, indices: Sequence[int]) -> list[Handle | None]:
        """The live handles with these indices; None for one that nobody wants any more."""
        handles = dict(self._live)
        return [handles.get(index) for index in indices]

    def commit(self, run: PendingRun) -> None:
        """Tell what was recorded which run makes and writes it, and let the recording go."""
        recording = self._recording
        for storage in recording.written:
            storage.run, storage.writer = run, None
        for _, handle in self._live:
            handle.run = run
            if handle.storage.writer is recording:
                handle.storage.run, handle.storage.writer = run, None
        recording.release()


class Layout:
    """The memory of a program: which storages its inputs and outputs are views of, and which it writes.

    `inputs` and `written` are numbers of storages; an output is its type, its storage's number and that
    storage's size, should the program make it.
    """

    __slots__ = ("inputs", "outputs", "written")

    def __init__(
        self, inputs: Sequence[int], outputs: Sequence[tuple[TensorType, int, int]], written: Sequence[int]
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.written = written


class Binding:
    """A known program on given inputs, without a recording: what a `Cut` is for a recorded one."""

    __slots__ = ("_storages", "inputs", "outputs", "written")

    def __init__(self, layout: Layout, inputs: Sequence[Handle]) -> None:
        storages = {number: h.storage for number, h in zip(layout.inputs, inputs, strict=True)}
        self.inputs = inputs
        self.outputs: list[Handle] = []
        for type_, number, nbytes in layout.outputs:
            if number not in storages:
                storages[number] = Storage(nbytes)
            self.outputs.append(Handle(type_, storages[number]))
        self._storages = [storages[number] for number in layout.written]
        self.written = Written(dict(zip(layout.written, self._storages, strict=True)))

    def commit(self, run: PendingRun) -> None:
        """Tell what the program makes and writes which run does it."""
        for handle in self.inputs:
            handle.pristine = False
        for storage in self._storages:
            storage.run = run
        for handle in self.outputs:
            handle.run = handle.storage.run = run


class Draw(NamedTuple):
    """Random numbers or fresh memory from the host: the value they became, and how to get them again.

    `generator`: the caller's own, if it is not the default one.
    """

    handle: Handle
    again: Callable[[], torch.Tensor]
    generator: torch.Generator | None


class RecorderBase:
    """What every recorder has: the lock, what the barrier injects, and reading.

    `draws`: while a step is captured, the random numbers that it drew and the memory that it asked for,
    in order, and how to get them again. None otherwise.

    `synchronize`: called by reads that need values; injected by the barrier, which stands above
    this module. `on_full`: called without the lock when the recording has reached the size bound.
    """

    def __init__(self) -> None:
        # Held for an entry or a cut, never while waiting for anything.
        self.lock = threading.RLock()
        self.draws: list[Draw] | None = None
        self.synchronize: Callable[[Sequence[Handle]], None] = _not_wired
        self.synchronize_all: Callable[[], None] = _not_wired
        self.on_full: Callable[[], None] = _not_wired

    @contextmanager
    def reading(self, handles: Sequence[Handle]) -> Iterator[None]:
        """Wait for these values, then hold them still: no step that writes them starts inside the block.

        Waits without the lock, and looks again under it, since another thread may have queued a step.
        """
        while True:
            self.synchronize(handles)
            with self.lock:
                runs = [run for h in handles for run in (h.run, h.storage.run) if run is not None]
                if all(run.is_finished for run in runs):
                    yield
                    return


class Recorder(RecorderBase):
    """Owns the current recording. All methods may be called from any thread."""

    # How to run a known program without a recording.
    layout = Layout
    bind = Binding

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording(None)
        self.last_known: KnownRecording | None = None
        # Weak: the program cache decides how long a recording is known.
        self._known: weakref.WeakValueDictionary[tuple[Entry, ...], KnownRecording]
        self._known = weakref.WeakValueDictionary()

    @property
    def num_entries(self) -> int:
        """How many entries the current recording has."""
        return len(self.recording.entries)

    def record(self, decision: Decision, operands: list[Handle], scalars: list[Any]) -> list[Handle]:
        """Append an op. Returns a handle for each result that is new, then one per rebound operand."""
        with self.lock:
            recording = self.recording
            num_entries = len(recording.entries)
            if not num_entries:
                recording.started = time.perf_counter()
            try:
                indices = [h.index if h.recording is recording else recording.adopt(h) for h in operands]
                recording.append((decision, *indices))
                if scalars:
                    recording.scalars += scalars
                for k in decision.writes:
                    storage = operands[k].storage
                    if storage.writer is not recording:
                        storage.writer = recording
                        recording.written.append(storage)
                made = _make_handles(recording, decision, operands)
            except BaseException:
                recording.roll_back(num_entries)
                raise
        if num_entries + 1 >= settings.max_instructions:
            self.on_full()
        return made

    def is_pending(self, handle: Handle) -> bool:
        """Whether the current recording has to run before this value can be read."""
        return self.index_in_current(handle) >= 0 or handle.storage.writer is self.recording

    def cut(self) -> Cut | None:
        """End the current recording and start the next. None if nothing was recorded. Needs the lock."""
        recording = self.recording
        if not recording.entries:
            return None
        # copy(): handles may die, and leave `live`, while we look at them.
        live = [(i, h) for i, ref in recording.live.copy().items() if (h := ref()) is not None]
        self.recording = Recording(None)
        return Cut(recording, self._identify(recording), live)

    def peek(self) -> KnownRecording:
        """The current recording as one that is known, without ending it. Needs the lock."""
        return self._identify(self.recording)

    def index_in_current(self, handle: Handle) -> int:
        """The index of a value that the current recording makes; -1 for any other."""
        recording = self.recording
        return handle.index if handle.recording is recording and handle.index in recording.live else -1

    def _identify(self, recording: Recording) -> KnownRecording:
        """The known recording with exactly these entries; a new one if there is none.

        A recording that followed its guess to the end costs nothing here.
        """
        guess = recording.guess
        num_entries = len(recording.entries)
        if guess is not None and len(guess.entries) == num_entries:
            return guess
        entries = tuple(recording.entries)
        known = self._known.get(entries)
        if known is None:
            sources = guess.sources[:num_entries] if guess is not None else recording.sources
            known = self._known[entries] = KnownRecording(entries, sources)
        return known

    def guess_next(self, known: KnownRecording) -> None:
        """Tell which known recording has just ended, so that the next one can be guessed."""
        if self.last_known is not None:
            self.last_known.follower = weakref.ref(known)
        self.last_known = known
        follower = known.follower() if known.follower is not None else None
        if follower is not None and not self.recording.entries:
            self.recording.guess = follower


def _make_handles(recording: Recording, decision: Decision, operands: list[Handle]) -> list[Handle]:
    made = []
    first_storage = recording.num_storages
    fresh: list[Storage] = []
    for type_, alias, nbytes in decision.made:
        if alias >= 0:
            storage = operands[alias].storage
            if nbytes > storage.nbytes:
                storage.nbytes = nbytes
        else:
            # Results with the same negative number share a new storage: numbered -1, -2, ...
            if len(fresh) < -alias:
                fresh.append(Storage(nbytes, recording, first_storage + len(fresh)))
            storage = fresh[-1 - alias]
        index = recording.num_values
        handle = Handle(type_, storage, recording, index)
        recording.num_values = index + 1
        recording.live[index] = weakref.ref(handle)
        made.append(handle)
    recording.num_storages = first_storage + len(fresh)
    return made


def _not_wired(*_: Any) -> None:
    raise AssertionError("the barrier has not been wired to the recorder")
