"""The reference executable: equal numbers in each run, no Python between ops, mended results, failures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lazystep
from lazystep.execute.executable import InstructionError
from lazystep.execute.reference import ReferenceExecutable
from lazystep.program.program import Program


def program_of(body: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Program:
    """What `body` records on `x`."""
    lazystep.mark_step(wait=True)
    kept = body(x.to("lazy"))
    lazystep.mark_step(wait=True)
    del kept
    program = lazystep.debug.last_program()
    assert program is not None
    return program


def num_calls(executable: ReferenceExecutable, x: torch.Tensor, *scalars: float) -> int:
    """How many functions a run calls that the interpreter sees: each takes its lock again."""
    calls: list[str] = []
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        executable.run([x], scalars)
    finally:
        sys.setprofile(None)
    return sum("call" in event for event in calls)


def chain_of(length: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def body(x: torch.Tensor) -> torch.Tensor:
        for _ in range(length):
            x = x.sin()
        return x

    return body


def test_a_run_takes_the_interpreter_lock_as_often_for_many_ops_as_for_few() -> None:
    x = torch.randn(5)
    short, long = (ReferenceExecutable(program_of(chain_of(length), x)) for length in (2, 200))
    for executable in short, long:
        executable.run([x.clone()], [])
    assert num_calls(short, x) == num_calls(long, x)


class Odd:
    """An op that is inferred to copy its argument, and does so until `kernel` is another function."""

    def __init__(self, library: torch.library.Library) -> None:
        self.kernel: Callable[[torch.Tensor], torch.Tensor] = torch.clone
        library.define("copy(Tensor x) -> Tensor")
        library.impl("copy", lambda x: self.kernel(x), "CompositeExplicitAutograd")
        library.impl("copy", torch.empty_like, "Meta")

    def executable(self, x: torch.Tensor) -> ReferenceExecutable:
        program = program_of(lambda x: torch.ops.test_reference_odd.copy(x * 3).add_(1), x)
        return ReferenceExecutable(program)


@pytest.fixture
def odd() -> Iterator[Odd]:
    library = torch.library.Library("test_reference_odd", "FRAGMENT")
    yield Odd(library)
    library._destroy()


def test_results_in_another_layout_are_mended_in_each_run(odd: Odd) -> None:
    x = torch.randn(3, 4)
    executable = odd.executable(x)
    odd.kernel = lambda x: x.t().contiguous().t()
    for run in 1, 2, 3:
        lazystep.metrics.reset()
        (output,) = executable.run([x.clone()], [3, 1])
        assert torch.equal(output, x * 3 + 1)
        assert output.is_contiguous()
        assert lazystep.metrics.counter_value("layout_repairs") == 1, run


def test_a_result_in_the_memory_of_an_argument_is_copied_where_it_was_inferred_as_new(odd: Odd) -> None:
    x = torch.randn(4)
    executable = odd.executable(x)
    arguments: list[torch.Tensor] = []

    def alias(x: torch.Tensor) -> torch.Tensor:
        arguments.append(x)
        return x.view(4)

    odd.kernel = alias
    for _ in range(3):
        (output,) = executable.run([x.clone()], [3, 1])
        assert torch.equal(output, x * 3 + 1)
        assert torch.equal(arguments[-1], x * 3)


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (lambda x: torch.cat([x, x]), "returned f32[8] where f32[4] was inferred"),
        (lambda x: x.double(), "returned f64[4] where f32[4] was inferred"),
    ],
)
def test_a_result_of_another_type_is_an_error_that_names_both(
    odd: Odd, kernel: Callable[[torch.Tensor], torch.Tensor], problem: str
) -> None:
    x = torch.randn(4)
    executable = odd.executable(x)
    for is_odd in True, False, True:  # the executable is usable again
        odd.kernel = kernel if is_odd else torch.clone
        if not is_odd:
            assert torch.equal(executable.run([x.clone()], [3, 1])[0], x * 3 + 1)
            continue
        with pytest.raises(InstructionError) as raised:
            executable.run([x.clone()], [3, 1])
        assert problem in str(raised.value.__cause__)
        assert executable.program.instructions[raised.value.position].op == "test_reference_odd.copy.default"


def views_and_writes(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[1].add_(3)
    y.t_()
    return y.mul_(0.5)


def lists(x: torch.Tensor) -> list[torch.Tensor]:
    parts = list((x * 1).split(2))
    torch._foreach_mul_(parts, 3.0)
    torch._foreach_addcmul_(parts, parts, parts, [0.5] * len(parts))
    return [*parts, *torch._foreach_norm(parts)]


def indexed(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    rows = torch.tensor([0, 2], device=x.device)
    y[:, rows] = 7.0
    y.index_put_((rows, None), y[rows] + 1, accumulate=True) if x.dim() == 1 else None
    return y[rows, :].cumsum(0)


def several_results(x: torch.Tensor) -> list[torch.Tensor]:
    values, places = x.topk(2, dim=1)
    return [values, places, *torch.var_mean(x, dim=0), x.to(torch.float64), torch.full_like(x, 3)]


def numbers_for_tensors(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.where(x > 0, 1.5, x), torch.add(x, 2, alpha=3), 1 - x, x**2, torch.maximum(x, x * 0.5)]


@pytest.mark.parametrize("body", [views_and_writes, lists, indexed, several_results, numbers_for_tensors])
def test_later_runs_equal_eager_bitwise(body: Callable[[torch.Tensor], Any]) -> None:
    for step in range(4):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        expected, actual = body(x.clone()), body(x.clone().to("lazy"))
        lazystep.mark_step()
        if isinstance(expected, torch.Tensor):
            expected, actual = [expected], [actual]
        for a, b in zip(expected, actual, strict=True):
            assert torch.equal(a, b.cpu())
            assert a.dtype == b.dtype
            assert a.stride() == b.cpu().stride()


def test_memory_is_freed_after_its_last_use_in_each_run() -> None:
    alive: list[int] = []
    library = torch.library.Library("test_reference", "FRAGMENT")
    library.define("look(Tensor x) -> Tensor")
    storages: list[torch.UntypedStorage] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(torch._C._storage_Use_Count(storage._cdata) > 1 for storage in storages))
        storages.append(x.untyped_storage())
        return x + 1

    library.impl("look", look, "CompositeExplicitAutograd")
    library.impl("look", lambda x: torch.empty_like(x), "Meta")
    x = torch.randn(3)

    def body(y: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            y = torch.ops.test_reference.look(y)
        return y

    executable = ReferenceExecutable(program_of(body, x))
    for _ in range(3):
        alive.clear()
        storages.clear()
        executable.run([x.clone()], [])
        # The argument of the call before is gone when the next one runs; an op's own is not listed yet.
        assert alive == [0, 0, 0, 0]


def test_an_error_of_an_op_in_python_keeps_its_type_and_the_position() -> None:
    library = torch.library.Library("test_reference_error", "FRAGMENT")
    library.define("fail(Tensor x) -> Tensor")
    is_failing = [False]

    def fail(x: torch.Tensor) -> torch.Tensor:
        if is_failing[0]:
            raise LookupError("nothing there")
        return x + 1

    library.impl("fail", fail, "CompositeExplicitAutograd")
    library.impl("fail", lambda x: torch.empty_like(x), "Meta")
    x = torch.randn(3)
    body = program_of(lambda y: torch.ops.test_reference_error.fail(y * y).sin(), x)
    executable = ReferenceExecutable(body)
    for fails in False, False, True:
        is_failing[0] = fails
        if not fails:
            executable.run([x.clone()], [])
    with pytest.raises(InstructionError) as raised:
        executable.run([x.clone()], [])
    assert isinstance(raised.value.__cause__, LookupError)
    assert raised.value.__cause__.__traceback__ is None  # its frames would keep the step's tensors
    assert executable.program.instructions[raised.value.position].op == "test_reference_error.fail.default"
    assert not raised.value.none_started
    is_failing[0] = False
    assert torch.equal(executable.run([x.clone()], [])[0], (x * x + 1).sin())


@pytest.mark.parametrize("num_runs", [0, 2])
def test_a_number_that_does_not_fit_fails_before_anything_is_written(num_runs: int) -> None:
    x = torch.zeros(3, dtype=torch.int64)
    program = program_of(lambda y: y.add_(1).mul_(2), x)
    executable = ReferenceExecutable(program)
    numbers = [1] * len(program.scalars)
    for _ in range(num_runs):
        executable.run([x.clone()], numbers)
    written = x.clone()
    with pytest.raises(InstructionError) as raised:
        executable.run([written], [*numbers[:-1], 2**70])
    assert raised.value.none_started
    assert torch.equal(written, x)
    executable.run([written], numbers)
    assert torch.equal(written, x + 1)
