"""Ops that come again with other sizes are asked of meta tensors: as eager does it, and without a trial."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import nn

import lazystep
from lazystep.decide import decide as decide_module
from lazystep.decide import resized, shape_rules
from lazystep.decide.decision import Action, Decision, Operand
from lazystep.decide.trial import run_trial
from lazystep.program.program import resolve_op
from lazystep.program.types import type_of


@pytest.fixture(autouse=True)
def nothing_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has decided nothing in full."""
    monkeypatch.setattr(resized, "_agreed", {})
    monkeypatch.setattr(resized, "_rule_agreed", {})


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
        weight = WEIGHT.to("lazy").requires_grad_()
        y = F.layer_norm((y * y + y).mm(weight.t()), (6,), torch.ones(6).to("lazy"), torch.ones(6).to("lazy"))
        F.cross_entropy(y, torch.zeros(size, dtype=torch.int64).to("lazy")).backward()
        lazystep.mark_step()

    step(23)
    assert {"aten.addmm.default", "aten.gelu.default", "aten.mm.default"} <= set(asked)
    asked.clear()
    for size in (29, 31):
        step(size)
    assert asked == []


def test_layers_of_images_need_no_trial_at_new_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch sizes and image sizes, small and large ones, for which torch may choose other kernels."""
    in_full: list[str] = []
    call, trial = decide_module.call, decide_module.run_trial
    monkeypatch.setattr(decide_module, "call", lambda func, *a: in_full.append(str(func)) or call(func, *a))
    monkeypatch.setattr(
        decide_module,
        "run_trial",
        lambda decision, *a, **k: in_full.append(decision.op) or trial(decision, *a, **k),
    )

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(24, 24, 3, stride=2, groups=24, bias=False),
            nn.Conv2d(24, 8, 1),
        )

    models = {"cpu": make(), "lazy": make().to("lazy")}
    expected = {"aten.convolution.default", "aten.max_pool2d_with_indices_backward.default"}
    for number, (batch, size) in enumerate([(5, 14), (1, 14), (2, 9), (32, 14), (3, 64), (17, 33), (1, 8)]):
        x = torch.randn(batch, 3, size, size)
        in_full.clear()
        found = []
        for device, model in models.items():
            given = x.to(device).detach().requires_grad_()
            y = model(given[:, :, 1:].contiguous())
            y.square().sum().backward()
            found.append([y, given.grad, *(p.grad for p in model.parameters()), *model.buffers()])
            model.zero_grad()
        lazystep.mark_step()
        decided = set(in_full) & set(shape_rules._LAYERS)
        assert expected <= decided if number == 0 else not decided
        assert layouts(found[0]) == layouts(found[1])
        assert all(torch.equal(a.detach(), b.detach().cpu()) for a, b in zip(*found, strict=True))
    assert lazystep.metrics.counter_value("layout_repairs") == 0


def test_a_new_size_needs_no_trial_and_no_inference(monkeypatch: pytest.MonkeyPatch) -> None:
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
    describe = resized.describe

    def wrong(decision: Any, *args: Any) -> None:
        describe(decision, *args)
        decision.results = tuple(r._replace(nbytes=r.nbytes + 4) for r in decision.results)

    monkeypatch.setattr(resized, "describe", wrong)
    for size in (2003, 2011):
        x = torch.randn(size, 6)
        assert torch.equal((x.to("lazy") @ WEIGHT.to("lazy")).cpu(), x @ WEIGHT)
    assert [agreed for key, agreed in resized._agreed.items() if key[0] == "aten.mm.default"] == [False]


def test_errors_are_those_of_eager() -> None:
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


# One op at a time, with arguments of many kinds. Integers are drawn from a range with wrong ones in it.
def _tensor(draw: st.DrawFn, dtype: torch.dtype = torch.float32, rank: int | None = None) -> torch.Tensor:
    """A tensor of random sizes: dense, transposed, or a part of a larger one."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=rank or 1, max_size=rank or 4))
    x = torch.zeros(shape, dtype=dtype)
    kind = draw(st.sampled_from(["dense", "dense", "transposed", "part"]))
    if kind == "transposed":
        return x.transpose(0, -1)
    return torch.zeros(*shape[:-1], shape[-1] + 2, dtype=dtype)[..., 1:-1] if kind == "part" else x


def _of_shape(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A dense tensor of this shape, and sometimes of another one."""
    return _tensor(draw, dtype) if draw(st.integers(0, 9)) == 0 else torch.zeros(shape, dtype=dtype)


_dims = st.integers(-5, 5)


def _image_call(draw: st.DrawFn, op: str) -> tuple[Any, ...]:
    """Arguments for a layer of images: mostly right ones."""
    rank = 2 if "pool" in op else draw(st.integers(1, 3))
    sizes = draw(st.lists(st.sampled_from([1, 3, 4, 7]), min_size=rank, max_size=rank))
    groups = draw(st.sampled_from([1, 1, 2]))
    batch, channels, made = draw(st.integers(1, 3)), groups * draw(st.integers(1, 2)), draw(st.integers(1, 4))
    x = torch.zeros(batch, channels, *sizes)
    if draw(st.integers(0, 4)) == 0:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    if rank == 2 and draw(st.integers(0, 3)) == 0:
        x = x.to(memory_format=torch.channels_last)

    def numbers(*choices: int) -> list[int]:
        return draw(st.lists(st.sampled_from(choices), min_size=rank, max_size=rank))

    mask = draw(st.lists(st.booleans(), min_size=3, max_size=3))
    if "batch_norm" in op:
        vectors = [_of_shape(draw, (channels,)) for _ in range(6)]
        if op == "aten.native_batch_norm.default":
            return x, *vectors[:4], draw(st.integers(0, 5)) > 0, 0.1, 1e-5
        grad = _of_shape(draw, x.shape)
        return grad, x, *vectors[:5], draw(st.integers(0, 5)) > 0, 1e-5, mask
    if "pool" in op:
        window = numbers(1, 2, 3), draw(st.sampled_from([[], [2], [1, 2]])), numbers(0, 0, 1), [1], False
        if op == "aten.max_pool2d_with_indices.default":
            return x, *window
        made_by = torch.ops.aten.max_pool2d_with_indices.default
        try:
            shape = made_by(x, *window)[0].shape
        except RuntimeError:
            shape = x.shape
        return _of_shape(draw, shape), x, *window, _of_shape(draw, shape, torch.int64)
    weight = torch.zeros(made * groups, channels // groups, *numbers(1, 2, 3))
    window = numbers(1, 1, 2), numbers(0, 1), numbers(1, 1, 2), False, [0] * rank, groups
    if op == "aten.convolution.default":
        bias = draw(st.sampled_from([None, torch.zeros(made * groups)]))
        return x, weight, bias, *window
    try:
        shape = torch.ops.aten.convolution(x, weight, None, *window).shape
    except RuntimeError:
        shape = x.shape
    return _of_shape(draw, shape), x, weight, [made * groups], *window, mask


@st.composite
def rule_calls(draw: st.DrawFn, op: str) -> tuple[Any, ...]:
    """Arguments for an op with a rule."""
    x = _tensor(draw)
    if op in ("aten.view.default", "aten._unsafe_view.default"):
        sizes = list(x.shape)
        if draw(st.booleans()):
            sizes = [math.prod(sizes[:2]), *sizes[2:]]
        elif sizes[-1] % 2 == 0:
            sizes = [*sizes[:-1], 2, sizes[-1] // 2]
        if draw(st.booleans()):
            sizes[draw(st.integers(0, len(sizes) - 1))] = draw(st.sampled_from([-1, 3]))
        return x, sizes
    if op == "aten.t.default":
        return (x,)
    if op in ("aten.transpose.int", "aten.select.int"):
        return x, draw(_dims), draw(_dims)
    if op == "aten.permute.default":
        return x, draw(st.permutations(range(x.dim())))
    if op == "aten.unsqueeze.default":
        return x, draw(_dims)
    if op == "aten.split.Tensor":
        return x, draw(st.integers(0, 4)), draw(_dims)
    if op == "aten.expand.default":
        new = draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2))
        return x, [*new, *(draw(st.sampled_from([-1, size, size, 3])) for size in x.shape)]
    if op == "aten.slice.Tensor":
        bounds = [draw(st.one_of(st.none(), st.integers(-7, 7), st.just(2**63 - 1))) for _ in range(2)]
        return x, draw(_dims), *bounds, draw(st.integers(1, 3))
    if op in shape_rules.IMAGES:
        return _image_call(draw, op)
    end = list(x.shape[draw(st.integers(-2, -1)) :])
    affine = [_of_shape(draw, tuple(end)), _of_shape(draw, tuple(end))]
    rest = (*x.shape[: -len(end)], *(1 for _ in end))
    if op == "aten.native_layer_norm.default":
        return x, end, *(one if draw(st.booleans()) else None for one in affine), 1e-5
    if op == "aten.native_layer_norm_backward.default":
        statistics = [_of_shape(draw, rest) for _ in range(2)]
        mask = draw(st.lists(st.booleans(), min_size=3, max_size=3))
        return _of_shape(draw, x.shape), x, end, *statistics, *affine, mask
    if op in ("aten._softmax.default", "aten._log_softmax.default"):
        return x, draw(_dims), False
    if "softmax_backward" in op:
        return _of_shape(draw, x.shape), x, draw(_dims), torch.float32
    if op.startswith("aten.nll_loss"):
        x = _tensor(draw, rank=2)
        target = _of_shape(draw, x.shape[:1], torch.int64)
        reduction = draw(st.integers(0, 2))
        if op == "aten.nll_loss_forward.default":
            return x, target, None, reduction, -100
        return _of_shape(draw, ()), x, target, None, reduction, -100, _of_shape(draw, ())
    if op == "aten.embedding.default":
        return _tensor(draw, rank=2), _tensor(draw, torch.int64), -1, False, False
    if op == "aten.embedding_dense_backward.default":
        return x, _of_shape(draw, x.shape[:-1], torch.int64), draw(st.integers(1, 9)), -1, False
    if op in ("aten.sum.dim_IntList", "aten.mean.dim"):
        return x, draw(st.lists(st.integers(-2, 2), max_size=2)), draw(st.booleans())
    assert op == "aten.cat.default", "a new rule needs arguments here"
    return [x, _of_shape(draw, x.shape), _of_shape(draw, x.shape)], draw(_dims)


@pytest.mark.parametrize("op", [*shape_rules.VIEWS, *shape_rules._LAYERS])
def test_a_rule_says_what_eager_does_or_nothing(op: str) -> None:
    num_answered = 0

    @seed(0)
    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(rule_calls(op))
    def check(args: tuple[Any, ...]) -> None:
        nonlocal num_answered
        tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
        to_operand = {id(t): Operand(type_of(t).at(0), t.untyped_storage().nbytes()) for t in tensors}
        operands = [to_operand[id(t)] for t in tensors]
        taken = torch.utils._pytree.tree_map(lambda a: to_operand.get(id(a), a), args)
        found = shape_rules.answer(op, operands, taken, {})
        decision = Decision(Action.RECORD, op, resolve_op(op))
        try:
            run_trial(decision, operands, taken, {}, is_value_free=True)
        except (RuntimeError, IndexError, AssertionError):
            assert found is None, "eager raises an error"
            return
        if found is not None:
            num_answered += 1
            assert found == (decision.results, decision.structure)

    check()
    assert num_answered >= 5
