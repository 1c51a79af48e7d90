"""Checkpoints: training that is interrupted and resumed equals training that is not, bit for bit."""

from __future__ import annotations

import json
import random
import struct
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


def test_numbers_of_all_kinds_keep_their_bits_and_types(tmp_path: Path) -> None:
    negative_nan = struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]
    extra: dict[str, Any] = {
        "huge": -(10**5000),
        "word": 2**64 - 1,
        "complex": complex(-0.0, float("inf")),
        "bytes": b"\x00\xff",
        "keys": {(1, "a"): 1, b"b": 2, None: 3, 2.5: 4},
        "text": "\ud800 \0 é",
        **{str(kind): kind(3) for kind in (np.int64, np.uint8, np.float16, np.float32, np.float64, np.bool_)},
    }
    with checkpoint.save_every(tmp_path, {"w": torch.ones(1)}, every=1) as save:
        save(0, extra=extra, nan=negative_nan, scalar_nan=np.float32("nan"))
    loaded = checkpoint.load(tmp_path / "step-00000000", {"w": torch.ones(1)}).extra
    assert loaded["extra"] == extra
    assert [type(value) for value in loaded["extra"].values()] == [type(value) for value in extra.values()]
    assert struct.pack(">d", loaded["nan"]).hex() == "fff8000000000001"
    assert str(loaded["extra"]["complex"]) == str(extra["complex"])
    assert np.isnan(loaded["scalar_nan"])


class Versioned(nn.Module):
    """Converts what an earlier version of itself has saved, as observers of torch.ao do."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(3.0))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[prefix + "scale"] = state[prefix + "scale"] * 100
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_modules_are_told_the_version_that_was_saved(device: str, tmp_path: Path) -> None:
    model = nn.Sequential(Versioned()).to(device)
    with checkpoint.save_every(tmp_path, {"model": model}, every=1) as save:
        save(0)
    model[0].scale.zero_()
    checkpoint.load(tmp_path / "step-00000000", {"model": model})
    assert model[0].scale.item() == 3.0


def test_program_may_change_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with checkpoint.save_every("checkpoints", {"w": torch.ones(1)}, every=1) as save:
        monkeypatch.chdir(tmp_path / "other")
        save(3)
    assert checkpoint.latest(tmp_path / "checkpoints") == checkpoint.Checkpoint(
        tmp_path / "checkpoints" / "step-00000003", 3
    )


def test_error_of_the_training_is_not_hidden_by_a_checkpoint_that_failed(tmp_path: Path) -> None:
    class Broken(Files):
        def make_directory(self, path: Path) -> None:
            raise OSError("no room")

    def train() -> None:
        with checkpoint.save_every(tmp_path, {"w": torch.ones(1)}, every=1, files=Broken()) as save:
            save(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        train()
    assert any("step-00000003 was not written: no room" in note for note in raised.value.__notes__)
    with pytest.warns(lazystep.LazyStepWarning, match="Training goes on"):
        lazystep.mark_step()


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
    with pytest.raises(lazystep.LazyStepError, match=r"extra\.m is of type MaskedArray"):
        save(0, m=np.ma.masked_array([1, 2], [True, False]))
    with pytest.raises(lazystep.LazyStepError, match=r"extra\.m is a tensor of .*on the meta device"):
        save(0, m=torch.empty(2, device="meta"))
    with pytest.raises(lazystep.LazyStepError, match=r"extra\.u is a parameter that has no shape yet"):
        save(0, u=torch.nn.LazyLinear(2).weight)
    with pytest.warns(UserWarning, match="prototype"):
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.raises(lazystep.LazyStepError, match=r"extra\.n is a tensor of .*nested"):
        save(0, n=nested)
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(lazystep.LazyStepError, match="or contains itself"):
        save(0, loop=loop)
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


class Counter:
    """An object with code of its own: it takes what it gets apart, and may raise in the middle."""

    def __init__(self, count: int, name: str) -> None:
        self.count, self.name = count, name

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, self.name: torch.tensor(float(self.count))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.count = int(state[self.name])


class Doubled(nn.Module):
    """A module with a state of its own beside its tensors."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 5.0))
        self.limit, self.seen = limit, 5

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, seen: int) -> None:
        self.seen = seen
        if seen > self.limit:
            raise ValueError(f"{seen} is too much")


def objects(width: int = 3, name: str = "loss", limit: int = 9, groups: int = 1, device: str = "lazy") -> Any:
    model = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width)).to(device)
    other = Doubled(limit).to(device)
    of_groups = (
        [{"params": [p]} for p in other.parameters()]
        if groups == 1
        else [{"params": [*other.parameters()]}, {"params": []}]
    )
    opt = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 2).to(device)).sum().backward()
    opt.step()
    return {
        "counter": Counter(7, name),
        "model": model,
        "opt": opt,
        "tensor": torch.full((width,), 3.0).to(device),
        "other": other,
        "small": torch.optim.SGD(of_groups),
        "generator": torch.Generator().manual_seed(width),
    }


def everything(state: dict[str, Any]) -> dict[str, Any]:
    """All that a load could change, the generators included."""
    seen: dict[str, Any] = {"torch": torch.get_rng_state().tolist(), "python": random.getstate()}
    seen["numpy"] = str(np.random.get_state())
    for name, thing in state.items():
        value = thing.get_state() if isinstance(thing, torch.Generator) else thing
        value = value if isinstance(value, torch.Tensor) else value.state_dict()
        seen[name] = str(torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.cpu().tolist(), value))
    return seen


MISFITS = {
    "shape of a module and of a tensor": (
        {"width": 1},
        {},
        r"state\['model'\]: .*has the shape \(1.*, but \(3.* was saved",
    ),
    "a module alone": ({}, {"model": nn.Linear(2, 3)}, r"state\['model'\]: .* not saved"),
    "a tensor that would be broadcast": (
        {},
        {"tensor": torch.zeros(2, 3)},
        r"\(2, 3\), but \(3,\) was saved",
    ),
    "a tensor for an object": ({}, {"model": torch.zeros(3)}, r"is a Tensor, but a .*[dD]ict was saved"),
    "an object for a tensor": ({}, {"tensor": nn.Linear(2, 3)}, r"is a Linear, but a tensor was saved"),
    "groups": ({"groups": 2}, {}, r"state\['small'\]: has 2 parameter groups, but 1 were saved"),
    "parameters of a group": (
        {},
        {"opt": torch.optim.Adam([torch.zeros(3, 2)])},
        r"has 1 parameters in group 0, but 4 were saved",
    ),
    "shapes of parameters": (
        {},
        {"opt": torch.optim.Adam([torch.zeros(3, 2), *(torch.zeros(2) for _ in range(3))])},
        r"a parameter 1 of group 0 of the shape \(2,\), but \(3,\) was saved",
    ),
    "no optimizer was saved": (
        {},
        {"counter": torch.optim.SGD([torch.zeros(2)])},
        "the state of none was saved",
    ),
    "no generator was saved": (
        {},
        {"tensor": torch.Generator()},
        r"state\['tensor'\]: is a generator that does",
    ),
    "an object that raises": ({"name": "accuracy"}, {}, r"state\['counter'\], a Counter, raised KeyError"),
    "a module that raises": ({"limit": 4}, {}, r"state\['other'\], a Doubled, raised .*5 is too much"),
}


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("misfit", MISFITS)
def test_load_that_fails_changes_nothing(misfit: str, device: str, tmp_path: Path) -> None:
    arguments, others, message = MISFITS[misfit]
    with checkpoint.save_every(tmp_path, objects(device=device), every=1) as save:
        save(4)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    state = {**objects(**arguments, device=device), **others}
    state["counter"].count, state["other"].seen = 1, 2
    before = everything(state)
    with pytest.raises(checkpoint.CheckpointError, match=message) as raised:
        checkpoint.load(found, state)
    assert str(found.path) in str(raised.value)
    assert "Nothing was restored" in str(raised.value)
    assert everything(state) == before


def test_object_that_does_not_take_back_its_own_state_is_named(tmp_path: Path) -> None:
    with checkpoint.save_every(tmp_path, {"other": Doubled(9)}, every=1) as save:
        save(4)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"but state\['other'\] did not take back its own state"
    ):
        checkpoint.load(tmp_path / "step-00000004", {"other": Doubled(4)})


def test_generator_states_that_this_process_does_not_take(tmp_path: Path) -> None:
    weight = torch.ones(1)
    with checkpoint.save_every(tmp_path, {"w": weight}, every=1) as save:
        random_state = checkpoint.saver._random_state
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                checkpoint.saver, "_random_state", lambda: {**random_state(), "python": (9, (1,), None)}
            )
            save(4)
    weight.zero_()
    with pytest.raises(checkpoint.CheckpointError, match="random generators that this process does not take"):
        checkpoint.load(tmp_path / "step-00000004", {"w": weight})
    assert weight.item() == 0
    checkpoint.load(tmp_path / "step-00000004", {"w": weight}, generators=False)
    assert weight.item() == 1


def test_optimizer_without_state_is_compared_by_its_parameters_also_in_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier releases have saved no shapes: then torch's comparison of the sizes of groups remains."""
    opt = torch.optim.SGD([torch.zeros(3)], momentum=0.5)
    monkeypatch.setattr(checkpoint.saver, "shapes_of", lambda optimizer: None)
    with checkpoint.save_every(tmp_path, {"opt": opt}, every=1) as save:
        save(0)
    two = torch.optim.SGD([torch.zeros(3), torch.zeros(3)])
    with pytest.raises(checkpoint.CheckpointError, match="has 2 parameters in group 0, but 1 were saved"):
        checkpoint.load(tmp_path / "step-00000000", {"opt": two})
    other = torch.optim.SGD([torch.zeros(4)], momentum=0.1)
    checkpoint.load(tmp_path / "step-00000000", {"opt": other})
    assert other.param_groups[0]["momentum"] == 0.5


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
