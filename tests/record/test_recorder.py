"""The native front end: no Python in the steady state, nothing kept, clear words where it can not be used."""

from __future__ import annotations

import gc
import importlib
import resource
import threading
from typing import Any

import pytest
import torch
from torch import nn

import lazystep
from benchmarks import models
from lazystep import metrics
from lazystep.record import native
from lazystep.record.device import IS_NATIVE

needs_native = pytest.mark.skipif(
    not IS_NATIVE, reason="the native recorder is not in use: LAZYSTEP_RECORDER=native"
)
if IS_NATIVE:
    from lazystep.record.native import _recorder


def make_loop(name: str = "mlp") -> Any:
    model, make_batch, loss_fn = models.MODELS[name]()
    model.to("lazy")
    optimizer = models.make_optimizer(model)

    def step() -> torch.Tensor:
        x, y = make_batch()
        loss = loss_fn(model(x.to("lazy")), y.to("lazy"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        lazystep.mark_step()
        return loss

    return step


@needs_native
@pytest.mark.parametrize("name", models.MODELS)
def test_steady_state_calls_no_python(name: str) -> None:
    step = make_loop(name)
    for _ in range(4):
        step()
    calls, lookups = _recorder.num_calls_to_python(), _recorder.num_lookups()
    for _ in range(3):
        step()
    assert (_recorder.num_calls_to_python(), _recorder.num_lookups()) == (calls, lookups)
    assert metrics.counter_value("cache_hits") >= 3


@needs_native
def test_dropout_draws_without_python_handlers_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(64, device="lazy")
    torch.manual_seed(3)
    first = nn.functional.dropout(x, 0.5)
    monkeypatch.setattr(native.front_end.python_front_end, "draw", None)
    before = metrics.counter_value("random_draws")
    second = nn.functional.dropout(x, 0.5)
    assert metrics.counter_value("random_draws") == before + 1
    torch.manual_seed(3)
    want = [nn.functional.dropout(torch.ones(64), 0.5) for _ in range(2)]
    assert torch.equal(first.cpu(), want[0])
    assert torch.equal(second.cpu(), want[1])


@needs_native
@pytest.mark.timeout(600)
def test_twenty_thousand_steps_keep_nothing() -> None:
    weight = torch.ones(4, 4).to("lazy").requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=1e-3, momentum=0.9)

    def run(num_steps: int) -> tuple[tuple[int, int], int]:
        for number in range(num_steps):
            # Every few steps another shape, so that guesses fail and programs are looked up.
            x = torch.ones(2 + (number % 50 == 0), 4).to("lazy")
            nn.functional.dropout(x @ weight, 0.1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            lazystep.mark_step()
        lazystep.wait_device_ops()
        gc.collect()
        return _recorder.num_alive(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    run(500)
    alive, _ = run(1500)
    _, kilobytes = run(3000)
    alive_after, kilobytes_after = run(15_000)
    assert alive_after == alive
    assert kilobytes_after - kilobytes < 8_000, f"{kilobytes} kB have become {kilobytes_after} kB"


@needs_native
def test_handles_die_with_their_tensors_on_any_thread() -> None:
    lazystep.wait_device_ops()
    gc.collect()
    before = _recorder.num_alive()
    tensors = [torch.ones(3, device="lazy") * 2 for _ in range(20)]

    rest = tensors[10:]
    del tensors[10:]
    thread = threading.Thread(target=rest.clear)
    thread.start()
    thread.join()
    assert [t.tolist() for t in tensors] == [[2.0, 2.0, 2.0]] * 10
    del tensors
    gc.collect()
    assert _recorder.num_alive() == before


@needs_native
def test_storages_answer_without_memory() -> None:
    x = torch.ones(3, 4, device="lazy")
    assert x.data_ptr() == 0
    assert torch._C._is_alias_of(x, x[1:])
    assert not torch._C._is_alias_of(x, x.clone())
    with pytest.raises(lazystep.UnsupportedError, match="untyped_storage"):
        x.untyped_storage()


@needs_native
def test_views_of_parameters_under_inference_mode_are_ordinary_tensors() -> None:
    weight = nn.Parameter(torch.ones(2, 3).to("lazy"))
    with torch.inference_mode():
        assert not weight.t().is_inference()
        assert (weight + 1).is_inference()


@needs_native
def test_custom_op_defined_anew_is_decided_anew() -> None:
    for shape in (2, 5):
        library = torch.library.Library("lazystep_native_tests", "DEF")
        library.define("stretch(Tensor x) -> Tensor")
        library.impl("stretch", lambda x, n=shape: x.new_ones(n), "CompositeExplicitAutograd")
        torch.library.register_fake(
            "lazystep_native_tests::stretch", lambda x, n=shape: x.new_empty(n), lib=library
        )
        out = torch.ops.lazystep_native_tests.stretch(torch.ones(1, device="lazy"))
        assert out.tolist() == [1.0] * shape
        library._destroy()


def test_mismatched_torch_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stale:
        torch_version = "2.12.1"

    monkeypatch.setattr(importlib, "import_module", lambda *_: Stale)
    with pytest.raises(lazystep.LazyStepError, match=r"built for torch 2\.12\.1.*pip install"):
        native.load("native")
    with pytest.warns(lazystep.LazyStepWarning, match=r"built for torch 2\.12\.1.*Python.*pip install"):
        assert native.load("auto") is None
    assert native.load("python") is None


def test_missing_or_unloadable_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise ModuleNotFoundError("no _recorder")

    def unloadable(*_: object) -> None:
        raise ImportError("undefined symbol: _ZN2at")

    monkeypatch.setattr(importlib, "import_module", missing)
    assert native.load("auto") is None
    with pytest.raises(lazystep.LazyStepError, match="installed without its native recorder"):
        native.load("native")
    monkeypatch.setattr(importlib, "import_module", unloadable)
    with pytest.raises(lazystep.LazyStepError, match="undefined symbol"):
        native.load("native")
    with pytest.warns(lazystep.LazyStepWarning, match="undefined symbol"):
        assert native.load("auto") is None
