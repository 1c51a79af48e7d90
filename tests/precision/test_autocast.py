"""`torch.autocast` on lazy tensors: entered, nested, kept casts, threads, and what is refused."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lazystep
from lazystep.device.cast_policies import names_of_cast_ops, policy_of
from lazystep.record import _recorder
from lazystep.record._recorder import CastTo

from ..conformance.compare import tree_difference
from ..helpers import count
from .cases import Case, Cases

BF16, F16 = torch.bfloat16, torch.float16
case = CASES = Cases()


def net(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)).to(device)


def data(device: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*(shape or (5, 6)), generator=generator).to(device)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def arrivals(device: str) -> list[str]:
    """The parameters in the order in which they get their gradients."""
    torch.manual_seed(0)
    layers = (nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4), nn.Unflatten(1, (1, 2, 2)))
    model = nn.Sequential(*layers, nn.Conv2d(1, 2, 2)).to(device)
    found: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: found.append(name))
    with torch.autocast(device, BF16):
        loss = model(data(device)).square().mean()
    loss.backward()
    return found


def test_gradients_arrive_in_eagers_order() -> None:
    assert arrivals("lazy") == arrivals("cpu")


@pytest.mark.parametrize("name", ["cpu", "lazy"])
def test_both_names_mean_the_same(name: str) -> None:
    x, w = data("lazy"), data("lazy", 6, 3)
    with torch.autocast(name, F16):
        for one in ("cpu", "lazy"):
            assert torch.is_autocast_enabled(one)
            assert torch.get_autocast_dtype(one) is F16
        assert (x @ w).dtype is F16
        with torch.autocast("lazy" if name == "cpu" else "cpu", enabled=False):
            assert (x @ w).dtype is torch.float32
        assert (x @ w).dtype is F16
    assert not torch.is_autocast_enabled("lazy")
    assert torch.get_autocast_dtype("lazy") is BF16
    assert torch.amp.is_autocast_available("lazy")
    assert (x @ w).dtype is torch.float32


@case
def nested(d: str) -> Any:
    x, w = data(d), data(d, 6, 3)
    with torch.autocast(d):
        a = x @ w
        with torch.autocast(d, enabled=False):
            b = x @ w
            c = a.float() @ b.t()
        e = torch.cat([a, b])
        f = torch.stack([a, a])
        with torch.autocast(d, F16):
            g = x @ w
        return a, b, c, e, f, g, x @ w


@case
def kept_casts_share_their_gradients(d: str) -> Any:
    model = net(d)
    with torch.autocast(d):
        out = model(data(d)) + model(data(d) * 2)
    out.float().square().sum().backward()
    return out, gradients(model)


@case
def no_casts_are_kept(d: str) -> Any:
    model = net(d)
    with torch.autocast(d, cache_enabled=False):
        out = model(data(d)) + model(data(d) * 2)
    out.float().square().sum().backward()
    return out, gradients(model)


@case
def kept_cast_is_stale_after_an_update_inside(d: str) -> Any:
    model = net(d)
    with torch.autocast(d):
        first = model(data(d))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        second = model(data(d))
        torch.clear_autocast_cache()
        third = model(data(d))
    return first, second, third, model(data(d))


@case
def kept_cast_of_another_type(d: str) -> Any:
    layer = nn.Linear(6, 6, bias=False).to(d)
    nn.init.eye_(layer.weight)
    with torch.autocast(d, BF16):
        layer(data(d))
        with torch.autocast(d, F16):
            try:
                return layer(data(d))
            except RuntimeError:
                return "eager's cache does not know types"


@case
def cast_made_without_gradients_is_kept_and_has_gradients(d: str) -> Any:
    model = net(d)
    with torch.autocast(d):
        with torch.no_grad():
            model(data(d))
            model[0].weight.mul_(2)
        out = model(data(d))
    out.float().square().sum().backward()
    return out, gradients(model)


@case
def cast_made_under_inference_mode_is_not_kept(d: str) -> Any:
    model = net(d)
    with torch.autocast(d):
        with torch.inference_mode():
            first = model(data(d))
        with torch.no_grad():
            model[0].weight.mul_(2)
        out = model(data(d))
        with torch.inference_mode():
            last = model(data(d))
    out.float().square().sum().backward()
    return first, out, last, gradients(model)


@case
def evaluated_on_the_fast_path(d: str) -> Any:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(d).eval()
    x = data(d, 3, 4, 8)
    mask = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1]]).bool().to(d)
    attention = model.layers[0].self_attn
    outs = []
    for mode in (torch.no_grad, torch.inference_mode):
        for dtype in (BF16, F16):
            with mode(), torch.autocast(d, dtype):
                outs += [model(x), model(x, src_key_padding_mask=mask), attention(x, x, x)]
        with mode():
            outs.append(model(x))
    return outs


@case
def under_inference_mode(d: str) -> Any:
    model = net(d)
    with torch.inference_mode(), torch.autocast(d):
        x = data(d)
        return model(x), torch.tensordot(x, x.t(), 1), F.softmax(x @ x.t(), 1)


@case
def decorated(d: str) -> Any:
    @torch.autocast(d, F16)
    def product(x: torch.Tensor) -> torch.Tensor:
        return x @ x.t()

    return product(data(d)), data(d) @ data(d).t()


@case
def exception_in_the_block(d: str) -> Any:
    try:
        with torch.autocast(d):
            raise ArithmeticError
    except ArithmeticError:
        return data(d) @ data(d).t(), torch.is_autocast_enabled("cpu")


@case
def norms_and_losses(d: str) -> Any:
    x = data(d, 5, 6).requires_grad_()
    with torch.autocast(d):
        y = x @ x.t()
        outs = [
            F.layer_norm(y, (5,)),
            F.softmax(y, -1),
            F.mse_loss(y, torch.zeros_like(y)),
            F.cross_entropy(y, torch.arange(5).to(d)),
            F.prelu(y, torch.ones(1).to(d)),
            F.grid_sample(y.view(1, 1, 5, 5), torch.zeros(1, 2, 2, 2).to(d), align_corners=False),
            y.double() @ y.double(),
        ]
    sum(out.float().sum() for out in outs).backward()
    return outs, x.grad


@case
def attention(d: str) -> Any:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True).to(d)
    x = data(d, 3, 4, 8).requires_grad_()
    with torch.autocast(d):
        out, weights = layer(x, x, x)
        q = x.view(3, 4, 2, 4).transpose(1, 2)
        direct = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    (out.float().sum() + weights.float().square().sum() + direct.float().sum()).backward()
    return out, weights, direct, x.grad, gradients(layer)


def recurrent(kind: Any, dtype: torch.dtype = BF16, is_cached: bool = True, **options: Any) -> Case:
    def run(d: str) -> Any:
        torch.manual_seed(0)
        layer = kind(5, 6, 2, **options).to(d)
        x = data(d, 4, 3, 5).requires_grad_()
        with torch.autocast(d, dtype, cache_enabled=is_cached):
            out = layer(x * 1)[0]
            # With the cache, both uses share the casts of the weights.
            out = out + layer(x * 2)[0] if is_cached else out * 1
        with torch.no_grad(), torch.autocast(d, dtype):
            evaluated = layer(x)[0]
        with torch.inference_mode(), torch.autocast(d, dtype):
            inferred = layer(x)[0]
        out.float().square().sum().backward()
        return out, evaluated, inferred, x.grad, gradients(layer)

    return run


CASES |= {
    "lstm": recurrent(nn.LSTM),
    "bidirectional_lstm_without_biases": recurrent(nn.LSTM, bidirectional=True, bias=False),
    "lstm_with_projection": recurrent(nn.LSTM, proj_size=3),
    "gru": recurrent(nn.GRU),
    "rnn": recurrent(nn.RNN),
    # As Lightning enters it: each time step casts the weights.
    "lstm_without_the_cache": recurrent(nn.LSTM, is_cached=False),
    "gru_without_the_cache": recurrent(nn.GRU, is_cached=False),
    "rnn_without_the_cache": recurrent(nn.RNN, F16, is_cached=False, nonlinearity="relu"),
    "lstm_with_projection_in_float16": recurrent(nn.LSTM, F16, proj_size=3),
    "gru_in_float16": recurrent(nn.GRU, F16, bidirectional=True),
    "rnn_in_float16": recurrent(nn.RNN, F16, nonlinearity="relu"),
}


@case
def packed_sequences_in_float16(d: str) -> Any:
    results: list[Any] = []
    for kind in (nn.LSTM, nn.GRU):
        torch.manual_seed(0)
        layer = kind(5, 6, 2, batch_first=True).to(d)
        lengths = torch.tensor([4, 3, 1])
        packed = nn.utils.rnn.pack_padded_sequence(data(d, 3, 4, 5), lengths, batch_first=True)
        with torch.autocast(d, F16):
            out = layer(packed)[0].data * 1
        out.float().square().sum().backward()
        results += [out, gradients(layer)]
    return results


@case
def lstm_without_onednn_in_float16(d: str) -> Any:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return recurrent(nn.LSTM, F16)(d)
    finally:
        torch._C._set_mkldnn_enabled(before)


@pytest.mark.filterwarnings("ignore:RNN module weights")
def test_lstm_in_float16_fails_where_eager_fails() -> None:
    """oneDNN has an LSTM in float16 for processors with float16 instructions only."""
    try:
        want = recurrent(nn.LSTM, F16)("cpu")
    except RuntimeError as error:
        with pytest.raises(lazystep.StepError, match=str(error)[:60]) as raised:
            recurrent(nn.LSTM, F16)("lazy")[0].cpu()
        assert "mkldnn_rnn_layer" in str(raised.value)
        assert "test_autocast.py" in str(raised.value)
    else:
        assert tree_difference(want, recurrent(nn.LSTM, F16)("lazy")) is None


class Cube(torch.autograd.Function):
    """Takes its inputs as they come, and runs backward as it ran forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: str) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return (grad @ x.t() + x.t() @ grad).float(), None


def custom(d: str, name: str | None = None, **options: Any) -> Any:
    forward = torch.amp.custom_fwd(Cube.forward, device_type=name or d, **options)
    backward = torch.amp.custom_bwd(Cube.backward, device_type=name or d)
    function: Any = type(
        "Custom",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )
    x = data(d, 6, 6).requires_grad_()
    with torch.autocast(d):
        out = function.apply(x, d)
    out.float().sum().backward()
    return out, x.grad


@case
def custom_function(d: str) -> Any:
    return custom(d)


@case
def custom_function_that_casts_inputs(d: str) -> Any:
    return custom(d, cast_inputs=torch.float32), custom(d, cast_inputs=F16)


@case
def custom_function_for_the_cpu(d: str) -> Any:
    return custom(d, "cpu"), custom(d, "cpu", cast_inputs=torch.float32), custom(d, "cpu", cast_inputs=F16)


@case
def recomputed(d: str) -> Any:
    model = net(d)
    x = data(d).requires_grad_()
    with torch.autocast(d):
        out = checkpoint(model, x, use_reentrant=False)
    out.float().sum().backward()
    return out, x.grad, gradients(model)


@case
def recomputed_reentrantly(d: str) -> Any:
    model = net(d)
    x = data(d).requires_grad_()
    with torch.autocast(d):
        out = checkpoint(model, x, use_reentrant=True)
    out.float().sum().backward()
    return out, x.grad, gradients(model)


@case
def backward_inside(d: str) -> Any:
    model = net(d)
    with torch.autocast(d):
        model(data(d)).float().sum().backward()
    return gradients(model)


@case
def kernels_that_cast_inside(d: str) -> Any:
    x, weight = data(d, 4, 4).requires_grad_(), data(d, 2, 4, 4).requires_grad_()
    with torch.autocast(d):
        outs = [F.bilinear(x, x, weight)]
        with torch.autocast(d, enabled=False):
            outs += [F.bilinear(x, x, weight), torch.linalg.pinv(x)]
        sum(out.float().sum() for out in outs).backward()
        return outs, x.grad, weight.grad, torch.linalg.pinv(x)


@case
def threads_have_their_own_state(d: str) -> Any:
    outs: dict[str, Any] = {}
    x = data(d)

    def run(name: str, *options: Any) -> None:
        with torch.autocast(d, *options):
            outs[name] = x @ x.t()

    def plain() -> None:
        outs["none"] = x @ x.t()

    with torch.autocast(d, F16):
        for target, args in ((run, ("bf16", BF16)), (run, ("off", BF16, False)), (plain, ())):
            thread = threading.Thread(target=target, args=args)
            thread.start()
            thread.join()
        outs["here"] = x @ x.t()
    return outs


@case
def cpu_tensors_beside(d: str) -> Any:
    x, host = data(d), data("cpu")
    with torch.autocast("cpu"):
        return x @ x.t(), (host @ host.t()).to(d), torch.cat([x @ x.t(), (x @ x.t()) * torch.tensor(2.0)])


@pytest.mark.filterwarnings("ignore:RNN module weights")
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", CASES)
def test_block_equals_eager_bitwise(name: str) -> None:
    try:
        want = CASES[name]("cpu")
    except RuntimeError as error:
        # A recurrent layer in low precision, on a processor without the instructions for it.
        with pytest.raises(lazystep.StepError, match=re.escape(str(error).partition(".")[0])):
            lazystep.to_cpu(CASES[name]("lazy"))
        return
    lazystep.metrics.reset()
    got = CASES[name]("lazy")
    assert count("synchronizations") == 0
    assert tree_difference(want, got) is None
    assert _recorder.num_casts() == 0


def test_casts_are_made_once_in_a_block_and_forgotten_after_it() -> None:
    model = net("lazy")
    with torch.autocast("lazy"):
        model(data("lazy"))
        assert _recorder.num_casts() == 4  # the weights and biases of two linear layers
        model(data("lazy"))
        with torch.autocast("cpu"):
            pass
        assert _recorder.num_casts() == 4
    assert _recorder.num_casts() == 0
    lazystep.mark_step()


@pytest.mark.parametrize("where", ["inside", "around"])
def test_captured_step_knows_autocast(where: str) -> None:
    model = net("lazy")
    dtype, enabled = BF16, True

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("lazy", dtype, enabled=enabled, cache_enabled=False):
            out: torch.Tensor = model(x)
        return out.detach()

    def plain(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x)
        return out.detach()

    step = lazystep.step(forward if where == "inside" else plain, audit_every=0)
    eager = net("cpu")
    for dtype, enabled in ((BF16, True), (F16, True), (BF16, False), (BF16, True)):
        for _ in range(5):
            with torch.autocast("cpu", dtype, enabled=enabled):
                want = eager(data("cpu")).detach()
            if where == "inside":
                got = step(data("cpu"))
            else:
                with torch.autocast("lazy", dtype, enabled=enabled, cache_enabled=False):
                    got = step(data("cpu"))
            assert got.dtype is want.dtype
            assert torch.equal(got.cpu(), want)
    assert step.num_replayed >= 8, step.explain()


def test_step_that_leaves_kept_casts_behind_is_recorded() -> None:
    def run(d: str, step: Callable[..., Any]) -> Any:
        out = []
        for _ in range(5):
            with torch.autocast(d):
                out += [step(data(d)), step(data(d))]
        return out

    def make(d: str) -> Callable[[torch.Tensor], torch.Tensor]:
        model = net(d)

        def step(x: torch.Tensor) -> torch.Tensor:
            out = model(x).detach()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
            return out

        return step

    want = run("cpu", make("cpu"))
    with pytest.warns(lazystep.LazyStepWarning, match="recorded in each call"):
        got = run("lazy", lazystep.step(make("lazy"), audit_every=0))
    assert tree_difference(want, got) is None


def test_switch_of_the_cpu_alone_is_refused() -> None:
    x = data("lazy")
    torch._C.set_autocast_enabled("cpu", True)
    try:
        with pytest.raises(lazystep.UnsupportedError, match="switched on for CPU tensors alone"):
            x @ x.t()
    finally:
        torch.set_autocast_enabled("cpu", False)
    assert (x @ x.t()).dtype is torch.float32


def test_autocast_of_another_device_changes_nothing() -> None:
    x = data("lazy")
    torch.set_autocast_enabled("xla", True)
    try:
        assert (x @ x.t()).dtype is torch.float32
    finally:
        torch.set_autocast_enabled("xla", False)


def test_policies_are_those_of_torch() -> None:
    policies = {name: policy_of(_op(name)) for name in names_of_cast_ops()}
    assert None not in policies.values()
    assert policies["aten::mm"] == (CastTo.LOWER, torch.float32)
    assert policies["aten::cat"] == (CastTo.PROMOTE, torch.float32)
    assert policies["aten::mse_loss"] == (CastTo.FIXED, torch.float32)
    assert len(policies) > 100


def _op(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")
