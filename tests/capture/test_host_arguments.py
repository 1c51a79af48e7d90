"""CPU tensors as arguments that share memory, or that the step writes: as in eager, or refused."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import lazystep

from .common import NUM_CALLS, captured
from .scenes import bits, shown

REMEDY = r"\.to\([\"']lazy[\"']\)|\.clone\(\)"

Function = Callable[..., Any]


def attempt(step: Function, arguments: Any) -> tuple[Any, str]:
    """The result of a call, or the text with which it is refused."""
    try:
        return step(*arguments), ""
    except lazystep.LazyStepError as error:
        return None, str(error)


def flags(arguments: Any) -> list[bool]:
    return [leaf.requires_grad for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def same(function: Function, make: Callable[[torch.Tensor], Any], is_replayed: bool = False) -> None:
    """Results and arguments as eager's at each call, or an error that says what to do instead."""
    step = captured(function)
    for number in range(NUM_CALLS):
        ours, eagers = (make(torch.arange(6.0).view(2, 3) + number) for _ in range(2))
        want = function(*eagers)
        got, refusal = attempt(step, ours)
        if refusal and not is_replayed:
            assert re.search(REMEDY, refusal), refusal
            return
        assert bits((got, ours)) == bits((want, eagers)), (
            f"wrong: call {number} gave {shown((got, ours))}, eager {shown((want, eagers))}\n{step.explain()}"
        )
        assert flags(ours) == flags(eagers), f"wrong: call {number}, requires_grad"
    if is_replayed:
        assert step.num_replayed > 0, step.explain()


def add_and_multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1.0)
    return (a * b).sum()


def total(a: Any, b: Any) -> torch.Tensor:
    return (a * 2 + b).sum()


# Two arguments of one memory.
SHARED: dict[str, Callable[[torch.Tensor], tuple[Any, Any]]] = {
    "itself": lambda x: (x, x),
    "row": lambda x: (x, x[0]),
    "row first": lambda x: (x[0], x),
    "rows that overlap": lambda x: (x.view(-1)[:4], x.view(-1)[2:]),
    "rows that do not overlap": lambda x: (x[0], x[1]),
    "detached": lambda x: (x, x.detach()),
    "data": lambda x: (x, x.data),
    "view": lambda x: (x, x.view(2, 3)),
    "expanded": lambda x: (x[:1].expand(2, 3), x),
    "from numpy": lambda x: (x, torch.from_numpy(x.numpy())),
    "parameter": lambda x: (x, nn.Parameter(x, requires_grad=False)),
}


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("function", [add_and_multiply, total], ids=["written", "read"])
def test_arguments_of_one_memory(kind: str, function: Function) -> None:
    if kind == "expanded" and function is add_and_multiply:
        return  # nobody can write it
    same(function, SHARED[kind])


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (lambda pair: add_and_multiply(*pair), lambda x: ([x, x],)),
        (lambda pair: add_and_multiply(*pair), lambda x: ((x, x[1]),)),
        (lambda batch: add_and_multiply(batch["x"], batch["y"]), lambda x: ({"x": x, "y": x},)),
        (lambda a, *rest: add_and_multiply(a, rest[1][0]), lambda x: (x, 2.0, [x])),
    ],
    ids=["list", "tuple", "dict", "nested"],
)
def test_arguments_of_one_memory_in_containers(function: Function, make: Callable[..., Any]) -> None:
    same(function, make)


def test_sharing_that_begins_later() -> None:
    step = captured(add_and_multiply)
    for _ in range(4):
        assert step(torch.ones(2).to("lazy"), torch.ones(2)).item() == 4
    assert step.num_replayed > 0
    x = torch.ones(2).to("lazy")
    assert step(x, x).item() == 8
    host = torch.ones(2)
    got, refusal = attempt(step, (host, host))
    assert re.search(REMEDY, refusal) if refusal else got.item() == 8


def test_the_same_tensor_is_the_same_inside() -> None:
    same(lambda a, b: a * 2 if a is b else a * 3, lambda x: (x, x))


# -- writes ----------------------------------------------------------------------------------------


def assign_item(x: torch.Tensor) -> None:
    x[0] = 5.0


def assign_mask(x: torch.Tensor) -> None:
    x[x > 2] = 0.0


def augmented(x: torch.Tensor) -> None:
    x *= 2


def data(x: torch.Tensor) -> None:
    x.data.mul_(2)


def exchange_data(x: torch.Tensor) -> None:
    x.data = x * 2


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "div_": lambda x: x.div_(255),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(x * 2),
    "clamp_": lambda x: x.clamp_(1.0, 3.0),
    "relu": lambda x: nn.functional.relu(x, inplace=True),
    "dropout": lambda x: nn.functional.dropout(x, 1.0, inplace=True),
    "masked_fill_": lambda x: x.masked_fill_(x > 2, 0.0),
    "view": lambda x: x.view(-1)[2:].mul_(3),
    "transposed": lambda x: x.t().add_(torch.ones(2, device=x.device)),
    "out": lambda x: torch.add(x, 1, out=x),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "transpose_": lambda x: x.t_(),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "requires_grad_": lambda x: x.requires_grad_(),
    "item": assign_item,
    "mask": assign_mask,
    "operator": augmented,
    "data": data,
    "other data": exchange_data,
}


@pytest.mark.parametrize("kind", WRITES)
def test_argument_that_is_written(kind: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        WRITES[kind](x)
        return x.detach().sum()

    same(function, lambda x: (x,))


def divide(x: torch.Tensor) -> torch.Tensor:
    x.div_(255)
    return x.sum()


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (lambda batch: divide(batch[0]), lambda x: ([x, x + 1],)),
        (lambda batch: divide(batch["x"]), lambda x: ({"x": x},)),
        (lambda x: divide(x[0]), lambda x: (x,)),
        (divide, lambda x: (x[0],)),
        (divide, lambda x: (x.t(),)),
        (lambda x, y: divide(x) + y.sum(), lambda x: (x, x + 1)),
    ],
    ids=["list", "dict", "row inside", "row", "transposed", "one of two"],
)
def test_argument_that_is_written_wherever_it_is(function: Function, make: Callable[..., Any]) -> None:
    same(function, make)


def test_returned_argument_has_the_values_of_the_argument() -> None:
    same(lambda x: (x, x + 1), lambda x: (x,), is_replayed=True)


# -- what works today ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (x.t(), x + 1),
        lambda x: (x[:, ::2], x[:, 1:] + 0),
        lambda x: (x[:1].expand(2, 3), x + 1),
        lambda x: (x.double(), x.long()),
        lambda x: (x[0, 0] + 0, x > 2),
        lambda x: (x[:0], x),
        lambda x: (x.half(), x.bfloat16()),
        lambda x: (nn.Parameter(x, requires_grad=False), x + 1),
    ],
    ids=["transposed", "strided", "expanded", "types", "scalar", "empty", "halves", "parameter"],
)
def test_kinds_of_tensors(make: Callable[[torch.Tensor], tuple[Any, ...]]) -> None:
    same(lambda a, b: ((a * 2).sum(), (b * 3).sum()), make, is_replayed=True)


def test_memory_that_is_filled_anew_right_after_the_call() -> None:
    step = captured(lambda x: (x @ x).sum())
    batch, results = torch.empty(8, 8), []
    for number in range(20):
        batch.fill_(float(number))
        results.append(step(batch))
    batch.zero_()
    assert [result.item() for result in results] == [512.0 * n * n for n in range(20)]
    assert step.num_replayed >= 16


def test_copy_of_the_argument_may_be_written() -> None:
    same(lambda x: x.clone().div_(255).sum(), lambda x: (x,), is_replayed=True)


@pytest.mark.filterwarnings("ignore:.*is recorded in each call")
def test_gradient_of_a_cpu_argument_is_an_error_with_the_remedy() -> None:
    """Inside, the argument is a copy, whose `.grad` is not the argument's."""
    weight = torch.ones(3, device="lazy")

    def body(x: torch.Tensor) -> torch.Tensor:
        (x * weight).sum().backward()
        return (x * 2).detach()

    step = captured(body)
    with pytest.raises(lazystep.UnsupportedError, match=r"gradient of argument 0, a CPU.*requires_grad_\(\)"):
        step(torch.ones(3, requires_grad=True))
    x = torch.ones(3).to("lazy").requires_grad_()
    for number in range(4):
        step(x)
        assert x.grad is not None
        assert x.grad.tolist() == [number + 1.0] * 3


def test_cpu_argument_that_wants_a_gradient_and_gets_none_is_moved() -> None:
    step = captured(lambda x: (x * 2).detach())
    for number in range(4):
        assert step(torch.full((2,), float(number), requires_grad=True)).tolist() == [2.0 * number] * 2


def test_an_op_that_needs_a_cpu_tensor_says_where_it_went_and_the_remedy_works():
    torch.manual_seed(0)
    net = torch.nn.GRU(3, 4, batch_first=True).to("lazy")
    x, lengths = torch.randn(3, 5, 3), torch.tensor([5, 3, 2])

    @lazystep.step
    def wrong(x, lengths):
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return net(packed)[1].sum()

    with pytest.raises(RuntimeError, match="CPU") as raised:
        wrong(x, lengths)
    (note,) = (one for one in raised.value.__notes__ if "moves its CPU tensors" in one)
    assert "argument 0, 1" in note
    assert "x.cpu()" in note

    @lazystep.step
    def right(x, lengths):
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True)
        return net(packed)[1].sum()

    host = copy.deepcopy(net).cpu()
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    expected = host(packed)[1].sum()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lazystep.LazyStepWarning)
        for _ in range(3):
            assert torch.equal(right(x, lengths).detach().cpu(), expected.detach())


def test_errors_that_are_not_about_the_cpu_get_no_note():
    @lazystep.step
    def fail(x):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as raised:
        fail(torch.ones(2))
    assert not [one for one in getattr(raised.value, "__notes__", []) if "moves its CPU tensors" in one]


def test_a_gradient_left_in_an_argument_is_named_and_the_remedy_replays():
    weight = torch.ones(3, device="lazy", requires_grad=True)

    def penalty(x):
        y = (weight * x * x).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        loss = (slope * slope).sum()
        loss.backward()
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=0.1)
        weight.grad = None
        return loss.detach()

    step = lazystep.step(lambda x: penalty(x.requires_grad_()))
    with pytest.warns(lazystep.LazyStepWarning, match="it leaves a gradient in argument 0"):
        for x in [torch.ones(3, device="lazy") for _ in range(4)]:
            step(x)
    inside = lazystep.step(lambda x: penalty(x.detach().requires_grad_()), fullgraph=True)
    for _ in range(4):
        inside(torch.ones(3, device="lazy"))
    assert inside.num_replayed > 0
