"""Ordinary steps: each is replayed, equals eager, and is replayed again after an ordinary change."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import io
import itertools
import logging
import os
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import swa_utils

import lazystep
from tests.helpers import descend

from .common import captured
from .scenes import Scene, Scenes, check_replays, check_right, check_right_or_refused

scene = Scenes()


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USERS_SCALE", "2.0")
    monkeypatch.delenv("USERS_OTHER", raising=False)


# -- what is named and not touched -----------------------------------------------------------------

history: list[Any] = []
UNTOUCHED: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "list": (list, lambda items: items.append(len(items))),
    "list of tensors": (lambda: [torch.ones(1)], lambda items: items.append(torch.ones(1))),
    "dict": (dict, lambda items: items.update({len(items): 1})),
    "set": (set, lambda items: items.add(len(items))),
    "deque": (lambda: collections.deque(maxlen=3), lambda items: items.append(1)),
    "many objects": (lambda: [[] for _ in range(51_000)], lambda items: items.append([1])),
    "iterator": (lambda: iter(range(99)), next),
    "generator": (lambda: (number for number in range(99)), next),
    "open file": (io.StringIO, lambda file: file.write("line")),
    "lock": (threading.Lock, lambda lock: None),
    "event": (threading.Event, lambda event: event.set()),
    "generator of numbers": (torch.Generator, lambda generator: torch.rand(1, generator=generator)),
    "object": (types.SimpleNamespace, lambda box: setattr(box, "last", object())),
    "array": (lambda: bytearray(4096), lambda array: array.__setitem__(0, (array[0] + 1) % 256)),
}


@pytest.mark.parametrize("kind", UNTOUCHED)
def test_what_is_named_and_never_touched_may_change(kind: str) -> None:
    make, change = UNTOUCHED[kind]

    def scene_of(device: str) -> Scene:
        named = make()
        options = types.SimpleNamespace(is_logging=False)

        def step(x: torch.Tensor) -> torch.Tensor:
            if options.is_logging:
                print(named)
            return x * 2

        def arguments(number: int) -> tuple[torch.Tensor]:
            change(named)
            return (torch.ones(3) * number,)

        return Scene(step, arguments=arguments)

    check_replays(scene_of)


def test_list_of_losses_that_the_function_names() -> None:
    history.clear()

    @lazystep.step(audit_every=0, fullgraph=True)
    def step(x: torch.Tensor, is_last: bool = False) -> torch.Tensor:
        return torch.stack(history).sum() if is_last else x * 2

    for number in range(6):
        history.append(step(torch.ones(1) * number))
    assert step.num_replayed == 4
    assert step(torch.ones(1), is_last=True).item() == 30


class LitModel(nn.Module):
    """As a LightningModule: attributes and methods around a `training_step` that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.trainer = types.SimpleNamespace(global_step=0, current_epoch=0, logged={}, callbacks=[])
        self.completed = 0
        self.last_batch: Any = None
        self.validation_outputs: list[Any] = []
        self.prefix = "train"

    def log(self, name: str, value: torch.Tensor) -> None:
        self.trainer.logged[f"{self.prefix}/{name}"] = value.detach()

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.layer(x).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, x: torch.Tensor) -> None:
        self.validation_outputs.append(self.layer(x))
        self.completed += 1

    def on_epoch_end(self) -> None:
        self.trainer.current_epoch += 1
        self.validation_outputs.clear()


@scene
def training_step_of_a_module_with_much_around(device: str) -> Scene:
    model = LitModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model.training_step(x)
        descend(loss, optimizer)
        return loss.detach()

    def arguments(number: int) -> tuple[torch.Tensor]:
        model.trainer.global_step = number
        model.completed += 1
        model.last_batch = {"number": number}
        model.validation_outputs.append(number)
        model.trainer.callbacks.append(lambda: number)
        return (torch.linspace(0, 1, 6).view(2, 3) + number,)

    return Scene(step, model.on_epoch_end, lambda: dict(model.trainer.logged), arguments)


@scene
def steps_completed_are_counted_inside(device: str) -> Scene:
    model = LitModel().to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        model.completed += 1
        model.trainer.global_step += 1
        return model.layer(x).detach()

    return Scene(step, kept=lambda: (model.completed, model.trainer.global_step))


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


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


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


# -- slices of data on the device ------------------------------------------------------------------

SLICES: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "rows": lambda data, n: data[2 * n : 2 * n + 2],
    "row": lambda data, n: data[n],
    "columns": lambda data, n: data[:, n : n + 2],
    "narrow": lambda data, n: data.narrow(0, n, 2),
    "select": lambda data, n: data.select(1, n),
    "every other": lambda data, n: data[n::2][:3],
    "chunk": lambda data, n: data.chunk(12)[n],
    "split": lambda data, n: data.split(2)[n],
    "unbind": lambda data, n: data.unbind(0)[n],
    "element": lambda data, n: data[n, n],
    "transposed": lambda data, n: data.t()[n],
    "diagonal": lambda data, n: data.diagonal(n)[:4],
    "strided": lambda data, n: data.as_strided((2, 2), (1, 3), n),
    "unfold": lambda data, n: data.view(-1).unfold(0, 4, 4)[n],
}


@pytest.mark.parametrize("kind", SLICES)
def test_slices_of_data_on_the_device_are_right(kind: str) -> None:
    data = torch.randn(24, 24)
    on_device = data.to("lazy")
    step = captured(lambda x, y: ((x * 2 + y).sum(), x + 1))
    for n in [*range(4)] * 3:
        want = SLICES[kind](data, n)
        total, more = step(SLICES[kind](on_device, n), SLICES[kind](on_device * 2, n))
        assert torch.equal(total.cpu(), (want * 2 + want * 2).sum())
        assert torch.equal(more.cpu(), want + 1)
    assert step.num_replayed >= 4, step.explain()  # each offset is a kind of its own


def test_epochs_over_data_on_the_device() -> None:
    data, targets = torch.randn(10, 4), torch.randn(10, 1)

    def run(device: str) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        model = linear().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, y = data.to(device), targets.to(device)

        def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            loss = (model(a) - b).square().mean()
            descend(loss, optimizer)
            return loss.detach()

        call = captured(step, fullgraph=True) if device == "lazy" else step
        losses = [call(x[i : i + 4], y[i : i + 4]) for _ in range(5) for i in range(0, 10, 4)]
        return [loss.item() for loss in losses], call

    losses, step = run("lazy")
    assert losses == run("cpu")[0]
    assert step.num_replayed >= 6, step.explain()


@pytest.mark.parametrize("kind", ["rows", "columns", "element"])
def test_slice_that_is_written_inside_is_written_where_it_is(kind: str) -> None:
    data = torch.arange(576.0).view(24, 24)
    on_device = data.to("lazy")

    @lazystep.step(audit_every=0)
    def step(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.sum()

    for n in [0, 1] * 4:
        want = SLICES[kind](data, n).mul_(2).sum()
        assert step(SLICES[kind](on_device, n)).item() == want.item()
        assert torch.equal(on_device.cpu(), data)
    assert step.num_replayed >= 4, step.explain()


def test_slice_that_the_step_takes_by_a_number_around_it() -> None:
    def make(device: str) -> Scene:
        data = torch.arange(24.0).view(8, 3).to(device)
        box = types.SimpleNamespace(position=0)
        return Scene(lambda x: x * data[box.position], lambda: setattr(box, "position", 5))

    check_replays(make)


# -- options ---------------------------------------------------------------------------------------


class Kind(enum.Enum):
    TWICE = 2
    THRICE = 3


@dataclasses.dataclass(frozen=True)
class Options:
    kind: Kind = Kind.TWICE
    shift: float = 0.5
    names: tuple[str, ...] = ("a", "b")


option = Scenes()


@option
def frozen_options(device: str) -> Scene:
    box = types.SimpleNamespace(options=Options())

    def step(x: torch.Tensor) -> torch.Tensor:
        options = box.options
        return x * options.kind.value + (options.shift if "a" in options.names else 0.0)

    return Scene(step, lambda: setattr(box, "options", Options(Kind.THRICE)))


@option
def variable_of_the_environment(device: str) -> Scene:
    os.environ["USERS_SCALE"] = "2.0"
    return Scene(
        lambda x: x * float(os.environ["USERS_SCALE"]), lambda: os.environ.update({"USERS_SCALE": "3.0"})
    )


@option
def variable_of_the_environment_by_getenv(device: str) -> Scene:
    os.environ.pop("USERS_OTHER", None)
    return Scene(
        lambda x: x * float(os.getenv("USERS_OTHER", "2.0")),
        lambda: os.environ.update({"USERS_OTHER": "3.0"}),
    )


@option
def logger(device: str) -> Scene:
    log = logging.getLogger("users")
    box = types.SimpleNamespace(scale=2.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        log.debug("scale %s", box.scale)
        if log.isEnabledFor(logging.DEBUG):
            x = x + 1
        return x * box.scale

    return Scene(step, lambda: setattr(box, "scale", 3.0))


@option
def iterators_inside(device: str) -> Scene:
    layers = [nn.Softmax(0), nn.Sigmoid(), nn.Tanh()]

    def step(x: torch.Tensor) -> torch.Tensor:
        for number, (layer, scale) in enumerate(zip(layers, itertools.count(1), strict=False)):
            x = layer(x) * scale + number
        return sum(map(lambda scale: x * scale, range(3)), x)  # noqa: C417

    return Scene(step, lambda: layers.reverse())


@option
def questions_of_torch(device: str) -> Scene:
    box = types.SimpleNamespace(scale=2.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or torch.jit.is_scripting() or torch.jit.is_tracing():
            return x
        if torch.is_autocast_enabled("cpu") or not torch.is_grad_enabled():
            return x * 7
        return x * box.scale

    return Scene(step, lambda: setattr(box, "scale", 3.0))


@option
def profiled(device: str) -> Scene:
    box = types.SimpleNamespace(scale=2.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("forward"), torch.enable_grad():
            return x * box.scale

    return Scene(step, lambda: setattr(box, "scale", 3.0))


@pytest.mark.parametrize("make", option.parameters)
def test_options_are_compared_and_the_step_is_replayed(make: Callable[[str], Scene]) -> None:
    check_replays(make)


def equal_options_made_anew(device: str) -> Scene:
    box = types.SimpleNamespace(options=Options())

    def arguments(number: int) -> tuple[torch.Tensor]:
        box.options = copy.deepcopy(box.options)
        return (torch.ones(3) * number,)

    return Scene(
        lambda x: x * box.options.kind.value,
        lambda: setattr(box, "options", Options(Kind.THRICE)),
        arguments=arguments,
    )


def test_equal_options_made_anew_are_right_or_refused() -> None:
    check_right_or_refused(equal_options_made_anew)
