"""Scheduling: waits come late, launches stay in order, and dependencies hold."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from lazystep.program.collectives import WAIT, describe, is_launch, launches_of
from lazystep.program.program import Instruction, Program, Ref, ScalarRef, Storage, Value
from lazystep.program.prune import prune
from lazystep.program.schedule import schedule
from lazystep.program.types import type_of
from lazystep.program.verify import verify

TYPE = type_of(torch.empty(4))
REDUCE = "lazystep.all_reduce_.default"


def instruction(op: str, args: tuple, results: tuple = (None,), writes: tuple = ()) -> Instruction:
    return Instruction(op, args, (), results, writes, (), None)


def program(num_inputs: int, instructions: list[Instruction], outputs: tuple[int, ...] = ()) -> Program:
    made = [value for one in instructions for value in one.defines()]
    values = {value: Value(TYPE, value) for value in [*range(num_inputs), *made]}
    storages = tuple(Storage(16, value < num_inputs) for value in range(len(values)))
    num_scalars = max((slot for one in instructions for slot in one.slots()), default=-1) + 1
    scalars = (float,) * num_scalars
    found = Program(values, storages, tuple(range(num_inputs)), scalars, tuple(instructions), outputs)
    return verify(found)


def launch(value: int) -> Instruction:
    return instruction(REDUCE, (Ref(value), "sum", "lazystep:0"), (value,), (value,))


def wait(value: int) -> Instruction:
    return instruction(WAIT, (Ref(value),), (value,), (value,))


def add(target: int, source: int) -> Instruction:
    return instruction("aten.add_.Tensor", (Ref(target), Ref(source)), (target,), (target,))


def ops(scheduled: Program) -> list[str]:
    return [f"{one.op.split('.')[1]} {one.args[0].value}" for one in scheduled.instructions]


def test_each_update_waits_for_its_own_reduction_only() -> None:
    # Gradients 0 and 1 are reduced; the optimizer updates 3 from gradient 1 first, and 4 needs neither.
    recorded = [launch(0), wait(0), launch(1), wait(1), add(3, 1), add(2, 0), add(4, 4)]
    assert ops(verify(schedule(program(5, recorded)))) == [
        "all_reduce_ 0", "add_ 4", "all_reduce_ 1", "wait_ 0", "add_ 2", "wait_ 1", "add_ 3",
    ]  # fmt: skip


def make_gradient(parameter: int, gradient: int) -> Instruction:
    return instruction("aten.mul.Tensor", (Ref(parameter), Ref(parameter)), (gradient,))


def test_a_bucket_is_updated_and_freed_while_backward_computes() -> None:
    """Ten parameters are decayed and updated on lists. The gradients of three are there at once."""
    number = 10
    recorded = []
    for one in range(number):
        gradient = number + one
        recorded += [make_gradient(one, gradient), launch(gradient), wait(gradient)]
    parameters = tuple(map(Ref, range(number)))
    gradients = tuple(map(Ref, range(number, 2 * number)))
    writes = tuple(range(number))
    recorded += [
        instruction("aten._foreach_mul_.Scalar", (parameters, ScalarRef(0)), (None,), writes),
        instruction("aten._foreach_add_.List", (parameters, gradients), (None,), writes),
    ]
    found = verify(schedule(program(number, recorded)))
    last = {value: position for position, one in enumerate(found.instructions) for value in one.reads()}
    alive: set[int] = set()
    largest = 0
    for position, one in enumerate(found.instructions):
        alive.update(value for value in one.defines() if value >= number)
        largest = max(largest, len(alive))
        alive -= {value for value in alive if last[value] == position}
    assert largest == 3
    in_flight = peak = 0
    for one in found.instructions:
        in_flight += is_launch(one) - (one.op == WAIT)
        peak = max(peak, in_flight)
    assert peak == 3, "the network has work while the executor waits"


@pytest.mark.parametrize(("nbytes", "num_launched"), [(16, 1), (1 << 20, 2)])
def test_only_small_tensors_of_the_update_are_made_during_backward(nbytes: int, num_launched: int) -> None:
    copy = instruction("aten.clone.default", (Ref(0),), (3,))
    made = program(3, [launch(1), wait(1), launch(2), wait(2), copy], outputs=(3,))
    storages = (*made.storages[:3], Storage(nbytes, False))
    ordered = ops(schedule(dataclasses.replace(made, storages=storages)))
    assert sum("all_reduce" in name for name in ordered[: ordered.index("clone 0")]) == num_launched


def test_a_list_op_is_split_by_what_its_elements_wait_for() -> None:
    update = instruction(
        "aten._foreach_add_.List", ((Ref(2), Ref(3), Ref(4)), (Ref(1), Ref(0), Ref(1))), (None,), (2, 3, 4)
    )
    scaled = instruction("aten._foreach_mul_.Scalar", ((Ref(2), Ref(3)), ScalarRef(0)), (None,), (2, 3))
    recorded = [launch(0), wait(0), launch(1), wait(1), update, scaled]
    found = verify(schedule(program(5, recorded)))
    lists = [one.args for one in found.instructions if "_foreach_" in one.op]
    assert lists == [
        ((Ref(3),), (Ref(0),)),
        ((Ref(3),), ScalarRef(0)),
        ((Ref(2), Ref(4)), (Ref(1), Ref(1))),
        ((Ref(2),), ScalarRef(0)),
    ]


def test_what_the_network_reads_is_not_overwritten_before_the_wait() -> None:
    gather = instruction("lazystep.all_gather_.default", (Ref(0), Ref(1), "lazystep:0"), (0,), (0,))
    found = schedule(program(3, [gather, wait(0), add(1, 2)]))
    assert ops(found) == ["all_gather_ 0", "wait_ 0", "add_ 1"]


def test_a_dropped_collective_is_not_pruned() -> None:
    made = instruction("aten.mul.Tensor", (Ref(0), Ref(0)), (1,))
    found = prune(program(1, [made, launch(1), wait(1)]))
    assert ops(found) == ["mul 0", "all_reduce_ 1", "wait_ 1"]
    assert describe(found, launches_of(found)[0]) == "all_reduce(4 x torch.float32, 'sum', 'lazystep:0')"


def test_a_program_without_collectives_stays_as_it_is() -> None:
    plain = program(2, [add(0, 1), add(1, 0)])
    assert schedule(plain) is plain


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_compute_the_same_in_the_new_order(seed: int) -> None:
    """Every instruction adds small integers, so the result of an order is exact; a reduction doubles."""
    chosen = random.Random(seed)
    recorded = []
    for _ in range(25):
        target, source = chosen.randrange(6), chosen.randrange(6)
        recorded += [launch(target), wait(target)] if chosen.random() < 0.3 else [add(target, source)]
    before = program(6, recorded)
    after = verify(schedule(before))
    assert _run(after) == _run(before)
    assert [one.args for one in launches_of(after)] == [one.args for one in launches_of(before)]


def _run(program: Program) -> list[int]:
    values = list(range(1, 7))
    in_flight: set[int] = set()
    for one in program.instructions:
        target = one.args[0].value
        if is_launch(one):
            assert target not in in_flight
            in_flight.add(target)
        elif one.op == WAIT:
            in_flight.remove(target)
            values[target] = values[target] * 2 % 1009
        else:
            source = one.args[1].value
            assert not {target, source} & in_flight, "memory of the network is used before the wait"
            values[target] = (values[target] + values[source]) % 1009
    assert not in_flight
    return values
