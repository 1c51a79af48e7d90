"""Storages of lazy tensors, and the files of packages that ask for them: safetensors, torch.save."""

from __future__ import annotations

import gc
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import _find_shared_tensors, load_file, load_model, save, save_file, save_model
from torch import nn

import lazystep
from lazystep.device import storage as storage_module


class Tied(nn.Module):
    """`decoder` has the weight of `encoder`; `other` has the same size and a memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.other = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.decoder.weight = self.encoder.weight
        self.register_buffer("halves", torch.arange(6.0))


def synchronizations() -> float:
    return lazystep.metrics.counter_value("synchronizations")


# -- identity --------------------------------------------------------------------------------------


def test_views_and_tied_weights_share_a_storage_and_equal_sizes_do_not() -> None:
    model = Tied().to("lazy")
    first = model.encoder.weight.untyped_storage()
    assert (
        first == model.decoder.weight.untyped_storage() == model.encoder.weight.detach()[1:].untyped_storage()
    )
    assert hash(first) == hash(model.decoder.weight.untyped_storage())
    assert first != model.other.weight.untyped_storage()
    assert first.data_ptr() != model.other.weight.untyped_storage().data_ptr()
    assert first._cdata == model.decoder.weight.untyped_storage()._cdata
    assert synchronizations() == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x[1:, 2:],
        lambda x: x.t(),
        lambda x: x.expand(3, 4, 6),
        lambda x: x[2:2],
        lambda x: x.double()[1],
        lambda x: x.view(torch.int32)[1],
        lambda x: x @ x.t(),
    ],
)
def test_offsets_and_sizes_equal_eagers(make: Any) -> None:
    plain = torch.randn(4, 6)
    eager, lazy = make(plain), make(plain.to("lazy"))
    assert lazy.untyped_storage().nbytes() == eager.untyped_storage().nbytes()
    assert len(lazy.untyped_storage()) == lazy.untyped_storage().size() == len(eager.untyped_storage())
    ours, theirs = lazy.untyped_storage().data_ptr(), eager.untyped_storage().data_ptr()
    if eager.numel() == 0:
        assert lazy.data_ptr() == eager.data_ptr() == 0
    else:
        assert lazy.data_ptr() - ours == eager.data_ptr() - theirs
        assert ours % 64 == 0
    assert torch.empty(0, device="lazy").untyped_storage().data_ptr() == 0


def test_address_stays_while_steps_write_and_is_never_given_again() -> None:
    weight = torch.ones(3, device="lazy")
    seen = {weight.data_ptr()}
    for _ in range(3):
        weight.mul_(2.0)
        lazystep.mark_step()
        assert {weight.data_ptr()} == seen
    for _ in range(5):
        other = torch.ones(3, device="lazy")
        assert other.data_ptr() not in seen
        seen.add(other.data_ptr())
        del other


def test_addresses_lie_outside_of_every_process() -> None:
    # Bits 48 to 56 of an address in user space are all 0 on x86-64; 52 to 55 are on ARM.
    address = torch.ones(3, device="lazy").data_ptr()
    assert address >> 52 & 0xF
    assert address >> 57
    assert address < 1 << 63


# -- bytes -----------------------------------------------------------------------------------------


def test_bytes_on_demand_are_eagers_and_counted_with_the_line() -> None:
    x = torch.arange(6, dtype=torch.int16)
    lazy = x.to("lazy")
    lazy.add_(1)
    x.add_(1)
    assert bytes(lazy[2:].untyped_storage()) == bytes(x.untyped_storage().tolist())
    ((reason, line, count),) = lazystep.metrics.synchronizations()
    assert (reason, count) == ("storage", 1)
    assert "test_storage.py" in line
    copy = lazy.untyped_storage().cpu()
    copy.fill_(0)
    assert lazy.tolist() == [1, 2, 3, 4, 5, 6]


def test_storage_can_not_be_written_or_pickled() -> None:
    storage = torch.ones(2, device="lazy").untyped_storage()
    for refused in (lambda: storage.resize_(3), lambda: storage.fill_(0), lambda: pickle.dumps(storage)):
        with pytest.raises(lazystep.UnsupportedError, match=r"test_storage\.py.*\.cpu\(\)"):
            refused()
    assert (storage.device.type, storage.is_cuda, storage.is_shared(), storage.is_pinned()) == (
        "lazy",
        False,
        False,
        False,
    )
    assert storage.element_size() == 1
    assert "8 bytes" in repr(storage)
    with pytest.raises(NotImplementedError, match="storage"):
        torch.eye(2).to_sparse().to("lazy").untyped_storage()


# -- safetensors -----------------------------------------------------------------------------------


def test_safetensors_finds_the_tied_weights_that_it_finds_in_eager() -> None:
    model = Tied()
    expected = {frozenset(names) for names in _find_shared_tensors(model.state_dict())}
    assert frozenset({"encoder.weight", "decoder.weight"}) in expected
    model.to("lazy")
    assert {frozenset(names) for names in _find_shared_tensors(model.state_dict())} == expected
    buffer = model.halves
    halves = {"low": buffer[:3], "high": buffer[3:], "all": buffer}
    found = {frozenset(names) for names in _find_shared_tensors({k: halves[k] for k in ("low", "high")})}
    assert found == {frozenset({"low"}), frozenset({"high"})}


def test_save_model_writes_the_file_that_it_writes_in_eager(tmp_path: Path) -> None:
    model = Tied()
    save_model(model, str(tmp_path / "eager.safetensors"))
    model.to("lazy")
    save_model(model, str(tmp_path / "lazy.safetensors"))
    assert (tmp_path / "lazy.safetensors").read_bytes() == (tmp_path / "eager.safetensors").read_bytes()
    other = Tied().to("lazy")
    assert load_model(other, str(tmp_path / "lazy.safetensors")) == (set(), [])
    assert other.decoder.weight is other.encoder.weight
    assert torch.equal(other.decoder.weight.cpu(), model.encoder.weight.cpu())


def test_save_file_reads_each_tensor_once_for_the_line_that_saves(tmp_path: Path) -> None:
    tensors = {name: torch.randn(3) for name in "abc"}
    lazy = {name: tensor.to("lazy") for name, tensor in tensors.items()}
    for tensor in [*tensors.values(), *lazy.values()]:
        tensor.mul_(2.0)
    save_file(lazy, tmp_path / "lazy.safetensors")
    assert (tmp_path / "lazy.safetensors").read_bytes() == save(tensors)
    ((reason, line, count),) = lazystep.metrics.synchronizations()
    assert (reason, count) == ("to host", 3)
    assert "test_storage.py" in line
    assert lazystep.metrics.counter_value("programs_executed") == 1


def test_tied_weights_in_save_file_are_refused_as_in_eager(tmp_path: Path) -> None:
    model = Tied().to("lazy")
    with pytest.raises(RuntimeError, match="share memory"):
        save_file(model.state_dict(), tmp_path / "refused.safetensors")
    assert not (tmp_path / "refused.safetensors").exists()


def test_load_file_knows_no_lazy_device_and_moving_is_the_remedy(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(SafetensorError, match="device lazy is invalid"):
        load_file(tmp_path / "a.safetensors", device="lazy")
    loaded = {name: tensor.to("lazy") for name, tensor in load_file(tmp_path / "a.safetensors").items()}
    assert loaded["a"].device.type == "lazy"
    assert loaded["a"].tolist() == [1.0, 1.0]


# -- torch.save ------------------------------------------------------------------------------------


def test_torch_save_keeps_sharing_and_keeps_no_copy_afterwards() -> None:
    model = Tied().to("lazy")
    tensors = {**model.state_dict(), "part": model.encoder.weight.detach()[1:]}
    file = io.BytesIO()
    torch.save(tensors, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    memory = loaded["encoder.weight"].untyped_storage().data_ptr()
    assert loaded["decoder.weight"].untyped_storage().data_ptr() == memory
    assert loaded["part"].untyped_storage().data_ptr() == memory
    assert loaded["other.weight"].untyped_storage().data_ptr() != memory
    gc.collect()
    assert not storage_module._copies


def test_pickled_complex_views_keep_their_values() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    lazy = x.to("lazy")
    for make in (lambda z: z.conj(), lambda z: z.conj().imag, lambda z: z[1:]):
        assert torch.equal(pickle.loads(pickle.dumps(make(lazy))), make(x))


def test_file_holds_one_moment_while_another_thread_trains() -> None:
    """Every byte of a saved tensor is of one step, whatever the executor writes meanwhile."""
    weight = torch.zeros(200_000, device="lazy")
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            weight.add_(1.0)
            lazystep.mark_step()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(20):
            file = io.BytesIO()
            torch.save(weight, file)
            file.seek(0)
            saved = torch.load(file)
            assert saved.min() == saved.max()
            values = torch.frombuffer(bytearray(bytes(weight.untyped_storage())), dtype=torch.float32)
            assert values.min() == values.max()
    finally:
        stop.set()
        thread.join()
