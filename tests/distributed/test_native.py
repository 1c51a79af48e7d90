"""Data-parallel steps as native libraries: the same sequence of collectives, the same numbers up to rounding.

All tests train the same small model, so one of them builds its library and the others find it on disk.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

import lazystep
from lazystep import config
from lazystep.compile.scalars import fixed_slots
from lazystep.execute.communicate import Tape, num_pending, observed
from lazystep.execute.native import NativeExecutable
from lazystep.execute.reference import ReferenceExecutable
from lazystep.family.skeleton import skeleton_of
from lazystep.program.signature import signature_of
from lazystep.runtime import runtime
from lazystep.tiers.tiered import TieredExecutable
from tests.builds import cache
from tests.helpers import nightly
from tests.pool import Pool, World, raised_by

from .cases import CASES, OPTIMIZERS, train
from .test_faults import TIMEOUT
from .test_steps import make, step

# The first step of a model is a program of its own, which each test runs once: it is not worth a build.
BUILD_AFTER = 8
# Then the build is waited for. The next step is checked, and the steps behind it are counted.
WAIT_AT = 10
STEADY_AT = 12
NUM_CHAINED = 40
COUNTERS = (
    "programs_executed",
    "native_executions",
    "native_checks",
    "native_mismatches",
    "reference_executions",
    "builds_started",
    "collectives_launched",
    "program_agreements",
    "synchronizations",
    "cache_misses",
)


def counters() -> dict[str, int]:
    return {name: int(lazystep.metrics.counter_value(name)) for name in COUNTERS}


@contextmanager
def native_from_the_start(world: World, **settings: Any) -> Iterator[tuple[Any, Any]]:
    """A model and its optimizer whose steps have a library, which has been built before if need be."""
    with config.override(tier="auto", build_after=BUILD_AFTER, **settings):
        ddp, optimizer = make(world)
        for number in range(STEADY_AT):
            if number == WAIT_AT:
                lazystep.wait_device_ops()
                assert lazystep.wait_for_compile(270)
            step(ddp, optimizer)
        lazystep.wait_device_ops()
        lazystep.metrics.reset()
        yield ddp, optimizer
        lazystep.wait_device_ops()


# -- numbers and counts -----------------------------------------------------------------------------------


def train_natively(
    world: World, optimizer: str, captured: bool, num_steps: int, tiers: list[str], name: str = "plain"
) -> dict[str, Any]:
    """Train until the library is there, then as long natively; against torch's DDP on the CPU."""
    expected = train(world, CASES[name], optimizer, "cpu", num_steps=num_steps)
    counted: dict[str, int] = {}

    def before_step(number: int) -> None:
        if number == WAIT_AT:
            lazystep.wait_device_ops()
            assert lazystep.wait_for_compile(270)
        if number == STEADY_AT:
            lazystep.wait_device_ops()
            counted.update(counters())

    lazystep.metrics.reset()
    with config.override(tier=tiers[world.rank], build_after=BUILD_AFTER):
        actual = train(world, CASES[name], optimizer, "lazy", captured, num_steps, before_step)
        lazystep.wait_device_ops()
    # The gradient of a bias before a batch norm is nothing but rounding, which has no relative error.
    floor = 1e-3 if "batch norm" in name else 1e-30
    distances = [
        ((a.double() - b.double()).abs().max() / a.double().abs().max().clamp(min=floor)).item()
        for a, b in zip(expected.values, actual.values, strict=True)
    ]
    after = counters()
    steady = {name: after[name] - counted[name] for name in COUNTERS}
    return {"distance": max(distances), "all": after, "steady": steady, "replayed": actual.num_replayed}


def test_a_native_step_is_one_execution_and_one_rank_builds_it(lazy_pool: Pool) -> None:
    num_steps = STEADY_AT + 4
    found = lazy_pool.run(train_natively, "AdamW, fused", False, num_steps, ["auto"] * 2, timeout=280)
    assert sum(rank["all"]["builds_started"] for rank in found) == 1, "the other one has picked it up"
    assert sum(rank["all"]["native_checks"] for rank in found) >= 1
    for rank in found:
        assert 0 < rank["distance"] < 1e-4
        assert rank["all"]["native_mismatches"] == 0
        # Two buckets in each step; in the first one a broadcast and one bucket. The check sends nothing.
        assert rank["all"]["collectives_launched"] == 2 * num_steps
        steady = rank["steady"]
        assert steady["programs_executed"] == steady["native_executions"] == 4
        assert steady["collectives_launched"] == 2 * 4
        assert steady["reference_executions"] == steady["program_agreements"] == 0
        assert steady["cache_misses"] == 0


def test_the_generated_code_overlaps(lazy_pool: Pool) -> None:
    lazy_pool.run(run_natively, timeout=280)
    (called,) = (
        entry.manifest["collectives"] for entry in cache().entries() if "collectives" in entry.manifest
    )
    texts, num_kernels = zip(*called, strict=True)
    assert [text.split()[:2] for text in texts] == [
        ["0", "all_reduce_"], ["1", "all_reduce_"], ["0", "wait_"], ["1", "wait_"],
    ]  # fmt: skip
    assert num_kernels[1] >= 3, "backward computes while the first bucket is on its way"
    assert num_kernels[3] >= 1, "the first bucket is updated before the last one is waited for"


def run_natively(world: World) -> dict[str, int]:
    with native_from_the_start(world) as (ddp, optimizer):
        for _ in range(4):
            step(ddp, optimizer)
    return counters()


def test_a_captured_step_finds_the_same_library(lazy_pool: Pool) -> None:
    found = lazy_pool.run(train_natively, "AdamW, fused", True, STEADY_AT + 4, ["auto"] * 2, timeout=280)
    for rank in found:
        assert rank["all"]["builds_started"] <= 1
        assert rank["distance"] < 1e-4
        assert rank["replayed"] >= 6
        assert rank["steady"]["native_executions"] == 4


def test_a_native_rank_and_one_on_the_reference_work_together(lazy_pool: Pool) -> None:
    tiers = ["auto", "reference"]
    found = lazy_pool.run(train_natively, "AdamW, fused", False, STEADY_AT + 4, tiers, timeout=280)
    assert [rank["steady"]["native_executions"] for rank in found] == [4, 0]
    for rank in found:
        assert rank["distance"] < 1e-4
        assert rank["all"]["collectives_launched"] == 2 * (STEADY_AT + 4)
        assert rank["steady"]["program_agreements"] == 0


# -- batches of other sizes -------------------------------------------------------------------------------

# By rank: the ranks meet the sizes in another order, and one of them has batches that the other has not.
SIZES = ([4, 5, 7, 4, 9, 5, 7, 9, 4, 11], [5, 4, 4, 7, 5, 8, 4, 7, 8, 6])


def train_sizes(world: World, tier: str, num_before: int) -> dict[str, Any]:
    """Train on these sizes, and wait for builds behind the first steps."""
    with config.override(tier=tier, build_after=3):
        ddp, optimizer = make(world)
        lazystep.metrics.reset()
        for number, size in enumerate(SIZES[world.rank]):
            if number == num_before:
                lazystep.wait_device_ops()
                assert lazystep.wait_for_compile(270)
            step(ddp, optimizer, size)
        lazystep.wait_device_ops()
        values = torch.cat([p.detach().flatten() for p in ddp.parameters()]).cpu()
        return {"values": values, "all": counters(), "explained": lazystep.debug.explain()}


@pytest.mark.nightly
def test_batches_of_other_sizes_share_a_library(lazy_pool: Pool) -> None:
    expected = lazy_pool.run(train_sizes, "reference", 5, timeout=280)
    found = lazy_pool.run(train_sizes, "auto", 5, timeout=280)
    for rank, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(rank["values"], reference["values"], rtol=1e-4, atol=1e-5)
        assert rank["all"]["native_mismatches"] == 0
        assert rank["all"]["builds_started"] <= 1
        # Each step behind the wait is native, or the first of its size, which is checked.
        assert rank["all"]["native_executions"] + rank["all"]["native_checks"] == 5, rank["explained"]
        assert rank["all"]["collectives_launched"] == reference["all"]["collectives_launched"]
        assert rank["all"]["program_agreements"] == reference["all"]["program_agreements"]


def skeletons(world: World) -> list[str]:
    found: list[str] = []
    run = TieredExecutable.run

    def noting(self: TieredExecutable, inputs: list[torch.Tensor], scalars: Any) -> list[torch.Tensor]:
        signature = signature_of(self.program, fixed_slots(self.program))
        fixed = {slot: scalars[slot] for slot in signature.fixed}
        found.append(skeleton_of(self.program, signature, fixed).key)
        return run(self, inputs, scalars)

    with pytest.MonkeyPatch.context() as patch, config.override(tier="reference"):
        patch.setattr(TieredExecutable, "run", noting)
        ddp, optimizer = make(world)
        for size in (4, 4, 5, 7):
            step(ddp, optimizer, size)
        for size in (6, 8):
            x = torch.ones(size, device="lazy")
            dist.all_reduce(x, group=world.group)
            lazystep.mark_step()
        for root in (0, 1):
            x = torch.ones(3, device="lazy")
            dist.broadcast(x, root, group=world.group)
            lazystep.mark_step()
        lazystep.wait_device_ops()
    return found[1:]  # the first step makes the optimizer's state


def test_programs_with_other_collectives_are_no_family(lazy_pool: Pool) -> None:
    for same, second, third, *others in lazy_pool.run(skeletons):
        assert same == second == third, "other batch sizes, the same buckets"
        assert len({same, *others}) == 5, "other sizes of what is sent, and other roots"


@pytest.mark.parametrize("captured", nightly([False, True]))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_200_native_steps_equal_torchs_ddp_up_to_rounding(
    lazy_pool: Pool, optimizer: str, captured: bool
) -> None:
    for rank in lazy_pool.run(train_natively, optimizer, captured, 200, ["auto"] * 2, timeout=280):
        assert rank["distance"] < 1e-2
        assert rank["steady"]["native_executions"] == 200 - STEADY_AT


@pytest.mark.parametrize("name", nightly([name for name, case in CASES.items() if not case.not_replayed]))
def test_every_case_natively(lazy_pool: Pool, name: str) -> None:
    # AdamW would blow up the rounding of that bias.
    optimizer = "SGD" if "batch norm" in name else "AdamW, foreach"
    args = (optimizer, False, STEADY_AT + 4, ["auto"] * 2, name)
    is_coarse = "fp16" in name or CASES[name].autocast is not None
    for rank in lazy_pool.run(train_natively, *args, timeout=280):
        assert rank["distance"] < (3e-2 if is_coarse else 1e-3)
        assert rank["all"]["native_mismatches"] == 0
        assert rank["steady"]["native_executions"] >= 4


# -- memory -----------------------------------------------------------------------------------------------


def memory_of_a_native_step(world: World) -> float:
    """How far the process grows in a native step, over the size of all gradients. By the kernel's count."""
    num_layers, width = 40, 512
    with config.override(tier="auto", build_after=BUILD_AFTER):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers))).to("lazy")
        gradient = width * width * 4
        ddp = DistributedDataParallel(model, process_group=world.group, bucket_cap_mb=0.9 * gradient / 2**20)
        optimizer = torch.optim.AdamW(ddp.parameters(), fused=True)

        def train() -> None:
            ddp(torch.ones(1, width).to("lazy")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            lazystep.mark_step()
            lazystep.wait_device_ops()

        for number in range(STEADY_AT + 2):
            if number == WAIT_AT:
                assert lazystep.wait_for_compile(270)
            train()
        assert len(ddp.reducer.buckets) == num_layers
        before = counters()["native_executions"]
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        start = _status("VmRSS")
        train()
        grown = _status("VmHWM") - start
        assert counters()["native_executions"] == before + 1
    return grown / (num_layers * gradient)


def _status(name: str) -> int:
    """A number of this process in bytes, which the kernel gives in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


@pytest.mark.nightly
def test_a_native_step_frees_each_bucket_behind_its_update(monkeypatch: pytest.MonkeyPatch) -> None:
    # Blocks of this size and larger go back to the kernel when they are freed, and so are counted once.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    pool = Pool(2)
    try:
        found = pool.run(memory_of_a_native_step, timeout=600)
    finally:
        pool.close()
    assert 0.0 < max(found) <= 0.15, found


# -- events -----------------------------------------------------------------------------------------------


@contextmanager
def on_the_reference(world: World) -> Iterator[tuple[Any, Any]]:
    with config.override(tier="reference"):
        ddp, optimizer = make(world)
        for _ in range(4):
            step(ddp, optimizer)
        lazystep.wait_device_ops()
        yield ddp, optimizer


class Watcher:
    """Notes at each launch, and at the end of each wait: what is under way, written, and freed."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.inputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._buckets: list[StorageWeakRef] = []  # that have arrived

    def launch(self, target: torch.Tensor, operand: torch.Tensor) -> None:
        self._note("launch")

    def wait(self, target: torch.Tensor) -> None:
        self._note("wait")
        self._buckets.append(StorageWeakRef(target.untyped_storage()))

    def _note(self, what: str) -> None:
        written = [list(now.shape) for now, before in self.inputs if not torch.equal(now, before)]
        deadline = time.monotonic() + 10  # gloo's own thread lets go of a bucket a moment after the wait
        while what == "wait" and not all(one.expired() for one in self._buckets):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        freed = [bucket.expired() for bucket in self._buckets]
        self.events.append({"what": what, "pending": num_pending(), "written": written, "freed": freed})


def watch_events(world: World, executable: Any) -> list[dict[str, Any]]:
    """The events of one step."""
    watcher, run = Watcher(), executable.run
    stepping = native_from_the_start if executable is NativeExecutable else on_the_reference

    def watched_run(self: Any, tensors: list[torch.Tensor], scalars: Any) -> Any:
        watcher.inputs[:] = [(tensor, tensor.clone()) for tensor in tensors]
        with observed(watcher):
            return run(self, tensors, scalars)

    with stepping(world) as (ddp, optimizer), pytest.MonkeyPatch.context() as patch:
        patch.setattr(executable, "run", watched_run)
        step(ddp, optimizer)
        lazystep.wait_device_ops()
    return watcher.events


@pytest.mark.parametrize("executable", [ReferenceExecutable, NativeExecutable])
def test_a_bucket_is_updated_and_freed_before_the_last_one_has_arrived(
    lazy_pool: Pool, executable: Any
) -> None:
    for events in lazy_pool.run(watch_events, executable, timeout=280):
        assert [event["what"] for event in events] == ["launch", "launch", "wait", "wait"]
        assert [event["pending"] for event in events] == [0, 1, 1, 0]
        *_, at_first_wait, at_last_wait = events
        last_layer, first_layer = [6, 32], [32, 6]
        assert last_layer not in at_first_wait["written"]
        assert last_layer in at_last_wait["written"]
        assert first_layer not in at_last_wait["written"], "its bucket is still on its way"
        assert at_last_wait["freed"] == [True], "zero_grad is in the step: the updated bucket is gone"


# -- checks -----------------------------------------------------------------------------------------------


def check_each_run(world: World, spoil: bool) -> dict[str, Any]:
    """Compare each native run with the reference. If `spoil`, rank 0's library would send something else."""
    launch, run = Tape.launch, NativeExecutable.run
    is_native: list[bool] = []

    def noting_run(self: Any, *args: Any) -> Any:
        is_native.append(True)
        try:
            return run(self, *args)
        finally:
            is_native.clear()

    def spoiled(self: Tape, target: torch.Tensor, operand: torch.Tensor) -> None:
        launch(self, target, operand + 1 if is_native and spoil and world.rank == 0 else operand)

    with native_from_the_start(world, check_native="1") as (ddp, optimizer), warnings.catch_warnings():
        warnings.simplefilter("ignore", lazystep.LazyStepWarning)  # a library that disagrees
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tape, "launch", spoiled)
            patch.setattr(NativeExecutable, "run", noting_run)
            for _ in range(3):
                step(ddp, optimizer)
                lazystep.wait_device_ops()
        found: dict[str, Any] = counters()
        found["parameters"] = [parameter.detach().cpu() for parameter in ddp.parameters()]
    return found


def test_a_check_sends_nothing(lazy_pool: Pool) -> None:
    for rank in lazy_pool.run(check_each_run, False, timeout=280):
        assert rank["native_checks"] == 3
        assert rank["native_mismatches"] == 0
        assert rank["collectives_launched"] == 6


def test_a_library_that_would_send_something_else_is_not_used(lazy_pool: Pool) -> None:
    first, second = lazy_pool.run(check_each_run, True, timeout=280)
    assert first["native_mismatches"] == first["native_checks"] == 1
    assert first["reference_executions"] == 2
    assert second["native_checks"] == 3
    assert first["collectives_launched"] == second["collectives_launched"] == 6
    for mine, other in zip(first["parameters"], second["parameters"], strict=True):
        assert torch.equal(mine, other)


# -- failures ---------------------------------------------------------------------------------------------


def end(world: World) -> dict[str, Any]:
    with native_from_the_start(world) as (ddp, optimizer):
        step(ddp, optimizer)
        lazystep.wait_device_ops()
        assert counters()["native_executions"] == 1
        dist.barrier(group=world.group)
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raised = raised_by(lambda: (step(ddp, optimizer), lazystep.wait_device_ops()))
        read = raised_by(lambda: next(iter(ddp.parameters())).cpu())
        again = raised_by(lambda: (step(ddp, optimizer), lazystep.wait_device_ops()))
        unread = [raised_by(lambda: (step(ddp, optimizer), lazystep.wait_device_ops())) for _ in range(3)]
    return {"raised": raised, "read": read, "again": again, "unread": unread}


def test_a_native_step_names_the_collective_when_a_rank_ends() -> None:
    pool = Pool(3, collective_timeout=TIMEOUT)  # as many as in `lazy_pool`: the group has the same name
    try:
        pool.start(end)
        [survivor] = pool.gather([0], timeout=280)
    finally:
        pool.close()
    assert survivor["raised"].startswith("StepError: step 14 (native) failed in lazystep.all_reduce_")
    assert "all_reduce of" in survivor["raised"]
    assert "failed on rank 0: " in survivor["raised"]
    assert "StepError" in survivor["read"], "an update may have begun"
    assert "StepError" in survivor["again"]
    # Each later call is told, although nothing is read.
    assert all("StepError" in told for told in survivor["unread"]), survivor


# -- without the interpreter lock -------------------------------------------------------------------------


def captured_step(world: World) -> tuple[Any, Any]:
    """A captured step on this rank's data, and its model."""
    ddp, optimizer = make(world)
    x = torch.full((4, 6), float(world.rank + 1)).to("lazy")

    @lazystep.step(audit_every=0)
    def train(x: torch.Tensor) -> torch.Tensor:
        loss = ddp(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return lambda: train(x), ddp


@contextmanager
def in_the_chain(world: World) -> Iterator[tuple[Any, Any, Any, int]]:
    """A step, its model, the chain in which the executor replays it without Python, and how often it ran.

    All ranks leave the loop after the same step.
    """
    chain = runtime.executor._chain
    runtime.programs.clear()  # a test before may have given up the library of the same program
    with config.override(tier="auto", build_after=BUILD_AFTER, wait_timeout=60.0):
        train, ddp = captured_step(world)
        for number in range(STEADY_AT):
            if number == WAIT_AT:
                lazystep.wait_device_ops()
                assert lazystep.wait_for_compile(270)
            train()
        before, num_steps = chain.num_run, STEADY_AT
        while num_steps < STEADY_AT + 200:
            num_steps += 1
            train()
            has_begun = torch.tensor([int(chain.num_run > before)])
            dist.all_reduce(has_begun, op=dist.ReduceOp.MIN, group=world.group)
            if has_begun.item():
                break
        lazystep.wait_device_ops()
        yield train, ddp, chain, num_steps
        lazystep.wait_device_ops()


def chain_steps(world: World) -> dict[str, Any]:
    """Steps in the chain, then a collective of the user's in a step of its own, then steps again."""
    with in_the_chain(world) as (train, ddp, chain, num_steps):
        lazystep.metrics.reset()
        before, returns = chain.num_run, chain.num_returns
        losses = [train() for _ in range(NUM_CHAINED)]
        lazystep.wait_device_ops()
        found: dict[str, Any] = counters()
        found |= {"chained": chain.num_run - before, "returns": chain.num_returns - returns}
        total = torch.full((3,), float(world.rank + 1)).to("lazy")
        dist.all_reduce(total, group=world.group)
        lazystep.mark_step()
        losses += [train() for _ in range(3)]
        results = [*losses, *ddp.parameters()]
        found["total"] = total.tolist()
        lazystep.wait_device_ops()  # ranks agree when a step begins
        found["agreements"] = counters()["program_agreements"]
    with config.override(tier="reference"):
        train, ddp = captured_step(world)
        for _ in range(num_steps):
            train()
        expected = [*(train() for _ in losses), *ddp.parameters()]
        for want, got in zip(expected, results, strict=True):
            torch.testing.assert_close(got.cpu(), want.cpu(), rtol=1e-4, atol=1e-6)
    return found


def test_replays_communicate_without_the_interpreter_lock(lazy_pool: Pool) -> None:
    for rank in lazy_pool.run(chain_steps, timeout=280):
        assert rank["native_executions"] == rank["programs_executed"] == NUM_CHAINED
        assert rank["collectives_launched"] == 2 * NUM_CHAINED
        assert rank["program_agreements"] == rank["synchronizations"] == 0
        # Not all of them: where no step comes for a while, the executor leaves the chain.
        assert rank["chained"] >= NUM_CHAINED // 4
        assert rank["returns"] < rank["chained"], "the lock is not taken at each step, launch or wait"
        assert rank["total"] == [3.0] * 3
        assert rank["agreements"] == 2, "to the collective of the user's, and back"


def end_in_the_chain(world: World, how: int) -> dict[str, Any]:
    with in_the_chain(world) as (train, ddp, *_):
        dist.barrier(group=world.group)
        if world.rank == 1:
            os.kill(os.getpid(), how)

        def steps() -> None:
            for _ in range(6):
                train()
            lazystep.wait_device_ops()

        raised = raised_by(steps)
        read = raised_by(lambda: next(iter(ddp.parameters())).cpu())
        again = raised_by(lambda: train().item())
        unread = [raised_by(lambda: (train(), lazystep.wait_device_ops())) for _ in range(3)]
    return {"raised": raised, "read": read, "again": again, "unread": unread}


@pytest.mark.parametrize("how", [signal.SIGKILL, *nightly([signal.SIGSTOP])])
def test_a_replay_without_python_names_the_collective_when_a_rank_ends_or_hangs(how: int) -> None:
    pool = Pool(3, collective_timeout=TIMEOUT)
    try:
        pool.start(end_in_the_chain, how)
        [survivor] = pool.gather([0], timeout=280)
        if how == signal.SIGSTOP:
            os.kill(pool.processes[1].pid or 0, signal.SIGCONT)
    finally:
        pool.close()
    assert " (native) failed in lazystep.all_reduce_" in survivor["raised"]
    assert "failed on rank 0: " in survivor["raised"]
    assert "StepError" in survivor["read"], "an update may have begun"
    assert "StepError" in survivor["again"]
    # Each later call is told, although nothing is read.
    assert all("did not run" in told or "is broken" in told for told in survivor["unread"]), survivor
