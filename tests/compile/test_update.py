"""Updates as one node of the graph: equal to the reference, few nodes, closed where somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lazystep
from lazystep.compile import update
from lazystep.execute.native import NativeExecutable
from lazystep.program.program import Program
from lazystep.tiers.tiered import TieredExecutable
from tests.twice import copy_inputs, lower_for, results_of

SIZES = ((7, 5), (5,), (3, 2, 4), (1, 6), (2100,), ())


class Lowered(TieredExecutable):
    """Runs a program also as its lowered graph, op by op, and compares."""

    graphs: list[torch.fx.GraphModule]
    programs: list[Program]

    def run(self, inputs: list[torch.Tensor], scalars: Sequence[Any]) -> list[torch.Tensor]:
        program = self.program
        graph, signature = lower_for(program, scalars)
        native = NativeExecutable(program, signature, lambda flat: list(graph(*flat)), 1)
        copies = copy_inputs(program, inputs)
        given = list(inputs)
        actual = results_of(program, copies, native.run(list(copies), scalars))
        outputs = super().run(inputs, scalars)
        for (value, a), (_, b) in zip(results_of(program, given, outputs), actual, strict=True):
            # Eager's kernels contract some products and sums.
            a, b = a.double(), b.double()
            assert (a - b).abs().max() <= 1e-6 * a.abs().max(), (value, (a - b).abs().max())
        self.graphs.append(graph)
        self.programs.append(program)
        return outputs


@pytest.fixture(autouse=True)
def lowered(monkeypatch: pytest.MonkeyPatch, runtime: Any, runtime_module: Any) -> type[Lowered]:
    monkeypatch.setattr(runtime_module, "TieredExecutable", Lowered)
    monkeypatch.setattr(Lowered, "graphs", [], raising=False)
    monkeypatch.setattr(Lowered, "programs", [], raising=False)
    return Lowered


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size, dtype=dtype).to("lazy")) for size in SIZES]


def set_gradients(owned: list[nn.Parameter]) -> None:
    """Gradients that the step itself makes, so that they are no state of it."""
    for parameter in owned:
        parameter.grad = torch.sin(parameter.detach())


def updates_in(graph: torch.fx.GraphModule) -> list[Any]:
    return graph.graph.find_nodes(op="call_function", target=torch.ops.lazystep.update.default)


def step_of(make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype = torch.float32) -> None:
    owned = parameters(dtype)
    optimizer = make(owned)
    for _ in range(3):
        set_gradients(owned)
        optimizer.step()
        optimizer.zero_grad()
        lazystep.mark_step()
    lazystep.wait_device_ops()


WHOLE = {
    "AdamW": lambda p, **how: torch.optim.AdamW(p, weight_decay=0.1, **how),
    "Adam": lambda p, **how: torch.optim.Adam(p, weight_decay=0.1, amsgrad=True, **how),
    "SGD": lambda p, **how: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True, **how),
    "Adagrad": lambda p, **how: torch.optim.Adagrad(p, weight_decay=0.1, **how),
    "RMSprop": lambda p, **how: torch.optim.RMSprop(p, momentum=0.9, centered=True, **how),
    "Adadelta": lambda p, **how: torch.optim.Adadelta(p, weight_decay=0.1, **how),
    "NAdam": lambda p, **how: torch.optim.NAdam(p, **how),
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_is_one_node_and_equals_the_reference(
    name: str, foreach: bool, lowered: type[Lowered]
) -> None:
    step_of(lambda p: WHOLE[name](p, foreach=foreach), torch.float32 if foreach else torch.float64)
    graph = lowered.graphs[-1]
    assert len(updates_in(graph)) == 1
    # Inputs, a node for each gradient, the update, and what is returned.
    inputs = len(graph.graph.find_nodes(op="placeholder"))
    assert len(graph.graph.nodes) == inputs + len(SIZES) + 2


FUSED = {
    "AdamW": lambda p: torch.optim.AdamW(p, weight_decay=0.1, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, weight_decay=0.1, amsgrad=True, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, weight_decay=0.1, fused=True),
}


def fused_calls_in(graph: torch.fx.GraphModule) -> list[Any]:
    return [node for node in updates_in(graph) if node.args[-1].startswith("fused ")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_is_one_node_and_equals_the_reference(
    name: str, dtype: torch.dtype, lowered: type[Lowered]
) -> None:
    make = FUSED[name]
    if name == "SGD" and dtype.itemsize == 2:
        # With momentum, torch 2.13 puts memory that nobody has written into the buffer, from step two on.
        make = lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1, fused=True)  # noqa: E731
    step_of(make, dtype)
    graph = lowered.graphs[-1]
    (node,) = fused_calls_in(graph)
    # Besides, a node for each gradient, and five for each step count: Inductor counts so few steps.
    inputs = len(graph.graph.find_nodes(op="placeholder"))
    assert len(graph.graph.nodes) <= inputs + 6 * len(SIZES) + 2
    assert all(argument.op == "placeholder" for argument in node.args[0])


@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_fused_optimizer_takes_scaled_gradients(
    overflows: bool, keeps: bool, lowered: type[Lowered]
) -> None:
    owned = parameters()
    optimizer = torch.optim.AdamW(owned, fused=True)
    for _ in range(3):
        scale = torch.full((), 4.0).to("lazy")
        found = torch.full((), float(overflows)).to("lazy")
        set_gradients(owned)
        optimizer.grad_scale, optimizer.found_inf = scale, found  # type: ignore[attr-defined]
        optimizer.step()
        if not keeps:
            optimizer.zero_grad()
        lazystep.mark_step()
    lazystep.wait_device_ops()
    # Gradients that stay are unscaled by the optimizer: then it is taken apart, for their sake.
    assert len(fused_calls_in(lowered.graphs[-1])) == (not keeps)


def test_the_learning_rate_of_a_fused_optimizer_is_an_input(lowered: type[Lowered]) -> None:
    owned = parameters()
    optimizer = torch.optim.SGD(owned, 0.1, fused=True)
    codes = set()
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        set_gradients(owned)
        optimizer.step()
        optimizer.zero_grad()
        lazystep.mark_step(wait=True)
        (node,) = fused_calls_in(lowered.graphs[-1])
        codes.add(node.args[-1])
    assert len(codes) == 1


def test_a_damaged_fused_call_is_refused_before_a_write() -> None:
    from lazystep.execute import library

    assert library  # its extension has the kernel
    a, b = torch.ones(3, 4), torch.ones(3, 4)
    numbers = "F 3 0.0\nF 3 0.0\nF 3 0.5\nF 3 0.0\nB 0\nB 0\nB 1\nN\nN"
    code = f"fused _fused_sgd_ - 12\nL 1 0\nL 1 1\nL 0\n{numbers}"
    torch.ops.lazystep.update([a], [b], None, None, code)
    assert a.tolist() == [[0.5] * 4] * 3
    with pytest.raises(RuntimeError, match="differ in their layout"):
        torch.ops.lazystep.update([a], [torch.ones(4, 3).t()], None, None, code)
    for damaged in (
        code.replace("12", "11"),
        code.replace("_fused_sgd_", "add_"),
        code[:30],
        f"{code[:-1]}Q",
    ):
        with pytest.raises(RuntimeError, match="the code is damaged"):
            torch.ops.lazystep.update([a], [b], None, None, damaged)
    with pytest.raises(RuntimeError, match="no such tensor"):
        torch.ops.lazystep.update([a], [], None, None, code)
    assert a.tolist() == [[0.5] * 4] * 3


@pytest.mark.parametrize("name", ["Adamax", "RAdam"])
def test_other_optimizers_equal_the_reference(name: str, lowered: type[Lowered]) -> None:
    make = getattr(torch.optim, name)
    step_of(lambda p: make(p, foreach=True))
    assert len(lowered.graphs) >= 3


def test_update_is_closed_where_its_results_are_read(lowered: type[Lowered]) -> None:
    owned = parameters()
    optimizer = torch.optim.AdamW(owned, foreach=False)
    for _ in range(3):
        set_gradients(owned)
        optimizer.step()
        norm = torch.stack([p.detach().norm() for p in owned]).norm()
        with torch.no_grad():
            torch._foreach_mul_(owned, 0.5)
        lazystep.mark_step()
    assert norm.item() > 0
    (first,) = updates_in(lowered.graphs[-1])
    order = list(lowered.graphs[-1].graph.nodes)
    reads = [n for n in order if "norm" in str(n.target) or "pow" in str(n.target)]
    assert order.index(first) < min(map(order.index, reads))


def test_clipped_gradients_and_tensor_numbers(lowered: type[Lowered]) -> None:
    owned = parameters()
    optimizer = torch.optim.AdamW(owned, foreach=True)
    for _ in range(3):
        set_gradients(owned)
        nn.utils.clip_grad_norm_(owned, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        lazystep.mark_step()
    lazystep.wait_device_ops()
    (node,) = updates_in(lowered.graphs[-1])
    # The clipped gradients are temporaries of the update: they are never stored.
    assert all(argument.op == "placeholder" for argument in node.args[0])


def test_kept_gradients_are_right(lowered: type[Lowered]) -> None:
    owned = parameters()
    optimizer = torch.optim.SGD(owned, 0.1, momentum=0.9, foreach=True)
    for _ in range(3):
        set_gradients(owned)
        nn.utils.clip_grad_norm_(owned, 0.5)
        optimizer.step()
        lazystep.mark_step()
    lazystep.wait_device_ops()
    assert len(updates_in(lowered.graphs[-1])) == 1


def test_parts_of_a_gradient_are_summed_before_the_update(lowered: type[Lowered]) -> None:
    owned = parameters()
    optimizer = torch.optim.AdamW(owned)
    for _ in range(3):
        for parameter in owned:
            parts = [torch.sin(parameter.detach() * n) for n in range(20)]
            parameter.grad = sum(parts[1:], parts[0])
        del parts
        optimizer.step()
        optimizer.zero_grad()
        lazystep.mark_step()
    lazystep.wait_device_ops()
    (node,) = updates_in(lowered.graphs[-1])
    # One gradient for each parameter, not its twenty parts.
    assert len(node.args[1]) == len(SIZES)


def test_small_updates_are_left_to_inductor(lowered: type[Lowered]) -> None:
    x = torch.zeros(8).to("lazy")
    for _ in range(2):
        x.add_(1).mul_(2)
        lazystep.mark_step()
    assert x.tolist() == [6.0] * 8
    assert not updates_in(lowered.graphs[-1])


def test_wrong_layouts_and_damaged_code_are_refused_before_a_write() -> None:
    from lazystep.execute import library

    assert library  # its extension has the kernel
    code = "1\n0 2 0 0 1 2 0 0 1 0 0\n1\n0 0 1"
    a, b = torch.ones(3, 4), torch.ones(3, 4)
    torch.ops.lazystep.update([a], [b], None, None, code)
    assert a.tolist() == [[2.0] * 4] * 3
    for other in (torch.ones(4, 3).t(), torch.ones(3, 5), torch.ones(3, 4).double()):
        with pytest.raises(RuntimeError, match="differ in their layout"):
            torch.ops.lazystep.update([a], [other], None, None, code)
    for damaged in ("", "1\n0 2 0 0 1 99 0 0 1 0 0\n1\n0 0 1", "1\n0 2 0 0 1 2 2 0 1 0 0\n1\n0 0 1"):
        with pytest.raises(RuntimeError, match="the code is damaged"):
            torch.ops.lazystep.update([a], [b], None, None, damaged)
    with pytest.raises(RuntimeError, match="no such tensor"):
        torch.ops.lazystep.update([a], [], None, None, code)
    assert a.tolist() == [[2.0] * 4] * 3


def test_operations_have_the_kernels_numbers() -> None:
    from pathlib import Path

    text = (Path(update.__file__).parents[1] / "execute" / "update.h").read_text()
    body = text.partition("enum Operation : int {")[2].partition("};")[0]
    names = [line.strip().split(",")[0].split(" ")[0].lower() for line in body.splitlines() if line.strip()]
    assert names == [*update._OPERATIONS, "num_operations"]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank. Sums over it change nothing, so the graph needs no network either."""

    def same(order: torch.Tensor, out: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return order.clone(), out.clone()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torch.library._scoped_library("lazystep", "IMPL") as library:
            library.impl("launched", same, "CPU")
            library.impl("waited", same, "CPU")
            yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "Adagrad"])
@pytest.mark.usefixtures("alone")
def test_a_data_parallel_step_has_one_update_per_bucket(
    name: str, foreach: bool, lowered: type[Lowered]
) -> None:
    owned = parameters()
    options = {"momentum": 0.9} if name == "SGD" else {"weight_decay": 0.1}
    optimizer = getattr(torch.optim, name)(owned, lr=0.1, foreach=foreach, **options)
    for _ in range(4):
        for bucket in (owned[3:], owned[:3]):
            flat = torch.cat([torch.sin(parameter.detach()).reshape(-1) for parameter in bucket])
            dist.all_reduce(flat)
            parts = flat.split([parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = part.view(parameter.shape)
        optimizer.step()
        optimizer.zero_grad()
        lazystep.mark_step()
    lazystep.wait_device_ops()
    graph = lowered.graphs[-1]
    targets = [node.target for node in graph.graph.nodes]
    waits = [n for n, target in enumerate(targets) if target is torch.ops.lazystep.waited.default]
    updates = [n for n, target in enumerate(targets) if target is torch.ops.lazystep.update.default]
    assert len(waits) == len(updates) == 2
    assert waits[0] < updates[0] < waits[1] < updates[1]


def test_an_update_that_reads_nothing_has_no_empty_list(lowered: type[Lowered]) -> None:
    many = [torch.ones(3).to("lazy") for _ in range(update.MIN_OPERATIONS)]
    torch._foreach_mul_(many, 0.5)
    lazystep.mark_step(wait=True)
    (node,) = updates_in(lowered.graphs[-1])
    assert len(node.args[0]) == len(many)
    assert node.args[1], "AOTInductor can't call an op with an empty list of tensors"
