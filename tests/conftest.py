"""What every test gets: checked programs, and a lazy device without leftovers of the test before.

Internals that several tests look at come from the fixtures here, so that a module that moves is named in one
place.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# One thread unless a test asks for two. Where two processes share two cores, threads mostly wait for each
# other: 500 steps of a small model took a minute instead of a second. torch reads it when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The reference executable unless a test asks for more: bit for bit eager, and nothing in the background.
os.environ.setdefault("LAZYSTEP_TIER", "reference")
# Never the user's own cache.
_cache = tempfile.TemporaryDirectory(prefix="lazystep-tests-")
os.environ["LAZYSTEP_CACHE_DIR"] = _cache.name
# The compiler takes ten seconds for them, and they depend on nothing that tests change.
_headers = Path(tempfile.gettempdir()) / f"lazystep-tests-headers-{os.getuid()}"
os.environ.setdefault("LAZYSTEP_HEADER_DIR", str(_headers))

import torch  # noqa: E402

import lazystep  # noqa: E402
from lazystep import config, notices  # noqa: E402
from lazystep.ops import dispatch as dispatch_module  # noqa: E402
from lazystep.record import _recorder  # noqa: E402
from lazystep.record.tensor import handle_of  # noqa: E402
from lazystep.runtime import Runtime  # noqa: E402
from lazystep.runtime import runtime as the_runtime  # noqa: E402
from lazystep.tiers import tiered  # noqa: E402
from lazystep.tiers.families import Families  # noqa: E402
from lazystep.tiers.history import History  # noqa: E402

# What `make fast` takes: some of every part, in a minute. A file, and which of its tests take too long:
# they start a process, build a library or run a thousand steps.
FAST = {
    "compat/test_names.py": "",
    "compat/test_torch_lazy.py": "beside",
    "compat/test_torch_xla.py": "",
    "test_tiny.py": "native_library",
    "test_faults.py": "exit|interrupt_while_waiting|environment|nobody_looked|torchs_own",
    "record/test_device.py": "without_lazystep|compile|data_loader",
    "record/test_recorder.py": "steady_state|twenty_thousand",
    "record/test_semantics.py": "lstm",
    "record/test_storage.py": "trains",
    "program/test_program.py": "",
    "family/test_fit.py": "",
    "family/test_families.py": "",
    "family/test_lowering.py": "gpt|bert|conv",
    "checkpoint/test_checkpoints.py": "",
    "compile/test_cache.py": "built_anew|must_not_be_used|mid_run|killed_process",
    "execute/test_barrier.py": "thousand|garbage_collector",
    "execute/test_thread_choice.py": "",
    "closures/test_handlers.py": "stress|TestHandlers",
    "closures/test_report.py": "example",
    "closures/test_step_closures.py": "exit|interrupt|TestSteps",
    "capture/test_footguns.py": "",
    "capture/test_hidden_reads.py": "",
    "capture/test_host_tensors.py": "",
    "capture/test_names_around.py": "",
    "capture/test_numbers.py": "",
    "capture/test_questions.py": "",
    "capture/test_state.py": "",
    "capture/test_step.py": "five_hundred|benchmark_models|adafactor",
    "capture/test_torch_around.py": "",
    "capture/test_values_around.py": "",
    "capture/test_values_read_by_c.py": "",
    "integrations/test_accelerate.py": "example",
    "integrations/test_lightning.py": "example|sixty|waits|resumes|loggers|hooks|bar",
    "integrations/test_transformers.py": "example|resumes|training_and_evaluation|best|another_class|reports",
    "overlap/test_in_backward.py": "",
    "overlap/test_parts.py": "",
    "tools/test_benchmarks.py": "process_of_its_own|names_the_processors",
    "tools/test_cli.py": "run_|doctor|bench",
    "tools/test_config.py": "",
    "tools/test_docs.py": "runs|readme|blocks|wrong",
    "tools/test_public_names.py": "",
    "tools/test_run_report.py": "",
    "tools/test_timeline.py": "build",
    # Those of conformance are in its own conftest.py.
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        too_long = FAST.get(item.path.relative_to(Path(__file__).parent).as_posix())
        if too_long is not None and not (too_long and re.search(too_long, item.nodeid.partition("::")[2])):
            item.add_marker(pytest.mark.fast)


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Captures and tests collect garbage: not each time through all that torch and earlier modules have made.

    Late in a session a collection took seconds, and a hundred of them a test's whole time limit.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_device(runtime: Runtime) -> Iterator[None]:
    config.settings.verify_programs = True
    torch.manual_seed(0)
    lazystep.metrics.reset()
    runtime.history = History()
    runtime.tiers.num_loaded = 0  # the limit is a process's, not a test session's
    runtime.tiers.families = Families(runtime.tiers.builder)
    yield
    # A test that expects a background failure has to take it: none may leak into the next one.
    lazystep.mark_step(wait=True)
    lazystep.wait_device_ops()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# -- internals -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def runtime() -> Runtime:
    """The lazy device's state: recorder, programs, executor, tiers, history."""
    return the_runtime


@pytest.fixture(scope="session")
def runtime_module(runtime: Runtime) -> ModuleType:
    """The module that cuts and queues programs, to replace what it calls."""
    return sys.modules[type(runtime).__module__]


@pytest.fixture(scope="session")
def value_of() -> Callable[[torch.Tensor], torch.Tensor | None]:
    """The CPU tensor behind a lazy one; None as long as it has not been computed."""
    return lambda tensor: handle_of(tensor).tensor


@pytest.fixture(scope="session")
def extension() -> ModuleType:
    """The recorder in C++, for what it counts."""
    return _recorder


@pytest.fixture(scope="session")
def dispatch() -> ModuleType:
    """The module that C++ asks about a new call (`decide`), a draw (`draw`) and a line (`user_source`)."""
    return dispatch_module


# -- native libraries ------------------------------------------------------------------------------


@pytest.fixture
def auto_tier(runtime: Runtime) -> Iterator[None]:
    """Libraries are built from the second run on. The builder stays warm from test to test."""
    runtime.programs.clear()
    notices.forget()
    with config.override(tier="auto", build_after=2):
        yield
        lazystep.wait_for_compile(300)
    notices.forget()


@pytest.fixture
def own_cache(auto_tier: None, tmp_path: Path) -> Iterator[None]:
    """The tier `auto` with an empty cache of the test's own, for tests that count or break its entries."""
    with config.override(cache_dir=str(tmp_path / "cache")):
        yield
        lazystep.wait_for_compile(300)


@pytest.fixture
def own_builder(own_cache: None, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A builder that the test may break."""
    own = tiered.Tiers()
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "tiers", own)
        yield own.builder
        lazystep.wait_device_ops()
        runtime.programs.clear()
        own.close()


@pytest.fixture
def wrap_libraries(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Any]], None]:
    """Have every library that is loaded from now on wrapped by a function."""
    load = tiered.load

    def wrap(wrapper: Callable[[Any], Any]) -> None:
        monkeypatch.setattr(tiered, "load", lambda path: wrapper(load(path)))

    return wrap
