"""Views of a tensor that has got another shape in place: eager's gradient, or a refusal at the line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import lazystep

Change = Callable[[torch.Tensor], torch.Tensor]
CHANGES: dict[str, Change] = {
    "t_": lambda b: b.t_(),
    "transpose_": lambda b: b.transpose_(0, 1),
    "swapaxes_": lambda b: b.swapaxes_(0, 1),
    "as_strided_": lambda b: b.as_strided_((3, 3), (1, 3)),
}


def start(d: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(9.0).reshape(3, 3).to(d).requires_grad_()
    return x, x * 1


@pytest.mark.parametrize("change", CHANGES)
def test_view_made_before_its_base_changed_shape_is_refused(change: str) -> None:
    _, b = start("lazy")
    view = b[1]
    CHANGES[change](b)
    b.mul_(2)
    with pytest.raises(lazystep.UnsupportedError, match=r"aten\.sum\.default at .*stale_views") as error:
        view.sum()
    assert "make the view after it" in str(error.value)
    with pytest.raises(lazystep.UnsupportedError, match="mul_"):
        view.mul_(3)
    with torch.no_grad():  # no gradient: nothing can differ
        assert view.tolist() == [6.0, 8.0, 10.0]


def test_view_op_that_autograd_cannot_repeat_names_the_way_out() -> None:
    _, b = start("lazy")
    view = b[1]
    b.unsqueeze_(0)
    b.mul_(2)
    with pytest.raises(IndexError) as error:
        view.sum()
    assert any("make the view after it" in note for note in error.value.__notes__)


def test_view_that_changed_its_own_shape_is_refused_once_its_memory_is_written() -> None:
    _, b = start("lazy")
    view = b[:2]
    view.t_()
    with pytest.raises(lazystep.UnsupportedError, match="mul_"):
        view.mul_(2)
    b.mul_(2)
    with pytest.raises(lazystep.UnsupportedError, match="sum"):
        view.sum()


def view_after_change(d: str) -> torch.Tensor | None:
    x, b = start(d)
    b.t_()
    view = b[1]
    b.mul_(2)
    (view * torch.arange(3.0).to(d)).sum().backward()
    return x.grad


def view_of_a_view_that_changed(d: str) -> torch.Tensor | None:
    x, b = start(d)
    middle = b[:2]
    view = middle[0]
    middle.t_()
    b.mul_(2)
    (view * torch.arange(3.0).to(d)).sum().backward()
    return x.grad


def changed_view_alone(d: str) -> torch.Tensor | None:
    x, b = start(d)
    view = b[:2]
    view.t_()
    (view * torch.arange(6.0).reshape(3, 2).to(d)).sum().backward()
    return x.grad


def detached_alias(d: str) -> torch.Tensor | None:
    x, b = start(d)
    alias = b.detach()
    b.t_()
    (b * alias[1]).sum().backward()
    return x.grad


@pytest.mark.parametrize(
    "case", [view_after_change, view_of_a_view_that_changed, changed_view_alone, detached_alias]
)
def test_other_views_have_the_gradient_of_eager(case: Callable[[str], torch.Tensor | None]) -> None:
    want, got = case("cpu"), case("lazy")
    assert want is not None
    assert got is not None
    assert torch.equal(got.cpu(), want)
