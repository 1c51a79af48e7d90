"""PyTorch/XLA's step API: its tests of closures, steps, metrics and loaders, told in lazystep's words."""

from __future__ import annotations

import io
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lazystep
import lazystep.compat.torch_xla as torch_xla
import lazystep.compat.torch_xla.core.xla_model as xm
import lazystep.compat.torch_xla.debug.metrics as met
import lazystep.compat.torch_xla.distributed.parallel_loader as pl
import lazystep.compat.torch_xla.runtime as xr
from lazystep import config, notices
from tests.helpers import count, failing


@pytest.fixture(autouse=True)
def flushed() -> Any:
    yield
    torch_xla.sync(wait=True)
    lazystep.flush_step_closures(30)


# -- closures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("barrier", [torch_xla.sync, xm.mark_step], ids=["sync", "mark_step"])
def test_sync_closures_have_run_in_order_when_the_barrier_returns(barrier: Callable[[], None]) -> None:
    order: list[float] = []
    x = torch.ones((), device=torch_xla.device())
    for _ in range(3):
        x = x * 2
        xm.add_step_closure(lambda value: order.append(value.item()), (x,))
    assert order == []
    barrier()
    assert order == [2.0, 4.0, 8.0]
    assert count("programs_executed") == 1


def test_async_closure_runs_while_the_training_thread_goes_on() -> None:
    may_go_on = threading.Event()
    seen: list[bool] = []
    xm.add_step_closure(lambda: seen.append(may_go_on.wait(30)), run_async=True)
    torch_xla.sync()
    assert seen == []
    may_go_on.set()
    lazystep.flush_step_closures(30)
    assert seen == [True]


def test_async_closures_see_the_values_of_their_own_step() -> None:
    gate = threading.Event()
    seen: list[float] = []
    weight = torch.zeros((), device=torch_xla.device())
    xm.add_step_closure(lambda: gate.wait(30), run_async=True)
    for _ in range(3):
        with torch_xla.step():
            weight += 1
            xm.add_step_closure(lambda value: seen.append(value.item()), (weight,), run_async=True)
    xm.wait_device_ops()
    gate.set()
    lazystep.flush_step_closures(30)
    assert seen == [1.0, 2.0, 3.0]


def test_error_of_a_sync_closure_comes_out_of_sync() -> None:
    xm.add_step_closure(failing("sync"))
    with pytest.raises(ArithmeticError, match="sync"):
        torch_xla.sync()


def test_error_of_an_async_closure_comes_out_of_a_later_sync() -> None:
    xm.add_step_closure(failing("async"), run_async=True)
    torch_xla.sync()
    while lazystep.get_device_context().num_pending():
        time.sleep(0.001)
    ran = threading.Event()
    xm.add_step_closure(ran.set, run_async=True)
    with pytest.raises(RuntimeError, match="async"):
        torch_xla.sync()
    torch_xla.sync()
    assert ran.wait(30)


# -- steps ---------------------------------------------------------------------------------------------------


def train(device: Any, update: Callable[[torch.optim.Optimizer], Any], around: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(6):
        with around():
            loss = model(torch.randn(3, 4).to(device)).square().mean()
            loss.backward()
            update(optimizer)
            optimizer.zero_grad()
        losses.append(loss.detach())
    return [tensor.cpu() for tensor in (*losses, *model.parameters())]


class Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...


@pytest.mark.parametrize("has_barrier", [True, False], ids=["barrier", "step"])
def test_training_equals_eager_bit_for_bit_and_is_one_program_a_step(has_barrier: bool) -> None:
    expected = train("cpu", lambda optimizer: optimizer.step(), Nothing)
    lazystep.metrics.reset()

    def update(optimizer: torch.optim.Optimizer) -> None:
        assert xm.optimizer_step(optimizer, barrier=has_barrier) is None

    found = train(torch_xla.device(), update, Nothing if has_barrier else torch_xla.step)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert count("programs_recorded") == 6
    assert count("synchronizations") == len(found)


def test_optimizer_step_passes_arguments_and_returns_the_loss() -> None:
    weight = nn.Parameter(torch.ones(2, device=torch_xla.device()))
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    loss = xm.optimizer_step(optimizer, barrier=True, optimizer_args={"closure": closure})
    assert loss.item() == 2.0
    assert weight.tolist() == [0.0, 0.0]
    with pytest.raises(lazystep.UnsupportedError, match="new_group"):
        xm.optimizer_step(optimizer, groups=[[0], [1]])


def test_step_is_a_barrier_before_and_after_the_block() -> None:
    torch_xla.sync()
    lazystep.metrics.reset()
    before = torch.ones(2, device="lazy") + 1
    with torch_xla.step():
        assert count("programs_recorded") == 1
        inside = before * 2
    assert count("programs_recorded") == 2
    assert count("synchronizations") == 0
    assert inside.tolist() == [4.0, 4.0]


def test_step_ends_also_after_an_error_in_the_block() -> None:
    weight = torch.zeros(2, device="lazy")

    def fail() -> None:
        with torch_xla.step():
            weight.add_(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert lazystep.debug.pending_program([weight]).instructions == ()
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "decorate",
    [torch_xla.step(), torch_xla.compile(), torch_xla.compile, torch_xla.compile(full_graph=True)],
    ids=["step()", "compile()", "compile", "full_graph"],
)
def test_decorated_function_is_captured_and_replayed(decorate: Any) -> None:
    weight = torch.zeros(2).to("lazy")

    @decorate
    def step(x: torch.Tensor) -> torch.Tensor:
        weight.add_(x)
        return weight * 2

    results = [step(torch.full((2,), float(n))) for n in range(8)]
    assert [r.tolist() for r in results] == [[n * (n + 1.0)] * 2 for n in range(8)]
    assert step.num_replayed >= 4
    assert step.__name__ == "step"


def test_full_graph_raises_where_a_value_is_read_and_needs_a_function() -> None:
    @torch_xla.compile(full_graph=True)
    def reads(x: torch.Tensor) -> float:
        return (x * 2).sum().item()

    with pytest.raises(lazystep.CaptureError):
        [reads(torch.ones(2)) for _ in range(4)]
    with pytest.raises(lazystep.UnsupportedError, match="as a decorator"), torch_xla.compile(full_graph=True):
        pass
    with pytest.raises(lazystep.UnsupportedError, match="max_captures"):
        torch_xla.compile(reads, max_different_graphs=1)
    with pytest.raises(lazystep.UnsupportedError, match="AOTInductor"):
        torch_xla.compile(reads, custom_compile_options={"xla_flag": True})


def test_sync_waits_if_it_is_told_to_and_raises_what_failed() -> None:
    x = torch.ones(3).to("lazy")
    torch_xla.sync(wait=True)
    lazystep.metrics.reset()
    y = x + 1
    torch_xla.sync(wait=True, reset_scope=False)
    assert count("programs_executed") == 1
    assert y.tolist() == [2.0] * 3
    row = x[torch.tensor([7]).to("lazy")]
    with pytest.raises(lazystep.StepError, match="index 7"):
        torch_xla.sync(wait=True)
    del row


def test_warning_at_a_barrier_names_the_users_line() -> None:
    notices.forget()
    for barrier in (torch_xla.sync, xm.mark_step, lambda: torch_xla.step().__exit__(None, None, None)):
        notices.notice(str(barrier), "something is slow")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            barrier()
        assert [Path(warning.filename).name for warning in caught] == ["test_torch_xla.py"]
    notices.forget()


# -- one process ---------------------------------------------------------------------------------------------


def test_there_is_one_device_and_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    device = torch_xla.device()
    assert str(device) == "lazy:0"
    assert device == xm.xla_device() == torch_xla.device(0)
    assert torch_xla.devices() == [device]
    assert torch_xla.real_devices() == xm.xla_real_devices([device]) == ["CPU:0"]
    assert xm.get_xla_supported_devices() == ["lazy:0"]
    assert (xm.xla_device_hw(device), xr.device_type(), xr.is_spmd()) == ("CPU", "CPU", False)
    with pytest.raises(IndexError, match="number 0"):
        torch_xla.device(1)
    with pytest.raises(ValueError, match="no device 'xla:0'"):
        xm.wait_device_ops(["xla:0"])
    assert (xr.world_size(), xr.global_ordinal(), xm.get_local_ordinal(), torch_xla.device_count()) == (
        1,
        0,
        0,
        1,
    )
    assert xm.is_xla_tensor(torch.ones(1, device=device))
    assert not xm.is_xla_tensor(torch.ones(1))
    xm.master_print("step", 3, flush=True)
    assert capsys.readouterr().out == "step 3\n"
    indices: list[Any] = []
    torch_xla.launch(lambda index, name: indices.append((index, name)), args=("a",))
    assert indices == [(0, "a")]


def test_collectives_of_one_process_give_back_what_they_get() -> None:
    x = torch.arange(3.0).to("lazy")
    reduced = xm.all_reduce(xm.REDUCE_SUM, x, scale=0.5)
    assert isinstance(reduced, torch.Tensor)
    assert reduced is not x
    assert reduced.tolist() == [0.0, 1.0, 2.0]
    listed = [x]
    assert xm.all_reduce(xm.REDUCE_MAX, listed) is listed
    assert xm.all_gather(x[None], dim=1).tolist() == [[0.0, 1.0, 2.0]]
    out = torch.zeros(3).to("lazy")
    assert xm.all_gather(x, output=out) is out
    assert out.tolist() == [0.0, 1.0, 2.0]
    assert xm.rendezvous("here", b"payload") == [b"payload"]
    assert xm.mesh_reduce("sum", {"x": x}, lambda found: found[0]["x"].sum().item()) == 3.0
    assert xm.do_on_ordinals(lambda a: a.device.type, (x,)) == "cpu"
    assert xm.do_on_ordinals(lambda a: a, (x,), ordinals=(1,)) is None
    with pytest.raises(ValueError, match="expected one of"):
        xm.all_reduce("average", x)
    with pytest.raises(TypeError, match="expected bytes"):
        xm.rendezvous("here", "text")  # type: ignore[arg-type]


def test_tensors_are_moved_saved_computed_and_compared_by_memory(tmp_path: Path) -> None:
    batch = xm.send_cpu_data_to_device({"x": torch.ones(2), "n": 3}, torch_xla.device())
    assert xm.is_xla_tensor(batch["x"])
    assert batch["n"] == 3
    [alone] = xm.send_cpu_data_to_device(torch.ones(2), torch_xla.device())
    y = alone * 2
    xm.unlazy([y])
    assert count("synchronizations") == 1
    xm.save({"y": y}, tmp_path / "y.pt")
    loaded = torch.load(tmp_path / "y.pt")["y"]
    assert loaded.device.type == "cpu"
    assert loaded.tolist() == [2.0, 2.0]
    xm.check_view_sharing([alone, y, torch.ones(2)])
    with pytest.raises(RuntimeError, match="share memory"):
        xm.check_view_sharing({"a": y, "b": y[:1]})


def test_loader_has_a_barrier_between_batches_and_behind_the_last() -> None:
    data = [{"x": torch.full((2,), float(n))} for n in range(4)]
    total = torch.zeros(2).to("lazy")
    for every, num_programs in ((1, 4), (2, 2)):
        torch_xla.sync()
        lazystep.metrics.reset()
        loader = pl.MpDeviceLoader(
            data, torch_xla.device(), batches_per_execution=every, loader_prefetch_size=8
        )
        assert len(loader) == 4
        for batch in loader:
            assert xm.is_xla_tensor(batch["x"])
            total += batch["x"]
        assert count("programs_recorded") == num_programs
        assert count("synchronizations") == 0
    assert total.tolist() == [12.0, 12.0]
    with pytest.raises(lazystep.UnsupportedError, match="DistributedSampler"):
        pl.MpDeviceLoader(data, torch_xla.device(), input_sharding=object())


def test_seed_and_forked_generator_are_torchs() -> None:
    torch_xla.manual_seed(3)
    first = torch.rand(2, device="lazy").tolist()
    xm.set_rng_state(3)
    with xm.fork_rng():
        assert torch.rand(2, device="lazy").tolist() == first
    torch.manual_seed(3)
    assert first == torch.rand(2).tolist()
    torch.manual_seed(3)
    with xm.fork_rng():
        torch.rand(5)
    assert torch.rand(2).tolist() == first


def test_metrics_count_programs_and_waits() -> None:
    torch_xla.sync(wait=True)
    met.clear_all()
    assert met.counter_value("programs_executed") is None
    x = torch.ones(2, device="lazy") + 1
    torch_xla.sync(wait=True)
    assert x.tolist() == [2.0, 2.0]
    assert met.counter_value("programs_executed") == 1
    assert "programs_executed" in met.counter_names()
    assert "seconds_recording" in met.metric_names()
    assert not set(met.counter_names()) & set(met.metric_names())
    assert len(met.executed_fallback_ops()) == 1
    short = met.short_metrics_report(["programs_executed"], ["seconds_recording"]).splitlines()
    assert [line.split()[0] for line in short] == ["programs_executed", "seconds_recording"]
    assert set(met.short_metrics_report().splitlines()) < set(met.metrics_report().splitlines())
    met.clear_counters()
    assert met.counter_names() == met.metric_names() == []


def test_rate_is_smoothed_and_counts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    tracker = xm.RateTracker(smooth_factor=0.25)
    tracker.add(10)
    assert tracker.rate() == tracker.global_rate() == 0.0
    now[0] += 2
    assert tracker.rate() == 5.0
    tracker.add(30)
    now[0] += 2
    assert tracker.rate() == 0.75 * 15.0 + 0.25 * 5.0
    assert tracker.global_rate() == 10.0


def test_cache_directory_is_the_setting(tmp_path: Path) -> None:
    with config.override(cache_dir=""):
        xr.initialize_cache(str(tmp_path))
        assert config.settings.cache_dir == str(tmp_path)
    with pytest.raises(lazystep.UnsupportedError, match="LAZYSTEP_TIER"):
        xr.initialize_cache(str(tmp_path), readonly=True)
    assert xr.get_num_cached_compilation_graph() >= 0


def test_print_of_a_lazy_tensor_goes_to_the_given_file() -> None:
    file = io.StringIO()
    xm.master_print(torch.ones(1, device="lazy") + 1, fd=file)
    assert "2." in file.getvalue()
