"""Ops that come again with other sizes are asked of meta tensors: as eager does it, and without a trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lazystep
from lazystep.decide import decide as decide_module
from lazystep.decide import resized

WEIGHT, TABLE = torch.randn(6, 8), torch.randn(9, 4)

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "mm": lambda x: x @ WEIGHT.to(x.device),
    "mm of a transpose": lambda x: WEIGHT.to(x.device).t() @ x.t(),
    "bmm": lambda x: x[None].expand(3, -1, -1).bmm(x.t()[None].expand(3, -1, -1)),
    "views": lambda x: [x.view(-1, 2), x.t(), x[1:], x[:, 1], x[None], x.permute(1, 0), x.split(2)],
    "expand": lambda x: x[:, None].expand(-1, 3, -1),
    "sum": lambda x: [x.sum(0), x.t().sum(1), x.sum((0, 1), keepdim=True)],
    "cat": lambda x: [torch.cat([x, x.t().contiguous().t()]), torch.cat([x, x], 1)],
    "embedding": lambda x: F.embedding(x.abs().long().clamp(max=8), TABLE.to(x.device)),
    "arange": lambda x: (
        torch.arange(x.shape[0], device=x.device) + torch.arange(2.0, 2.0 + len(x)).to(x.device)
    ),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.reshape(1, 2, -1, 3)] * 3, is_causal=True),
    "pointwise on a transpose": lambda x: x.t() + x.t().contiguous() * x.sum(),
    "softmax": lambda x: x.t().log_softmax(0),
    "layer norm": lambda x: F.layer_norm(x.t().contiguous().t(), (6,)),
    "gelu": lambda x: F.gelu(x.t()),
    "pointwise": lambda x: [x + x, x * x, x - x * 2, x + x[:1], x * 2, F.gelu(x) + x.tanh(), x + x.double()],
    "pointwise on integers": lambda x: [x.long() + x.long(), x.long() * 2.5, x.long() + x, x.long().tanh()],
    "linear": lambda x: [
        F.linear(x, WEIGHT.t().to(x.device), TABLE.view(-1)[:8].to(x.device)),
        torch.addmm(x[:, :1], x, WEIGHT.to(x.device)),
        torch.addmm(TABLE[0, 0].to(x.device), x, WEIGHT.to(x.device)),
    ],
}


def layouts(out: Any) -> list[Any]:
    return [(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in torch.utils._pytree.tree_leaves(out)]


@pytest.mark.parametrize("are_large", [False, True], ids=["small", "no trials"])
@pytest.mark.parametrize("name", CALLS)
def test_layouts_and_values_equal_eager_at_every_size(
    name: str, are_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resized, "_agreed", {})
    asked = []
    ask = resized._ask
    monkeypatch.setattr(resized, "_ask", lambda *args: asked.append(args[0].op) or ask(*args))
    if are_large:  # as if each were: what is not quick is asked of meta tensors, too
        monkeypatch.setattr(resized, "is_cheap", lambda *_: False)
    for size in (194, 196, 250, 4, 3, 162) if are_large else (94, 96, 150, 2, 1, 62):  # decisions are kept
        x = torch.randn(size, 6)
        lazy = CALLS[name](x.to("lazy"))
        found = torch.utils._pytree.tree_leaves(lazy)
        eager = torch.utils._pytree.tree_leaves(CALLS[name](x))
        assert layouts(found) == layouts(eager)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, eager, strict=True))
    if are_large or name in ("mm", "views", "cat", "embedding"):
        assert asked
    assert lazystep.metrics.counter_value("layout_repairs") == 0


def test_a_small_op_with_a_rule_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resized, "_agreed", {})
    asked: list[str] = []
    ask, trial = resized._ask, decide_module.run_trial
    monkeypatch.setattr(resized, "_ask", lambda *args: asked.append(args[0].op) or ask(*args))
    monkeypatch.setattr(
        decide_module,
        "run_trial",
        lambda decision, *a, **k: asked.append(decision.op) or trial(decision, *a, **k),
    )

    def step(size: int) -> None:
        x = torch.ones(size, 6).to("lazy")
        y = F.gelu(torch.addmm(TABLE.view(-1)[:8].to("lazy"), x, WEIGHT.to("lazy")))
        (y * y + y).mm(WEIGHT.to("lazy").t())
        lazystep.mark_step()

    step(23)
    assert {"aten.addmm.default", "aten.gelu.default", "aten.mm.default"} <= set(asked)
    asked.clear()
    for size in (29, 31):
        step(size)
    assert asked == []


def test_a_new_size_needs_no_trial_and_no_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resized, "_agreed", {})
    in_full: list[str] = []
    call, trial = decide_module.call, decide_module.run_trial
    monkeypatch.setattr(decide_module, "call", lambda func, *a: in_full.append(str(func)) or call(func, *a))
    monkeypatch.setattr(
        decide_module,
        "run_trial",
        lambda decision, *a, **k: in_full.append(decision.op) or trial(decision, *a, **k),
    )

    def step(size: int) -> None:
        x = torch.ones(size, 6).to("lazy") @ WEIGHT.to("lazy")
        torch.cat([x, x]).view(-1, 4).sum(0)
        lazystep.mark_step()

    step(1013)
    assert {"aten.mm.default", "aten.cat.default", "aten.view.default"} <= set(in_full)
    in_full.clear()
    for size in (1019, 1021):
        step(size)
    assert in_full == []


def test_an_op_that_meta_tensors_get_wrong_is_decided_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resized, "_agreed", {})
    describe = resized.describe

    def wrong(decision: Any, *args: Any) -> None:
        describe(decision, *args)
        decision.results = tuple(r._replace(nbytes=r.nbytes + 4) for r in decision.results)

    monkeypatch.setattr(resized, "describe", wrong)
    for size in (2003, 2011):
        x = torch.randn(size, 6)
        assert torch.equal((x.to("lazy") @ WEIGHT.to("lazy")).cpu(), x @ WEIGHT)
    assert [agreed for key, agreed in resized._agreed.items() if key[0] == "aten.mm.default"] == [False]


def test_errors_are_those_of_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resized, "_agreed", {})
    for size in (71, 73):
        (torch.ones(size, 6).to("lazy") @ WEIGHT.to("lazy")).cpu()
    for wrong in (
        lambda x, d: x.t() @ WEIGHT.to(d),
        lambda x, d: x.view(-1, 7),
        lambda x, d: x.expand(3, 3, 3),
    ):
        with pytest.raises(RuntimeError) as eager:
            wrong(torch.ones(79, 6), "cpu")
        with pytest.raises(RuntimeError) as lazy:
            wrong(torch.ones(79, 6).to("lazy"), "lazy")
        assert str(lazy.value).startswith(str(eager.value).partition("\n")[0])


def test_rule_that_no_full_decision_has_confirmed_is_not_used() -> None:
    """The rule is not for the transpose, so the first call says nothing about it."""
    first = torch.ones(11, 12, device="lazy") > 0
    assert (first.t() * 2.5).dtype == torch.float32
    later = (torch.ones(13, 12, device="lazy") > 0) * 2.5
    assert later.dtype == torch.float32
    assert later.tolist() == [[2.5] * 12] * 13


def test_strides_of_an_empty_result_are_those_of_eager() -> None:
    def strides(device: str, size: int) -> tuple[int, ...]:
        return (torch.ones(size, 4, device=device).t() + torch.ones(4, 1, device=device)).stride()

    for size in (14, 0, 15):
        assert strides("lazy", size) == strides("cpu", size)
