"""Programs as data: assembly, invariants, dead code, text."""

from __future__ import annotations

import dataclasses

import expecttest
import pytest
import torch

import lazystep
from lazystep.program.program import Instruction, Program, Ref, ScalarRef, Storage, Value
from lazystep.program.prune import prune
from lazystep.program.types import tensor_type, type_of
from lazystep.program.verify import verify

VECTOR = tensor_type(torch.float32, (4,), (1,))


def instruction(
    op: str, args: tuple[object, ...], results: tuple[int, ...], writes: tuple[int, ...] = ()
) -> Instruction:
    return Instruction(op, args, (), results, writes, (), None)


def small_program() -> Program:
    """%1 = %0 + 2.0; %2 = sin(%1), dead; %0 += %1."""
    return Program(
        values={0: Value(VECTOR, 0), 1: Value(VECTOR, 1), 2: Value(VECTOR, 2)},
        storages=(Storage(16, True), Storage(16, False), Storage(16, False)),
        inputs=(0,),
        scalars=(float,),
        instructions=(
            instruction("aten.add.Tensor", (Ref(0), ScalarRef(0)), (1,)),
            instruction("aten.sin.default", (Ref(1),), (2,)),
            instruction("aten.add_.Tensor", (Ref(0), Ref(1)), (0,), (0,)),
        ),
        outputs=(1,),
    )


def test_prune_keeps_outputs_and_writes_to_inputs() -> None:
    pruned = verify(prune(verify(small_program())))
    assert [i.op for i in pruned.instructions] == ["aten.add.Tensor", "aten.add_.Tensor"]
    assert pruned.inputs == (0,)
    assert pruned.scalars == (float,)


def test_storage_writes_names_the_first_writer_of_an_input() -> None:
    assert small_program().storage_writes() == {0: 2}


def sin(argument: int, result: int) -> Instruction:
    return instruction("aten.sin.default", (Ref(argument),), (result,))


def add(slot: int, result: int, writes: tuple[int, ...] = ()) -> Instruction:
    return instruction("aten.add.Tensor", (Ref(0), ScalarRef(slot)), (result,), writes)


BROKEN = {
    "used before it is defined": {"instructions": (sin(9, 1),)},
    "defined twice": {"instructions": (sin(0, 1), sin(0, 1))},
    "is not defined": {"outputs": (7,)},
    "listed twice": {"outputs": (1, 1)},
    "slot 3 does not exist": {"instructions": (add(3, 1),)},
    "never merged": {"instructions": (add(0, 1), add(0, 2))},
    "written but is not an argument": {"instructions": (add(0, 1, writes=(2,)),)},
    "reaches past its storage": {"storages": (Storage(8, True), Storage(16, False), Storage(16, False))},
    "made by the program": {"storages": (Storage(16, False), Storage(16, False), Storage(16, False))},
    "has no type": {"instructions": (sin(0, 5),), "outputs": ()},
}


@pytest.mark.parametrize("message", BROKEN)
def test_verify_finds(message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        verify(dataclasses.replace(small_program(), **BROKEN[message]))


def test_types_are_interned() -> None:
    a = torch.ones(2, 3).t()
    assert type_of(a) is type_of(torch.zeros(2, 3).t())
    assert type_of(a) is not type_of(torch.zeros(3, 2))
    assert str(type_of(a)) == "f32[3, 2] stride [1, 3]"
    assert type_of(a[1:]).extent == 24
    assert str(type_of(torch.empty(2, 0, 3))) == "f32[2, 0, 3]"


class TestText(expecttest.TestCase):
    def test_program_prints_as_python_with_types_views_writes_and_lines(self) -> None:
        weight = torch.ones(2, 3).to("lazy")
        bias = torch.zeros(2).to("lazy")
        out = torch.addmm(bias, torch.ones(4, 3).to("lazy"), weight.t())
        weight.mul_(0.5)
        out.add_(1, alpha=2)
        text = lazystep.debug.dump_ir([out], "text")
        self.assertExpectedInline(
            "\n".join(
                line.split(".py:")[0].rsplit(" ", 1)[0].rstrip() if ".py:" in line else line
                for line in text.split("\n")
            ),
            """\
def step(3 inputs, 3 scalars):
    %0: input                                 # f32[2, 3] in s0
    %2: input                                 # f32[2] in s1
    %3: input                                 # f32[4, 3] in s2
    %1 = aten.t(%0)                           # f32[3, 2] stride [1, 3] view of s0
    %4 = aten.addmm(%2, %3, %1)               # f32[4, 2]
    aten.mul_.Tensor(%0, float$0)             # writes s0
    aten.add_.Tensor(%4, int$1, alpha=int$2)  # writes s3
    return %4""",
        )
        lazystep.mark_step(wait=True)


def test_dot_has_a_node_per_instruction_and_orders_writes() -> None:
    x = torch.ones(2).to("lazy")
    x.add_(1)
    y = x * 2
    dot = lazystep.debug.render_ir_graph([y])
    assert dot.startswith("digraph step {")
    assert "aten.add_.Tensor" in dot
    assert "i0 -> i1" in dot  # the product reads what the update wrote
    assert dot.rstrip().endswith("}")


def test_dump_runs_nothing_and_shows_only_what_is_needed() -> None:
    x = torch.ones(2).to("lazy")
    y = x + 1
    z = x * 3
    text = lazystep.debug.dump_ir([y])
    assert "aten.add.Tensor" in text
    assert "aten.mul" not in text
    assert lazystep.metrics.counter_value("programs_executed") == 0
    assert z.tolist() == [3.0, 3.0]
    with pytest.raises(ValueError, match="format"):
        lazystep.debug.dump_ir([y], "html")


def test_lines_are_those_of_the_user() -> None:
    x = torch.ones(2).to("lazy")
    y = torch.nn.Linear(2, 2).to("lazy")(x)
    lazystep.mark_step(wait=True)
    program = lazystep.debug.last_program()
    assert program is not None
    assert all("test_program.py" in i.where for i in program.instructions)
    assert y.shape == (2,)


def test_source_lines_can_be_switched_off() -> None:
    with lazystep.config.override(source_lines=False):
        y = torch.ones(5).to("lazy").sin().cos()
        lazystep.mark_step(wait=True)
    program = lazystep.debug.last_program()
    assert program is not None
    assert {i.source for i in program.instructions} == {None}
    assert program.instructions[0].where == "an unknown line"
    del y
