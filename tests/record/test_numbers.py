"""Numbers among arguments: what eager refuses is refused at the same line, and the target stays usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Call = Callable[[torch.Tensor, Any], Any]


def index(like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0, 1]).to(like.device)


# A call, the data type, a number that eager takes, and one that it does not take.
ROWS: dict[str, tuple[Call, torch.dtype, Any, Any]] = {
    "mul_ of integers by a float": (lambda x, n: x.mul_(n), torch.int64, 2, 0.9),
    "add_ of a complex number": (lambda x, n: x.add_(n), torch.float32, 1.5, 1j),
    "div_ of integers": (lambda x, n: x.div_(n), torch.int64, None, 2),
    "alpha": (lambda x, n: x.add_(x, alpha=n), torch.int64, 2, 0.5),
    "full": (lambda x, n: torch.full((2,), n, dtype=x.dtype, device=x.device), torch.int8, 3, 300),
    "full of infinity": (lambda x, n: torch.full_like(x, n), torch.int64, 3.0, float("inf")),
    "full of nan": (lambda x, n: torch.full_like(x, n), torch.int64, 3.0, float("nan")),
    "full of floats": (lambda x, n: x.new_full((2,), n), torch.float32, 1.0, 1e39),
    "fill_": (lambda x, n: x.fill_(n), torch.int8, 3, -300),
    "fill_ of half": (lambda x, n: x.fill_(n), torch.float16, 3.0, 70000.0),
    "masked_fill": (lambda x, n: x.masked_fill(x > 1, n), torch.int8, 3, 300),
    "index_fill_": (lambda x, n: x.index_fill_(0, index(x), n), torch.int16, 3, 70000),
    "scatter": (lambda x, n: x.scatter(0, index(x), n), torch.int8, 3, 300),
    # Since torch 2.15 a largest value that no element can have is taken, and a smallest one refused.
    "clamp": (lambda x, n: x.clamp(min=n), torch.int8, 3, 300),
    "pow": (lambda x, n: x**n, torch.int64, 2, -1),
    "pow_": (lambda x, n: x.pow_(n), torch.int32, 2, -1),
    "remainder": (lambda x, n: x % n, torch.int64, 2, 0),
    "floor_divide": (lambda x, n: x // n, torch.int64, 2, 0),
    "div": (lambda x, n: torch.div(x, n, rounding_mode="trunc"), torch.int32, 2, 0),
    "bitwise_and": (lambda x, n: x.bitwise_and_(n), torch.int64, 2, 0.5),
    "addcmul": (lambda x, n: torch.addcmul(x, x, x, value=n), torch.int8, 2, 300),
    "renorm": (lambda x, n: torch.renorm(x[None], 2, 0, n), torch.float32, 1.0, -1.0),
    "softshrink": (lambda x, n: torch.nn.functional.softshrink(x, n), torch.float32, 0.5, -0.5),
    "_foreach_mul_": (lambda x, n: torch._foreach_mul_([x], n), torch.int64, 2, 0.9),
    "_foreach_pow": (lambda x, n: torch._foreach_pow([x], n), torch.int64, 2, -1),
    "_foreach_addcmul_": (lambda x, n: torch._foreach_addcmul_([x], [x], [x], n), torch.int8, 2, 300),
    "index_put_ of no dimensions": (
        lambda x, n: x.sum().index_put_((x.sum().long() * 0,), x.sum()),
        torch.float32,
        None,
        0,
    ),
}


def make(dtype: torch.dtype, d: str) -> torch.Tensor:
    return torch.tensor([3, 2, 1]).to(dtype).to(d)


@pytest.mark.parametrize("first", ["taken", "refused"])
@pytest.mark.parametrize("row", ROWS)
def test_number_is_refused_at_the_line_whatever_was_recorded_before(row: str, first: str) -> None:
    call, dtype, good, bad = ROWS[row]
    for number in (good, bad, good, bad) if first == "taken" else (bad, good, bad):
        if number is None:
            continue
        want, got = make(dtype, "cpu"), make(dtype, "lazy")
        if number is good:
            call(want, number)
            call(got, number)
        else:
            with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever eager raises
                call(want, number)
            with pytest.raises(type(expected.value)) as error:
                call(got, number)
            assert str(error.value) == str(expected.value)
            assert any("test_numbers.py" in note for note in error.value.__notes__)
        assert torch.equal(got.cpu(), want)


def test_numbers_of_a_known_kind_are_recorded_without_asking(extension: Any) -> None:
    x = torch.ones(5, 7).to("lazy")
    x.mul_(0.5).add_(x, alpha=-2.0).clamp_(min=-3.0)
    before = extension.num_calls_to_python()
    tries = []
    for step in range(1, 20):
        x.mul_(0.5 / step).add_(x, alpha=-2.0 / step).clamp_(min=-3.0 / step)
        tries.append(extension.num_calls_to_python() - before)
    assert tries[-1] <= 3 * 19  # a line per new instruction, and nothing else


def test_number_outside_of_the_range_is_taken_where_eager_takes_it() -> None:
    for d in ("cpu", "lazy"):
        x = torch.tensor([3, 2, 1], dtype=torch.uint8).to(d)
        got = [(x == -1).cpu(), (x + 300).cpu(), (x > 1e10).cpu(), (torch.ones(2).to(d) * 1e39).cpu()]
        if d == "cpu":
            want = got
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
