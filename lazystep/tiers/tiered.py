"""Which executable runs a program.

Every program starts on the reference executable, which is right at once. A program that repeats is built in
the background. When its library has been loaded, the executor switches between two steps. The first native
run is compared with the reference on the same inputs, and a library that disagrees is never used. A program
whose library is on disk starts natively.

A library fits one number of threads and one set of fixed scalars. So the choice is made per
`Specialization`, a state machine whose `Stage` only the executor thread changes. The training thread never
waits for a compiler.
"""

from __future__ import annotations

import enum
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from .. import metrics
from ..compile.builder import Builder, BuildError, Request
from ..compile.cache import Library
from ..compile.scalars import fixed_slots
from ..config import settings
from ..execute.library import load
from ..execute.malloc import give_freed_memory_back, keep_freed_memory
from ..execute.native import NativeExecutable, UnfitError
from ..execute.reference import ReferenceExecutable
from ..notices import notice
from ..openmp import sleeping_barriers
from ..program.collectives import is_effect, launches_of
from ..program.own_ops import CHECKED
from ..program.program import Number, Program
from ..program.signature import NotCallableError, Signature, signature_of
from ..program.updates import UPDATE
from .agreement import Communication
from .check import run_checked
from .families import Families, Member, Served
from .kept import NoRoomError
from .loaded import Licence, LoadedLibrary

# A program with more of them has a fixed scalar that changes all the time.
_MAX_SPECIALIZATIONS = 64


class Stage(enum.Enum):
    """Where a specialization of a program stands. The order of the members is the order of its life."""

    # On the reference until it has run `build_after` times, or until its family has a library.
    # Ends as BUILDING; as UNCHECKED or NATIVE if the library is on disk or its family's; as STAYS if it may
    # not be built.
    COUNTING = "counting"
    # On the reference while its library is being built. Ends as UNCHECKED, or as STAYS if the build fails.
    BUILDING = "building"
    # The library is loaded, and the next run compares it. Ends as NATIVE, or as STAYS if it disagrees.
    UNCHECKED = "unchecked"
    # Ends as STAYS if inputs come that do not fit the library, or if a later check finds a difference.
    NATIVE = "native"
    # On the reference for good: `reason` says why.
    STAYS = "stays on the reference executable"


class Tiers:
    """What all programs share: the builder, and how many libraries have been loaded."""

    def __init__(self) -> None:
        self.builder = Builder(sleeping_barriers)
        self.families = Families(self.builder)
        self.num_loaded = 0  # ever: a library that is not used any more stays mapped

    def close(self) -> None:
        """End building, at once."""
        self.builder.close()

    def wait_for_builds(self, timeout: float) -> bool:
        """Block until nothing is queued or being built. False after `timeout` seconds."""
        start = time.perf_counter()
        is_idle = self.builder.wait_idle(timeout)
        metrics.count("waits_for_compile")
        metrics.add_seconds("waiting_for_compile", time.perf_counter() - start)
        return is_idle


class TieredExecutable:
    """A program on the best executable that there is for it. See `Executable`."""

    def __init__(self, program: Program, tiers: Tiers) -> None:
        self.program = program
        self.written_storages = tuple(program.storage_writes())
        self.number = 0
        self.tier = "reference"
        self._communication = Communication(program) if launches_of(program) else None
        # Collectives know their thread: each waits in the order of the queue.
        self.runs_anywhere = self._communication is None and not _first_foreign_op(program)
        self.num_runs = 0
        self.num_native_runs = 0
        # For runs without Python, given by a native run and taken back by any other run.
        self.licence: Licence | None = None
        self._last_licence: Licence | None = None
        self.specializations: dict[tuple[object, ...], Specialization] = {}
        self._tiers = tiers
        self._reference = ReferenceExecutable(program)
        self._signature: Signature | None = None
        # Why the program has no signature, and so no library.
        self._refusal = ""

    def run(self, inputs: list[torch.Tensor], scalars: Sequence[Number]) -> list[torch.Tensor]:
        """See `Executable.run`. Blocks for other ranks before collectives that they have not agreed on."""
        if self._communication is None:
            return self._run(inputs, scalars)
        with self._communication.running():
            return self._run(inputs, scalars)

    def _run(self, inputs: list[torch.Tensor], scalars: Sequence[Number]) -> list[torch.Tensor]:
        licence: Licence | None = None
        try:
            outputs, licence = self._run_on_best(inputs, scalars)
            return outputs
        finally:
            # Not before: what is queued meanwhile counts on a run like the last one.
            self.licence = licence

    def _run_on_best(
        self, inputs: list[torch.Tensor], scalars: Sequence[Number]
    ) -> tuple[list[torch.Tensor], Licence | None]:
        self.num_runs += 1
        self.tier = "reference"
        specialization = self._specialization(scalars) if settings.tier != "reference" else None
        library = specialization.advance() if specialization is not None else None
        if specialization is None or library is None:
            metrics.count("reference_executions")
            start = time.perf_counter()
            outputs = self._reference.run(inputs, scalars)
            if specialization is not None:
                specialization.spend(time.perf_counter() - start)
            return outputs, None
        try:
            if specialization.is_check_due():
                directory = library.library.path.parent
                checked = run_checked(library.native, self._reference, inputs, scalars, directory)
                self.tier = "checked"
                if settings.keep_memory:
                    metrics.count("memory_given_back", int(give_freed_memory_back()))
                specialization.end_check(checked.failure, checked.mismatch)
                return checked.outputs, None
            outputs = library.run(inputs, scalars)
        except UnfitError as error:
            torch.set_num_threads(library.native.num_threads)
            specialization.stay("unfit_inputs", f"its inputs do not fit the library: {error}")
            return self._reference.run(inputs, scalars), None
        except NoRoomError as error:
            specialization.postpone_check(str(error))
            metrics.count("reference_executions")
            return self._reference.run(inputs, scalars), None
        self.tier = "native"
        self.num_native_runs += 1
        metrics.count("native_executions")
        return outputs, self._license(library, specialization)

    @property
    def is_licensed(self) -> bool:
        """Whether a run like the last one may go without Python."""
        return self.licence is not None

    def _license(self, library: LoadedLibrary, specialization: Specialization) -> Licence | None:
        """Let runs like the last one go without Python, unless the next one is checked."""
        if not specialization.is_trusted:
            return None
        fixed, num_threads = specialization.fixed, specialization.num_threads
        licence = Licence(self, library, fixed, num_threads, self._communication)
        if licence != self._last_licence:
            self._last_licence = licence
        return self._last_licence

    def _specialization(self, scalars: Sequence[Number]) -> Specialization | None:
        """The one for these scalars and the present number of threads; None if there can be none."""
        signature = self._signature or self._sign()
        if signature is None:
            return None
        num_threads = torch.get_num_threads()
        # Zeros by their text: 0.0 and -0.0 are equal and not the same.
        key = (num_threads, *(scalars[slot] or repr(scalars[slot]) for slot in signature.fixed))
        found = self.specializations.get(key)
        if found is None and len(self.specializations) < _MAX_SPECIALIZATIONS:
            fixed = {slot: scalars[slot] for slot in signature.fixed}
            found = Specialization(self.program, signature, fixed, num_threads, self._tiers)
            self.specializations[key] = found
        return found

    def _sign(self) -> Signature | None:
        if self._refusal:
            return None
        unknown = _first_foreign_op(self.program)
        if unknown:
            self._refusal = f"{unknown} is not one of torch's own ops: the builder does not know it"
            _count_refusal("custom_op")
            return None
        try:
            self._signature = signature_of(self.program, fixed_slots(self.program))
        except NotCallableError as error:
            self._refusal = str(error)
            _count_refusal("not_callable")
        return self._signature

    @property
    def stage(self) -> Stage:
        """The stage of the specialization that has come furthest. For `standing` and for tests."""
        if self._refusal:
            return Stage.STAYS
        stages = [one.stage for one in self.specializations.values()]
        for stage in (Stage.NATIVE, Stage.UNCHECKED, Stage.BUILDING, Stage.COUNTING, Stage.STAYS):
            if stage in stages:
                return stage
        return Stage.COUNTING

    @property
    def reason(self) -> str:
        """Why the program, or one of its specializations, stays on the reference; empty if none does."""
        reasons = [one.reason for one in self.specializations.values() if one.reason]
        return self._refusal or (reasons[-1] if reasons else "")

    @property
    def standing(self) -> str:
        """In plain words: on which executable the program runs, and why."""
        stage, reason = self.stage, self.reason
        if stage is Stage.STAYS:
            return f"stays on the reference executable: {reason}"
        if stage is Stage.BUILDING:
            if any(one.is_ready for one in self.specializations.values()):
                return "on the reference executable; its library is ready for the next run"
            return "on the reference executable while its library is being built"
        postponed = next((one.postponed for one in self.specializations.values() if one.postponed), "")
        if stage is Stage.UNCHECKED and postponed:
            return f"on the reference executable; its library has not been checked: {postponed}"
        if stage in (Stage.UNCHECKED, Stage.NATIVE):
            shared = next((one.shared for one in self.specializations.values() if one.shared), "")
            return f"native{shared}" + (
                f"; some runs are on the reference executable: {reason}" if reason else ""
            )
        if self.num_runs >= settings.build_after and not self.specializations:
            return "on the reference executable: the tier was `reference` whenever it ran"
        return "on the reference executable: it has not repeated often enough to be built"


class Specialization:
    """A program for one number of threads and one set of fixed scalars. See `Stage`.

    Belongs to the executor thread, except for the delivery of a build.
    """

    def __init__(
        self,
        program: Program,
        signature: Signature,
        fixed: Mapping[int, Number],
        num_threads: int,
        tiers: Tiers,
    ) -> None:
        self.stage = Stage.COUNTING
        self.reason = ""
        self.library: LoadedLibrary | None = None
        self.postponed = ""  # why the last check could not be made
        self._program = program
        self._signature = signature
        self.fixed = fixed
        self.num_threads = num_threads
        self._tiers = tiers
        self._num_runs = 0
        self._seconds = 0.0  # on the reference
        # The program among its relatives; None before the first run, and if it goes on alone.
        self._member: Member | None = None
        # Set by the build thread, the result first. Taken over by the executor thread.
        self._delivered: LoadedLibrary | BuildError | None = None
        self._is_delivered = threading.Event()

    def advance(self) -> LoadedLibrary | None:
        """A run is about to begin: go to the next stage if it is time. Returns the library to run on."""
        if self.stage is Stage.COUNTING:
            self._count_run()
        if self.stage is Stage.BUILDING:
            if settings.tier == "native" and not self._is_delivered.is_set():
                metrics.count("executor_waits_for_compile")
                self._is_delivered.wait(settings.build_timeout)
            self._take_delivery()
            if self.stage is Stage.BUILDING:
                # Not yet, but the family's library may be there, if other sizes have come meanwhile.
                self._take_from_family()
        return self.library

    def spend(self, seconds: float) -> None:
        """Count the time of a run on the reference: it is what a library is worth."""
        self._seconds += seconds
        if self._member is not None:
            self._member.seconds += seconds

    @property
    def shared(self) -> str:
        """For `standing`: which family's library it runs on; empty if it has its own, or none."""
        if self._member is None or self.library is None or self.library.served is None:
            return ""
        symbols = ", ".join(f"s{n} = {value}" for n, value in enumerate(self.library.served.symbols))
        return f", with the library of family {self._member.family.number} ({symbols})"

    @property
    def worth(self) -> float:
        """What a library of its own would save; 0 if it has one. From any thread."""
        return 0.0 if self.library is not None else self._seconds + 1e-9

    @property
    def is_ready(self) -> bool:
        """Whether a build has ended and no run has come since."""
        return self._delivered is not None

    def is_check_due(self) -> bool:
        """Whether the next run is compared with the reference."""
        period = settings.check_native
        if period == "off" or self.library is None:
            return False
        is_turn = period.isdigit() and self.library.num_runs % int(period) == 0
        return self.stage is Stage.UNCHECKED or is_turn

    @property
    def is_trusted(self) -> bool:
        """Whether no run of the library is compared with the reference any more."""
        return self.stage is Stage.NATIVE and not settings.check_native.isdigit()

    def end_check(self, failure: str, mismatch: str) -> None:
        """Take the outcome of a check: texts that are empty if the library ran and agreed."""
        assert self.library is not None
        self.library.num_runs += 1
        self.postponed = ""
        served = self.library.served
        if served is not None and (failure or mismatch) and self.stage is Stage.UNCHECKED:
            self._leave_family(served, failure or mismatch)
        elif failure:
            self.stay("failed", f"its library failed: {failure}")
        elif mismatch:
            metrics.count("native_mismatches")
            notice(
                f"mismatch {self.library.library.key}",
                f"a native library disagrees with the reference executable, which goes on: {mismatch}. "
                "The numbers are right; please report this",
            )
            self.stay("mismatch", f"its library disagreed with the reference: {mismatch}")
        else:
            self.stage = Stage.NATIVE
            self._tiers.builder.mark_checked(self.library.library, served.tag if served is not None else "")

    def postpone_check(self, reason: str) -> None:
        """There was no room for a check, so the reference has run: the next run tries again."""
        assert self.library is not None
        self.library.num_runs += 1  # a check that is due every N runs is left out
        self.postponed = reason
        metrics.count("native_checks_postponed")
        notice(
            f"postponed {self.library.library.key}",
            f"a native library is not used until it has been compared with the reference: {reason}. Free "
            "some space, or set LAZYSTEP_CHECK_NATIVE=off to use it unchecked",
        )

    def stay(self, kind: str, reason: str) -> None:
        """Run on the reference from now on. `kind` is one word, for counters."""
        self.stage = Stage.STAYS
        self.library = None
        self.reason = reason
        _count_refusal(kind)

    def _leave_family(self, served: Served, what: str) -> None:
        """The family's library is wrong for this program: back to the reference, and a library of its own."""
        assert self._member is not None
        self._member.family.distrust(served.family_library)
        notice(
            f"family {served.family_library.library.key}",
            "a library that several programs share disagrees with the reference executable for one of them, "
            f"which goes on: {what}. The numbers are right; please report this",
        )
        self._member = self.library = None
        self.stage = Stage.COUNTING
        self._num_runs = 1

    # -- transitions -------------------------------------------------------------------------------

    def _count_run(self) -> None:
        self._num_runs += 1
        if self._num_runs == 1:
            library = self._tiers.builder.find(self._program, self.fixed, self.num_threads)
            if library is not None:
                self._take(self._load(library))
                return
            if settings.families:
                self._member = self._tiers.families.join(
                    self._program, self._signature, self.fixed, self.num_threads
                )
        is_full = self._tiers.num_loaded >= settings.max_libraries
        if self._member is not None and (self._take_from_family() or (not is_full and self._is_in_family())):
            return
        if self._num_runs == 2:  # not for a first step alone, which makes state and never comes again
            self._tiers.builder.prepare(self.num_threads)
        if self._num_runs < settings.build_after and settings.tier != "native":
            return
        if is_full:
            limit = f"{settings.max_libraries} libraries are loaded already (setting max_libraries)"
            self.stay("too_many_libraries", limit)
            return
        self.stage = Stage.BUILDING
        this = weakref.ref(self)
        request = Request(self._program, self.fixed, self.num_threads, _deliverer(this), _worth(this))
        self._tiers.builder.submit(request)

    def _is_in_family(self) -> bool:
        """Whether the family takes care of a library for this program, or has one now."""
        assert self._member is not None
        is_cared_for = self._member.count_run()
        if is_cared_for and settings.tier == "native":
            self._member.family.wait_for_build()
            return self._take_from_family()
        return is_cared_for

    def _take_from_family(self) -> bool:
        """Go on with the family's library if there is one for this program."""
        served = self._member.find_library() if self._member is not None else None
        if served is None:
            return False
        shared = served.family_library
        if not shared.is_used:
            shared.is_used = True
            self._tiers.num_loaded += 1
            metrics.count("libraries_loaded")
        native = NativeExecutable(
            self._program, self._signature, shared.call, self.num_threads, served.carriers()
        )
        self._use(LoadedLibrary(native, shared.library, served))
        return True

    def _take_delivery(self) -> None:
        if self._is_delivered.is_set():
            assert self._delivered is not None
            delivered, self._delivered = self._delivered, None
            self._take(delivered)

    def _take(self, result: LoadedLibrary | BuildError) -> None:
        if isinstance(result, BuildError):
            self.stay(result.kind, str(result))
            return
        self._tiers.num_loaded += 1
        metrics.count("libraries_loaded")
        if result.library.proxy_ops:
            metrics.count("proxy_ops", len(result.library.proxy_ops))
        self._use(result)

    def _use(self, loaded: LoadedLibrary) -> None:
        self.library = loaded
        if self._member is not None:
            self._member.has_library = True
        self.stage = Stage.NATIVE if loaded.is_checked else Stage.UNCHECKED

    # -- the build thread's side -------------------------------------------------------------------

    def deliver(self, result: Library | BuildError) -> None:
        """A build has ended. The library is loaded here, on the build thread, so that no step waits."""
        self._delivered = result if isinstance(result, BuildError) else self._load(result)
        self._is_delivered.set()

    def _load(self, library: Library) -> LoadedLibrary | BuildError:
        try:
            call = load(library.path)
        except (RuntimeError, OSError) as error:
            notice("load", f"a native library can't be loaded, so its step stays on the reference: {error}")
            return BuildError("load", f"the library can't be loaded: {error}")
        if settings.keep_memory:
            keep_freed_memory()
        native = NativeExecutable(self._program, self._signature, call, self.num_threads)
        return LoadedLibrary(native, library)


def _deliverer(target: weakref.ref[Specialization]) -> Callable[[Library | BuildError], None]:
    # Weak: a program that has left the program cache meanwhile is not worth loading.
    def deliver(result: Library | BuildError) -> None:
        specialization = target()
        if specialization is not None:
            specialization.deliver(result)

    return deliver


def _worth(target: weakref.ref[Specialization]) -> Callable[[], float]:
    def worth() -> float:
        specialization = target()
        return 0.0 if specialization is None else specialization.worth

    return worth


def _count_refusal(kind: str) -> None:
    metrics.count("programs_on_reference")
    metrics.count(f"programs_on_reference:{kind}")


def _first_foreign_op(program: Program) -> str:
    """The first op that the builder does not know, if there is one: neither torch's nor ours."""
    for instruction in program.instructions:
        is_known = instruction.is_torchs or is_effect(instruction) or instruction.op in (UPDATE, str(CHECKED))
        if not is_known:
            return instruction.op
    return ""
