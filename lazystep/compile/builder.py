"""Builds libraries in the background: a queue of requests, a thread that serves it, a process that compiles.

A request brings a program; its `deliver` callback gets a library or a `BuildError`. The thread looks for the
program's library on disk, and if there is none, sends the program to the builder process. The process starts
before the first build (`prepare`) and stays alive. If it crashes, it is started again, a few times. At exit
it is killed, because no build is worth waiting for then.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import metrics, timeline
from ..config import settings, variable
from ..family.plan import Plan, region_from_data
from ..notices import notice
from ..program.program import Program
from ..program.serialize import NotPlainError, to_json
from .cache import CacheError, Library, LibraryCache, cache_directory, make_private
from .key import NoCompilerError, environment, family_key, inductor_options, library_key

COMMAND = (sys.executable, "-m", "lazystep.compile.worker")
_MAX_CRASHES = 3
# A family with more regions than this is none.
MAX_FAMILY_LIBRARIES = 4
_POLL_SECONDS = 0.2
_CLOSE_SECONDS = 5.0
# Failures of the machine or its tools, about which the user can do something, so they are noticed. Other
# reasons are properties of the program; `debug.explain` shows them.
_UNEXPECTED = ("compiler", "crash", "timeout", "system", "internal", "order")


class BuildError(Exception):
    """A program was not built. `kind` is one word, for counters; the message says why."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclasses.dataclass(eq=False)
class Request:
    """A program to build, for these fixed scalars and threads. `deliver` is called on the build thread.

    `worth`: what the library would save, in seconds or any other unit that all requests share. The request
    that is worth most is served first; one that is worth nothing any more is dropped, and nothing delivered.
    `plan`: build a library for the whole family of the program.
    """

    program: Program
    fixed: Mapping[int, Any]
    num_threads: int
    deliver: Callable[[Library | BuildError], None]
    worth: Callable[[], float] = lambda: 1.0
    plan: Plan | None = None


class _Preparation(NamedTuple):
    num_threads: int
    if_cache_is_empty: bool


class Builder:
    """Serves build requests from any thread. There is one builder per process."""

    def __init__(
        self, while_building: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    ) -> None:
        """`while_building`: a context that the build thread enters for the time of each build."""
        self._while_building = while_building
        self._condition = threading.Condition()
        self._queue: collections.deque[Request] = collections.deque()
        self._current: Request | None = None
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""  # from the process, behind the last whole line that was read
        self._closed = False
        self._num_crashes = 0
        self._num_requests = 0
        self._cache: LibraryCache | None = None
        self._cache_for: Path | None = None
        self._own_directory: Path | None = None
        self._preparation: _Preparation | None = None
        self._has_prepared = False

    # -- for any thread ---------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a build. Never waits."""
        with self._condition:
            if self._closed:
                return
            self._queue.append(request)
            metrics.count("builds_requested")
            self._wake()

    def prepare(self, num_threads: int, if_cache_is_empty: bool = False) -> None:
        """Have the builder process started and prepared for a first build, once. Never waits.

        `if_cache_is_empty`: the programs to come are not known, so libraries on disk may serve them all.
        """
        with self._condition:
            if self._closed or self._has_prepared or self._process is not None:
                return
            self._preparation = _Preparation(num_threads, if_cache_is_empty)
            self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="lazystep-builder", daemon=True)
            self._thread.start()
        self._condition.notify_all()

    def wait_idle(self, timeout: float) -> bool:
        """Block until every requested build has ended; False if this takes longer than `timeout` seconds."""
        with self._condition:
            return self._condition.wait_for(self._is_idle, timeout)

    @property
    def num_pending(self) -> int:
        """The number of builds that are queued or running."""
        return len(self._queue) + (self._current is not None)

    def find(self, program: Program, fixed: Mapping[int, Any], num_threads: int) -> Library | None:
        """The library of a program if it is on disk, else None. Reads the disk; builds nothing."""
        try:
            cache = self._open_cache()
            library = self._look_up(cache, library_key(to_json(program), fixed, num_threads))
        except (NoCompilerError, NotPlainError, CacheError, OSError, subprocess.SubprocessError):
            return None  # a later build reports the reason
        metrics.count("disk_hits" if library is not None else "disk_misses")
        return library

    def find_family(self, skeleton: str, num_threads: int) -> list[Library]:
        """The libraries of a family that are on disk. Reads the disk; builds nothing."""
        try:
            cache = self._open_cache()
            found = [self._look_up(cache, key) for key in _family_keys(skeleton, num_threads)]
        except (NoCompilerError, CacheError, OSError, subprocess.SubprocessError):
            return []  # a later build reports the reason
        return [library for library in found if library is not None]

    def mark_checked(self, library: Library, member: str = "") -> None:
        """Remember on disk that this library agreed with the reference, for this member of its family."""
        if self._cache is not None:
            self._cache.mark_checked(library.key, member)

    def close(self) -> None:
        """Stop building at once: kill the process and its compilers, and drop queued requests.

        Blocks until the build thread has ended, for 5 s at most.
        """
        with self._condition:
            self._closed = True
            self._queue.clear()
            self._condition.notify_all()
            thread, process = self._thread, self._process
        # Its pipes are closed afterwards: the build thread learns by them that the process has ended.
        if process is not None:
            _send_kill(process)
        # A thread that is inside of an op of torch when the interpreter ends would abort this process.
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_SECONDS)
        self._kill()
        if self._own_directory is not None:
            shutil.rmtree(self._own_directory, ignore_errors=True)

    def _is_idle(self) -> bool:
        return self._closed or self.num_pending == 0

    # -- the build thread's side -------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._queue and not self._closed and self._preparation is None:
                    self._condition.wait()
                if self._closed:
                    return
                preparation, self._preparation = self._preparation, None
                request = self._current = self._take_next()
                if request is None:
                    self._condition.notify_all()
            if request is None:
                if preparation is not None:
                    self._prepare(preparation)
                continue
            result: Library | BuildError | None
            try:
                result = self._serve(request)
            except BuildError as error:
                result = error
            except Exception as error:
                result = BuildError("internal", f"{type(error).__name__}: {error}")
            if isinstance(result, BuildError) and not self._closed:
                metrics.count("builds_failed")
                metrics.count(f"builds_failed:{result.kind}")
                if result.kind in _UNEXPECTED:
                    reason = str(result).strip().partition("\n")[0]
                    notice(
                        f"build {result.kind}",
                        f"a step can't be made native and stays on the reference executable: {reason}",
                    )
            if result is not None and not self._closed:
                request.deliver(result)
            with self._condition:
                self._current = None
                if result is None:  # another process is building the library: look again later
                    self._queue.append(request)
                self._condition.notify_all()
                if result is None:
                    self._condition.wait(_POLL_SECONDS)
            del request, result

    def _take_next(self) -> Request | None:
        """Take the request that is worth most from the queue, and drop those that are worth nothing now."""
        worths = {request: request.worth() for request in self._queue}
        pointless = [request for request, worth in worths.items() if worth <= 0]
        for request in pointless:
            self._queue.remove(request)
            metrics.count("builds_dropped")
        if not self._queue:
            return None
        best = max(self._queue, key=worths.__getitem__)  # the first of equals
        self._queue.remove(best)
        return best

    def _serve(self, request: Request) -> Library | None:
        """The library, found on disk or built. None if another process is building it now."""
        try:
            text = to_json(request.program)
            keys = self._keys(request, text)
        except NotPlainError as error:
            raise BuildError("not_plain", f"a program with {error} can't be sent to the builder") from None
        except NoCompilerError as error:
            notice("no compiler", str(error))
            raise BuildError("no_compiler", str(error)) from None
        try:
            return self._find_or_build(self._open_cache(), request, text, keys)
        except CacheError as error:
            # The directory has become read-only, full or deleted since it was opened. Go on without it.
            self._use_own_directory(str(error))
            return self._find_or_build(self._open_cache(), request, text, keys)

    def _find_or_build(
        self, cache: LibraryCache, request: Request, text: str, keys: Sequence[str]
    ) -> Library | None:
        for key in keys:
            with cache.building(key) as may_build:
                if not may_build:
                    return None
                library = self._look_up(cache, key)
                if library is None:
                    return self._build(cache, request, text, key)
                if request.plan is None or _serves(library, request.plan):
                    return library
        raise BuildError(
            "family", f"the family has {len(keys)} libraries already, and none is for this program"
        )

    def _keys(self, request: Request, text: str) -> list[str]:
        """The keys under which the library may be: one, or those of all libraries of a family."""
        if request.plan is None:
            return [library_key(text, request.fixed, request.num_threads)]
        return _family_keys(request.plan.key, request.num_threads)

    def _open_cache(self) -> LibraryCache:
        directory = self._own_directory or cache_directory()
        if self._cache is None or self._cache_for != directory:
            try:
                self._cache = LibraryCache.open(directory)
                self._cache_for = directory
            except CacheError as error:
                self._use_own_directory(str(error))
                return self._open_cache()
        return self._cache

    def _use_own_directory(self, why: str) -> None:
        if self._own_directory is not None:
            raise BuildError("cache", why)
        notice("cache", f"{why}. Libraries of this process are kept in a temporary directory")
        metrics.count("cache_unusable")
        self._kill()  # the process keeps its own files in the unusable directory
        try:
            self._own_directory = Path(tempfile.mkdtemp(prefix="lazystep-"))
        except OSError as error:
            raise BuildError("cache", f"{why}; and no temporary directory: {error}") from error

    def _look_up(self, cache: LibraryCache, key: str) -> Library | None:
        try:
            return cache.find(key)
        except CacheError as error:
            notice("damaged", f"{error}; it is built anew")
            metrics.count("cache_entries_damaged")
            cache.remove(key)
            return None

    def _build(self, cache: LibraryCache, request: Request, text: str, key: str) -> Library:
        directory = cache.temporary_directory()
        metrics.count("builds_started")
        try:
            size = len(request.program.instructions)
            with timeline.span("build", "build", key=key, instructions=size), self._while_building():
                answer = self._ask(cache, request, text, directory)
            if "error" in answer:
                if answer["kind"] in ("compiler", "system"):
                    # Inductor examines the compiler once per process. A new process examines it again.
                    self._kill()
                raise BuildError(answer["kind"], _with_line(answer, request.program))
            manifest = {
                **environment(),
                "options": inductor_options(request.num_threads),
                "num_threads": request.num_threads,
                "fixed": {slot: repr(value) for slot, value in request.fixed.items()},
                "proxy_ops": answer["proxy_ops"],
                "build_seconds": answer["seconds"],
                "build_processor_seconds": answer["processor_seconds"],
                "graph_nodes": answer["nodes"],
                "wrapper_lines": answer["wrapper_lines"],
                "program": str(request.program),
            }
            if "collectives" in answer:
                # Each launch and wait of its code, and how many kernels run before it.
                manifest["collectives"] = answer["collectives"]
            if request.plan is not None:
                manifest["family"] = answer["family"]
            library = cache.publish(key, directory, manifest)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        metrics.count("builds_succeeded")
        metrics.add_seconds("building", answer["seconds"])
        return library

    # -- the process -------------------------------------------------------------------------------

    def _prepare(self, preparation: _Preparation) -> None:
        """Start the process, and stay as in a build until it is prepared or a request comes."""
        try:
            cache = self._open_cache()
            if preparation.if_cache_is_empty and not cache.is_empty():
                return  # the first program without a library asks again
            options = inductor_options(preparation.num_threads)
            self._has_prepared = True
            process = self._start(cache)
            # In the cache, which removes what a killed process leaves there.
            directory = str(cache.temporary_directory())
            self._send(process, {"id": 0, "options": options, "directory": directory})
            with self._while_building(), selectors.DefaultSelector() as selector:
                assert process.stdout is not None
                selector.register(process.stdout.fileno(), selectors.EVENT_READ)
                while not self._closed and not self._queue and not selector.select(_POLL_SECONDS):
                    pass
        except (BuildError, NoCompilerError, CacheError, OSError, subprocess.SubprocessError):
            pass  # a build reports the reason

    def _send(self, process: subprocess.Popen[bytes], question: Mapping[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()

    def _ask(self, cache: LibraryCache, request: Request, text: str, directory: Path) -> dict[str, Any]:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start(cache)
        self._num_requests += 1
        question = {
            "id": self._num_requests,
            "program": text,
            "fixed": {slot: _number_text(value) for slot, value in request.fixed.items()},
            "num_threads": request.num_threads,
            "options": inductor_options(request.num_threads),
            "directory": str(directory),
        }
        if request.plan is not None:
            question["family"] = request.plan.to_data()
        try:
            self._send(process, question)
            while True:
                answer: dict[str, Any] = json.loads(self._read_line(process))
                for kind, number in answer["made"].items():
                    metrics.count(f"{kind}_compiled", number)
                if answer["id"] == question["id"]:
                    return answer  # the other answer says that the process is prepared
        except TimeoutError as error:
            self._kill()
            raise BuildError("timeout", str(error)) from error
        except (OSError, EOFError) as error:
            self._num_crashes += 1
            self._kill()
            if self._num_crashes >= _MAX_CRASHES:
                notice(
                    "crashes", f"the builder process died {self._num_crashes} times; nothing more is built"
                )
            raise BuildError("crash", f"the builder process died ({error})") from error

    def _start(self, cache: LibraryCache) -> subprocess.Popen[bytes]:
        if self._num_crashes >= _MAX_CRASHES:
            raise BuildError("crash", f"the builder process has died {self._num_crashes} times")
        self._kill()  # one that has died still has its pipes
        environ = dict(os.environ)
        # A separate cache: entries of other users of Inductor must not get in, and ours must not get out.
        environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache.root / "inductor")
        # A new interpreter may not have the package on its path.
        package_root = str(Path(__file__).parents[2])
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, environ.get("PYTHONPATH")]))
        environ["OMP_NUM_THREADS"] = "1"
        try:
            environ[variable("header_dir")] = str(
                make_private(Path(settings.header_dir or cache.root / "headers"))
            )
        except OSError as error:
            raise CacheError(f"the directory of headers can't be used: {error}") from error
        self._has_prepared = True  # or not needed any more
        try:
            process = self._process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environ,
                process_group=0,  # so that its compilers can be killed with it
            )
        except OSError as error:
            raise BuildError("system", f"the builder process can't be started: {error}") from error
        self._received = b""
        metrics.count("builder_starts")
        if self._closed:  # closed while the process was starting
            self._kill()
            raise BuildError("closed", "building has been stopped")
        return process

    def _read_line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        deadline = time.monotonic() + settings.build_timeout
        descriptor = process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            # One read may bring two answers: that the process is prepared, and the first build's.
            while b"\n" not in self._received:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"the build took more than {settings.build_timeout:g} s (setting build_timeout)"
                    )
                if selector.select(min(left, 1.0)):
                    chunk = os.read(descriptor, 65536)
                    if not chunk:
                        raise EOFError(f"exit status {_wait_for_end(process)}")
                    self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        _send_kill(process)
        _wait_for_end(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # the process never read a request
                    pipe.close()


def _wait_for_end(process: subprocess.Popen[bytes]) -> int | None:
    """The exit status; None if the process, which is ending, has not got there within 5 s."""
    try:
        return process.wait(5)
    except subprocess.TimeoutExpired:
        return None


def _family_keys(skeleton: str, num_threads: int) -> list[str]:
    return [family_key(skeleton, number, num_threads) for number in range(MAX_FAMILY_LIBRARIES)]


def _serves(library: Library, plan: Plan) -> bool:
    """Whether the library, which another process has built, serves the member that the plan starts from."""
    try:
        return library.family is not None and region_from_data(library.family).bind(plan.numbers) is not None
    except (ValueError, TypeError, KeyError):
        return False


def _send_kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and the compilers that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()


def _with_line(answer: Mapping[str, Any], program: Program) -> str:
    """The builder's error for a program, with the user's line if the builder named the instruction."""
    position = answer.get("position")
    where = "" if position is None else f" (recorded at {program.instructions[position].where})"
    return f"{answer['error']}{where}"


def _number_text(value: Any) -> str:
    return f"{type(value).__name__}:{value.hex() if isinstance(value, float) else value}"
