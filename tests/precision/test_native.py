"""Steps in mixed precision as native libraries: within the stated tolerances of eager, without mismatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lazystep
from lazystep import config

from ..helpers import count, nightly
from ..twice import lower_for
from .training import PRECISIONS, WORKLOADS, Training, train

pytestmark = pytest.mark.timeout(900)
# Not here: a model in float16 alone with AdamW. Its squared gradients are a few of the smallest steps of the
# type, so that no library agrees with the reference, which goes on.
IN_SUITE = 16
# The largest difference of the losses, relative to the largest loss, in a few steps.
TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 2e-2}


def test_batch_norm_of_a_lower_input_keeps_float32_statistics() -> None:
    norm = torch.nn.BatchNorm2d(3).to("lazy")
    x = torch.randn(2, 3, 4, 4).to("lazy", torch.bfloat16).requires_grad_()
    norm(x).float().square().sum().backward()
    lazystep.mark_step()
    program = lazystep.debug.last_program()
    # Lowering compares the type of each result with the recorded one, here float32.
    lower_for(program, [kind(1) for kind in program.scalars])


@pytest.mark.parametrize("cache_enabled", [True, False], ids=["kept", "not kept"])
def test_lowered_step_casts_each_weight_once(cache_enabled: bool) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3))).to("lazy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8).to("lazy")
    num_uses = 4
    with torch.autocast("lazy", torch.bfloat16, cache_enabled=cache_enabled):
        loss = sum(model(x * number).float().square().mean() for number in range(num_uses))
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    optimizer.step()
    lazystep.mark_step()
    program = lazystep.debug.last_program()
    graph, _ = lower_for(program, [kind(1) for kind in program.scalars])
    inputs = {node for node in graph.graph.nodes if node.op == "placeholder"}
    is_weight = {node: node.meta["val"].shape == (8, 8) for node in inputs}
    casts = [
        node
        for node in graph.graph.nodes
        if node.op == "call_function"
        and "val" in node.meta
        and isinstance(node.meta["val"], torch.Tensor)
        and node.meta["val"].dtype is torch.bfloat16
        and any(is_weight.get(source, False) for source in node.all_input_nodes)
    ]
    # Without the cache a cast is made for each use. What is cast once stays so in the compiler's graph.
    assert len(casts) == (3 if cache_enabled else 3 * num_uses)


@pytest.mark.parametrize(
    "case",
    [
        ("mlp", "autocast to bfloat16", IN_SUITE),
        *nightly((name, "autocast to bfloat16", 100) for name in WORKLOADS),
        *nightly((name, "autocast to float16", 100) for name in WORKLOADS if name != "conv"),
        # In 100 steps, batch norm over a few images grows a rounding to 2.8e-2 of the loss.
        *nightly([("conv", "autocast to float16", IN_SUITE)]),
        *nightly(("transformer", name, 100) for name in ("bfloat16", "bfloat16 with float32 masters")),
    ],
    ids=lambda case: ", ".join(map(str, case)),
)
def test_native_steps_with_a_scaler_stay_close_to_eager(case: tuple[str, str, int], runtime: Any) -> None:
    name, precision, num_steps = case

    def make(device: str) -> Training:
        # It grows so seldom that no gradient comes near the largest float16, where one rounding decides.
        scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=max(3, num_steps // 5))
        return Training(
            WORKLOADS[name],
            device,
            PRECISIONS[precision],
            lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
            None if PRECISIONS[precision].model is not torch.float32 else scaler,
        )

    overflows = (5, 11, num_steps - 2)
    want = train(make("cpu"), num_steps, overflows=overflows)
    runtime.programs.clear()
    lazystep.metrics.reset()
    with config.override(tier="auto", build_after=2):
        training = make("lazy")
        train(training, 4)
        assert lazystep.wait_for_compile(800)
        training = make("lazy")
        got = train(training, num_steps, overflows=overflows)
        lazystep.wait_device_ops()
    assert count("native_executions") >= num_steps - 4
    assert count("native_mismatches") == 0
    assert got.scaler == want.scaler
    wanted = torch.tensor(want.losses).nan_to_num(0.0)
    distance = float((torch.tensor(got.losses).nan_to_num(0.0) - wanted).abs().max() / wanted.abs().max())
    dtype = PRECISIONS[precision].autocast or PRECISIONS[precision].model
    assert distance <= TOLERANCE[dtype]
