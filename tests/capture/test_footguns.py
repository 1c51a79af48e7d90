"""Surprises of other systems that capture functions: here each of them works, is noticed, or raises."""

from __future__ import annotations

import copy
import os
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import lazystep
from tests.helpers import count, descend, run_python

from .common import NUM_CALLS, captured


def test_list_of_tensors_is_not_frozen() -> None:
    total = captured(lambda xs: torch.stack(xs).sum())
    for number in range(NUM_CALLS):
        assert total([torch.full((2,), float(number)), torch.ones(2)]).item() == 2 * number + 2
    assert total([torch.ones(2)]).item() == 2  # another length is another capture
    assert total.num_replayed >= NUM_CALLS - 2


def test_output_is_never_overwritten_by_a_later_replay() -> None:
    double = captured(lambda x: x * 2)
    outputs = [double(torch.full((2,), float(n))) for n in range(NUM_CALLS)]
    assert [o[0].item() for o in outputs] == [2.0 * n for n in range(NUM_CALLS)]


def test_assignment_of_a_parameter_is_honoured() -> None:
    model = nn.Linear(2, 2, bias=False).to("lazy")
    forward = captured(lambda x: model(x).sum())
    for number in range(NUM_CALLS):
        with torch.no_grad():
            if number == 3:
                model.weight.data = torch.full((2, 2), 5.0).to("lazy")
            elif number == 5:
                model.weight = nn.Parameter(torch.ones(2, 2).to("lazy"))
            elif number == 4:
                model.weight.fill_(3.0)
        want = (torch.ones(1, 2) @ model.weight.detach().cpu().t()).sum().item()
        assert forward(torch.ones(1, 2)).item() == pytest.approx(want)


def test_load_state_dict_between_calls_is_honoured() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).to("lazy")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    @lazystep.step(audit_every=0)
    def fit(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        descend(loss, optimizer)
        return loss

    x = torch.randn(4, 3)
    losses = [fit(x).item() for _ in range(4)]
    saved, saved_optimizer = copy.deepcopy(lazystep.to_cpu((model.state_dict(), optimizer.state_dict())))
    later = [fit(x).item() for _ in range(4)]
    model.load_state_dict(saved)
    optimizer.load_state_dict(saved_optimizer)
    assert [fit(x).item() for _ in range(4)] == later
    assert losses != later


def test_mutated_closure_variable_is_noticed() -> None:
    factor = 1.0
    options = {"shift": 0.0}
    shifted = captured(lambda x: (x * factor + options["shift"]).sum())
    for number in range(12):
        factor = 2.0 if number >= 4 else 1.0
        options["shift"] = 1.0 if number >= 8 else 0.0
        assert shifted(torch.ones(2)).item() == 2 * (factor + options["shift"])
    assert shifted.num_replayed >= 5


def test_randomness_follows_eagers_stream() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5) + torch.randn(4, device=x.device)

    torch.manual_seed(3)
    want = [(noisy(torch.ones(4)), torch.rand(1)) for _ in range(NUM_CALLS)]
    step = lazystep.step(audit_every=0)(noisy)
    torch.manual_seed(3)
    got = [(step(torch.ones(4)), torch.rand(1)) for _ in range(NUM_CALLS)]
    for (a, host_a), (b, host_b) in zip(got, want, strict=True):
        assert a.cpu().equal(b)
        assert host_a.equal(host_b)
    assert step.num_replayed >= NUM_CALLS - 2


def test_mode_is_not_frozen() -> None:
    model = nn.Sequential(nn.Dropout(1.0)).to("lazy")
    forward = captured(lambda x: model(x).sum())
    for number in range(12):
        model.train(number % 4 < 2)
        assert forward(torch.ones(3)).item() == (0.0 if model.training else 3.0)
    assert forward.num_replayed >= 6


def test_frozen_parameter_and_added_group_are_noticed() -> None:
    one = nn.Parameter(torch.zeros(2).to("lazy"))
    two = nn.Parameter(torch.zeros(2).to("lazy"))
    optimizer = torch.optim.SGD([one], lr=1.0)

    @lazystep.step(audit_every=0)
    def fit() -> None:
        descend(one.sum() + two.sum(), optimizer)
        two.grad = None

    for _ in range(4):
        fit()
    assert one.tolist() == [-4, -4]
    optimizer.add_param_group({"params": [two]})
    for _ in range(4):
        fit()
    assert two.tolist() == [-4, -4]
    one.requires_grad_(False)
    for _ in range(3):
        fit()
    assert one.tolist() == [-8, -8]
    assert two.tolist() == [-7, -7]


def test_shape_changes_are_captures_of_their_own() -> None:
    total = captured(lambda x: x.sum())
    for number in range(16):
        size = 2 + number % 2
        assert total(torch.ones(size)).item() == size
    assert total.num_replayed >= 11


def test_arguments_that_share_memory_or_are_the_same() -> None:
    @lazystep.step(audit_every=0)
    def update(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1.0)
        return (a * b).sum()

    def lazy(n: float) -> torch.Tensor:
        return torch.full((2,), float(n)).to("lazy")

    for number in range(5):
        assert update(lazy(number), lazy(2.0)).item() == 4 * (number + 1)
    for number in range(5):
        same = lazy(number)
        assert update(same, same).item() == 2 * (number + 1) ** 2
    for number in range(5):
        base = torch.full((4,), float(number)).to("lazy")
        assert update(base[:2], base[1:3]).item() == (number + 1) * number + (number + 1) ** 2
    replayed = update.num_replayed
    for number in range(3):
        assert update(lazy(number), lazy(2.0)).item() == 4 * (number + 1)
    assert update.num_replayed == replayed + 3


def test_output_that_is_an_input_is_that_input() -> None:
    same = captured(lambda x: (x, x + 1))
    for number in range(NUM_CALLS):
        x = torch.full((1,), float(number)).to("lazy")
        out, more = same(x)
        assert out is x
        assert more.item() == number + 1


def test_input_mutated_inside_is_mutated() -> None:
    @lazystep.step(audit_every=0)
    def bump(x: torch.Tensor) -> None:
        x.mul_(3.0)

    for number in range(NUM_CALLS):
        x = torch.full((2,), float(number)).to("lazy")
        bump(x)
        assert x.tolist() == [3.0 * number] * 2


def test_input_that_is_not_contiguous() -> None:
    weighted = captured(lambda x: (x * torch.arange(6.0, device="lazy").reshape(3, 2)).sum())
    for number in range(10):
        x = torch.arange(6.0).reshape(2, 3).t() if number % 2 else torch.arange(6.0).reshape(3, 2)
        assert weighted(x.to("lazy")).item() == (x * torch.arange(6.0).reshape(3, 2)).sum().item()


def test_exception_while_recording_leaves_everything_usable() -> None:
    weight = nn.Parameter(torch.zeros(2).to("lazy"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    fails = [False, True, False, False, False, False]

    @lazystep.step(audit_every=0)
    def fit(fail: bool) -> None:
        weight.sum().backward()
        if fail:
            raise RuntimeError("half way")
        optimizer.step()
        optimizer.zero_grad()

    done = 0
    for fail in fails:
        try:
            fit(fail)
            done += 1
        except RuntimeError:
            optimizer.zero_grad()
    assert done == 5
    assert weight.tolist() == [-5, -5]
    assert type(optimizer.param_groups[0]["lr"]) is float


@pytest.mark.parametrize(
    "values",
    [
        [(2, 3), (5, 3)],
        [(2, 3), (2, 3, 4)],
        [(1, (2, "a")), (1, (3, "a"))],
        [1.0, 2.0],
        [2, 2.5],
        [1, True],
        [1, 1.0],
    ],
)
def test_attribute_that_is_no_tensor_is_compared_with_its_type(values: list[Any]) -> None:
    box = types.SimpleNamespace(value=values[0])

    def scale() -> Any:
        return sum(leaf for leaf in tree_leaves(box.value) if not isinstance(leaf, str))

    scaled = captured(lambda x: x * scale())
    x = torch.arange(3)
    for value in [*values, *values]:
        box.value = value
        want = x * scale()
        for _ in range(NUM_CALLS):
            got = scaled(x)
            assert got.dtype == want.dtype
            assert got.tolist() == want.tolist()
    assert scaled.num_replayed >= 4 * (NUM_CALLS - 3)


def test_result_with_a_graph_is_refused_with_the_way_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).to("lazy")
    forward = lazystep.step(lambda x: model(x).sum())
    with pytest.warns(lazystep.LazyStepWarning, match=r"carries a graph.*torch\.no_grad"):
        for _ in range(NUM_CALLS):
            forward(torch.ones(1, 2)).backward()
    assert model[0].weight.grad is not None
    assert forward.num_replayed == 0


def test_gradients_that_are_kept_accumulate() -> None:
    weight = nn.Parameter(torch.zeros(2).to("lazy"))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    @lazystep.step(audit_every=0)
    def accumulate(x: torch.Tensor, last: bool) -> None:
        (weight * x).sum().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()

    for number in range(21):
        accumulate(torch.ones(2), number % 3 == 2)
    assert weight.tolist() == [-21, -21]
    assert accumulate.num_replayed >= 4


def test_list_that_grows_is_noticed() -> None:
    history: list[torch.Tensor] = []
    remember = captured(lambda x: history.append(x * 2))
    remember(torch.ones(1))
    with pytest.warns(lazystep.LazyStepWarning, match="length of a list"):
        remember(torch.ones(1))
    for _ in range(4):
        remember(torch.ones(1))
    assert len(history) == 6


def test_counter_that_changes_inside_is_carried() -> None:
    counter = types.SimpleNamespace(steps=0)

    @lazystep.step(audit_every=0)
    def count(x: torch.Tensor) -> torch.Tensor:
        counter.steps += 1
        return x + counter.steps

    for number in range(1, NUM_CALLS + 1):
        assert count(torch.zeros(1)).item() == number
        assert counter.steps == number
        assert type(counter.steps) is int
    counter.steps = 100  # the next replay goes on from there
    assert count(torch.zeros(1)).item() == 101
    assert count.num_replayed >= NUM_CALLS - 1, count.explain()


KEPT: dict[str, Any] = {
    "list": lambda rate: [rate],
    "comprehension": lambda rate: [value for value in (rate, 1.0)],  # noqa: C416
    "tuple": lambda rate: (rate, 1.0),
    "dict": lambda rate: {"rate": rate},
    "nested": lambda rate: {"rates": [rate, (rate, [rate])]},
}


@pytest.mark.parametrize("kind", KEPT)
def test_new_container_of_numbers_is_made_anew(kind: str) -> None:
    """As schedulers do: `self._last_lr = [group["lr"] for group in ...]`."""
    state = types.SimpleNamespace(rate=1.0, kept=None)

    @lazystep.step(audit_every=0)
    def decay(x: torch.Tensor) -> torch.Tensor:
        y = x * state.rate
        state.rate = state.rate * 0.5
        state.kept = KEPT[kind](state.rate)
        return y

    kept = []
    for number in range(NUM_CALLS):
        assert decay(torch.ones(1)).item() == 0.5**number
        assert state.kept == KEPT[kind](0.5 ** (number + 1)), decay.explain()
        kept.append(state.kept)
    assert len(set(map(id, kept))) == NUM_CALLS
    assert decay.num_replayed >= NUM_CALLS - 3, decay.explain()


def test_read_inside_keeps_recording_with_a_warning() -> None:
    branch = captured(lambda x: x * 2 if x.sum().item() > 0 else x * 3)
    assert branch(torch.ones(1)).item() == 2
    with pytest.warns(lazystep.LazyStepWarning, match=r"waits for a value.*test_footguns\.py"):
        branch(torch.ones(1))
    assert branch(-torch.ones(1)).item() == -3
    assert branch.num_replayed == 0


def test_environment_variable_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = captured(lambda x: (x * float(os.environ["SCALE"])).sum())
    for number in range(14):
        scale = 1.0 if number < 5 else 4.0
        monkeypatch.setenv("SCALE", str(scale))
        assert scaled(torch.ones(1)).item() == scale
    assert scaled.num_replayed >= 8, scaled.explain()


def test_audit_finds_what_python_does_differently() -> None:
    table = torch.ones(20_000, dtype=torch.float64)
    array = table.numpy()  # out of sight: torch does not see what NumPy writes
    scaled = lazystep.step(audit_every=4)(lambda x: (x * table[0].item()).sum())
    results = []
    with pytest.warns(lazystep.LazyStepWarning) as caught:
        for number in range(14):
            array[0] = 0.004 if number < 3 else 0.008
            results.append(scaled(torch.ones(1, dtype=torch.float64)).item())
    (text,) = [str(one.message) for one in caught]
    assert "a number is 0.008, a replay would have used 0.004" in text
    num_wrong = results[3:].count(0.004)
    assert num_wrong > 0, "the change is in sight: this test needs another one"
    assert f"Numbers of its last {num_wrong + 1} replays may be wrong" in text  # one was before the change
    assert set(results[3 + num_wrong :]) == {0.008}
    assert "does something else than when it was captured" in scaled.explain()


def accumulating(device: str) -> Callable[[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    model, number = nn.Linear(4, 1).to(device), [0]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def accumulate(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        number[0] += 1
        if number[0] % 3 == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return accumulate


@pytest.mark.parametrize("audit_every", [None, 1, 2])
def test_call_that_a_capture_would_refuse_is_no_fault_of_the_capture(audit_every: int | None) -> None:
    """An audit was due in a call with an update, and found that the capture of those without was wrong."""
    plain = accumulating("cpu")
    step = lazystep.step(audit_every=audit_every)(accumulating("lazy"))
    for x in torch.randn(60, 2, 4):
        assert step(x.to("lazy")).item() == plain(x).item()
    assert count("captures_outdated") == 0
    if audit_every != 1:
        assert step.num_replayed >= 20, step.explain()


def test_module_that_a_later_call_imports_first_is_no_reason_to_refuse() -> None:
    """As optimizers of torch do in their first step, which under accumulation is not the first call."""
    done = run_python("-c", IMPORTS_LATE)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 12


IMPORTS_LATE = """
import torch, lazystep
model = torch.nn.Linear(4, 1).to("lazy")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
number = [0]

@lazystep.step(fullgraph=True)
def accumulate(x):
    loss = model(x).square().mean()
    loss.backward()
    number[0] += 1
    if number[0] % 3 == 0:
        import sched, colorsys  # one that nobody else has imported
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()

for _ in range(40):
    accumulate(torch.randn(2, 4).to("lazy"))
print(accumulate.num_replayed)
"""


def test_scheduler_inside_is_noticed() -> None:
    """It may be replayed or refused. It is never frozen."""
    weight = nn.Parameter(torch.zeros(1).to("lazy"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    @lazystep.step(audit_every=0)
    def fit() -> None:
        descend(weight.sum(), optimizer)
        schedule.step()

    total = 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(16):
            fit()
            total -= 0.5**number
            assert weight.item() == total
            assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0] == 0.5 ** (number + 1)
            assert schedule.last_epoch == number + 1
    refused = [str(one.message) for one in caught if one.category is lazystep.LazyStepWarning]
    assert fit.num_replayed > 0 or any("not replayed: " in text for text in refused), fit.explain()


def test_generator_and_discriminator_side_by_side() -> None:
    def run(device: str, decorate: Any) -> tuple[list[float], list[Any]]:
        torch.manual_seed(0)
        nets = nn.Linear(2, 2).to(device), nn.Linear(2, 1).to(device)
        optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in nets]

        @decorate
        def generator_step(z: torch.Tensor) -> torch.Tensor:
            loss = -nets[1](nets[0](z)).mean()
            optimizers[0].zero_grad()
            loss.backward()
            optimizers[0].step()
            return loss.detach()

        @decorate
        def discriminator_step(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            loss = nets[1](nets[0](z).detach()).mean() - nets[1](x).mean()
            optimizers[1].zero_grad()
            loss.backward()
            optimizers[1].step()
            return loss.detach()

        losses = []
        for _ in range(8):
            losses.append(generator_step(torch.randn(4, 2)).item())
            losses.append(discriminator_step(torch.randn(4, 2), torch.randn(4, 2)).item())
        return losses, [generator_step, discriminator_step]

    losses, steps = run("lazy", lazystep.step(audit_every=0))
    assert losses == run("cpu", lambda function: function)[0]
    assert sum(step.num_replayed for step in steps) >= 6


def test_argument_that_never_repeats_is_reported_and_not_kept() -> None:
    scaled = lazystep.step(lambda x, number: x * number)
    with pytest.warns(lazystep.LazyStepWarning, match=r"argument 1 \(int\) has another value") as caught:
        for number in range(100):
            assert scaled(torch.ones(1), number).item() == number
    assert len(caught) == 1
    assert len(scaled._captures) <= 17


def test_wait_that_times_out_loses_nothing(runtime: Any) -> None:
    """A replay that finds no room raises before it has moved a step count or drawn a number."""
    model = nn.Linear(2, 2).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters())

    @lazystep.step(audit_every=0)
    def train(x: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.dropout(model(x), 0.5).sum()
        descend(loss, optimizer)
        return loss

    for _ in range(NUM_CALLS):
        train(torch.ones(1, 2))
    lazystep.wait_device_ops()
    assert train.num_replayed >= 2
    counts = [state["step"].item() for state in optimizer.state.values()]
    stream = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(runtime.executor), "has_room", lambda self: False)
        patch.setattr(type(runtime.executor), "num_in_flight", lazystep.config.settings.max_in_flight)
        with lazystep.config.override(wait_timeout=0.01), pytest.raises(lazystep.WaitTimeoutError):
            train(torch.ones(1, 2))
    assert [state["step"].item() for state in optimizer.state.values()] == counts
    assert torch.equal(torch.get_rng_state(), stream)
    train(torch.ones(1, 2))
    assert [state["step"].item() for state in optimizer.state.values()] == [c + 1 for c in counts]
