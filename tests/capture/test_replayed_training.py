"""Models and optimizers whose training steps are replayed."""

from __future__ import annotations

import collections
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import swa_utils

from tests.helpers import descend

from .common import captured
from .scenes import Scene, Scenes, check_replays, check_right, linear

scene = Scenes()


# -- models ----------------------------------------------------------------------------------------


def training(
    make_model: Callable[[], nn.Module],
    forward: Callable[[Any, torch.Tensor], torch.Tensor] = lambda model, x: model(x),
    shape: tuple[int, ...] = (2, 3, 4),
    make_optimizer: Callable[..., Any] = lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    around: Callable[[nn.Module, Any], tuple[Callable[[], object], Callable[[], object]]] | None = None,
) -> Callable[[str], Scene]:
    """A scene that trains. `around` gives what to do at the end of the step, and between two calls."""

    def make(device: str) -> Scene:
        model = make_model().to(device)
        optimizer = make_optimizer(model.parameters())
        inside, outside = around(model, optimizer) if around else (lambda: None, lambda: None)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = forward(model, x).square().mean()
            descend(loss, optimizer)
            inside()
            return loss.detach()

        def arguments(number: int) -> tuple[torch.Tensor]:
            if number:
                outside()
            return (torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape) * (number + 1),)

        return Scene(step, kept=lambda: [p.detach() + 0 for p in model.parameters()], arguments=arguments)

    return make


def transformer() -> nn.Module:
    return nn.Transformer(4, 2, 1, 1, 8, dropout=0.1, batch_first=True)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    )


def causal(x: torch.Tensor) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(3, device=x.device)


def padding(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([[False, False, True], [False, False, False]]).to(x.device)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, padding_idx=0)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding((x > 0).long()))


scene.rows(
    transformer_that_is_said_to_be_causal=training(
        transformer, lambda model, x: model(x, x, tgt_mask=causal(x), tgt_is_causal=True)
    ),
    transformer_with_padding=training(
        transformer, lambda model, x: model(x, x, src_key_padding_mask=padding(x))
    ),
    # torch looks whether the mask is a causal one, unless it is told.
    transformer_with_a_mask=training(transformer, lambda model, x: model(x, x, tgt_mask=causal(x))),
    encoder_with_a_mask=training(encoder, lambda model, x: model(x, causal(x))),
    encoder_with_a_mask_that_is_found_to_be_causal=training(
        encoder, lambda model, x: model(x, causal(x), is_causal=True)
    ),
    attention_with_a_mask=training(
        lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        lambda model, x: model(x, x, x, attn_mask=causal(x), need_weights=False)[0],
    ),
    dropout_modules=training(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.AlphaDropout(0.2), nn.Linear(4, 1))
    ),
    channels_dropped=training(
        lambda: nn.Sequential(nn.Conv1d(3, 3, 1), nn.Dropout1d(0.5), nn.FeatureAlphaDropout(0.2))
    ),
    batch_norm=training(lambda: nn.Sequential(nn.Conv1d(3, 2, 1), nn.BatchNorm1d(2), nn.InstanceNorm1d(2))),
    weight_norm=training(lambda: parametrizations.weight_norm(nn.Linear(4, 2))),
    spectral_norm=training(lambda: parametrizations.spectral_norm(nn.Linear(4, 2))),
    recurrent=training(lambda: nn.GRU(4, 4, 2, batch_first=True), lambda model, x: model(x)[0]),
    tied_weights=training(Tied),
    checkpointed=training(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)),
        lambda model, x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False),
    ),
    functional_call=training(
        lambda: nn.Linear(4, 4),
        lambda model, x: torch.func.functional_call(model, dict(model.named_parameters()), (x,)),
    ),
    parameters_in_containers=training(
        lambda: nn.ParameterDict({"a": nn.Parameter(torch.ones(4)), "b": nn.Parameter(torch.ones(4))}),
        lambda model, x: x * model["a"] + model["b"],
    ),
)


# -- optimizers ------------------------------------------------------------------------------------


def schedule(make: Callable[[Any], Any], **options: Any) -> Callable[[str], Scene]:
    """Stepped outside, after each call."""

    def around(model: nn.Module, optimizer: Any) -> tuple[Callable[[], object], Callable[[], object]]:
        schedule = make(optimizer)
        return lambda: None, lambda: schedule.step()

    return training(linear, around=around, **options)


def average(make: Callable[[nn.Module], Any]) -> Callable[[str], Scene]:
    """Updated inside, after each update of the model."""

    def around(model: nn.Module, optimizer: Any) -> tuple[Callable[[], object], Callable[[], object]]:
        average = make(model)
        return lambda: average.update_parameters(model), lambda: None

    return training(linear, around=around)


class Lookahead(torch.optim.Optimizer):
    """As in timm: slow weights, a count in each group, and an update of them every k-th step."""

    def __init__(self, parameters: Any, k: int = 3) -> None:
        base = torch.optim.AdamW(parameters, lr=0.05)
        self.base = base
        self.defaults = base.defaults
        self.param_groups = base.param_groups
        self.state = collections.defaultdict(dict)
        self._optimizer_step_pre_hooks = collections.OrderedDict()
        self._optimizer_step_post_hooks = collections.OrderedDict()
        for group in self.param_groups:
            group.update(lookahead_alpha=0.5, lookahead_k=k, lookahead_step=0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % group["lookahead_k"] == 0:
                for fast in group["params"]:
                    state = self.base.state[fast]
                    if "slow" not in state:
                        state["slow"] = fast.detach().clone()
                    state["slow"].add_(fast - state["slow"], alpha=group["lookahead_alpha"])
                    fast.copy_(state["slow"])
        return loss


class Counting(torch.optim.Optimizer):
    """Written by hand, with its count as an int in the group, as in timm's LAMB."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            correction = 1 - group["beta"] ** group["step"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                p.add_(state["mean"] / correction, alpha=-group["lr"])


class CountingInState(torch.optim.Optimizer):
    """Written by hand, with its count as an int in each parameter's state, as in older optimizers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p))
                state["step"] += 1
                state["mean"].lerp_(p.grad, 1 - group["beta"])
                step_size = group["lr"] / (1 - group["beta"] ** state["step"])
                p.add_(state["mean"], alpha=-step_size)


class LaProp(torch.optim.Optimizer):
    """As in timm: averages of the rate, kept as floats in each parameter's state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "beta": 0.9, "eps": 1e-15, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            beta, lr = group["beta"], group["lr"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p), rate=0.0)
                state["step"] += 1
                state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                state["rate"] = state["rate"] * beta + (1 - beta) * lr
                step_size = 1 / (state["rate"] / lr if lr != 0.0 else 1.0)
                root = state["square"].div(1 - 0.99 ** state["step"]).sqrt_().add_(group["eps"])
                state["mean"].mul_(beta).add_(p.grad / root, alpha=lr * (1 - beta))
                p.add_(state["mean"], alpha=-step_size)
                if group["weight_decay"] != 0:
                    p.add_(p, alpha=-lr * group["weight_decay"])


schedules = torch.optim.lr_scheduler
scene.rows(
    schedule_step=schedule(lambda o: schedules.StepLR(o, 2, 0.5)),
    schedule_one_cycle=schedule(lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20)),
    schedule_lambda=schedule(lambda o: schedules.LambdaLR(o, lambda step: 1 / (step + 1))),
    schedule_in_sequence=schedule(
        lambda o: schedules.SequentialLR(
            o, [schedules.LinearLR(o, total_iters=3), schedules.CosineAnnealingLR(o, 9)], [3]
        )
    ),
    averaged_model=average(swa_utils.AveragedModel),
    averaged_model_exponential=average(
        lambda model: swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    ),
    averaged_model_by_parameter=average(
        lambda model: swa_utils.AveragedModel(model, avg_fn=lambda mean, p, count: 0.9 * mean + 0.1 * p)
    ),
    optimizer_that_counts_in_its_group=training(linear, make_optimizer=Counting),
    optimizer_that_counts_in_its_state=training(linear, make_optimizer=CountingInState),
    optimizer_that_averages_its_rate=training(linear, make_optimizer=LaProp),
    optimizer_that_averages_a_rate_on_schedule=schedule(
        lambda o: schedules.ExponentialLR(o, 0.9), make_optimizer=LaProp
    ),
    optimizer_of_several_groups=training(
        linear, make_optimizer=lambda ps: torch.optim.Adam([{"params": [p], "lr": 0.1} for p in ps])
    ),
)


@pytest.mark.parametrize("make", scene.parameters)
def test_is_replayed(make: Callable[[str], Scene]) -> None:
    check_replays(make)


def test_lookahead_is_replayed_in_its_rhythm() -> None:
    step, replays = check_right(training(linear, make_optimizer=Lookahead), num_after=24)
    assert replays[-1] >= 8, step.explain()


# They read a value on the device themselves: right, and said to be the reason.
READS: dict[str, Callable[[str], Scene]] = {
    "averaged model with its count on the device": average(
        lambda model: swa_utils.AveragedModel(model, device=next(model.parameters()).device)
    ),
    "batch norm that averages": training(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(3, momentum=None))
    ),
    "random slopes": training(lambda: nn.Sequential(nn.Linear(4, 4), nn.RReLU())),
}


@pytest.mark.parametrize("kind", READS)
def test_module_that_reads_a_value_is_right_and_says_so(kind: str) -> None:
    step, replays = check_right(READS[kind])
    assert replays[-1] or "waits for a value" in step.explain() or "and then changes it" in step.explain()


def test_state_of_an_optimizer_that_is_loaded_onto_the_device() -> None:
    def run(device: str) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        model = linear().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            descend(loss, optimizer)
            return loss.detach()

        call = captured(step) if device == "lazy" else step
        x = torch.linspace(-1, 1, 8).view(2, 4)
        losses = [call(x) for _ in range(6)]
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        losses += [call(x) for _ in range(3)]
        file.seek(0)
        loaded = torch.load(file, map_location=device)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        if device == "lazy":
            assert call.num_replayed >= 5, call.explain()
        num_replayed = call.num_replayed if device == "lazy" else 0
        losses += [call(x) for _ in range(8)]
        assert device == "cpu" or call.num_replayed >= num_replayed + 4, call.explain()
        return [loss.item() for loss in losses], call

    assert run("lazy")[0] == run("cpu")[0]
