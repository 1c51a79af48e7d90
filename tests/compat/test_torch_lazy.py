"""torch._lazy's own tests of closures, metrics, dumps and extracted graphs, told in lazystep's words."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import lazystep
import lazystep.compat.torch_lazy as torch_lazy
from lazystep.compat.torch_lazy import (
    closure,
    computation,
    config,
    debug,
    device_context,
    extract_compiled_graph,
    ir_cache,
    metrics,
    tensor_factory_functions,
    ts_backend,
)
from tests.helpers import count, failing, run_python


@pytest.fixture(autouse=True)
def flushed() -> Any:
    yield
    torch_lazy.mark_step(wait=True)
    lazystep.flush_step_closures(30)


# -- closures ------------------------------------------------------------------------------------------------


def test_sync_closures_have_run_in_order_when_mark_step_returns() -> None:
    order: list[int] = []
    for number in range(3):
        torch_lazy.add_step_closure(order.append, (number,))
    assert order == []
    torch_lazy.mark_step("lazy:0")
    assert order == [0, 1, 2]
    torch_lazy.mark_step()
    assert order == [0, 1, 2]


def test_async_closure_runs_while_the_training_thread_goes_on() -> None:
    may_go_on, has_run = threading.Event(), threading.Event()

    def wait() -> None:
        assert may_go_on.wait(30)
        has_run.set()

    torch_lazy.add_step_closure(wait, run_async=True)
    torch_lazy.mark_step()
    assert not has_run.is_set()
    may_go_on.set()
    assert has_run.wait(30)


def test_error_of_a_sync_closure_comes_out_of_mark_step() -> None:
    torch_lazy.add_step_closure(failing("sync"))
    with pytest.raises(ArithmeticError, match="sync"):
        torch_lazy.mark_step()


def test_error_of_an_async_closure_comes_out_of_a_later_barrier_and_the_next_one_still_runs() -> None:
    has_failed, ran = threading.Event(), threading.Event()

    def fail() -> None:
        has_failed.set()
        raise ArithmeticError("async")

    torch_lazy.add_step_closure(fail, run_async=True)
    torch_lazy.mark_step()
    assert has_failed.wait(30)
    device_context.get_device_context().async_handler.wait_idle(30)
    torch_lazy.add_step_closure(ran.set, run_async=True)
    with pytest.raises(RuntimeError, match="async"):
        torch_lazy.mark_step()
    torch_lazy.mark_step()  # torch's own handler drops the second closure
    assert ran.wait(30)


def test_handlers_and_contexts_are_lazysteps() -> None:
    ran: list[int] = []
    closure.ClosureHandler()([lambda: ran.append(1), lambda: ran.append(2)])
    handler = closure.AsyncClosureHandler(max_queue_size=1)
    handler.start_event_loop()
    handler.run(lambda: ran.append(3))
    handler.flush(30)
    assert handler.close(30) == []
    assert ran == [1, 2, 3]
    context = torch_lazy.run_step_closures()
    assert isinstance(context, device_context.DeviceContext)
    assert context is device_context.get_device_context("lazy")
    assert device_context.DeviceContext("lazy:0").device == "lazy:0"
    with pytest.raises(ValueError, match="no device 'cuda'"):
        device_context.get_device_context("cuda")


# -- values --------------------------------------------------------------------------------------------------


def test_tensors_are_computed_moved_and_saved_with_one_wait_each(tmp_path: Path) -> None:
    ts_backend.init()
    x = torch.ones(2, 2, device="lazy") * 3
    y = x + 1
    assert torch_lazy.get_tensor_id(x) != torch_lazy.get_tensor_id(y)
    torch_lazy.sync_multi([x, y], ["lazy:0"])
    assert count("synchronizations") == 1
    moved = torch_lazy.to_cpu({"x": [x], "y": y})
    assert torch.equal(moved["x"][0], torch.full((2, 2), 3.0))
    torch_lazy.save({"y": y}, tmp_path / "y.pt")
    assert torch.equal(torch.load(tmp_path / "y.pt")["y"], torch.full((2, 2), 4.0))
    torch_lazy.wait_device_ops(["lazy:0"])
    assert count("programs_executed") == 1


def test_init_beside_torchs_own_backend_is_refused() -> None:
    done = run_python(
        "-c",
        "import lazystep.compat.torch_lazy.ts_backend as ours\n"
        "ours.init()\n"
        "import torch._lazy.ts_backend\n"
        "try: ours.init()\n"
        "except RuntimeError as error: print(error)\n",
    )
    assert "both want the lazy device" in done.stdout, done.stderr


# -- metrics and dumps ---------------------------------------------------------------------------------------


def test_counter_is_none_until_something_is_counted() -> None:
    torch_lazy.mark_step(wait=True)
    metrics.reset()
    assert metrics.counter_value("programs_recorded") is None
    assert metrics.counter_value("no such counter") is None
    x = torch.ones(2, device="lazy") + 1
    torch_lazy.mark_step(wait=True)
    assert metrics.counter_value("programs_recorded") == 1
    assert "programs_recorded" in metrics.counter_names()
    assert "programs_recorded" in metrics.metrics_report()
    assert x.tolist() == [2.0, 2.0]


def test_pending_program_is_shown_and_nothing_runs() -> None:
    torch_lazy.mark_step()
    x = torch.ones(2, device="lazy").add(1)
    torch_lazy.mark_step(wait=True)
    metrics.reset()
    y = x.mul(3)
    assert "aten.mul.Tensor" in debug.dump_ir([y], "text")
    assert debug.render_ir_graph([y]).startswith("digraph")
    with pytest.raises(lazystep.UnsupportedError, match=r"lazystep\.debug\.explain"):
        debug.dump_ir([y], "backend")
    with pytest.raises(RuntimeError, match='expected "text"'):
        debug.dump_ir([y], ir_format="no such format")
    assert count("programs_executed") == count("synchronizations") == 0


def test_graph_hash_is_that_of_the_program_and_not_of_its_numbers() -> None:
    def graph_hash(factor: float, size: int = 2) -> str:
        torch_lazy.mark_step()
        return computation.get_graph_hash([torch.ones(size, device="lazy").mul(factor)])

    assert graph_hash(2.0) == graph_hash(3.0) != graph_hash(2.0, size=3)
    assert len(graph_hash(1.0)) == 64


def test_reset_of_the_cache_makes_the_next_step_a_miss_and_dump_shows_every_program(tmp_path: Path) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x.sinh()
        torch_lazy.mark_step(wait=True)
        return y

    x = torch.ones(2).to("lazy")
    for _ in range(3):
        assert torch.equal(step(x).cpu(), torch.ones(2).sinh())
    assert count("cache_misses") == 1
    ir_cache.dump(str(tmp_path / "cache.dot"))
    assert (tmp_path / "cache.dot").read_text().count("aten.sinh") == 1
    ir_cache.reset()
    for _ in range(2):
        assert torch.equal(step(x).cpu(), torch.ones(2).sinh())
    assert count("cache_misses") == 2


def test_switches_take_what_changes_nothing_and_refuse_the_rest() -> None:
    config.set_reuse_ir(True)
    config.set_force_fallback("")
    assert config.get_force_fallback() == ""
    with pytest.raises(lazystep.UnsupportedError, match="LAZYSTEP_TIER=reference"):
        config.set_force_fallback("aten::add")
    assert config.get_force_fallback() == ""


# -- extracted graphs ----------------------------------------------------------------------------------------


class WithConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.constant = nn.Parameter(torch.rand(2, 3))

    def forward(self, a: torch.Tensor) -> Any:
        return a + self.constant + torch.ones(3)


class InPlace(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        a.add_(b)
        return a * 2


class SameTwice(nn.Module):
    def forward(self, a: torch.Tensor) -> Any:
        b = a * 2
        return b, b, a


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)

    def forward(self, a: torch.Tensor) -> Any:
        return self.drop(self.norm(a))


@pytest.mark.parametrize(
    ("module", "num_inputs"),
    [(WithConstant, 1), (InPlace, 2), (SameTwice, 1), (Normalized, 1), (lambda: nn.Linear(3, 4), 1)],
    ids=["constant", "in place", "same twice", "state and draws", "linear"],
)
def test_extracted_graph_equals_the_model_and_is_replayed(module: Any, num_inputs: int) -> None:
    torch.manual_seed(0)
    model = fx.symbolic_trace(module())
    examples = [torch.randn(2, 3) for _ in range(num_inputs)]
    kept = [example.clone() for example in examples]
    run = extract_compiled_graph.extract_compiled_graph(model, examples)
    assert all(torch.equal(a, b) for a, b in zip(examples, kept, strict=True))
    for seed in range(10):
        torch.manual_seed(seed)
        given = [torch.randn(2, 3) for _ in range(num_inputs)]
        ours = [tensor.clone() for tensor in given]
        torch.manual_seed(seed)
        expected = model(*given)
        torch.manual_seed(seed)
        found = run(*ours)
        expected = expected if isinstance(expected, tuple) else (expected,)
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(ours, given, strict=True))
    assert count("programs_replayed") >= 4


def test_graph_that_waits_for_a_value_is_not_extracted() -> None:
    class Reads(nn.Module):
        def forward(self, a: torch.Tensor) -> Any:
            return a.nonzero()

    with pytest.raises(RuntimeError, match="waits for values: shape depends on values"):
        extract_compiled_graph.extract_compiled_graph(fx.symbolic_trace(Reads()), [torch.ones(2)])
    assert extract_compiled_graph.get_fallback_ops()


def test_factory_functions_are_torchs() -> None:
    assert torch.ones in tensor_factory_functions.tensor_factory_functions
