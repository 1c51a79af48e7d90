"""What works on `device="lazy"` besides plain ops: factories, moves, modules, saving, autograd."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lazystep
from lazystep import metrics
from tests.helpers import count, descend, run_python

FACTORIES: dict[str, Callable[[str], torch.Tensor]] = {
    "tensor": lambda d: torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=d),
    "tensor_scalar": lambda d: torch.tensor(1.5, device=d),
    "tensor_bool": lambda d: torch.tensor([True, False], device=d),
    "as_tensor": lambda d: torch.as_tensor(np.arange(3), device=d),
    "asarray": lambda d: torch.asarray([1, 2], device=d),
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "ones": lambda d: torch.ones(2, dtype=torch.int32, device=d),
    "full": lambda d: torch.full((2,), 7, device=d),
    "full_float": lambda d: torch.full((2,), 7.5, device=d),
    "eye": lambda d: torch.eye(3, device=d),
    "arange": lambda d: torch.arange(5, device=d),
    "arange_float": lambda d: torch.arange(0.0, 1.0, 0.25, device=d),
    "arange_step": lambda d: torch.arange(1, 9, 3, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 4, device=d),
    "logspace": lambda d: torch.logspace(0, 2, 3, device=d),
    "rand": lambda d: torch.rand(3, device=d),
    "randn": lambda d: torch.randn(3, 3, dtype=torch.float64, device=d),
    "randint": lambda d: torch.randint(0, 9, (4,), device=d),
    "randperm": lambda d: torch.randperm(6, device=d),
    "normal": lambda d: torch.normal(0.0, 1.0, (3,), device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
    "hann_window": lambda d: torch.hann_window(4, device=d),
    "complex": lambda d: torch.randn(3, dtype=torch.complex64, device=d),
    "new_tensor": lambda d: torch.zeros(2, device=d).new_tensor([1, 2]),
    "new_zeros": lambda d: torch.ones(2, device=d).new_zeros(3),
    "new_ones": lambda d: torch.zeros(2, dtype=torch.float64, device=d).new_ones(2),
    "new_full": lambda d: torch.zeros(2, device=d).new_full((2,), 3.0),
    "zeros_like": lambda d: torch.zeros_like(torch.ones(2, 2, device=d)),
    "ones_like": lambda d: torch.ones_like(torch.ones(2, device=d), dtype=torch.int64),
    "full_like": lambda d: torch.full_like(torch.ones(2, device=d), 3.0),
    "rand_like": lambda d: torch.rand_like(torch.ones(5, device=d)),
    "randn_like": lambda d: torch.randn_like(torch.ones(5, device=d)),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factory_equals_eager(name: str) -> None:
    torch.manual_seed(3)
    want = FACTORIES[name]("cpu")
    torch.manual_seed(3)
    got = FACTORIES[name]("lazy")
    assert got.device == torch.device("lazy:0")
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    assert torch.equal(got.cpu(), want)


def test_generators_and_both_spellings_of_the_device() -> None:
    a = torch.randn(4, device="lazy:0", generator=torch.Generator().manual_seed(5))
    b = torch.randn(4, generator=torch.Generator().manual_seed(5))
    assert torch.equal(a.cpu(), b)
    assert a.to("lazy") is a
    assert a.to("lazy:0") is a


def test_default_device() -> None:
    torch.set_default_device("lazy")
    try:
        layer = nn.Linear(3, 2)
        x = torch.ones(1, 3)
        assert layer.weight.device.type == x.device.type == torch.tensor(1.0).device.type == "lazy"
        optimizer = torch.optim.Adam(layer.parameters())
        layer(x).sum().backward()
        optimizer.step()
    finally:
        torch.set_default_device(None)
    assert layer(x).shape == (1, 2)


def test_moves_convert_and_copy() -> None:
    host = torch.arange(6.0).reshape(2, 3).t()
    lazy = host.to("lazy")
    assert lazy.stride() == host.stride()
    host.zero_()
    assert lazy.sum().item() == 15.0
    assert lazy.to("cpu", torch.float64).dtype is torch.float64
    assert host.to("lazy", torch.int64).dtype is torch.int64
    back = lazy.cpu()
    lazy.zero_()
    assert back.sum().item() == 15.0
    target = torch.empty(3, 2)
    target.copy_(lazy)
    assert target.sum().item() == 0.0
    assert torch.zeros_like(lazy, device="cpu").device.type == "cpu"
    assert lazy.to("meta").device.type == "meta"


def test_host_tensors_are_copied_when_recorded() -> None:
    x = torch.zeros(3, device="lazy")
    host = torch.ones(3)
    x.copy_(host)
    scale = torch.tensor(2.0)
    y = x * scale
    index = torch.tensor([0, 1])
    z = x[index]
    host.fill_(9)
    scale.fill_(9)
    index.fill_(2)
    assert x.tolist() == [1.0, 1.0, 1.0]
    assert y.tolist() == [2.0, 2.0, 2.0]
    assert z.tolist() == [1.0, 1.0]


def test_cpu_scalars_mix_and_other_cpu_tensors_name_both_places() -> None:
    x = torch.ones(3, device="lazy")
    assert (x + torch.tensor(1)).tolist() == [2.0, 2.0, 2.0]
    assert (torch.tensor(2.0, dtype=torch.float64) * x).dtype is torch.float32
    with pytest.raises(
        lazystep.DeviceMismatchError, match=r"self \[3\] on lazy:0, other \[3\] on cpu"
    ) as error:
        x + torch.ones(3)
    assert "test_device.py" in str(error.value)
    assert '.to("lazy")' in str(error.value)
    with pytest.raises(lazystep.DeviceMismatchError):
        torch.add(x, x, out=torch.empty(3))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.decoder = nn.Linear(4, 10, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.norm(self.encoder(tokens)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, steps: int = 4) -> list[float]:
    losses = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(0, 10, (8,), generator=generator).to(device)
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        descend(loss, optimizer)
        lazystep.mark_step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("made", ["before", "after"])
def test_tied_parameters_stay_tied_and_optimizers_keep_theirs(made: str) -> None:
    model = Tied()
    reference = copy.deepcopy(model)
    assert reference.decoder.weight is reference.encoder.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5) if made == "before" else None
    weight = model.encoder.weight
    model.to("lazy")
    assert model.encoder.weight is weight
    assert model.decoder.weight is weight
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert all(b.device.type == "lazy" for b in model.buffers())
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.5)
    want = train(reference, torch.optim.SGD(reference.parameters(), lr=0.5), "cpu")
    assert train(model, optimizer, "lazy") == want
    model.to("cpu")
    assert model.encoder.weight is weight
    assert model.decoder.weight is weight
    assert type(weight) is nn.Parameter
    assert torch.equal(weight, reference.encoder.weight)
    # And it goes on training there, with the same optimizer.
    assert train(model, optimizer, "cpu") == train(
        reference, torch.optim.SGD(reference.parameters(), lr=0.5), "cpu"
    )


def test_modules_whose_parameters_have_weak_references_move() -> None:
    """As between other devices, where torch sets `data`: the references are of the Python object."""
    module = torch.nn.Linear(2, 3)
    refs = [weakref.ref(parameter) for parameter in module.parameters()]
    expected = [parameter.tolist() for parameter in module.parameters()]
    module.to("lazy")
    assert [ref() is parameter for ref, parameter in zip(refs, module.parameters(), strict=True)] == [
        True
    ] * 2
    assert refs[0]().device.type == "lazy"
    module.double().cpu().float()
    assert [ref().tolist() for ref in refs] == expected
    assert refs[0]().device.type == "cpu"


def test_module_does_not_move_between_forward_and_backward() -> None:
    """torch's other checks of a swap hold, with weak references and without."""
    for holds in (False, True):
        module = torch.nn.Linear(2, 3).to("lazy")
        refs = [weakref.ref(module.weight)] if holds else []
        loss = module(torch.ones(1, 2).to("lazy")).sum()
        module.cpu()
        with pytest.raises(RuntimeError, match="poisoned by swap_tensors"):
            loss.backward()
        assert all(ref() is module.weight for ref in refs)


def test_captured_recurrent_layer_moves_back() -> None:
    """Its list of weak references to its weights is one of the places of the capture."""
    module = torch.nn.GRU(2, 3).to("lazy")
    opt = torch.optim.SGD(module.parameters(), 0.1)

    @lazystep.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = module(x)[0].square().mean()
        descend(loss, opt)
        return loss

    for _ in range(5):
        step(torch.ones(2, 2))
    assert step.num_replayed > 0
    before = module.weight_ih_l0.tolist()
    module.cpu()
    assert module.weight_ih_l0.device.type == "cpu"
    assert module.weight_ih_l0.tolist() == before
    module(torch.ones(2, 2))
    module.to("lazy")
    losses = [step(torch.ones(2, 2)).item() for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.Adam, torch.optim.RAdam])
def test_optimizers_that_were_loaded_read_no_value(make: Any) -> None:
    """NAdam keeps a product beside its step count, which torch loads onto the device of the parameter."""
    runs = []
    for device in ("cpu", "lazy"):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(3).to(device))
        opt = make([parameter], lr=0.1)
        for _ in range(3):
            descend(parameter.square().sum(), opt)
        resumed = make([parameter], lr=0.1)
        state = opt.state_dict()
        moved = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t, to=device: t.to(to), state)
        resumed.load_state_dict(copy.deepcopy(moved))
        before = count("synchronizations")
        for _ in range(3):
            descend(parameter.square().sum(), resumed)
            lazystep.mark_step()
        assert count("synchronizations") == before
        runs.append(parameter.tolist())
    assert runs[0] == runs[1]


def test_module_conversions_between_types_on_the_device() -> None:
    model = nn.Linear(3, 2).to("lazy")
    weight = model.weight
    model.double()
    assert model.weight is weight
    assert weight.dtype is torch.float64
    model.to("lazy", torch.bfloat16)
    assert model(torch.ones(1, 3, dtype=torch.bfloat16, device="lazy")).dtype is torch.bfloat16


def test_uninitialized_parameters_materialize_on_the_device() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    reference = copy.deepcopy(model)
    model.to("lazy")
    torch.manual_seed(4)
    got = model(torch.ones(2, 3, device="lazy"))
    torch.manual_seed(4)
    want = reference(torch.ones(2, 3))
    assert torch.equal(got.cpu(), want)
    assert model[0].weight.device.type == "lazy"
    assert isinstance(model[0].weight, nn.Parameter)


def test_state_dict_both_ways() -> None:
    lazy, host = Tied().to("lazy"), Tied()
    host.load_state_dict(lazy.state_dict())
    assert torch.equal(host.encoder.weight, lazy.encoder.weight.cpu())
    other = Tied()
    lazy.load_state_dict(other.state_dict())
    assert torch.equal(lazy.encoder.weight.cpu(), other.encoder.weight)
    optimizer = torch.optim.Adam(lazy.parameters())
    train(lazy, optimizer, "lazy", steps=1)
    resumed = torch.optim.Adam(lazy.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    state = resumed.state[lazy.encoder.weight]["exp_avg"]
    assert torch.equal(state.cpu(), optimizer.state[lazy.encoder.weight]["exp_avg"].cpu())


def test_deepcopy_is_lazy_and_independent() -> None:
    model = Tied().to("lazy")
    train(model, torch.optim.SGD(model.parameters()), "lazy", steps=1)
    model.encoder.weight.grad = torch.ones_like(model.encoder.weight)
    model.encoder.weight.note = "not kept, as in eager"
    clone = copy.deepcopy(model)
    assert not hasattr(clone.encoder.weight, "note")
    assert clone.encoder.weight.grad is None
    assert isinstance(clone.encoder.weight, nn.Parameter)
    assert clone.decoder.weight is clone.encoder.weight
    assert clone.encoder.weight.device.type == "lazy"
    before = model.encoder.weight.cpu()
    with torch.no_grad():
        clone.encoder.weight.zero_()
    assert torch.equal(model.encoder.weight.cpu(), before)
    plain = torch.ones(3, device="lazy", requires_grad=True)
    plain.grad = torch.full((3,), 2.0, device="lazy")
    plain.note = ["kept"]
    twin = copy.deepcopy(plain)
    assert twin.note == ["kept"]
    assert twin.grad.tolist() == [2.0, 2.0, 2.0]


def test_shallow_copy_shares_the_value() -> None:
    x = torch.ones(2, device="lazy")
    y = copy.copy(x)
    x.add_(1)
    assert y.device.type == "lazy"
    assert y.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("write", [torch.save, lazystep.save])
def test_saved_files_hold_plain_cpu_tensors(write: Any) -> None:
    model = Tied().to("lazy")
    view = model.encoder.weight.detach()[2:4]
    file = io.BytesIO()
    write({"model": model.state_dict(), "view": view, "step": 3, "param": model.norm.weight}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["step"] == 3
    assert loaded["view"].device.type == "cpu"
    assert type(loaded["param"]) is nn.Parameter
    assert torch.equal(loaded["view"], view.cpu())
    weights = loaded["model"]
    assert weights["encoder.weight"].data_ptr() == weights["decoder.weight"].data_ptr()
    file.seek(0)
    mapped = torch.load(file, map_location="lazy", weights_only=True)
    assert mapped["model"]["encoder.weight"].device.type == "lazy"
    assert torch.equal(mapped["model"]["encoder.weight"].cpu(), model.encoder.weight.detach().cpu())


def test_saved_files_load_without_lazystep(tmp_path: Any) -> None:
    lazystep.save({"w": torch.ones(2, device="lazy") * 3}, tmp_path / "w.pt")
    code = "import sys, torch; w = torch.load(sys.argv[1])['w']; assert w.tolist() == [3.0, 3.0]; "
    code += "assert 'lazystep' not in sys.modules; print('loaded')"
    done = run_python("-c", code, tmp_path / "w.pt")
    assert done.stdout.strip() == "loaded", done.stderr


def test_saving_many_tensors_synchronizes_once(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to("lazy")
    lazystep.save(model.state_dict(), tmp_path / "model.pt")
    assert [(reason, count) for reason, _, count in lazystep.metrics.synchronizations()] == [("save", 1)]
    with torch.no_grad():
        model[0].weight.add_(1.0)
    pickle.dumps(model[0].weight)
    assert lazystep.metrics.counter_value("synchronizations:pickle") == 1


def test_pickle_gives_cpu_tensors() -> None:
    x = torch.arange(3.0, device="lazy").requires_grad_()
    y = pickle.loads(pickle.dumps(x))
    assert y.device.type == "cpu"
    assert y.requires_grad
    assert y.tolist() == [0.0, 1.0, 2.0]


def test_reading_values() -> None:
    x = torch.arange(4.0, device="lazy")
    scalar = x.sum()
    assert x.numpy().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert np.asarray(x).sum() == 6.0
    assert np.array(x, dtype=np.float64).dtype == np.float64
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert scalar.item() == float(scalar) == 6.0
    assert int(scalar) == 6
    assert bool(scalar > 5)
    assert f"{scalar:.2f}" == "6.00"
    assert f"{scalar}" == "6.0"
    assert repr(x) == "tensor([0., 1., 2., 3.], device='lazy:0')"
    assert "grad_fn=<MulBackward0>" in repr(x.requires_grad_() * 2)
    assert "requires_grad=True" in repr(x)
    assert [float(v) for v in x.detach()] == [0.0, 1.0, 2.0, 3.0]
    assert len(x) == 4
    assert 3.0 in x
    assert torch.equal(x, x.clone())
    assert torch.allclose(x, x + 1e-9)
    with pytest.raises(RuntimeError, match="requires grad"):
        x.numpy()
    assert torch.from_dlpack(x.detach()).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_memory_of_a_lazy_tensor_is_refused() -> None:
    x = torch.ones(2, device="lazy")
    with pytest.raises(lazystep.UnsupportedError, match=r"storage\(\).*test_device\.py"):
        x.storage()
    with pytest.raises(lazystep.UnsupportedError):
        x.share_memory_()
    assert torch._C._is_alias_of(x, x[1:])
    assert not torch._C._is_alias_of(x, x.clone())


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
def test_quantized_tensors_are_refused() -> None:
    x = torch.ones(2, device="lazy")
    with pytest.raises(lazystep.UnsupportedError, match="quantized"):
        torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)


def test_data_loader_batches() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10.0).reshape(10, 1), torch.arange(10))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2)
    total = torch.zeros((), device="lazy")
    for x, y in loader:
        total += x.to("lazy").sum() + y.to("lazy").sum()
        lazystep.mark_step()
    assert total.item() == 90.0


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_the_same_dropout(reentrant: bool) -> None:
    def run(device: str) -> list[Any]:
        torch.manual_seed(2)
        layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()).to(device)
        x = torch.ones(4, 8).to(device).requires_grad_()
        y = checkpoint(layer, x, use_reentrant=reentrant)
        y.sum().backward()
        return [y.detach().cpu(), x.grad.cpu(), layer[0].weight.grad.cpu()]

    for got, want in zip(run("lazy"), run("cpu"), strict=True):
        assert torch.equal(got, want)


def test_hooks_double_backward_and_custom_functions() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return 3 * x**2 * grad

    def run(device: str) -> list[torch.Tensor]:
        x = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
        seen: list[torch.Tensor] = []
        x.register_hook(lambda g: seen.append(g) or g * 2)
        y = Cube.apply(x)
        y.retain_grad()
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (gg,) = torch.autograd.grad(g.sum(), x)
        Cube.apply(x).sum().backward()
        return [y.detach(), g.detach(), gg, x.grad, *seen]

    for got, want in zip(run("lazy"), run("cpu"), strict=True):
        assert torch.equal(got.detach().cpu(), want.detach())


def test_module_hooks_see_lazy_tensors() -> None:
    layer = nn.Linear(2, 2).to("lazy")
    seen = []
    layer.register_forward_hook(lambda m, i, o: seen.append(o.shape))
    layer.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].shape))
    layer(torch.ones(1, 2, device="lazy").requires_grad_()).sum().backward()
    assert seen == [(1, 2), (1, 2)]


def test_custom_ops_with_and_without_shape_inference() -> None:
    @torch.library.custom_op("lazystep_tests::scaled", mutates_args=())
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    @torch.library.custom_op("lazystep_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(3, device="lazy")
    assert doubled(x).tolist() == [2.0, 2.0, 2.0]
    assert metrics.counter_value("synchronizations:no shape inference for the op") == 1
    before = metrics.counter_value("synchronizations")

    scaled.register_fake(lambda x, factor: torch.empty_like(x))
    scaled.register_autograd(lambda ctx, grad: (grad * 10, None))

    @torch.library.custom_op("lazystep_tests::add_one_", mutates_args=("x",))
    def add_one_(x: torch.Tensor) -> None:
        x += 1

    y = torch.ones(3, device="lazy", requires_grad=True)
    z = scaled(y * 1, 4.0)
    z.sum().backward()
    base = torch.zeros(4, device="lazy")
    add_one_(base[1:3])
    assert metrics.counter_value("synchronizations") == before
    assert y.grad is not None
    assert y.grad.tolist() == [10.0, 10.0, 10.0]
    assert base.tolist() == [0.0, 1.0, 1.0, 0.0]


def test_no_grad_and_inference_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Conv1d(1, 2, 3)).to("lazy")
    reference = copy.deepcopy(model).to("cpu")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.manual_seed(1)
            got = model(torch.ones(2, 1, 4, device="lazy")).reshape(-1)
            torch.manual_seed(1)
            want = reference(torch.ones(2, 1, 4)).reshape(-1)
            assert not got.requires_grad
            assert got.is_inference() == want.is_inference()
            assert torch.equal(got.cpu(), want)


def test_several_threads_record_at_once() -> None:
    results: dict[int, float] = {}

    def work(seed: int) -> None:
        x = torch.full((16,), float(seed), device="lazy")
        for _ in range(30):
            x = x * 1.5 - x * 0.5
            if seed % 2:
                lazystep.mark_step()
        results[seed] = x.sum().item()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {n: 16.0 * n for n in range(4)}


def test_backward_on_another_thread() -> None:
    x = torch.ones(3, device="lazy", requires_grad=True)
    loss = (x * 2).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join(60)
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_torch_compile_is_refused() -> None:
    function = torch.compile(lambda x: x + 1, backend="eager")
    with pytest.raises(Exception, match=r"torch\.compile does not take lazy tensors"):
        function(torch.ones(2, device="lazy"))


def test_device_errors_of_the_step_api() -> None:
    with pytest.raises(ValueError, match="cuda"):
        lazystep.mark_step("cuda")
    with pytest.raises(ValueError, match="cpu"):
        lazystep.sync_multi([torch.ones(1)], [])
    with pytest.raises(ValueError, match="cpu"):
        lazystep.get_tensor_id(torch.ones(1))
    assert repr(lazystep.get_device_context("lazy")) == "DeviceContext('lazy:0')"
    assert lazystep.get_device_context() is lazystep.get_device_context("lazy:0")
