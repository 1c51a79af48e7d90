"""PyTorch's operators, modules and optimizers as native libraries: forward and backward in one program.

Building a library takes seconds, whatever is in it. So a dozen operators are recorded into one program,
each on its own sample, and each one's results are compared with eager's; a dozen that does not
build is halved until the culprit is found. A few stand for all of them here; `make nightly`
takes every one. (`test_lowering` compares the uncompiled graphs of all operators.)
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import lazystep
from lazystep import config, metrics
from lazystep.execute.compare import TOLERANCES
from tests.helpers import nightly

from .compare import Outcome, seed, tensors_in
from .conftest import Counts
from .modules import MODULES, cases
from .test_lowering import COMPLEX, NOT_LOWERED, WITH_A_SAMPLE, one_sample
from .test_ops import OPS, UNINITIALIZED, call
from .test_optims import OPTIMS, implementations, make_net

pytestmark = pytest.mark.timeout(1800)
A_FEW_OPS = (
    *("addcdiv", "cumsum", "linalg.solve", "nn.functional.batch_norm", "nn.functional.conv2d"),
    *("nn.functional.dropout", "scatter_add", "sort"),
)
A_FEW_THAT_STAY = (COMPLEX[0], "resize_")
A_FEW_MODULES = ("nn.BatchNorm2d", "nn.Embedding", "nn.GRU", "nn.LSTM", "nn.LayerNorm")
A_FEW_OPTIMS = (("AdamW", "foreach"), ("Adam", "fused"))
NUM_OPTIM_STEPS = 6
NUM_RADAM_STEPS = 12  # its program changes with the sixth
# Operators whose programs stay on the reference executable, and part of the reason.
STAYS = {
    **NOT_LOWERED,
    # torch's proxy executor and its code generator do not agree on this op's arguments: found by the check.
    "hash_tensor": "its library failed: Mismatch between ints consumed",
    # Custom ops in Python, though torch's own.
    "nn.functional.linear_cross_entropy.chunked": "is not one of torch's own ops",
    "nn.functional.linear_cross_entropy.chunked_none": "is not one of torch's own ops",
}

# One recorded part of a program: its name, and the function that records it and returns its results.
Part = tuple[str, Callable[[str], Outcome]]


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch, runtime: Any) -> Iterator[None]:
    """Wait for each library. torch.testing ends a step at every random operator: here it must not."""
    monkeypatch.setattr(torch, "_lazy", types.SimpleNamespace(mark_step=lambda: None), raising=False)
    runtime.programs.clear()
    with config.override(tier="native", max_libraries=100_000):
        yield


def dozens(names: Sequence[Any], size: int) -> list[Any]:
    """Names in groups of a size, each with an id that says from where to where."""
    groups = [tuple(names[start : start + size]) for start in range(0, len(names), size)]
    return [
        pytest.param(group, id=f"{group[0]} to {group[-1]}", marks=pytest.mark.nightly) for group in groups
    ]


# -- operators -------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [A_FEW_OPS, *dozens([n for n in WITH_A_SAMPLE if n not in STAYS], 12)])
def test_operators_as_a_library(names: tuple[str, ...], counts: Counts, runtime: Any) -> None:
    parts = [part for name in names for part in operator_parts(name)]
    check_natively(parts, counts, runtime)


@pytest.mark.parametrize("name", [*A_FEW_THAT_STAY, *nightly(n for n in STAYS if n not in A_FEW_THAT_STAY)])
def test_operator_that_stays_on_the_reference(name: str, counts: Counts, runtime: Any) -> None:
    (_, run), *_ = operator_parts(name)
    eager, lazy = run("cpu"), run("lazy")
    lazystep.mark_step(wait=True)
    if eager.error is None:
        compare(name, eager, lazy)
    assert type(eager.error) is type(lazy.error)
    assert metrics.counter_value("native_executions") == 0
    assert any(STAYS[name] in reason for reason in reasons(runtime))
    counts.add("operators on reference")


def operator_parts(name: str) -> list[Part]:
    op = OPS[name]
    samples, grad = one_sample(op)
    return [(name, lambda device, s=s: call(op.op, s, device, grad=grad, barrier=False)) for s in samples]


# -- modules ---------------------------------------------------------------------------------------


NATIVE_MODULES = [name for name, info in MODULES.items() if torch.float32 in info.dtypes]


@pytest.mark.parametrize("names", [A_FEW_MODULES, *dozens(NATIVE_MODULES, 8)])
@pytest.mark.parametrize("mode", ["train", *nightly(["eval"])])
def test_modules_as_a_library(names: tuple[str, ...], mode: str, counts: Counts, runtime: Any) -> None:
    check_natively([part for name in names for part in module_parts(name, mode)], counts, runtime)


def module_parts(name: str, mode: str) -> list[Part]:
    return [
        (f"{name} {mode}", lambda device, case=case: Outcome(case.prepare(device), device, barrier=False))
        for case in cases(MODULES[name], torch.float32, mode == "train", 1)
    ]


# -- what both share -------------------------------------------------------------------------------


def check_natively(parts: Sequence[Part], counts: Counts, runtime: Any) -> None:
    """Record the parts as one program, twice: the second run is a library's. Compare each with eager."""
    eager = {name: run("cpu") for name, run in parts}
    # What eager refuses is no part of a library; the reference suites compare the errors.
    parts = [part for part in parts if eager[part[0]].error is None]
    before = metrics.counter_value("native_executions")
    for _ in range(2):
        lazy = {name: run("lazy") for name, run in parts}
        lazystep.mark_step(wait=True)
    stays = [reason for reason in reasons(runtime) if not any(kind in reason for kind in STAYS.values())]
    if stays and len(parts) > 1:
        half = len(parts) // 2
        runtime.programs.clear()
        runtime.history._programs.clear()
        check_natively(parts[:half], counts, runtime)
        check_natively(parts[half:], counts, runtime)
        return
    assert not stays, f"{parts[0][0]}: {stays[0]}"
    assert metrics.counter_value("native_mismatches") == 0
    for name, _ in parts:
        assert lazy[name].error is None, f"{name}: {lazy[name].error!r}"
        compare(name, eager[name], lazy[name])
        counts.add("in a library")
    is_native = metrics.counter_value("native_executions") > before
    assert is_native or not runtime.history._programs, "nothing ran natively"


def reasons(runtime: Any) -> list[str]:
    """Why programs have stayed on the reference."""
    return [one.reason for one in runtime.history._programs if one.reason]


def compare(name: str, eager: Outcome, lazy: Outcome) -> None:
    assert torch.equal(eager.rng_state, lazy.rng_state), f"{name}: other random numbers"
    wanted, given = tensors_in(eager.tree), tensors_in(lazy.tree)
    for number, (want, got) in enumerate(zip(wanted, given, strict=True)):
        try:
            assert_close(got.detach().cpu(), want.detach(), has_values=name not in UNINITIALIZED)
        except AssertionError as error:
            pytest.fail(f"{name}, result {number}: {error}", pytrace=False)


def assert_close(
    got: torch.Tensor,
    want: torch.Tensor,
    *,
    has_values: bool = True,
    computed_in: torch.dtype = torch.float64,
) -> None:
    assert (got.dtype, got.shape, got.layout) == (want.dtype, want.shape, want.layout)
    if not has_values:
        return
    if want.layout is not torch.strided:
        got, want = got.to_dense(), want.to_dense()
    if not want.dtype.is_floating_point and not want.dtype.is_complex:
        assert torch.equal(got, want)
        return
    scale = float(want[want.isfinite()].abs().max()) if want.isfinite().any() else 1.0
    tolerance = max(TOLERANCES.get(want.dtype, 1e-4), TOLERANCES[computed_in])
    atol = tolerance * max(scale, 0.1)  # samples are about one: less is rounding
    torch.testing.assert_close(got, want, rtol=0, atol=atol, equal_nan=True)


# -- optimizers ------------------------------------------------------------------------------------


def optim_cases() -> list[Any]:
    """Each optimizer in each form; complex and sparse parameters never leave the reference."""
    found = [
        (name, kind)
        for name, info in OPTIMS.items()
        for kind in implementations(info)
        if kind in ("loop", "foreach", "fused") and name not in ("LBFGS", "SparseAdam")
    ]
    return [*A_FEW_OPTIMS, *nightly(case for case in found if case not in A_FEW_OPTIMS)]


@pytest.mark.parametrize("case", optim_cases(), ids="-".join)
def test_optimizer_as_a_library(case: tuple[str, str], counts: Counts, runtime: Any) -> None:
    """All configurations of the database side by side in one step."""
    name, kind = case
    info = OPTIMS[name]
    options = [{**g.kwargs, **implementations(info)[kind]} for g in info.optim_inputs_func(device="cpu")]
    expected, _ = train(name, kind, options, "cpu")
    with config.override(tier="auto", build_after=2):
        actual, num_native = train(name, kind, options, "lazy")
    assert metrics.counter_value("native_mismatches") == 0
    assert num_native >= 1, reasons(runtime)
    # Muon iterates in bfloat16.
    dtype = torch.bfloat16 if name == "Muon" else torch.float64
    for want, got in zip(tensors_in(expected), tensors_in(actual), strict=True):
        assert_close(got.detach().cpu(), want.detach(), computed_in=dtype)
    for _ in options:
        counts.add("optimizer configurations in a library")


def train(name: str, kind: str, options: Sequence[dict[str, Any]], device: str) -> tuple[Any, int]:
    """Losses, parameters and state after some steps, and how many of the steps ran natively."""
    seed()
    nets = [make_net(name, kind) for _ in options]
    x = torch.randn(10, 6).to(device)
    nets = [net.to(device) for net in nets]
    kind_of = OPTIMS[name].optim_cls
    pairs = zip(nets, options, strict=True)
    optimizers = [kind_of(net.parameters(), **copy.deepcopy(given)) for net, given in pairs]
    losses = []
    num_steps = NUM_RADAM_STEPS if name == "RAdam" else NUM_OPTIM_STEPS
    for number in range(num_steps):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        lazystep.mark_step()
        if number == num_steps - 3:
            lazystep.wait_for_compile()
    lazystep.wait_device_ops()
    state = [optimizer.state_dict() for optimizer in optimizers]
    results = losses, [list(net.parameters()) for net in nets], state
    return results, metrics.counter_value("native_executions")
