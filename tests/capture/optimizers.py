"""Every optimizer of the package pytorch-optimizer: how it is made, and a training with it on a device."""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
import pytorch_optimizer as package
import torch
from pytorch_optimizer.optimizer.utils.offload import CPUOffloadOptimizer
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel

import lazystep

NUM_STEPS = 15
NUM_JUDGED = 6  # a form is replayed if the last calls are, through two periods of everything that has one
PERIOD = 3  # of Lookahead, and of the optimizers that do something every so many steps
PLAIN, SCHEDULE, LOOKAHEAD, AVERAGE = "plain", "with a schedule", "inside Lookahead", "with AveragedModel"
NAMED_LOOKAHEAD = "inside Lookahead, where the step can reach both"

# -- models: an input has 4 x 4 numbers, an output 4 -----------------------------------------------------


class Net(nn.Module):
    """A convolution, a norm and a linear layer, with their biases."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.conv(x).tanh().flatten(1))
        return torch.as_tensor(self.linear(hidden))


def make_linear() -> nn.Module:
    """Without a convolution, whose weight has four dimensions."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.LayerNorm(4))


def make_matrices() -> nn.Module:
    """A pair of matrices, which is also what LoRA trains."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False), nn.Linear(3, 4, bias=False))


def make_half() -> nn.Module:
    return Net().bfloat16()


# -- making an optimizer ---------------------------------------------------------------------------------

Kind = Callable[..., Any]
Options = Mapping[str, Any]


def of_parameters(kind: Kind, model: nn.Module, options: Options) -> Any:
    return kind(model.parameters(), **options)


def of_model(kind: Kind, model: nn.Module, options: Options) -> Any:
    return kind(model, **options)


def of_model_and_parameters(kind: Kind, model: nn.Module, options: Options) -> Any:
    return kind(model, model.parameters(), **options)


def around_adamw(kind: Kind, model: nn.Module, options: Options) -> Any:
    return kind(torch.optim.AdamW(model.parameters(), lr=1e-2), **options)


def of_matrices_and_others(key: str, value: Any, **more: Any) -> Callable[[Kind, nn.Module, Options], Any]:
    """Two groups of parameters: one for matrices, with an entry that says so, and one for the rest."""

    def make(kind: Kind, model: nn.Module, options: Options) -> Any:
        parameters = list(model.parameters())
        matrices = [p for p in parameters if p.dim() >= 2]
        others = [p for p in parameters if p.dim() < 2]
        other_entry = {key: False} if isinstance(value, bool) else {}
        return kind([{"params": matrices, key: value, **more}, {"params": others, **other_entry}], **options)

    return make


def make_gsam(kind: Kind, model: nn.Module, options: Options) -> Any:
    """Its radius follows the learning rate of a schedule."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = CosineAnnealingLR(optimizer, NUM_STEPS)
    radius = package.ProportionScheduler(schedule, max_lr=0.1, max_value=0.2, min_value=0.1)
    return kind(model.parameters(), optimizer, model, radius, **options)


# -- a schedule: the function that is called between two steps -------------------------------------------


def cosine(optimizer: Any) -> Callable[[], object]:
    if not hasattr(optimizer, "param_groups"):  # SafeFP16Optimizer
        optimizer = optimizer.optimizer
    if any("lr" not in group for group in optimizer.param_groups):
        raise TypeError("it has no learning rate")
    return CosineAnnealingLR(optimizer, NUM_STEPS, eta_min=1e-4).step


def cosine_and_radius(optimizer: Any) -> Callable[[], object]:
    def step() -> None:
        optimizer.rho_scheduler.lr_scheduler.step()
        optimizer.update_rho_t()

    return step


# -- a step with an optimizer ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Trainee:
    """A model and the optimizer whose `step` is called.

    `inner` is the optimizer of the row, where the step names it: the same one, or the one inside Lookahead.
    """

    model: nn.Module
    optimizer: Any
    inner: Any

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse_loss(self.model(x), y)


class Update(Protocol):
    def __call__(self, trainee: Trainee, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor: ...


def ordinary(trainee: Trainee, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = trainee.loss(x, y)
    loss.backward()
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    return loss


def with_graph(trainee: Trainee, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The optimizer differentiates the gradients."""
    loss = trainee.loss(x, y)
    loss.backward(create_graph=True)
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    return loss


def with_loss(trainee: Trainee, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The optimizer asks for the loss."""
    loss = trainee.loss(x, y)
    loss.backward()
    trainee.optimizer.step(lambda: loss)
    trainee.optimizer.zero_grad()
    return loss


def with_closure(trainee: Trainee, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The optimizer computes loss and gradients as often as it likes."""

    def closure() -> torch.Tensor:
        trainee.optimizer.zero_grad()
        loss = trainee.loss(x, y)
        loss.backward()
        return loss

    return torch.as_tensor(trainee.optimizer.step(closure))


def with_second_pass(trainee: Trainee, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Sharpness-aware: the optimizer computes the gradients again, somewhere else."""

    def closure() -> torch.Tensor:
        trainee.optimizer.zero_grad()
        loss = trainee.loss(x, y)
        loss.backward()
        return loss

    loss = closure()
    trainee.optimizer.step(closure)
    trainee.optimizer.zero_grad()
    return loss


def with_outputs(trainee: Trainee, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The optimizer keeps what computes outputs and loss."""
    trainee.inner.set_closure(mse_loss, x, y)
    _, loss = trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    return torch.as_tensor(loss)


def fused(trainee: Trainee, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The updates happen in the hooks of the backward pass."""
    loss = trainee.loss(x, y)
    trainee.inner.fused_backward(loss, trainee.inner.param_groups[0]["lr"])
    if trainee.optimizer is not trainee.inner:  # inside Lookahead
        trainee.optimizer.step()
    return loss


def with_two_tasks(trainee: Trainee, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    outputs = trainee.model(x)
    loss = mse_loss(outputs, y)
    trainee.inner.pc_backward([loss, outputs.abs().mean()])
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    return loss


def with_loss_scale(trainee: Trainee, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = mse_loss(trainee.model(x.bfloat16()), y.bfloat16())
    trainee.inner.backward(loss)
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    return loss


# -- rules -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """How an optimizer is made and used, if not as `kind(model.parameters())` and in an ordinary step."""

    options: Options = field(default_factory=dict)
    make: Callable[[Kind, nn.Module, Options], Any] = of_parameters
    update: Update = ordinary
    model: Callable[[], nn.Module] = Net
    schedule: Callable[[Any], Callable[[], object]] = cosine
    names_inner: bool = False  # the step calls a method that Lookahead does not have


_BASE = {"base_optimizer": torch.optim.SGD, "lr": 0.1}
_MUON = Rule(make=of_matrices_and_others("use_muon", True))
_LOW_RANK = Rule(
    {"lr": 0.1},
    make=of_matrices_and_others("rank", 2, update_proj_gap=PERIOD, scale=1.0, projection_type="std"),
)

RULES: dict[str, Rule] = {
    "APOLLO": Rule(
        {"lr": 0.1},
        make=of_matrices_and_others("rank", 2, update_proj_gap=PERIOD, scale=1.0, projection_type="random"),
    ),
    "AdaGC": Rule({"warmup_steps": 4}),
    "AdaGO": _MUON,
    "AdaHessian": Rule(update=with_graph),
    "AdaLOMO": Rule(make=of_model, update=fused, model=make_linear, names_inner=True),
    "AdaMuon": _MUON,
    "AdaShift": Rule({"keep_num": PERIOD}),
    "AdamMini": Rule({"lr": 1e-2}, make=of_model),
    "Alice": Rule({"update_interval": PERIOD, "rank": 2, "leading_basis": 1}),
    "AliG": Rule(update=with_loss),
    "ApolloDQN": Rule({"warmup_steps": 4}),
    "BSAM": Rule({"num_data": 100}, update=with_second_pass),
    "Conda": Rule({"lr": 0.1, "update_proj_gap": PERIOD}),
    "DASH": Rule({"precondition_frequency": PERIOD}),
    "DistributedMuon": _MUON,
    "Fira": _LOW_RANK,
    "FriendlySAM": Rule(_BASE, update=with_second_pass),
    "GSAM": Rule(make=make_gsam, update=with_outputs, schedule=cosine_and_radius, names_inner=True),
    "GaLore": _LOW_RANK,
    "Kron": Rule({"balance_prob": 0.5}),
    "LBFGS": Rule({"max_iter": 2}, update=with_closure),
    "LOMO": Rule(make=of_model, update=fused, names_inner=True),
    "LoRARite": Rule(model=make_matrices),
    "LookSAM": Rule({**_BASE, "k": PERIOD}, update=with_second_pass),
    "Lookahead": Rule({"k": PERIOD}, make=around_adamw),
    "Magma": Rule(make=around_adamw),
    "Muon": _MUON,
    "MuonClip": _MUON,
    "NorMuon": _MUON,
    "OrthoGrad": Rule(make=around_adamw),
    "PCGrad": Rule(make=around_adamw, update=with_two_tasks, names_inner=True),
    "Ranger": Rule({"k": PERIOD}),
    "Ranger21": Rule({"num_iterations": NUM_STEPS}),
    "SAM": Rule(_BASE, update=with_second_pass),
    "SOAP": Rule({"precondition_frequency": PERIOD}),
    "SPAM": Rule({"update_proj_gap": PERIOD, "warmup_epoch": 2}),
    "SPlus": Rule({"inverse_steps": PERIOD}),
    "SaRA": Rule({"lr": 1e-2, "threshold": 0.2}),
    "SafeFP16Optimizer": Rule(make=around_adamw, update=with_loss_scale, model=make_half, names_inner=True),
    "ScalableShampoo": Rule({"start_preconditioning_step": 4, "preconditioning_compute_steps": PERIOD}),
    "ScheduleFreeWrapper": Rule(make=around_adamw),
    "Shampoo": Rule({"preconditioning_compute_steps": PERIOD}),
    "SophiaH": Rule({"update_period": PERIOD}, update=with_graph),
    "SpectralSphere": Rule({"solver_max_iterations": 4, "power_iteration_steps": 2}, model=make_matrices),
    "StableSPAM": Rule({"update_proj_gap": PERIOD}),
    "TRAC": Rule(make=around_adamw),
    "WSAM": Rule(_BASE, make=of_model_and_parameters, update=with_second_pass),
}


@cache
def optimizers() -> dict[str, Kind]:
    """All optimizers of the package by name, also those that wrap another one."""
    found = {kind for name in dir(package) if inspect.isclass(kind := getattr(package, name))}
    kinds: dict[str, Kind] = {kind.__name__: kind for kind in found if issubclass(kind, Optimizer)}
    kinds["CPUOffloadOptimizer"] = CPUOffloadOptimizer  # not a subclass
    return dict(sorted(kinds.items(), key=lambda item: item[0].lower()))


# -- a training ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """What is compared of a training, the step function, and which of its calls were replayed."""

    losses: list[Any]
    values: dict[str, Any]  # parameters, buffers and the optimizer's state, by their names
    step: Any
    replayed: list[bool]


def train(name: str, form: str, device: str) -> Training:
    """Some steps with an optimizer: captured on the lazy device, as a plain function elsewhere."""
    rule = RULES.get(name, Rule())
    random.seed(0)  # some optimizers draw from it, or from NumPy
    np.random.seed(0)
    torch.manual_seed(0)
    model = rule.model().to(device)
    inner = rule.make(optimizers()[name], model, rule.options)
    optimizer = package.Lookahead(inner, k=PERIOD) if form in (LOOKAHEAD, NAMED_LOOKAHEAD) else inner
    if hasattr(inner, "train"):  # schedule-free
        inner.train()
    trainee = Trainee(model, optimizer, inner if rule.names_inner or form == NAMED_LOOKAHEAD else None)
    update = rule.update
    average = AveragedModel(model, device=torch.device(device)) if form == AVERAGE else None
    step_schedule = rule.schedule(optimizer) if form == SCHEDULE else lambda: None

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = update(trainee, x, y)
        if average is not None:
            average.update_parameters(model)
        return loss.detach()

    function: Any = lazystep.step(audit_every=0)(step) if device == "lazy" else step
    batches = torch.Generator().manual_seed(1)
    losses = []
    replayed = []
    for _ in range(NUM_STEPS):
        num_before = getattr(function, "num_replayed", 0)
        x, y = torch.randn(3, 1, 4, 4, generator=batches), torch.randn(3, 4, generator=batches)
        losses.append(function(x, y))
        replayed.append(getattr(function, "num_replayed", 0) > num_before)
        step_schedule()
    values = dict(named_values("model", model.state_dict()))
    values |= named_values("optimizer", optimizer.state_dict())
    if average is not None:
        values |= named_values("average", average.state_dict())
    return Training([loss.item() for loss in losses], values, function, replayed)


def named_values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers in nested containers and objects, the tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        yield name, value.detach().cpu()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_values(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from named_values(f"{name}[{number}]", item)
    elif isinstance(value, bool | int | float | str | None):
        yield name, value
    elif type(value).__module__.startswith("pytorch_optimizer."):  # such as the projector of GaLore
        yield from named_values(name, vars(value))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def first_difference(eager: Training, lazy: Training) -> str:
    """Where the lazy training first departs from eager's, or nothing."""
    for call, (want, got) in enumerate(zip(eager.losses, lazy.losses, strict=True), 1):
        if want != got:
            how = "replayed" if lazy.replayed[call - 1] else "recorded"
            return f"the loss of call {call}, which was {how}, is {got!r} instead of {want!r}"
    if eager.values.keys() != lazy.values.keys():
        return f"only one of them has {sorted(eager.values.keys() ^ lazy.values.keys())}"
    for name, want in eager.values.items():
        got = lazy.values[name]
        if not same(want, got):
            kinds = "" if type(want) is type(got) else f" ({type(got).__name__}, {type(want).__name__})"
            return f"{name} is {got!r} instead of {want!r}{kinds}"
    return ""


@contextlib.contextmanager
def known_warnings() -> Iterator[None]:
    """Without warnings of the package and of torch that are of no interest here, and of recorded steps."""
    with warnings.catch_warnings():
        for category, message in (
            (lazystep.LazyStepWarning, ".* is recorded in each call"),
            (ImportWarning, "you need to install `transformers`"),
            (UserWarning, r"Using backward\(\) with create_graph=True"),
            (UserWarning, r"Detected call of `lr_scheduler.step\(\)` before"),  # LOMO has no `step`
        ):
            warnings.filterwarnings("ignore", message, category)
        yield


# -- what came of it -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What came of an optimizer in a form.

    `verdict`: replayed, in part, recorded; "-" where eager can't do it, or an error that only the lazy device
    raises. `reason`: why it is not replayed. `difference` from eager: a bug, unless it is empty.
    """

    verdict: str
    reason: str = ""
    difference: str = ""


@cache
def outcome(name: str, form: str) -> Outcome:
    """Train in eager and in captured steps, once, and compare."""
    # Recorded calls collect garbage: not each time through all that earlier trainings have left.
    gc.collect()
    gc.freeze()
    with known_warnings():
        try:
            eager = train(name, form, "cpu")
        except Exception as error:
            # Builds with and without CUDA say in other words that there is none.
            reason = "needs CUDA" if "CUDA" in str(error) else shortened(described(error))
            return Outcome("-", f"not in eager: {reason}")
        if not all(map(math.isfinite, eager.losses)):
            raise ArithmeticError(f"{name} diverges: nothing would be compared")
        try:
            lazy = train(name, form, "lazy")
        except Exception as error:
            return Outcome("error", shortened(described(error)), described(error))
    last = lazy.replayed[-NUM_JUDGED:]
    verdict = "replayed" if all(last) else "in part" if any(last) else "recorded"
    reason = "" if verdict == "replayed" else reason_of(lazy.step.explain())
    return Outcome(verdict, reason, first_difference(eager, lazy))


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def reason_of(explanation: str) -> str:
    """The reasons in the text of `explain()`, without advice: why not at all, else why not always."""
    for kinds in ("not replayed|recorded, not captured", "captured anew", "recorded, not captured yet"):
        found = re.findall(rf"^ +(?:{kinds}): ([^\n]*)", explanation, re.MULTILINE)
        reasons = dict.fromkeys(shortened(one) for one in found if "this was the first" not in one)
        if reasons:
            return ", and ".join(reasons)
    return "no reason is given"


def shortened(text: str) -> str:
    """The first part of a message: no advice, no numbers, and of a place in the code the file."""
    text = re.split(r"; |: call backward|, which a replay|, please ", text)[0]
    text = re.sub(r"(?:/[^ :]*/)?(\w+\.py):\d+(?: in [\w<>.]+)?", r"\1", text)
    text = re.sub(r"(?<![\w'])-?\d[\d.e+-]*(?![\w'])", "…", text)
    return text.replace("|", "/").strip().rstrip(".")
