"""Native steps: within tolerance of eager, built once, switched in without a wait, and kept on disk."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lazystep
from lazystep import config, debug
from lazystep.compile.cache import LibraryCache, cache_directory
from tests.builds import repeat, steps_until_native
from tests.helpers import count, descend, run_python

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("auto_tier")]

# Relative to the largest element, after a handful of steps.
TOLERANCE = 1e-5


class Net(nn.Module):
    """Something of everything: views, normalization, dropout, buffers.

    No bias before the normalization, which would take it out again: its gradient is nothing but rounding,
    and AdamW makes a full step out of that.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        last = nn.Linear(2 * width, width, bias=False)
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), last)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.1)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.dropout(self.norm(x + self.inner(x))))


def train(
    device: str,
    num_steps: int,
    weight: Callable[[int], float] = lambda n: 1.0,
    at: Callable[[int], None] = id,
) -> tuple[list[float], list[torch.Tensor], Net]:
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    losses = []
    for number in range(num_steps):
        x = torch.randn(32, 16)
        model.dropout.p = 0.1 + 0.3 * number / num_steps
        loss = nn.functional.mse_loss(model(x.to(device)), x.roll(1, 1).to(device)) * weight(number)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if device == "lazy":
            lazystep.mark_step()
            at(number)
        losses.append(loss.detach())
    state = [t.detach().cpu() for t in (*model.parameters(), *model.buffers())]
    return [loss.item() for loss in losses], state, model


def assert_close(got: list[torch.Tensor], want: list[torch.Tensor], tolerance: float = TOLERANCE) -> None:
    for a, b in zip(got, want, strict=True):
        scale = max(b.abs().max().item(), 1e-3)
        assert (a - b).abs().max().item() <= tolerance * scale


@pytest.mark.usefixtures("two_threads")
def test_schedule_loss_weight_and_dropout_probability_never_recompile() -> None:
    """A cosine schedule, a loss weight and a dropout probability that change at each of 1,000 steps."""

    def until_native(number: int) -> None:
        if number == 20:
            lazystep.wait_device_ops()
            # Nobody has waited for a compiler so far, and one is at work.
            assert count("waits_for_compile") == 0
            assert count("executor_waits_for_compile") == 0
            assert lazystep.wait_for_compile(300)

    def weight(number: int) -> float:
        return 1.0 + 0.01 * number

    losses, state, _ = train("lazy", 1000, weight, until_native)
    lazystep.wait_device_ops()
    assert count("builds_started") <= 2
    assert count("builds_failed") == 0
    assert count("native_mismatches") == 0
    # One execution a step; reads at the end compute nothing new. All but the first steps natively.
    assert count("programs_executed") <= 1000 + 2
    assert count("native_executions") >= 975
    eager_losses, eager_state, _ = train("cpu", 1000, weight)
    assert_close([torch.tensor(losses)], [torch.tensor(eager_losses)], 1e-4)
    assert_close(state, eager_state, 1e-3)
    assert "natively" in debug.explain()


@pytest.mark.parametrize(("kind", "options"), [("AdamW", "foreach"), ("AdamW", "fused"), ("SGD", "fused")])
def test_learning_rate_is_an_input_in_every_form_of_an_optimizer(kind: str, options: str) -> None:
    def run(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(device)
        optimizer = getattr(torch.optim, kind)(
            model.parameters(), lr=0.1, weight_decay=0.01, **{options: True}
        )
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for _ in steps_until_native(20, wait_at=6):
            descend(model(torch.ones(2, 4, device=device)).square().sum(), optimizer)
            schedule.step()
        return model.weight.detach().cpu()

    got = run("lazy")
    assert count("builds_started") <= 2, debug.explain()
    assert count("native_executions") >= 10, debug.explain()
    assert count("native_mismatches") == 0
    torch.testing.assert_close(got, run("cpu"), rtol=0, atol=1e-5)


PROCESS = """
import json, sys
import lazystep
from tests.execute.test_native import train
losses, _, _ = train("lazy", 8, at=lambda n: lazystep.wait_for_compile() if n == 4 else None)
lazystep.wait_device_ops()
names = ("native_executions", "reference_executions", "builds_requested", "disk_hits", "builder_starts")
print(json.dumps([losses, {n: lazystep.metrics.counter_value(n) for n in names}]))
"""


def test_second_process_starts_natively_at_the_first_step() -> None:
    def run() -> tuple[list[float], dict[str, int]]:
        environ = {"LAZYSTEP_TIER": "auto", "LAZYSTEP_BUILD_AFTER": "2"}
        done = run_python("-c", PROCESS, **environ, LAZYSTEP_CACHE_DIR=str(cache_directory()))
        assert done.returncode == 0, done.stderr
        losses, counts = json.loads(done.stdout.splitlines()[-1])
        return losses, counts

    losses, counts = run()
    assert counts["native_executions"] >= 2
    again, counts = run()
    # The first step makes the optimizer's state and was never built; every other step is native.
    assert counts["native_executions"] == 7, counts
    assert counts["builds_requested"] == 0
    assert counts["builder_starts"] == 0
    torch.testing.assert_close(torch.tensor(again), torch.tensor(losses), rtol=1e-5, atol=0)


def test_fixed_scalar_that_changes_runs_on_the_reference() -> None:
    x = torch.randn(4, 8)
    lazy = x.to("lazy")
    eps = 1e-5

    def step() -> torch.Tensor:
        return nn.functional.layer_norm(lazy, (8,), eps=eps)

    torch.testing.assert_close(repeat(step), nn.functional.layer_norm(x, (8,), eps=1e-5))
    native = count("native_executions")
    assert native >= 1
    eps = 0.5
    got = step().cpu()
    assert torch.equal(got, nn.functional.layer_norm(x, (8,), eps=0.5))
    assert count("native_executions") == native


def test_views_overlaps_and_updates_in_place() -> None:
    """Inputs that share memory, updates through views, outputs that are views of inputs and each other."""

    def step(base: torch.Tensor, window: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
        base.mul_(1.05)
        window.add_(base[1:5].sin(), alpha=0.25)
        fresh = torch.exp(other * 0.1)
        part = fresh[1:]
        part.sub_(1.0)
        return [fresh, part, base[2:], window.sum()]

    def setup(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        base = torch.arange(8.0).to(device)
        return base, base[2:6], torch.arange(6.0).reshape(2, 3).to(device)

    eager, lazy = setup("cpu"), setup("lazy")
    for number in range(8):
        want = step(*eager)
        got = step(*lazy)
        lazystep.mark_step()
        if number == 4:
            assert lazystep.wait_for_compile(300)
        assert_close([t.cpu() for t in (*got, *lazy)], [*want, *eager])
        # They still share memory as eager's do.
        got[1].zero_()
        want[1].zero_()
        assert_close([got[0].cpu()], [want[0]])
    lazystep.mark_step()
    assert count("native_executions") >= 2
    assert count("native_mismatches") == 0


def test_updates_that_read_what_they_overwrite() -> None:
    """Loops that Inductor would fuse, and that would then read elements which they have overwritten."""

    def step(base: torch.Tensor, window: torch.Tensor, matrix: torch.Tensor, rolled: torch.Tensor) -> None:
        base.mul_(1.05)
        window.add_(base[1:-3].sin(), alpha=0.25)
        matrix.diagonal().mul_(1.5)
        matrix.diagonal()[1:].add_(matrix.diagonal()[:-1].sin())
        rolled.mul_(0.5)
        rolled.add_(rolled.roll(1).cos())

    def setup(device: str) -> tuple[torch.Tensor, ...]:
        base = torch.linspace(0, 1, 4_000).to(device)
        rest = torch.linspace(0, 1, 10_000).to(device)
        # Of two that share memory, so that the library gets the memory and not the tensor.
        return base, base[2:-2], torch.linspace(0, 1, 90_000).reshape(300, 300).to(device), rest[100:]

    eager, lazy = setup("cpu"), setup("lazy")
    for _ in steps_until_native(6):
        step(*eager)
        step(*lazy)
    assert_close([t.cpu() for t in lazy], list(eager))
    assert count("native_executions") >= 1
    assert count("native_mismatches") == 0


def test_types_of_results_stay_eagers() -> None:
    """0-d results, integers, bfloat16 and comparisons with numbers that are inputs of the library."""

    def step(loss: torch.Tensor, n: torch.Tensor, h: torch.Tensor, k: float) -> list[torch.Tensor]:
        return [loss * k, n * 2, n * k, n / 3, h * k, h + 0.1, loss > k, n.clamp(max=3), torch.full((2,), k)]

    def setup(device: str) -> list[torch.Tensor]:
        return [
            torch.tensor(0.75).to(device),
            torch.arange(5).to(device),
            torch.linspace(0, 1, 7, dtype=torch.bfloat16).to(device),
        ]

    eager, lazy = setup("cpu"), setup("lazy")
    for number in range(6):
        got = step(*lazy, 0.3 + number)
        lazystep.mark_step()
        if number == 3:
            assert lazystep.wait_for_compile(300)
        for a, b in zip(got, step(*eager, 0.3 + number), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            torch.testing.assert_close(a.cpu(), b)
    assert count("native_executions") >= 1
    assert count("builds_started") == 1


def test_program_seen_once_is_never_built_and_shapes_are_right_at_once() -> None:
    weight = torch.ones(6, 6).to("lazy")
    with config.override(families=False):
        for size in (3, 5, 2, 7):
            x = torch.arange(size * 6.0).reshape(size, 6)
            got = x.to("lazy") @ weight
            lazystep.mark_step()
            assert torch.equal(got.cpu(), x @ torch.ones(6, 6))
        lazystep.wait_device_ops()
    assert count("builds_requested") == 0


def test_program_that_ran_on_the_tier_reference_is_said_to_have() -> None:
    lazy = torch.ones(3).to("lazy")
    with config.override(tier="reference"):
        for _ in range(5):
            lazy.mul_(2.0)
            lazystep.mark_step()
        assert lazy.tolist() == [32.0] * 3
    assert "the tier was `reference` whenever it ran" in debug.explain()


def test_native_tier_waits_for_the_build() -> None:
    x = torch.randn(5, 5)
    with config.override(tier="native", check_native="off"):
        got = (x.to("lazy").sin() + 1).cpu()
    torch.testing.assert_close(got, x.sin() + 1)
    assert count("native_executions") == 1
    assert count("reference_executions") == 0
    assert count("executor_waits_for_compile") == 1


def test_closures_see_the_values_of_their_own_step() -> None:
    total = torch.zeros(3).to("lazy")
    seen: list[float] = []
    for _ in steps_until_native(12):
        total.add_(1.0)
        lazystep.add_step_closure(lambda t: seen.append(t[0].item()), (total,), run_async=True)
    lazystep.flush_step_closures()
    assert seen == [float(n) for n in range(1, 13)]
    assert count("native_executions") >= 5


@pytest.mark.usefixtures("two_threads")
def test_number_of_threads_is_the_users() -> None:
    x = torch.randn(300, 300)
    lazy = x.to("lazy")
    repeat(lambda: lazy + 1)  # on two
    torch.set_num_threads(1)
    got = repeat(lambda: (lazy * 1.5).tanh().sum(1))
    torch.testing.assert_close(got, (x * 1.5).tanh().sum(1))
    assert count("native_executions") >= 2
    assert torch.get_num_threads() == 1


def test_python_runs_beside_a_native_step(wrap_libraries: Any) -> None:
    """A thread gets its turn while the library runs, although nobody hands over the interpreter lock."""
    has_begun, is_inside, found = threading.Event(), [False], []

    def watch(call: Any) -> Any:
        def watched(arguments: list[torch.Tensor]) -> list[torch.Tensor]:
            is_inside[0] = True
            has_begun.set()
            results = call(arguments)
            is_inside[0] = False
            return results

        return watched

    def look() -> None:
        has_begun.wait(60)
        found.append(is_inside[0])

    wrap_libraries(watch)
    x = torch.full((1000, 1000), 1e-3)
    thread = threading.Thread(target=look)
    thread.start()
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1000)  # who has the lock keeps it, unless it lets go by itself
        with config.override(tier="native", check_native="off"):
            lazy = result = x.to("lazy")
            for _ in range(12):
                result = result @ lazy
            got = result.cpu()
    finally:
        sys.setswitchinterval(interval)
        thread.join(60)
    assert count("native_executions") == 1
    assert found == [True]
    torch.testing.assert_close(got, x)


def test_custom_op_stays_on_the_reference_with_a_reason() -> None:
    library = torch.library.Library("lazystep_test_native", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    library.impl("twice", lambda x: torch.empty_like(x), "Meta")
    x = torch.ones(3).to("lazy")
    for _ in range(4):
        got = torch.ops.lazystep_test_native.twice(x)
        lazystep.mark_step()
    assert got.cpu().tolist() == [2, 2, 2]
    assert count("builds_requested") == 0
    assert "lazystep_test_native.twice" in debug.explain()


def test_cache_entry_says_what_it_is() -> None:
    x = torch.randn(3).to("lazy")
    repeat(lambda: x.cos() * 3)
    entries = LibraryCache.open(cache_directory()).entries()
    manifest = next(e.manifest for e in entries if "aten.cos" in e.manifest["program"])
    assert manifest["torch"] == torch.__version__
    assert {"compiler", "cpu", "options", "files", "num_threads", "build_seconds"} <= set(manifest)
