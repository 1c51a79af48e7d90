"""Checkpoints: training that is interrupted and resumed equals training that is not, bit for bit."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import lazystep
from lazystep import checkpoint
from lazystep.checkpoint.files import Files
from tests.helpers import count, descend


class Training:
    """A small model with dropout and batch norm, Adam, a schedule; it draws from three generators."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        self.device = device
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)).to(
            device
        )
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.opt, [4, 9], gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.own = torch.Generator().manual_seed(5)

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "opt": self.opt,
            "schedule": self.schedule,
            "scaler": self.scaler,
            "own": self.own,
        }

    def batch(self) -> tuple[torch.Tensor, float]:
        x = torch.randn(6, 4) + torch.randn(6, 4, generator=self.own)
        return x.to(self.device), random.random() + np.random.random()

    def step(self) -> torch.Tensor:
        x, weight = self.batch()
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean() * weight
        descend(loss, self.opt)
        self.schedule.step()
        return loss.detach()

    def numbers(self) -> list[torch.Tensor]:
        state = [t for s in self.opt.state.values() for t in s.values()]
        return [t.detach().cpu() for t in [*self.model.state_dict().values(), *state]]


def run(training: Training, steps: range, save: Any = None) -> list[float]:
    losses = []
    for step in steps:
        losses.append(training.step())
        if save is not None:
            save(step, position=step * 6)
        lazystep.mark_step()
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_resumed_training_equals_one_that_was_never_interrupted(device: str, tmp_path: Path) -> None:
    eager = Training("cpu")
    expected = run(eager, range(12))
    training = Training(device)
    with checkpoint.save_every(tmp_path, training.state, every=5, keep=2) as save:
        assert run(training, range(8), save) == expected[:8]
    found = checkpoint.latest(tmp_path)
    assert found is not None
    torch.manual_seed(99)
    resumed = Training(device)
    loaded = checkpoint.load(found, resumed.state)
    assert (loaded.step, loaded.extra) == (5, {"position": 30})
    assert run(resumed, range(6, 12)) == expected[6:]
    assert all(map(torch.equal, resumed.numbers(), eager.numbers()))
    assert resumed.schedule.state_dict() == eager.schedule.state_dict()


def test_state_is_of_the_call_although_later_steps_overwrite_it(tmp_path: Path) -> None:
    """The disk blocks until ten more steps have written the weights."""
    gate = threading.Event()

    class Slow(Files):
        def make_directory(self, path: Path) -> None:
            assert gate.wait(60)
            super().make_directory(path)

    weight = torch.zeros(3).to("lazy")
    save = checkpoint.save_every(tmp_path, {"weight": weight}, every=1, files=Slow())
    for step in range(11):
        weight.add_(1.0)
        if step == 0:
            save(step)
        lazystep.mark_step()
    lazystep.wait_device_ops()
    assert count("synchronizations") == 0
    gate.set()
    save.close()
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 0
    checkpoint.load(found, {"weight": weight})
    assert weight.tolist() == [1.0] * 3


def test_saving_adds_no_program_and_no_synchronization(tmp_path: Path) -> None:
    counts = []
    for is_saving in (False, True):
        training = Training("lazy")
        lazystep.metrics.reset()
        save = checkpoint.save_every(tmp_path, training.state, every=2)
        for step in range(6):
            training.step()
            if is_saving:
                save(step)
            lazystep.mark_step()
        save.close()
        lazystep.wait_device_ops()
        counts.append([count(name) for name in ("programs_executed", "cache_misses", "synchronizations")])
        assert count("checkpoints_written") == (3 if is_saving else 0)
    assert counts[1][0] == counts[0][0]
    assert counts[1][2] == 0
    assert [found.step for found in checkpoint.directory.committed(tmp_path)] == [0, 2, 4]


def test_after_a_captured_step_the_state_is_of_that_step(tmp_path: Path) -> None:
    training = Training("lazy")

    @lazystep.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = training.model(x).square().mean()
        descend(loss, training.opt)
        return loss

    seen = {}
    with checkpoint.save_every(tmp_path, training.state, every=1, keep=9) as save:
        for step in range(8):
            train_step(torch.randn(6, 4))
            save(step)
            seen[step] = training.model[0].weight.detach().clone()
    for found in checkpoint.directory.committed(tmp_path):
        other = Training("lazy")
        checkpoint.load(found, other.state)
        assert torch.equal(other.model[0].weight.cpu(), seen[found.step].cpu())
        assert other.opt.state[other.model[0].weight]["step"].item() == found.step + 1


def test_call_inside_a_step_function_is_refused(tmp_path: Path) -> None:
    weight = torch.zeros(2).to("lazy")
    save = checkpoint.save_every(tmp_path, {"weight": weight}, every=1)

    @lazystep.step
    def step() -> None:
        weight.add_(1)
        save(0)

    with pytest.raises(lazystep.LazyStepError, match=r"inside a @lazystep.step.*test_checkpoints\.py"):
        step()
    save.close()


# -- the files -------------------------------------------------------------------------------------


def test_tensors_are_a_file_of_safetensors_and_tied_ones_are_in_it_once(tmp_path: Path) -> None:
    tied = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    tied[1].weight = tied[0].weight
    tied.to("lazy")
    kinds = {
        str(dtype): torch.arange(5).to(dtype)
        for dtype in (
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int8,
            torch.uint8,
            torch.bool,
            torch.complex64,
        )
    }
    odd = {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "view": torch.arange(6.0).view(2, 3).t()}
    state = {"tied": tied, **kinds, **odd, "lazy view": torch.arange(6.0).to("lazy").view(2, 3).t()}
    with checkpoint.save_every(tmp_path, state, every=1) as save:
        save(7)
    path = tmp_path / "step-00000007"
    loaded = safetensors.torch.load_file(path / "tensors.safetensors")
    assert torch.equal(loaded["state.tied.0.weight"], tied[0].weight.detach().cpu())
    assert "state.tied.1.weight" not in loaded
    for name, tensor in {**kinds, **odd}.items():
        assert torch.equal(loaded[f"state.{name}"], tensor)
    assert torch.equal(loaded["state.lazy view"], odd["view"])
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 7
    assert not list(path.glob("*.pkl"))
    zeros = {name: torch.zeros_like(t) if isinstance(t, torch.Tensor) else t for name, t in state.items()}
    checkpoint.load(path, zeros)
    for name, tensor in {**kinds, **odd}.items():
        assert torch.equal(zeros[name], tensor)


def test_small_tensors_are_written_together_and_large_ones_as_they_are(tmp_path: Path) -> None:
    written: list[int] = []

    class Noted(Files):
        def write(self, descriptor: int, data: memoryview) -> int:
            written.append(len(data))
            return super().write(descriptor, data)

    small = {f"small {n}": torch.full((n + 1,), float(n)) for n in range(300)}
    state = {**small, "large": torch.randn(50_000), "last": torch.randn(5)}
    with checkpoint.save_every(tmp_path, state, every=1, files=Noted()) as save:
        save(0)
    # The header with the small ones, the large one, the rest; then the JSON of the state and of the manifest.
    assert len(written) == 5
    assert written[1] == 200_000
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    checkpoint.load(tmp_path / "step-00000000", loaded)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_floats_and_keys_keep_their_bits_and_types(tmp_path: Path) -> None:
    extra = {"floats": [0.1, float("inf"), -0.0], 3: (1, None), "deep": {True: "text", "t": torch.ones(2)}}
    with checkpoint.save_every(tmp_path, {"w": torch.ones(1)}, every=1) as save:
        save(0, extra=extra, nan=float("nan"))
    loaded = checkpoint.load(tmp_path / "step-00000000", {"w": torch.ones(1)}).extra
    assert loaded["nan"] != loaded["nan"]
    assert torch.equal(loaded["extra"]["deep"].pop("t"), torch.ones(2))
    extra["deep"].pop("t")
    assert repr(loaded["extra"]) == repr(extra)


def test_arrays_of_one_size_stay_different_values(tmp_path: Path) -> None:
    arrays = {f"{dtype} {n}": np.full(4, n, dtype) for n in range(3) for dtype in (">i4", "f8")}
    with checkpoint.save_every(tmp_path, {"w": torch.ones(1)}, every=1) as save:
        save(0, **arrays, half=np.ones(3, np.float16))
    loaded = checkpoint.load(tmp_path / "step-00000000", {"w": torch.ones(1)}).extra
    assert loaded.pop("half").dtype == np.float16
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array, strict=True)


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_values_at_places_that_read_the_same_stay_different(device: str, tmp_path: Path) -> None:
    one, two, three = (torch.tensor([float(n)]).to(device) for n in (1, 2, 3))
    extra = {"a.b": one, "a": {"b": two, 1: one, "1": three}}
    with checkpoint.save_every(tmp_path, {"w": torch.ones(1)}, every=1) as save:
        save(0, **extra)
    loaded = checkpoint.load(tmp_path / "step-00000000", {"w": torch.ones(1)}).extra
    assert (loaded["a.b"].item(), loaded["a"]["b"].item()) == (1.0, 2.0)
    assert (loaded["a"][1].item(), loaded["a"]["1"].item()) == (1.0, 3.0)


def test_single_value_with_a_stride_is_kept(tmp_path: Path) -> None:
    single = torch.tensor([[1.0, 2.0]])[:, :1].view(1)
    strided = torch.tensor([4 + 3j]).imag
    assert strided.stride() == (2,)
    with checkpoint.save_every(tmp_path, {"w": torch.ones(1)}, every=1) as save:
        save(0, single=single, strided=strided)
    loaded = checkpoint.load(tmp_path / "step-00000000", {"w": torch.ones(1)}).extra
    assert (loaded["single"].item(), loaded["strided"].item()) == (1.0, 3.0)


# -- refusals --------------------------------------------------------------------------------------


def test_what_can_not_be_kept_is_refused_with_its_place(tmp_path: Path) -> None:
    weight = torch.ones(1)
    with pytest.raises(lazystep.LazyStepError, match=r"state\['x'\] is a int"):
        checkpoint.save_every(tmp_path, {"x": 3}, every=1)
    with pytest.raises(ValueError, match="every = 0"):
        checkpoint.save_every(tmp_path, {"w": weight}, every=0)
    save = checkpoint.save_every(tmp_path, {"w": weight}, every=1)
    with pytest.raises(lazystep.LazyStepError, match=r"extra\.f is of type function"):
        save(0, f=lambda: 1)
    with pytest.raises(lazystep.LazyStepError, match=r"extra\.s is a tensor of .*sparse"):
        save(0, s=torch.eye(2).to_sparse())
    save.close()
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("step", [-1, 2.0, torch.tensor(2), None])
def test_step_that_can_not_name_a_checkpoint_is_refused(step: Any, tmp_path: Path) -> None:
    with checkpoint.save_every(tmp_path, {"w": torch.ones(1)}, every=1) as save:
        with pytest.raises(checkpoint.CheckpointError, match="expected an int, 0 or more"):
            save.now(step)
        save(np.int64(3))
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 3


def test_state_that_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    with checkpoint.save_every(tmp_path, {"w": torch.ones(1)}, every=1) as save:
        save(0)
    other = torch.zeros(1)
    with pytest.raises(lazystep.LazyStepError, match=r"has \['w'\], but the state to restore has \['v'\]"):
        checkpoint.load(tmp_path / "step-00000000", {"v": other})
    with pytest.raises(lazystep.LazyStepError, match="is not the name of a checkpoint"):
        checkpoint.load(tmp_path / "elsewhere", {"v": other})
    assert other.item() == 0


def test_step_that_failed_leaves_no_checkpoint_and_the_error_names_the_op(tmp_path: Path) -> None:
    table = torch.zeros(3, 2).to("lazy")
    save = checkpoint.save_every(tmp_path, {"row": table}, every=1)
    table.add_(table[torch.tensor([5]).to("lazy")])
    save(0)
    with pytest.raises(checkpoint.CheckpointError, match="index"):
        save.flush()
    with pytest.raises(lazystep.StepError, match="index 5"):
        lazystep.mark_step(wait=True)
    with pytest.warns(lazystep.LazyStepWarning, match="Training goes on"):
        lazystep.mark_step()
    save.close()
    assert checkpoint.latest(tmp_path) is None
    table.zero_()


def test_same_state_twice_is_one_commit_and_another_state_is_refused(tmp_path: Path) -> None:
    weight = torch.ones(1)
    with checkpoint.save_every(tmp_path, {"w": weight}, every=1) as save:
        save(0)
        save(0)
    weight.add_(1)
    save = checkpoint.save_every(tmp_path, {"w": weight}, every=1)
    save(0)
    with pytest.raises(checkpoint.CheckpointError, match="already there and is another state"):
        save.close()
    with pytest.warns(lazystep.LazyStepWarning, match="already there"):
        lazystep.mark_step()
    checkpoint.load(tmp_path / "step-00000000", {"w": weight})
    assert weight.item() == 1
