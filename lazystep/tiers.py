"""Tiers: which executable runs a program.

Every program starts on the reference executable, which is right at once. A program that repeats is
built in the background; when its library has been loaded, the executor switches between two steps.
The first native run is compared with the reference on the same inputs; a library that disagrees is
never used. A program whose library is on disk starts natively.

Everything here but `wait_for_builds` runs on the executor thread or on the build thread: the
training thread never waits for a compiler.
"""

from __future__ import annotations

import enum
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import metrics
from .compile.builder import Builder, BuildError, Request
from .compile.cache import Library
from .compile.scalars import fixed_slots
from .config import settings
from .execute.compare import Results, describe, differences, perturb
from .execute.library import load
from .execute.memory import keep_freed_memory
from .execute.native import NativeExecutable, UnfitError
from .execute.reference import ReferenceExecutable
from .execute.thread_choice import ThreadChoice
from .notices import notice
from .openmp import sleeping_barriers
from .program.program import Program
from .program.signature import NotCallableError, Signature, signature_of


class State(enum.Enum):
    """Where a program stands."""

    REFERENCE = "reference"  # has not repeated often enough, or the tier is `reference`
    BUILDING = "building"
    NATIVE = "native"
    STAYS = "stays on reference"  # `reason` says why


class Tiers:
    """What all programs share: the builder, and how many libraries have been loaded."""

    def __init__(self) -> None:
        self.builder = Builder(sleeping_barriers)
        self.num_loaded = 0  # ever: a library that is not used any more stays mapped

    def close(self) -> None:
        """End building, at once."""
        self.builder.close()


class TieredExecutable:
    """A program on the best executable that there is for it. See `Executable`."""

    def __init__(self, program: Program, tiers: Tiers) -> None:
        self.program = program
        self.written_storages = tuple(program.storage_writes())
        self.state = State.REFERENCE
        self.reason = ""
        self.number = 0
        self.tier = "reference"
        self.num_runs = 0
        self.num_native_runs = 0
        self._tiers = tiers
        self._reference = ReferenceExecutable(program)
        self._signature: Signature | None = None
        self._loaded: list[_Loaded] = []  # the executor's alone
        self._arrived: deque[_Loaded] = deque()  # from the build thread: the executor takes them over
        # (fixed scalars, threads) to how often they have come without a library.
        self._missed: dict[tuple[Any, ...], int] = {}

    def run(self, inputs: list[torch.Tensor], scalars: Sequence[Any]) -> list[torch.Tensor]:
        """See `Executable.run`."""
        self.num_runs += 1
        loaded = self._choose(scalars) if settings.tier != "reference" else None
        self.tier = "reference"
        if loaded is None:
            metrics.count("reference_executions")
            return self._reference.run(inputs, scalars)
        try:
            if loaded.is_check_due():
                self.tier = "checked"
                return self._run_checked(loaded, inputs, scalars)
            outputs = loaded.run(inputs, scalars)
        except UnfitError as error:
            torch.set_num_threads(loaded.native.num_threads)
            self._discard(loaded, "unfit_inputs", f"its inputs do not fit the library: {error}")
            return self._reference.run(inputs, scalars)
        self.tier = "native"
        self.num_native_runs += 1
        metrics.count("native_executions")
        return outputs

    @property
    def has_looked(self) -> bool:
        """Whether a run has asked for a library: the tier was not `reference` then."""
        return bool(self._missed)

    # -- choosing ----------------------------------------------------------------------------------

    def _choose(self, scalars: Sequence[Any]) -> _Loaded | None:
        """The library that fits, if it is loaded; asks for it if it is worth it."""
        num_threads = torch.get_num_threads()
        loaded = self._find_loaded(scalars, num_threads)
        if loaded is not None:
            return loaded
        if self.state is State.STAYS:
            return None
        if self._signature is None and not self._sign():
            return None
        assert self._signature is not None
        fixed = {slot: scalars[slot] for slot in self._signature.fixed}
        key = (num_threads, *fixed.items())
        if len(self._missed) > 64 and key not in self._missed:
            return None  # a fixed scalar that changes every time
        misses = self._missed[key] = self._missed.get(key, 0) + 1
        if misses == 1:
            library = self._tiers.builder.find(self.program, fixed, num_threads)
            if library is not None:
                self._load(library, fixed, num_threads)
                return self._find_loaded(scalars, num_threads)
        is_due = settings.tier == "native" or misses >= settings.build_after
        if misses > settings.build_after or not is_due or not self._may_build():
            return None
        self._missed[key] = settings.build_after + 1  # asked for once
        done = self._request(fixed, num_threads)
        if settings.tier == "native":
            metrics.count("executor_waits_for_compile")
            done.wait(settings.build_timeout)
            return self._find_loaded(scalars, num_threads)
        return None

    def _find_loaded(self, scalars: Sequence[Any], num_threads: int) -> _Loaded | None:
        while self._arrived:
            self._loaded.append(self._arrived.popleft())
        return next((one for one in self._loaded if one.native.fits(scalars, num_threads)), None)

    def _sign(self) -> bool:
        try:
            self._signature = signature_of(self.program, fixed_slots(self.program))
        except NotCallableError as error:
            self._stay("not_callable", str(error))
            return False
        unknown = _first_foreign_op(self.program)
        if unknown:
            self._stay("custom_op", f"{unknown} is not one of torch's own ops: the builder does not know it")
            return False
        return True

    def _may_build(self) -> bool:
        if self._tiers.num_loaded < settings.max_libraries:
            return True
        limit = f"{settings.max_libraries} libraries are loaded already (setting max_libraries)"
        self._stay("too_many_libraries", limit)
        return False

    def _request(self, fixed: Mapping[int, Any], num_threads: int) -> threading.Event:
        self.state = State.BUILDING
        done = threading.Event()
        # Weak: a program that has left the program cache meanwhile is not worth loading.
        me = weakref.ref(self)

        def deliver(result: Library | BuildError) -> None:
            program = me()
            if program is not None:
                if isinstance(result, BuildError):
                    program._stay(result.kind, str(result))
                else:
                    program._load(result, fixed, num_threads)
            done.set()

        self._tiers.builder.submit(Request(self.program, fixed, num_threads, deliver))
        return done

    def _load(self, library: Library, fixed: Mapping[int, Any], num_threads: int) -> None:
        assert self._signature is not None
        try:
            call = load(library.path)
        except (RuntimeError, OSError) as error:
            self._stay("load", f"the library can't be loaded: {error}")
            notice("load", f"a native library can't be loaded, the step runs as it was: {error}")
            return
        if settings.keep_memory:
            keep_freed_memory()
        native = NativeExecutable(self.program, self._signature, call, fixed, num_threads)
        self._tiers.num_loaded += 1
        metrics.count("libraries_loaded")
        if library.proxy_ops:
            metrics.count("proxy_ops", len(library.proxy_ops))
        self._arrived.append(_Loaded(native, library, self._tiers.builder))
        self.state = State.NATIVE

    def _stay(self, kind: str, reason: str) -> None:
        self.state = State.NATIVE if self._loaded or self._arrived else State.STAYS
        self.reason = reason
        metrics.count("programs_on_reference")
        metrics.count(f"programs_on_reference:{kind}")

    def _discard(self, loaded: _Loaded, kind: str, reason: str) -> None:
        self._loaded.remove(loaded)
        self._stay(kind, reason)

    # -- checking ----------------------------------------------------------------------------------

    def _run_checked(
        self, loaded: _Loaded, inputs: list[torch.Tensor], scalars: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Run both executables on the same inputs and compare; the step's results are the reference's."""
        program = self.program
        written = program.storage_writes()
        before = copy_written(program, inputs, written)
        copies = copy_written(program, inputs, written)
        state = list(inputs)
        metrics.count("native_checks")
        try:
            actual = self._labelled(copies, loaded.native.run(list(copies), scalars), written)
        except UnfitError:
            raise
        except Exception as error:
            # On copies: nothing is lost. If memory has run out, the reference will say so itself.
            reason = str(error.__cause__ or error).partition("\n")[0]
            self._discard(loaded, "failed", f"its library failed: {reason}")
            return self._reference.run(inputs, scalars)
        outputs = self._reference.run(inputs, scalars)
        expected = self._labelled(state, outputs, written)

        def perturbed() -> Results:
            metrics.count("native_checks_perturbed")
            generator = torch.Generator().manual_seed(0)
            # By storage: views of one memory that come apart would seem to be very sensitive.
            memory: dict[int, torch.Tensor] = {}
            moved = []
            for value, tensor in zip(program.inputs, before, strict=True):
                storage = program.values[value].storage
                if storage not in memory:
                    memory[storage] = perturb(_flat(tensor), generator)
                moved.append(_rewrap(tensor, memory[storage]))
            again = self._reference.run(list(moved), scalars)
            return self._labelled(moved, again, written)

        found = differences(program, expected, actual, perturbed)
        if found:
            metrics.count("native_mismatches")
            detail = describe(program, found)
            notice(
                f"mismatch {loaded.library.key}",
                f"a native library disagrees with the reference executable, which goes on: {detail}. "
                "The numbers are right; please report this",
            )
            self._discard(loaded, "mismatch", f"its library disagreed with the reference: {detail}")
        else:
            loaded.passed()
        return outputs

    def _labelled(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], written: Mapping[int, int]
    ) -> Results:
        program = self.program
        results = list(zip(program.outputs, outputs, strict=True))
        for value, tensor in zip(program.inputs, inputs, strict=True):
            if program.values[value].storage in written:
                results.append((value, tensor))
        return results


class _Loaded:
    """A library in use: whether it has been checked, and on how many threads it runs now."""

    def __init__(self, native: NativeExecutable, library: Library, builder: Builder) -> None:
        self.native = native
        self.library = library
        self._builder = builder
        self._num_runs = 0
        self._is_checked = library.is_checked
        tries_one = settings.tune_threads and native.num_threads > 1
        self._threads = ThreadChoice([native.num_threads, 1] if tries_one else [native.num_threads])

    def is_check_due(self) -> bool:
        period = settings.check_native
        if period == "off":
            return False
        return not self._is_checked or (period.isdigit() and self._num_runs % int(period) == 0)

    def passed(self) -> None:
        self._is_checked = True
        self._builder.mark_checked(self.library)

    def run(self, inputs: list[torch.Tensor], scalars: Sequence[Any]) -> list[torch.Tensor]:
        self._num_runs += 1
        num_threads = self._threads.next()
        if num_threads != self.native.num_threads:
            # The executor sets its count again before the next step that needs it.
            torch.set_num_threads(num_threads)
        start = time.perf_counter()
        outputs = self.native.run(inputs, scalars)
        self._threads.took(time.perf_counter() - start)
        return outputs


def copy_written(
    program: Program, inputs: Sequence[torch.Tensor], written: Mapping[int, int]
) -> list[torch.Tensor]:
    """The inputs, with copies of the memory that the program writes."""
    memory: dict[int, torch.UntypedStorage] = {}
    copies = []
    for value, tensor in zip(program.inputs, inputs, strict=True):
        storage = program.values[value].storage
        if storage in written:
            if storage not in memory:
                memory[storage] = tensor.untyped_storage().clone()
            like = torch.empty(0, dtype=tensor.dtype)
            tensor = like.set_(memory[storage], tensor.storage_offset(), tensor.shape, tensor.stride())
        copies.append(tensor)
    return copies


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All memory behind a tensor, as one row of its elements."""
    storage = tensor.untyped_storage()
    size = storage.nbytes() // tensor.dtype.itemsize
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (size,), (1,))


def _rewrap(tensor: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _first_foreign_op(program: Program) -> str:
    """The first op that is not torch's own, if there is one."""
    for instruction in program.instructions:
        if instruction.op.partition(".")[0] not in ("aten", "prims"):
            return instruction.op
    return ""


def wait_for_builds(tiers: Tiers, timeout: float) -> bool:
    """Block until nothing is queued or being built; False if that takes longer than `timeout` seconds."""
    start = time.perf_counter()
    is_idle = tiers.builder.wait_idle(timeout)
    metrics.count("waits_for_compile")
    metrics.add_seconds("waiting_for_compile", time.perf_counter() - start)
    return is_idle
