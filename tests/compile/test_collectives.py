"""The generated code of a program with collectives has the program's launches and waits, in order."""

from __future__ import annotations

import pytest
import torch

from lazystep.compile.collectives import Called, OrderError, calls_in, check_order, write_early
from lazystep.program.collectives import sequence_of
from lazystep.program.program import Instruction, Program, Ref, Storage, Value
from lazystep.program.types import type_of

REDUCE, WAIT, GATHER = (
    "lazystep.all_reduce_.default",
    "lazystep.wait_.default",
    "lazystep.all_gather_.default",
)
ORDER = ["0 all_reduce_ sum lazystep:0", "1 all_gather_ - lazystep:0", "0 wait_", "1 wait_"]


def program() -> Program:
    def instruction(op: str, *args: object) -> Instruction:
        return Instruction(op, args, (), (args[0].value,), (args[0].value,), (), None)  # type: ignore[attr-defined]

    instructions = (
        instruction(REDUCE, Ref(0), "sum", "lazystep:0"),
        instruction(GATHER, Ref(1), Ref(2), "lazystep:0"),
        instruction(WAIT, Ref(0)),
        instruction(WAIT, Ref(1)),
    )
    values = {n: Value(type_of(torch.empty(4)), n) for n in range(3)}
    return Program(values, (Storage(16, True),) * 3, (0, 1, 2), (), instructions, ())


def wrapper(order: list[int]) -> str:
    """Code as Inductor writes it: kernels, and calls through the dispatcher by number."""
    lines = ["void AOTInductorModel::run_impl("]
    for number in order:
        lines.append("    cpp_fused_0((float*)(buf0.data_ptr()));")
        lines.append(f"    CHECK(aoti_torch_proxy_executor_call_function(proxy_executor, {number}, 0, ...));")
    return "\n".join(lines)


def nodes() -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for text in ORDER:
        target = "lazystep::wait" if text.endswith("wait_") else "lazystep::launch"
        inputs = [{"arg": {"as_tensor": {"name": "buf0"}}}, {"arg": {"as_string": text}}]
        found.append({"node": {"target": target, "inputs": inputs}})
    found.append({"node": {"target": "lazystep::update", "inputs": [{"arg": {"as_string": "code"}}]}})
    return found


def test_the_sequence_names_each_launch_and_the_wait_for_it() -> None:
    assert [text for _, _, text in sequence_of(program())] == ORDER


def test_code_in_the_programs_order_is_accepted() -> None:
    called = calls_in(wrapper([0, 1, 4, 2, 3]), nodes())
    assert called == [Called(ORDER[0], 1), Called(ORDER[1], 1), Called(ORDER[2], 3), Called(ORDER[3], 1)]
    check_order(program(), called)


@pytest.mark.parametrize(
    ("order", "got"),
    [([1, 0, 2, 3], ORDER[1]), ([0, 1, 3, 2], ORDER[3]), ([0, 1, 2], "nothing"), ([0, 0, 1, 2, 3], ORDER[0])],
    ids=["launches swapped", "waits swapped", "a wait is missing", "a launch twice"],
)
def test_code_in_another_order_is_refused(order: list[int], got: str) -> None:
    with pytest.raises(OrderError, match="would not fit the others") as caught:
        check_order(program(), calls_in(wrapper(order), nodes()))
    assert f"has {got!r}" in str(caught.value)


def test_inputs_are_written_where_their_new_values_are_there() -> None:
    graph = torch.fx.Graph()
    copy_, add, mul = torch.ops.aten.copy_.default, torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
    early, late, source = (graph.placeholder(name) for name in ("early", "late", "source"))
    new_early = graph.call_function(add, (early, source))
    new_late = graph.call_function(mul, (late, source))
    view = graph.call_function(torch.ops.aten.permute.default, (late, [0]))
    last_read = graph.call_function(add, (view, new_early))
    end = graph.call_function(mul, (last_read, 2))
    writes = [graph.call_function(copy_, (early, new_early)), graph.call_function(copy_, (late, new_late))]
    graph.output((end,))
    write_early(graph)
    graph.lint()
    order = list(graph.nodes)
    assert order.index(writes[0]) == order.index(new_early) + 1
    assert order.index(writes[1]) == order.index(last_read) + 1, "not before the last read of the old value"


def test_a_new_value_that_an_update_writes_is_stored_behind_the_update() -> None:
    graph = torch.fx.Graph()
    state, gradient = graph.placeholder("state"), graph.placeholder("gradient")
    decayed = graph.call_function(torch.ops.aten.mul.Tensor, (state, 0.9))
    other = graph.call_function(torch.ops.aten.neg.default, (gradient,))
    update = graph.call_function(torch.ops.lazystep.update.default, ([decayed], [other], None, None, "code"))
    end = graph.call_function(torch.ops.aten.neg.default, (other,))
    write = graph.call_function(torch.ops.aten.copy_.default, (state, decayed))
    graph.output((end,))
    write_early(graph)
    graph.lint()
    order = list(graph.nodes)
    assert order.index(write) == order.index(update) + 1
