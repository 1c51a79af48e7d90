"""Faults of libraries: wrong, failing, or given what they were not built for."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import lazystep
from lazystep import config
from lazystep.compile import builder as builder_module
from lazystep.execute.compare import TOLERANCES, tolerances_by_storage
from lazystep.execute.native import UnfitError
from lazystep.tiers.loaded import LoadedLibrary
from lazystep.tiers.tiered import Stage, TieredExecutable
from tests.builds import X, cache, repeat, run_square_sum, square_sum, steps_until_native
from tests.helpers import count

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("own_cache")]


def test_library_that_disagrees_is_never_used(runtime: Any) -> None:
    """The library of another program under this program's key: whole, loadable, and wrong."""
    lazy = X.to("lazy")
    repeat(lambda: (lazy * lazy).sum(1) + 2)
    (wrong,) = cache().entries()
    captured: list[str] = []
    original = builder_module.library_key

    def redirect(*args: Any) -> str:
        captured.append(original(*args))
        return wrong.key

    runtime.programs.clear()
    (Path(config.settings.cache_dir) / "libraries" / wrong.key / "checked").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder_module, "library_key", redirect)
        with pytest.warns(lazystep.LazyStepWarning, match=r"aten\.add\.Tensor at .*_faults") as caught:
            got = repeat(lambda: (lazy * lazy).mean(1) + 2)
            lazystep.mark_step()
    assert captured
    assert len(caught) == 1
    assert got.tolist() == ((X * X).mean(1) + 2).tolist()
    assert count("native_mismatches") == 1
    assert "disagreed with the reference" in lazystep.debug.explain()


def test_library_that_is_wrong_about_shared_memory_is_never_used(wrap_libraries: Any) -> None:
    """How sensitive a step is to its inputs is measured on inputs that share memory as the real ones do."""

    def make_wrong(call: Any) -> Any:
        def run(flat: list[torch.Tensor]) -> list[torch.Tensor]:
            results = call(flat)
            flat[0][4] += 0.1  # one element of the memory that both tensors look at
            return results

        return run

    wrap_libraries(make_wrong)

    def step(base: torch.Tensor, window: torch.Tensor) -> None:
        base.mul_(1.05)
        window.add_(base[1:5].sin(), alpha=0.25)

    eager, lazy = torch.arange(8.0), torch.arange(8.0).to("lazy")
    views = eager[2:6], lazy[2:6]
    with pytest.warns(lazystep.LazyStepWarning, match="disagrees with the reference"):
        for _ in steps_until_native(6):
            step(eager, views[0])
            step(lazy, views[1])
        lazystep.wait_device_ops()
        lazystep.mark_step()  # barriers warn
    assert torch.equal(lazy.cpu(), eager)
    assert count("native_mismatches") == 1


def test_library_that_fails_at_its_first_run_costs_nothing(wrap_libraries: Any) -> None:
    def fail(flat: list[torch.Tensor]) -> list[torch.Tensor]:
        raise RuntimeError("a kernel is missing")

    wrap_libraries(lambda call: fail)
    total = torch.zeros(3).to("lazy")
    for _ in steps_until_native(6):
        total.add_(2.0)
    assert total.tolist() == [12.0] * 3
    assert count("programs_on_reference:failed") == 1
    assert "a kernel is missing" in lazystep.debug.explain()


def test_rounding_that_an_optimizer_blows_up_is_no_disagreement() -> None:
    """A gradient that is zero but for rounding, divided by its own size: both results are as good."""
    x = torch.randn(64, 8).to("lazy")

    def step() -> torch.Tensor:
        centred = x - x.mean(0)
        noise = centred.sum(0)
        return noise / (noise.abs() + 1e-12)

    repeat(step, 6)
    assert count("native_mismatches") == 0
    assert count("native_executions") >= 1


def test_float32_computed_in_bfloat16_is_held_to_bfloat16(runtime: Any) -> None:
    weight, other = torch.randn(8, 8).to("lazy"), torch.randn(8).to("lazy")

    def step() -> torch.Tensor:
        low = weight.bfloat16()
        weight.sub_((low @ low.t() @ low).float(), alpha=1e-2)
        other.mul_(1.01)
        return weight

    repeat(step, 6)
    assert count("native_mismatches") == 0
    assert count("native_executions") >= 1
    program = runtime.history._programs[-1].program
    tolerances = tolerances_by_storage(program)
    written = {
        instruction.op: program.values[instruction.writes[0]].storage
        for instruction in program.instructions
        if instruction.writes
    }
    assert tolerances[written["aten.sub_.Tensor"]] == TOLERANCES[torch.bfloat16]
    assert tolerances[written["aten.mul_.Tensor"]] == TOLERANCES[torch.float32]


def library_of(executable: TieredExecutable) -> LoadedLibrary:
    (specialization,) = executable.specializations.values()
    assert specialization.library is not None
    return specialization.library


def test_inputs_that_do_not_fit_run_on_the_reference(runtime: Any) -> None:
    run_square_sum()
    executable = runtime.history._programs[-1]
    assert executable.stage is Stage.NATIVE
    native = library_of(executable).native
    transposed = X.t().contiguous().t()
    for unfit in (X.double(), X[:2], transposed):
        with pytest.raises(UnfitError):
            native.run([unfit], [])
    # The program itself goes on, on the reference, with what the inputs really are.
    scalars = [1] * len(executable.program.scalars)
    got = executable.run([transposed], scalars)
    assert torch.equal(got[0], square_sum(X))
    assert executable.stage is Stage.STAYS
    assert "do not fit" in executable.reason


def test_two_inputs_in_one_memory_are_refused(runtime: Any) -> None:
    a, b = torch.ones(4).to("lazy"), torch.ones(4).to("lazy")
    repeat(lambda: a * 2 + b)
    executable = runtime.history._programs[-1]
    shared = torch.ones(8)
    with pytest.raises(UnfitError, match="share their memory"):
        library_of(executable).native.run([shared[:4], shared[:4]], [2] * len(executable.program.scalars))


def test_out_of_memory_names_the_op_and_the_step() -> None:
    x = torch.ones(1).to("lazy")
    with config.override(tier="native", check_native="off"):
        huge = x.expand(1 << 46).clone()
        with pytest.raises(lazystep.StepError, match=r"step \d+ \(native\) failed in aten\.clone"):
            huge.sum().item()
        del huge
        with contextlib.suppress(lazystep.StepError):
            lazystep.mark_step(wait=True)
        # A smaller step works.
        assert x.expand(4).clone().sum().item() == 4


def test_interrupt_while_waiting_for_a_build_leaves_everything_usable() -> None:
    lazy = X.to("lazy")
    for _ in range(3):
        result = square_sum(lazy)
        lazystep.mark_step()
    lazystep.wait_device_ops()
    timer = threading.Timer(0.5, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        lazystep.wait_for_compile(300)
    timer.join()
    assert result.cpu().tolist() == square_sum(X).tolist()
    run_square_sum()
    assert count("builds_started") == 1
    assert count("native_executions") >= 1


def test_number_of_libraries_is_bounded(runtime: Any) -> None:
    lazy = X.to("lazy")
    with config.override(max_libraries=runtime.tiers.num_loaded + 1):
        repeat(lambda: lazy * 2)
        repeat(lambda: lazy.sin())
    assert count("libraries_loaded") == 1
    assert count("programs_on_reference:too_many_libraries") == 1


def test_storm_of_programs_is_reported_once() -> None:
    lazy = torch.ones(200).to("lazy")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with config.override(families=False):
            for size in range(1, 120):
                result = (lazy * 1)[:size] * 2
                lazystep.mark_step()
            # The executor reads the setting when a program runs, which may be after this block.
            lazystep.wait_device_ops()
    messages = [str(w.message) for w in caught if issubclass(w.category, lazystep.LazyStepWarning)]
    assert len(messages) == 1
    assert "aten.slice" in messages[0]
    assert "test_native_faults.py" in messages[0]
    assert result.cpu().shape == (119,)
    assert count("builds_requested") == 0


def test_tiered_executable_forgotten_while_building_is_not_loaded(runtime: Any) -> None:
    lazy = X.to("lazy")
    for _ in range(2):
        result = square_sum(lazy)
        lazystep.mark_step()
    lazystep.wait_device_ops()
    assert isinstance(runtime.history._programs[-1], TieredExecutable)
    deadline = time.monotonic() + 60
    while not count("builds_started"):  # a request that is still queued would be dropped
        assert time.monotonic() < deadline
        time.sleep(0.01)
    runtime.programs.clear()
    runtime.history._programs.clear()
    runtime.last_program = None
    del result
    assert lazystep.wait_for_compile(300)
    assert (count("builds_succeeded"), count("libraries_loaded")) == (1, 0)
