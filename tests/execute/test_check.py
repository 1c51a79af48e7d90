"""Checks of libraries: both executables update the same memory, and large copies are in a file.

The library is the program's lowered graph, which needs no compiler.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lazystep
from lazystep.execute.native import NativeExecutable
from lazystep.execute.reference import ReferenceExecutable
from lazystep.tiers import kept
from lazystep.tiers.check import Checked, run_checked
from lazystep.tiers.kept import KeptMemory, NoRoomError
from lazystep.tiers.tiered import TieredExecutable
from tests.helpers import count
from tests.twice import lower_for

Wrapper = Callable[[list[torch.Tensor], list[torch.Tensor]], list[torch.Tensor]]


class CheckedExecutable(TieredExecutable):
    """Checks the program's graph in each run. `wrapper` gets its arguments and results."""

    wrapper: Wrapper
    directory: Path | None
    checks: list[Checked]

    def run(self, inputs: list[torch.Tensor], scalars: Sequence[Any]) -> list[torch.Tensor]:
        program = self.program
        graph, signature = lower_for(program, scalars)

        def call(flat: list[torch.Tensor]) -> list[torch.Tensor]:
            return type(self).wrapper(flat, list(graph(*flat)))

        native = NativeExecutable(program, signature, call, 1)
        checked = run_checked(native, ReferenceExecutable(program), inputs, scalars, self.directory)
        self.checks.append(checked)
        return checked.outputs


@pytest.fixture(autouse=True)
def executable(
    monkeypatch: pytest.MonkeyPatch, runtime: Any, runtime_module: Any, tmp_path: Path
) -> type[CheckedExecutable]:
    monkeypatch.setattr(runtime_module, "TieredExecutable", CheckedExecutable)
    monkeypatch.setattr(
        CheckedExecutable, "wrapper", staticmethod(lambda flat, results: results), raising=False
    )
    monkeypatch.setattr(CheckedExecutable, "directory", tmp_path, raising=False)
    monkeypatch.setattr(CheckedExecutable, "checks", [], raising=False)
    runtime.programs.clear()
    return CheckedExecutable


@pytest.fixture(params=["memory", "disk"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the copies are."""
    if request.param == "disk":
        monkeypatch.setattr(kept, "_SMALL", 0)
    return str(request.param)


class Training:
    """A model with state, gradients that live on, and views of its parameters."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, foreach=False)
        self.device = device

    def step(self) -> list[torch.Tensor]:
        self.optimizer.zero_grad()
        row = self.model[0].weight[1]
        loss = (self.model(torch.arange(24.0).view(4, 6).to(self.device)).square().mean() + row.sum()).tanh()
        loss.backward()
        self.optimizer.step()
        if self.device == "lazy":
            lazystep.mark_step()
        return [loss.detach(), row.detach()]

    def tensors(self) -> list[torch.Tensor]:
        state = [value for s in self.optimizer.state.values() for value in s.values()]
        parameters = list(self.model.parameters())
        return [
            t.detach().cpu() for t in (*parameters, *(p.grad for p in parameters), *state) if t is not None
        ]


def train(num_steps: int = 4) -> None:
    """Train on both devices and compare every bit."""
    eager, lazy = Training("cpu"), Training("lazy")
    for _ in range(num_steps):
        for a, b in zip(eager.step(), lazy.step(), strict=True):
            assert torch.equal(a, b.cpu())
    for a, b in zip(eager.tensors(), lazy.tensors(), strict=True):
        assert torch.equal(a, b)


def test_checked_steps_equal_eager_bitwise(where: str) -> None:
    train()
    assert [c.failure + c.mismatch for c in CheckedExecutable.checks if c.failure or c.mismatch] == []
    assert count("native_checks") >= 4
    assert (count("check_bytes_in_memory") > 0, count("check_bytes_on_disk") > 0) == (
        where == "memory",
        where == "disk",
    )


def test_library_that_is_wrong_leaves_no_trace(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(flat: list[torch.Tensor], results: list[torch.Tensor]) -> list[torch.Tensor]:
        for tensor in flat[:-2]:
            if tensor.is_floating_point():
                tensor.add_(1.0)
        return results

    monkeypatch.setattr(CheckedExecutable, "wrapper", staticmethod(wrong))
    # Only what the step writes is put back: other inputs are never written, by no library.
    lazy = torch.ones(5).to("lazy")
    for number in range(3):
        lazy.mul_(2.0).add_(number)
        lazystep.mark_step()
    eager = torch.ones(5)
    for number in range(3):
        eager.mul_(2.0).add_(number)
    assert torch.equal(lazy.cpu(), eager)
    assert all("of its magnitude" in checked.mismatch for checked in CheckedExecutable.checks[-3:])
    assert count("native_checks_perturbed") >= 3


def test_library_that_fails_after_it_has_written_leaves_no_trace(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(flat: list[torch.Tensor], results: list[torch.Tensor]) -> list[torch.Tensor]:
        raise RuntimeError("a kernel is missing")

    monkeypatch.setattr(CheckedExecutable, "wrapper", staticmethod(fail))
    train()
    assert {checked.failure for checked in CheckedExecutable.checks} == {"a kernel is missing"}


def test_measuring_how_sensitive_a_step_is_leaves_no_trace(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A difference that rounding explains: the reference runs again, on the same memory."""

    def rounded(flat: list[torch.Tensor], results: list[torch.Tensor]) -> list[torch.Tensor]:
        (state,) = (tensor for tensor in flat if tensor.shape == (2, 1))
        state.neg_()
        return results

    monkeypatch.setattr(CheckedExecutable, "wrapper", staticmethod(rounded))
    angles = {device: torch.tensor([0.1, 0.7]).to(device) for device in ("cpu", "lazy")}
    state = {device: torch.full((2, 1), 0.5).to(device) for device in angles}
    for _ in range(2):
        for device, values in state.items():
            # The last bit of an angle turns it by several radians.
            values.copy_((values.flatten() + angles[device] * 1e9).sin().view(2, 1))
        lazystep.mark_step()
    assert torch.equal(state["lazy"].cpu(), state["cpu"])
    assert count("native_checks_perturbed") == 2
    assert [checked.mismatch for checked in CheckedExecutable.checks] == ["", ""]


# -- room ------------------------------------------------------------------------------------------


def no_space(fd: int, offset: int, length: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_means_copies_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_SMALL", 0)
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    train()
    assert count("check_bytes_on_disk") == 0
    assert count("check_bytes_in_memory") > 0


def test_no_room_at_all_is_known_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kept, "_SMALL", 0)
    monkeypatch.setattr(kept, "available_memory", lambda: 1 << 20)
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(NoRoomError, match=r"needs 3 MB .*No space left on device.* and 1 MB of memory"):
        KeptMemory(3 << 20, tmp_path)
    with pytest.raises(NoRoomError, match="no directory"):
        KeptMemory(3 << 20, None)


def test_state_that_can_not_be_read_again_fails_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_SMALL", 0)
    lazy = torch.ones(5).to("lazy")
    lazystep.wait_device_ops()

    def broken(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        lazy.add_(1.0)
        with pytest.raises(lazystep.StepError, match="Input/output error"):
            lazystep.mark_step(wait=True)
    with pytest.raises(lazystep.LazyStepError):
        lazy.cpu()


def test_copies_are_gone_with_the_check(tmp_path: Path) -> None:
    storage = torch.arange(1000.0).untyped_storage()
    before = len(os.listdir("/proc/self/fd"))
    with KeptMemory(kept._SMALL + 1, tmp_path) as memory:
        memory.keep("a", storage)
        assert list(tmp_path.iterdir()) == []  # the file has no name
        assert len(os.listdir("/proc/self/fd")) == before + 1
        loaded = memory.load("a")
        assert loaded.tolist() == storage.tolist()
        assert loaded.data_ptr() != storage.data_ptr()
    assert len(os.listdir("/proc/self/fd")) == before
