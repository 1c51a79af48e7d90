"""Views, in-place ops, metadata changes, random streams, errors: each equal to eager at every read."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazystep
from lazystep import metrics
from tests.helpers import descend


def same(got: Any, want: Any) -> None:
    if isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            same(g, w)
    elif isinstance(want, torch.Tensor):
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
        host = got.detach().cpu()
        assert torch.equal(host.isnan(), want.isnan())
        assert torch.equal(host.nan_to_num(0), want.detach().nan_to_num(0))
    else:
        assert got == want


def base(d: str) -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4).to(d)


def in_place_on_view(d: str) -> Any:
    x = base(d)
    row = x[1]
    row.mul_(10)
    column = x[:, 2]
    column += row[0]
    return x, row, column


def view_of_view_then_base_changes(d: str) -> Any:
    x = base(d)
    v = x.view(4, 3).t()[1:].transpose(0, 1)
    x.add_(1)
    lazystep.mark_step()
    x.mul_(2)
    return v, x


def view_made_before_barrier_write_after(d: str) -> Any:
    x = base(d)
    v = x[0]
    lazystep.mark_step()
    v.zero_()
    lazystep.mark_step()
    x[1] = 5
    return x, v


def metadata_in_place(d: str) -> Any:
    x = base(d)
    y = x.clone()
    y.t_()
    z = x.clone()
    z.unsqueeze_(0).squeeze_(0)
    z.transpose_(0, 1)
    w = x.clone()
    alias = w.detach()
    w.t_()
    w.add_(1)
    return y, z, w, alias


def resize(d: str) -> Any:
    x = base(d)
    x.resize_(2, 2)
    y = base(d)
    v = y[0]
    y.resize_(5, 4)[3:].zero_()
    return x, y, v


def set_source(d: str) -> Any:
    x, y = base(d), torch.ones(2, 2).to(d)
    x.set_(y)
    x.add_(1)
    return x, y


def data_attribute(d: str) -> Any:
    x = base(d).requires_grad_()
    y = x * x
    x.data.mul_(2)
    version = x._version
    x.data = torch.ones(3, 4).to(d)
    y.sum().backward()
    return x, x.grad, version


def out_arguments(d: str) -> Any:
    x = base(d)
    right = torch.empty(3, 4).to(d)
    torch.add(x, x, out=right)
    grown = torch.empty(0).to(d)
    torch.mul(x, 3, out=grown)
    torch.mm(x, x.t(), out=(square := torch.empty(3, 3).to(d)))
    values, indices = torch.empty(3).to(d), torch.empty(3, dtype=torch.int64).to(d)
    torch.max(x, dim=1, out=(values, indices))
    return right, grown, square, values, indices


def conjugate_and_negative_views(d: str) -> Any:
    x = torch.complex(base("cpu"), base("cpu") + 1).to(d)
    c = x.conj()
    n = c.imag
    x.mul_(2)
    lazystep.mark_step()
    c.add_(1)
    return c.is_conj(), n.is_neg(), c.resolve_conj(), n * 1, c * 2, x, torch.view_as_real(x)[..., 0]


def empty_and_scalar_tensors(d: str) -> Any:
    e = torch.empty(0, 3).to(d)
    s = torch.tensor(2.0).to(d)
    return e.sum(0), torch.cat([e, torch.ones(1, 3).to(d)]), s**2, s.expand(2), e.t() @ e, s.view(1)


def indexing(d: str) -> Any:
    x = base(d)
    index = torch.tensor([0, 2]).to(d)
    x[index, 1] = -1
    x[x > 9] = 0
    picked = x[index]
    x.index_add_(0, index, torch.ones(2, 4).to(d))
    x.scatter_(1, torch.zeros(3, 1, dtype=torch.int64).to(d), 7.0)
    return x, picked, x[..., None, 1::2], x.gather(1, torch.ones(3, 1, dtype=torch.int64).to(d))


def data_dependent(d: str) -> Any:
    x = base(d)
    large = x > 5
    masked = torch.masked_select(x, x > 3)
    return torch.nonzero(large), x[large], torch.unique(x // 3), masked, torch.where(x > 8)


def many_types(d: str) -> Any:
    results = []
    integers = torch.int8, torch.int16, torch.int32, torch.uint8, torch.bool
    for dtype in (*integers, torch.float16, torch.bfloat16):
        x = torch.tensor([0, 1, 1]).to(dtype).to(d)
        results += [x + x, x * 2, x / 3, x.sum(), x == x, x.to(torch.float64)]
    return results


def scalar_types(d: str) -> Any:
    x = torch.tensor([1, 2]).to(d)
    return x + 1, x + 1.0, x + True, x * 2j, x / 2, x**2, torch.tensor(1.5).to(d) + x, x.float() + 1j


def multi_output_views(d: str) -> Any:
    x = base(d)
    a, b = x.split(2, 1)
    a += 1
    c, *_ = x.unbind(0)
    c *= 2
    return x, a, b, c, torch.ops.aten.unsafe_split(x, 1)


def detach_shares_memory(d: str) -> Any:
    x = base(d)
    y = x.detach()
    y.zero_()
    z = torch.alias_copy(x)
    z += 1
    return x, y, z


def fill_diagonal_and_friends(d: str) -> Any:
    x = base(d)[:, :3].contiguous()
    x.fill_diagonal_(9)
    x.masked_fill_(x < 3, float("nan"))
    return x, x.nan_to_num_(0.5), torch.tril(x), x.cumsum(0), x.flip(0), x.roll(1, 1)


CASES = [
    in_place_on_view,
    view_of_view_then_base_changes,
    view_made_before_barrier_write_after,
    metadata_in_place,
    resize,
    set_source,
    data_attribute,
    out_arguments,
    conjugate_and_negative_views,
    empty_and_scalar_tensors,
    indexing,
    data_dependent,
    many_types,
    scalar_types,
    multi_output_views,
    detach_shares_memory,
    fill_diagonal_and_friends,
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("barrier", [False, True], ids=["", "barrier"])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_equals_eager(case: Callable[[str], Any], barrier: bool) -> None:
    for _ in range(3):  # the second run follows the first, the third runs translated programs
        torch.manual_seed(0)
        want = case("cpu")
        torch.manual_seed(0)
        got = case("lazy")
        if barrier:
            lazystep.mark_step()
        same(got, want)


def test_random_ops_share_eagers_stream_with_the_host() -> None:
    def run(d: str) -> list[Any]:
        torch.manual_seed(11)
        x = torch.ones(6, 4).to(d)
        results: list[Any] = [F.dropout(x, 0.3)]
        results.append(torch.randint(0, 100, (3,)))  # the host samples a batch in between
        results.append(x.clone().normal_())
        results.append(torch.rand_like(x) + torch.randn(4).to(d))
        results.append(torch.randperm(5))
        results.append(x.t().clone().t().uniform_(-1, 1))
        results.append(torch.bernoulli(x * 0.5))
        results.append(torch.multinomial(x.abs(), 2))
        results.append(F.rrelu(-x, training=True))
        results.append(F.alpha_dropout(x, 0.2, True))
        results.append(F.dropout2d(x.view(1, 6, 4, 1), 0.5))
        results.append(torch.normal(x, 2.0))
        results.append(torch.empty(4).to(d).exponential_())
        with torch.random.fork_rng():
            results.append(torch.rand(2).to(d) if d == "cpu" else torch.rand(2, device=d))
        results.append(torch.rand(2, device=d))
        results.append(torch.get_rng_state()[:64].clone())
        if d == "lazy":
            lazystep.mark_step()
        return results

    same(run("lazy"), run("cpu"))


def test_draws_on_an_unused_dropout_still_advance_the_stream() -> None:
    def run(d: str) -> float:
        torch.manual_seed(1)
        F.dropout(torch.ones(8).to(d), 0.5)  # nobody looks at it
        if d == "lazy":
            lazystep.mark_step()
        return torch.rand(()).item()

    assert run("lazy") == run("cpu")


def test_attention_lstm_and_encoder_take_cpus_kernels() -> None:
    def run(d: str) -> list[Any]:
        torch.manual_seed(0)
        q = torch.randn(2, 4, 8, 16).to(d).requires_grad_()
        mask = (torch.rand(8, 8) > 0.3).to(d)
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        out = out + F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        out = out + F.scaled_dot_product_attention(q, q, q, dropout_p=0.2)
        out.sum().backward()
        lstm = nn.LSTM(16, 8, num_layers=2, bidirectional=True, dropout=0.1, batch_first=True).to(d)
        y, (h, c) = lstm(q[0])
        (y.sum() + h.sum() + c.sum()).backward()
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, batch_first=True), 2).to(d)
        trained = encoder(q[0])
        encoder.eval()
        with torch.no_grad():
            evaluated = encoder(q[0])
        grads = [p.grad for p in lstm.parameters()]
        return [out, q.grad, y, h, c, trained, evaluated, *grads]

    same(run("lazy"), run("cpu"))


@pytest.mark.parametrize("mask", [None, (4, 4), (2, 4, 4), (1, 4, 4)])
@pytest.mark.parametrize("is_bool", [False, True])
def test_attention_without_a_batch_equals_eager_bitwise(mask: tuple[int, ...] | None, is_bool: bool) -> None:
    def attend(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        given = [torch.randn(2, 4, 8).to(device).requires_grad_() for _ in range(3)]
        bias = None
        if mask is not None:
            bias = (torch.rand(mask) > 0.3 if is_bool else torch.randn(mask)).to(device)
        out = F.scaled_dot_product_attention(*given, attn_mask=bias)
        return [t.detach().cpu() for t in (out, *torch.autograd.grad(out.square().sum(), given))]

    for expected, found in zip(attend("cpu"), attend("lazy"), strict=True):
        assert torch.equal(found, expected)


ERRORS: dict[str, Callable[[str], Any]] = {
    "matmul shapes": lambda d: torch.ones(2, 3).to(d) @ torch.ones(2, 3).to(d),
    "broadcast": lambda d: torch.ones(2).to(d) + torch.ones(3).to(d),
    "view": lambda d: torch.ones(6).to(d).view(4, 2),
    "dimension": lambda d: torch.ones(2).to(d).sum(3),
    "index out of range": lambda d: torch.ones(2).to(d)[5],
    "dtype of in-place": lambda d: torch.ones(2, dtype=torch.int64).to(d).add_(0.5),
    "no kernel": lambda d: (
        torch.ones(2, 2, dtype=torch.bool).to(d) @ torch.ones(2, 2, dtype=torch.bool).to(d)
    ),
    "cat": lambda d: torch.cat([torch.ones(2, 2).to(d), torch.ones(3).to(d)]),
    "linear": lambda d: F.linear(torch.ones(2, 3).to(d), torch.ones(4, 5).to(d)),
    "loss type": lambda d: F.cross_entropy(torch.ones(2, 3).to(d), torch.ones(2, dtype=torch.int32).to(d)),
    "leaf in place": lambda d: torch.ones(2).to(d).requires_grad_().add_(1),
    "two elements item": lambda d: torch.ones(2).to(d).item(),
    "bool of many": lambda d: bool(torch.ones(2).to(d)),
    "dropout": lambda d: F.dropout(torch.ones(2).to(d), 1.5),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_raised_while_recording_as_eagers_type(name: str) -> None:
    with pytest.raises(Exception) as want:  # noqa: PT011
        ERRORS[name]("cpu")
    before = metrics.counter_value("programs_recorded")
    with pytest.raises(want.type) as got:
        ERRORS[name]("lazy")
    assert not isinstance(got.value, lazystep.LazyStepError)
    assert any("test_semantics.py" in str(entry.path) for entry in got.traceback)
    assert metrics.counter_value("programs_recorded") - before <= 1
    assert (torch.ones(2, device="lazy") + 1).tolist() == [2.0, 2.0]


def test_data_dependent_ops_synchronize_and_name_the_line() -> None:
    x = torch.arange(4.0, device="lazy")
    torch.nonzero(x)
    x.sum().item()
    reasons = {
        (reason, line.rsplit(":", 1)[0].rsplit("/", 1)[-1]) for reason, line, _ in metrics.synchronizations()
    }
    assert ("shape depends on values", "test_semantics.py") in reasons
    assert ("item", "test_semantics.py") in reasons
    assert metrics.counter_value("synchronizations") == 2


def test_float_and_int_scalars_never_make_a_new_program() -> None:
    x = torch.ones(3, device="lazy")
    for i in range(6):
        x.mul_(1.0 + i).add_(i, alpha=0.5 * i)
        x.sub_(torch.tensor(float(i)))
        lazystep.mark_step()
    assert metrics.counter_value("cache_misses") <= 2
    y = torch.ones(3)
    for i in range(6):
        y.mul_(1.0 + i).add_(i, alpha=0.5 * i).sub_(torch.tensor(float(i)))
    assert x.tolist() == y.tolist()


def test_equal_scalars_are_never_merged() -> None:
    x = torch.ones(3).to("lazy")
    for a, b in [(2.0, 3.0), (2.0, 2.0), (4.0, 2.0)]:
        y = x * a + b * x
        lazystep.mark_step()
        assert y.tolist() == [a + b] * 3
    assert metrics.counter_value("cache_misses") == 1


def test_int_and_float_scalars_are_different_programs() -> None:
    x = torch.tensor([1, 2], device="lazy")
    assert (x + 1).dtype is torch.int64
    assert (x + 1.0).dtype is torch.float32
    assert (x + True).dtype is torch.int64
    assert torch.arange(3, device="lazy").dtype is torch.int64
    assert torch.arange(3.0, device="lazy").dtype is torch.float32


def test_an_abandoned_tensor_frees_its_buffer(value_of: Any) -> None:
    x = torch.ones(1000, device="lazy") * 2
    lazystep.mark_step(wait=True)
    buffer = weakref.ref(value_of(x))
    assert buffer() is not None
    del x
    gc.collect()
    assert buffer() is None


def test_dead_values_are_not_computed() -> None:
    x = torch.ones(4, device="lazy")
    y = x + 1
    (x * 3).sqrt()  # dead
    lazystep.mark_step(wait=True)
    program = lazystep.debug.last_program()
    assert [i.op for i in program.instructions] == ["aten.ones.default", "aten.add.Tensor"]
    assert y.tolist() == [2.0] * 4


def test_in_place_on_a_dead_temporary_is_not_computed_but_on_a_live_view_is() -> None:
    x = torch.zeros(4, device="lazy")
    lazystep.mark_step()
    (x + 1).mul_(2)  # dead
    x[1:3].add_(1)  # writes x
    lazystep.mark_step(wait=True)
    program = lazystep.debug.last_program()
    assert [i.op for i in program.instructions] == ["aten.add_.Tensor"]
    assert x.tolist() == [0.0, 1.0, 1.0, 0.0]


def test_running_statistics_are_read_after_their_step_and_kept_without_a_use() -> None:
    """Batch norm updates them without saying so in its schema."""
    torch.manual_seed(0)
    eager = torch.nn.BatchNorm1d(3)
    lazy = torch.nn.BatchNorm1d(3).to("lazy")
    for number in range(4):
        x = torch.randn(8, 3) + number
        eager(x)
        lazy(x.to("lazy"))  # nobody looks at the result
        if number % 2:
            lazystep.mark_step()
        assert torch.equal(lazy.running_mean.cpu(), eager.running_mean)
        assert torch.equal(lazy.running_var.cpu(), eager.running_var)


@pytest.mark.parametrize("width", [8, 96])  # the second is too large for a trial
def test_lstm_layer_trains_whatever_its_size(width: int) -> None:
    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        lstm = nn.LSTM(width, width, batch_first=True).to(device)
        optimizer = torch.optim.SGD(lstm.parameters(), lr=0.1)
        x = torch.randn(8, 16, width).to(device)
        found = []
        for _ in range(3):
            loss = lstm(x)[0].square().mean()
            descend(loss, optimizer)
            found.append(loss.item())
        return found

    assert losses("lazy") == losses("cpu")
