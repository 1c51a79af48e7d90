"""Random programs of plain loops, equal to eager after every line; and short ones that once were not."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

import lazystep
from tests.helpers import nightly
from tests.record.program_writer import programs
from tests.record.programs import Program, Refused, compare, differs, parse, shorten

# Random programs are mostly new ones, which a loop is warned of.
pytestmark = pytest.mark.filterwarnings("ignore:.*were new programs:lazystep.LazyStepWarning")

# The variable is for long runs: these programs are others than those of the ordinary run.
NUM_PROGRAMS = 300
NUM_RANDOM = int(os.environ.get("LAZYSTEP_TEST_PROGRAMS", "3000"))
# Mostly views that were made before their base got another shape in place: the grammar is fond of that.
MAX_REFUSED = 0.1


@pytest.mark.parametrize("num_programs", [NUM_PROGRAMS, *nightly([NUM_RANDOM])])
@pytest.mark.timeout(3600)
def test_random_programs_equal_eager(num_programs: int) -> None:
    num_run = num_refused = 0

    @settings(
        max_examples=num_programs,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # `shorten` takes lines away, and hypothesis could only try other seeds
        derandomize=num_programs == NUM_PROGRAMS,  # a change elsewhere does not meet a new program
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs())
    def check(program: Program) -> None:
        nonlocal num_run, num_refused
        num_run += 1
        try:
            compare(program)
        except Refused:
            num_refused += 1
        except AssertionError:
            compare(shorten(program))  # raises, with a program that can be read
            raise

    check()
    print(f"{num_run} programs, {num_refused} refused")
    assert num_refused <= MAX_REFUSED * num_run


# -- what it has found -------------------------------------------------------------------------------

START = """
x = torch.linspace(-2, 3, 9, device=D).view(3, 3).clone().requires_grad_()
b = x * 1
g = torch.arange(4., device=D).view(2, 2)
"""

# Equal to eager: the same values, or the same error at the same line.
EQUAL = {
    "foreach tells autograd that it writes": """
        loss = (x * x).sum()
        with torch.no_grad(): torch._foreach_mul_([x, b], 0.5)
        loss.backward()
    """,
    "data of integers is refused to a tensor with a gradient": "x.data = x.data.to(torch.int64)",
    "data of another type gets gradients of that type": """
        loss = (x * x).sum()
        x.data = x.data.double()
        (x * x).sum().backward()
    """,
    "data is itself": "b.data = b",
    "data made under inference mode": """
        with torch.inference_mode(): x.data = x.data * 2
        read(x.requires_grad)
        loss = (x * x).sum()
        loss.backward()
    """,
    "memory keeps its size when a view of larger memory had the same type": """
        large = (b * 2)[0].unsqueeze(0)
        small = b.sum(0)
        view = small.unsqueeze(0)
        beyond = small.as_strided((2, 2), (1, 2), 0)
    """,
    "memory of an in-place op keeps its size": """
        large = (b.detach() * 2)[0:2]
        large.t_()
        small = b.detach()[0:2].clone()
        small.t_()
        beyond = small.as_strided((3, 3), (1, 3))
    """,
    "type that an op does not take": "(b > 0).argmax()",
    "shape that indices do not select": "b[[0]] = b",
    "rows of an empty tensor": "b[3:].index_select(0, torch.tensor([0], device=D))",
    "shape that does not fit": "b.index_add_(1, torch.tensor([0], device=D), b[:1, :1])",
    "first of two errors": "b.index_copy_(0, torch.tensor([0], device=D), b)",
    "values of a stale view": """
        view = b[1]
        b.t_()
        b.mul_(2)
        read(view.tolist())
        read(view.detach().sum())
    """,
    "strided view of dense views": """
        view = b.flatten().as_strided((2, 2), (1, 3), 1)
        b.mul_(2)
        view.mul_(g)
        view.backward(g)
    """,
}


@pytest.mark.parametrize("name", EQUAL)
def test_short_program_equals_eager(name: str) -> None:
    compare(parse(START + EQUAL[name]))


# Would have another gradient than eager's, or another value.
REFUSED = {
    "backward from a view of a changed base": """
        view = b[:2, :2]
        b.t_()
        b.mul_(2)
        view.backward(g)
    """,
    "gradient of a view of a changed base": """
        view = b[:2, :2]
        b.t_()
        b.mul_(2)
        torch.autograd.grad([view], [x], [g])
    """,
    "view that changed without gradients": """
        view = b[:2, :2]
        with torch.no_grad(): view.t_()
        view.backward(g)
    """,
    "view that changed under inference mode": """
        view = b[:2, :2]
        with torch.inference_mode(): view.t_()
        (view * g).sum().backward()
    """,
    "base with other data": """
        view = b[:2, :2]
        b.data = b.data.t()
        b.mul_(2)
        (view * g).sum().backward()
    """,
    "view with other data": """
        view = b[:2, :2]
        view.data = view.data.t()
        b.mul_(2)
        (view * g).sum().backward()
    """,
    "view with other data after a write": """
        view = b[:2, :2]
        with torch.no_grad(): b.mul_(2)
        view.data = view.data.t()
        (view * g).sum().backward()
    """,
    "base with other memory": """
        view = b[:2, :2]
        with torch.no_grad(): b.set_(b.detach().t())
        (view * g).sum().backward()
    """,
    "base that an op with out= resized": """
        view = x[:2, :2]
        with torch.no_grad(): torch.cat([g, g, g], 1, out=x)
        (view * g).sum().backward()
    """,
    "view that an op with out= resized": """
        view = x[:2, :2]
        torch.gt(b, 0, out=view)
        view.backward(b.detach())
    """,
    "strided view beside a view": """
        view = b.diagonal().as_strided((2, 2), (1, 3))
        b.mul_(2)
        (view * g).sum().backward()
    """,
    "write into a strided view beside a view": """
        view = b.diagonal().as_strided((2, 2), (1, 3))
        view.mul_(g)
    """,
    "view of a view that changed": """
        view = b.diagonal()
        view.unsqueeze_(-1)
        other = view.diagonal(-1)
        b.mul_(2)
        other.sum()
    """,
    "result in the memory of an input": """
        flags = b > 0
        alias = flags.data
        torch.any(flags, 0, out=alias)
    """,
}


@pytest.mark.parametrize("name", REFUSED)
def test_short_program_is_refused(name: str) -> None:
    with pytest.raises(Refused):
        compare(parse(START + REFUSED[name]))


def test_program_that_differs_is_shortened() -> None:
    program = parse(START + "b = b * 2\nread(b.device.type)\ndel g\nb = b + 1")
    assert differs(program)
    short = shorten(program)
    assert list(short) == [*parse(START)[:2], "read(b.device.type)"]
    with pytest.raises(AssertionError, match="another value is read"):
        compare(short)


def test_leaving_no_reference_to_a_view_keeps_the_base_right() -> None:
    base = torch.zeros(4, device="lazy")
    for _ in range(3):
        base[1:].add_(1)
        gc.collect()
        lazystep.mark_step()
    assert base.tolist() == [0.0, 3.0, 3.0, 3.0]
