"""The recorder in C++: no Python in the steady state, nothing kept, and the same program each time."""

from __future__ import annotations

import gc
import resource
import threading
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import lazystep
from benchmarks import models
from tests.helpers import count, descend
from tests.record.program_writer import programs
from tests.record.programs import Machine, Program


def make_loop(name: str = "mlp") -> Any:
    model, make_batch, loss_fn = models.MODELS[name]()
    model.to("lazy")
    optimizer = models.make_optimizer(model)

    def step() -> torch.Tensor:
        x, y = make_batch()
        loss = loss_fn(model(x.to("lazy")), y.to("lazy"))
        descend(loss, optimizer)
        lazystep.mark_step()
        return loss

    return step


@pytest.mark.parametrize("name", models.MODELS)
def test_steady_state_calls_no_python(name: str, extension: Any) -> None:
    step = make_loop(name)
    for _ in range(4):
        step()
    calls, lookups = extension.num_calls_to_python(), extension.num_lookups()
    for _ in range(3):
        step()
    assert (extension.num_calls_to_python(), extension.num_lookups()) == (calls, lookups)
    assert count("cache_hits") >= 3


def test_dropout_draws_without_python_and_is_counted(monkeypatch: pytest.MonkeyPatch, dispatch: Any) -> None:
    x = torch.ones(64, device="lazy")
    torch.manual_seed(3)
    first = nn.functional.dropout(x, 0.5)
    monkeypatch.setattr(dispatch, "draw", None)
    before = count("random_draws")
    second = nn.functional.dropout(x, 0.5)
    assert count("random_draws") == before + 1
    torch.manual_seed(3)
    want = [nn.functional.dropout(torch.ones(64), 0.5) for _ in range(2)]
    assert torch.equal(first.cpu(), want[0])
    assert torch.equal(second.cpu(), want[1])


@pytest.mark.timeout(600)
def test_twenty_thousand_steps_keep_nothing(extension: Any) -> None:
    weight = torch.ones(4, 4).to("lazy").requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=1e-3, momentum=0.9)

    def run(num_steps: int) -> tuple[tuple[int, int], int]:
        for number in range(num_steps):
            # Every few steps another shape, so that guesses fail and programs are looked up.
            x = torch.ones(2 + (number % 50 == 0), 4).to("lazy")
            descend(nn.functional.dropout(x @ weight, 0.1).square().mean(), optimizer)
            lazystep.mark_step()
        lazystep.wait_device_ops()
        gc.collect()
        return extension.num_alive(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    run(500)
    alive, _ = run(1500)
    _, kilobytes = run(3000)
    alive_after, kilobytes_after = run(15_000)
    assert alive_after == alive
    assert kilobytes_after - kilobytes < 8_000, f"{kilobytes} kB have become {kilobytes_after} kB"


def test_handles_die_with_their_tensors_on_any_thread(extension: Any) -> None:
    lazystep.wait_device_ops()
    gc.collect()
    before = extension.num_alive()
    tensors = [torch.ones(3, device="lazy") * 2 for _ in range(20)]

    rest = tensors[10:]
    del tensors[10:]
    thread = threading.Thread(target=rest.clear)
    thread.start()
    thread.join()
    assert [t.tolist() for t in tensors] == [[2.0, 2.0, 2.0]] * 10
    del tensors
    gc.collect()
    assert extension.num_alive() == before


def test_views_of_parameters_under_inference_mode_are_ordinary_tensors() -> None:
    weight = nn.Parameter(torch.ones(2, 3).to("lazy"))
    with torch.inference_mode():
        assert not weight.t().is_inference()
        assert (weight + 1).is_inference()


def test_custom_op_defined_anew_is_decided_anew() -> None:
    for shape in (2, 5):
        library = torch.library.Library("lazystep_recorder_tests", "DEF")
        library.define("stretch(Tensor x) -> Tensor")
        library.impl("stretch", lambda x, n=shape: x.new_ones(n), "CompositeExplicitAutograd")
        torch.library.register_fake(
            "lazystep_recorder_tests::stretch", lambda x, n=shape: x.new_empty(n), lib=library
        )
        out = torch.ops.lazystep_recorder_tests.stretch(torch.ones(1, device="lazy"))
        assert out.tolist() == [1.0] * shape
        library._destroy()


def record(program: Program) -> list[str]:
    """The text of each step of a program, what its lines raise, and its values."""
    machine = Machine("lazy")
    texts = []
    # What only a reference cycle holds is an output: that must not depend on when the collector runs.
    gc.collect()
    gc.disable()
    for number, line in enumerate(program):
        error = machine.run(line)
        if error is not None:
            texts.append(f"refused: {type(error).__name__}")
        # The first two lines record: from there on the last program is one of these.
        if number == 1 or line.startswith("lazystep.mark_step"):
            lazystep.mark_step()
            texts.append(str(lazystep.debug.last_program()))
    gc.enable()
    gc.collect()
    lazystep.mark_step()
    texts.append(str(lazystep.debug.last_program()))
    with torch.no_grad():
        return [*texts, *(str(tensor.tolist()) for tensor in machine.tensors().values())]


@pytest.mark.filterwarnings("ignore:.*were new programs:lazystep.LazyStepWarning")
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(program=programs(num_lines=20))
def test_random_program_recorded_twice_is_the_same_with_its_lines(program: Program, runtime: Any) -> None:
    """The second time every op is recorded by a decision that is known, which must not change the text."""
    runtime.programs.clear()
    first = record(program)
    recorded = [line for text in first for line in text.splitlines() if "aten." in line]
    assert all("program.py:" in line for line in recorded), "each op has its line"
    assert record(program) == first
