"""`torch.amp.GradScaler` on the lazy device: scale, growth and skipped updates are eager's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lazystep

from ..helpers import count
from .training import PRECISIONS, WORKLOADS, Training, check_same, same, train

NUM_STEPS = 15
OVERFLOWS = (0, 1, 5, 9)
# A first step that overflows leaves torch's fused SGD with uninitialized momentum, in eager as well.
LATER_OVERFLOWS = (3, 5, 9)

optim = torch.optim
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "Adam fused, amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "Adagrad fused": lambda p: optim.Adagrad(p, lr=0.01, fused=True),
    "Adadelta": optim.Adadelta,
    "Adafactor": optim.Adafactor,
    "Adagrad": lambda p: optim.Adagrad(p, lr_decay=0.1),
    "Adam": lambda p: optim.Adam(p, lr=torch.tensor(0.01)),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AdamW foreach, amsgrad": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True, maximize=True, foreach=True),
    "Adamax": optim.Adamax,
    "ASGD": lambda p: optim.ASGD(p, t0=3),
    "Muon": lambda p: optim.Muon([one for one in p if one.dim() == 2]),
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Rprop": optim.Rprop,
}
# The parameters that Muon leaves out keep their gradients, so clipping takes them, too.
CLIPPED = ("SGD with momentum", "AdamW fused", "AdamW", "NAdam")


def trained(device: str, name: str, *, clip: bool, captured: bool = False, scaler_device: str = "") -> Any:
    scaler = torch.amp.GradScaler(scaler_device or device, init_scale=1024.0, growth_interval=3)
    precision = PRECISIONS["autocast to float16"]
    training = Training(WORKLOADS["mlp"], device, precision, OPTIMIZERS[name], scaler, clip)
    return train(
        training,
        NUM_STEPS,
        captured=captured,
        overflows=LATER_OVERFLOWS if name == "SGD fused" else OVERFLOWS,
    )


@pytest.mark.parametrize("captured", [False, True], ids=["plain", "captured"])
@pytest.mark.parametrize(
    ("name", "clip"), [*((name, False) for name in OPTIMIZERS), *((name, True) for name in CLIPPED)]
)
def test_steps_that_overflow_equal_eager_bitwise(name: str, clip: bool, captured: bool) -> None:
    want = trained("cpu", name, clip=clip)
    assert want.scaler["_growth_tracker"] != NUM_STEPS % 3, "no step has overflowed"
    with warnings.catch_warnings():
        # The flag is read in steps that make state.
        warnings.filterwarnings("ignore", ".*it waits for a value", lazystep.LazyStepWarning)
        got = trained("lazy", name, clip=clip, captured=captured, scaler_device="cpu" if clip else "lazy")
    check_same(want, got)
    if captured:
        assert got.step.num_replayed >= 8, got.step.explain()


def test_every_optimizer_of_torch_is_here() -> None:
    classes = {name for name, value in vars(optim).items() if isinstance(value, type)}
    # Eager's scaler takes no closure, as LBFGS needs one, and SparseAdam takes sparse gradients only.
    known = {name.partition(" ")[0] for name in OPTIMIZERS} | {"Optimizer", "LBFGS", "SparseAdam"}
    assert classes == known


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_one_program_without_a_synchronization(name: str) -> None:
    scaler = torch.amp.GradScaler("lazy", init_scale=1024.0, growth_interval=3)
    training = Training(
        WORKLOADS["mlp"], "lazy", PRECISIONS["autocast to bfloat16"], OPTIMIZERS[name], scaler
    )
    x, y = training.make_batch()

    def steps(number: int, blow_up: float) -> None:
        for _ in range(number):
            training.step(x.to("lazy"), y.to("lazy"), torch.tensor(blow_up).to("lazy"))
            lazystep.mark_step()

    steps(3, 1.0)  # the first makes state, the second moves the counts
    lazystep.wait_device_ops()
    lazystep.metrics.reset()
    steps(4, 1.0)
    steps(2, float("inf"))
    lazystep.wait_device_ops()
    assert count("synchronizations") == 0
    assert count("programs_executed") == 6
    assert count("cache_misses") == 0


# -- what happens around the steps ----------------------------------------------------------------

INF = float("inf")


class Loop:
    """A small model under a scaler, step by step."""

    def __init__(self, device: str, captured: bool, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.device = device
        self.is_captured = captured and device == "lazy"
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
        self.optimizer = make(self.model.parameters())
        self.scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=3)
        self.step: Any = lazystep.step(self.one, audit_every=0) if self.is_captured else self.one
        self.generator = torch.Generator().manual_seed(1)

    def batch(self) -> torch.Tensor:
        return torch.randn(4, 6, generator=self.generator).to(self.device)

    def one(self, x: torch.Tensor, blow_up: torch.Tensor) -> None:
        with torch.autocast(self.device, torch.float16):
            loss = self.model(x).float().square().mean() * blow_up
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def run(self, *blow_ups: float) -> None:
        for blow_up in blow_ups:
            self.step(self.batch(), torch.tensor(float(blow_up)).to(self.device))
            if self.device == "lazy" and not self.is_captured:
                lazystep.mark_step()

    def run_without_scaler(self, number: int) -> None:
        for _ in range(number):
            self.model(self.batch()).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.device == "lazy":
                lazystep.mark_step()


def without_a_scaler_in_between(loop: Loop) -> Any:
    loop.run(1, 1, INF, 1)
    before = count("synchronizations")
    loop.run_without_scaler(3)
    assert count("synchronizations") == before, "the counts are on the device, and stay there"
    loop.run(1, INF, 1)


def under_a_schedule(loop: Loop) -> Any:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, 12)
    for number in range(12):
        loop.run(INF if number in (0, 5, 9) else 1)
        loop.optimizer.param_groups[0]["weight_decay"] = 0.01 * number
        schedule.step()
    if loop.is_captured:
        assert loop.step.num_replayed >= 5, loop.step.explain()


def with_state_that_is_loaded(loop: Loop) -> Any:
    loop.run(1, 1, INF, 1)
    saved = copy.deepcopy(loop.optimizer.state_dict())
    loop.run(1, INF)
    loop.optimizer.load_state_dict(saved)
    loop.run(INF, 1, 1)


def with_overflows_alone(loop: Loop) -> Any:
    loop.run(INF, INF, INF)
    assert not loop.optimizer.state  # a skipped step makes no state


def with_a_second_group(loop: Loop) -> Any:
    loop.run(1, 1, INF, 1)
    torch.manual_seed(2)
    loop.model.append(nn.Linear(3, 2).to(loop.device))
    loop.optimizer.add_param_group({"params": list(loop.model[-1].parameters()), "lr": 0.1})
    loop.run(INF, 1, 1, INF, 1)


def with_counts_that_are_read(loop: Loop) -> Any:
    found = []
    for blow_up in (1, 1, INF, 1, INF, 1):
        loop.run(blow_up)
        found.append([float(state["step"]) for state in loop.optimizer.state.values()])
    return found


def with_parameters_that_thaw(loop: Loop) -> Any:
    """The counts of the others are on the device when a parameter gets its first gradient."""
    frozen = loop.model[2].bias, loop.model[0].weight
    for parameter in frozen:
        parameter.requires_grad_(False)
    loop.run(INF, 1, 1, 1)
    frozen[0].requires_grad_(True)
    loop.run(1, INF, 1)
    frozen[1].requires_grad_(True)
    loop.run_without_scaler(2)
    loop.run(1, INF, 1, 1)
    frozen[0].requires_grad_(False)
    loop.run(1, INF, 1)


AROUND = (
    with_parameters_that_thaw,
    without_a_scaler_in_between,
    under_a_schedule,
    with_state_that_is_loaded,
    with_overflows_alone,
    with_a_second_group,
    with_counts_that_are_read,
)


def state_of(loop: Loop) -> list[Any]:
    states = [list(state.values()) for state in loop.optimizer.state.values()]
    tensors = [*loop.model.parameters(), *(value for state in states for value in state)]
    return [t.detach().cpu() if isinstance(t, torch.Tensor) else t for t in tensors]


@pytest.mark.filterwarnings("ignore:.*it waits for a value", "ignore:.*before .optimizer.step")
@pytest.mark.parametrize("captured", [False, True], ids=["plain", "captured"])
@pytest.mark.parametrize("run", AROUND, ids=lambda run: run.__name__)
def test_loop_equals_eager_bitwise(run: Callable[[Loop], Any], captured: bool) -> None:
    loops = [Loop(device, captured, optim.NAdam) for device in ("cpu", "lazy")]
    want, got = map(run, loops)
    assert want == got
    states = [state_of(loop) for loop in loops]
    assert len(states[0]) == len(states[1])
    assert all(map(same, *states))
    assert loops[0].scaler.state_dict() == loops[1].scaler.state_dict()


class Counting(torch.optim.Optimizer):
    """Keeps its count on the host, as an int."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                parameter.sub_(parameter.grad * (group["lr"] / state["count"]))


def hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer = optim.Adam(parameters, lr=0.01)
    optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.param_groups[0].update(eps=1e-6))
    return optimizer


@pytest.mark.parametrize("make", [Counting, hooked], ids=["others' optimizer", "hook"])
def test_flag_is_read_where_the_host_has_to_know(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    loops = [Loop(device, False, make) for device in ("cpu", "lazy")]
    lazystep.metrics.reset()
    for loop in loops:
        loop.run(1, 1, INF, 1, INF)
    assert count("synchronizations") == 5
    states = [state_of(loop) for loop in loops]
    assert all(map(same, *states))


def test_option_that_no_program_can_hold_is_refused() -> None:
    loop = Loop("lazy", False, lambda p: optim.SGD(p, lr=0.1))
    loop.run(1)
    loop.optimizer.param_groups[0]["weight_decay"] = 1j
    with pytest.raises(lazystep.UnsupportedError, match="sgd under a GradScaler"):
        loop.run(1)
