"""Mistakes that everybody makes once: each message names the cause, the user's line and the way out."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

import lazystep
from tests.helpers import run_python

# The README's example, with places for mistakes.
SCRIPT = """\
import torch, lazystep

model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)).to("lazy")
opt = torch.optim.AdamW(model.parameters())

@lazystep.step
def train_step(x):
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward(); opt.step(); opt.zero_grad()
    BODY
    return loss

for _ in range(8):
    loss = train_step(torch.randn(32, 8))
lazystep.wait_for_compile()
print("loss", loss.item())
"""


def run(
    directory: Path, body: str = "pass", width: int = 64, **environ: str
) -> subprocess.CompletedProcess[str]:
    script = directory / "train.py"
    script.write_text(SCRIPT.replace("BODY", body).replace("WIDTH", str(width)))
    return run_python(script, **{"LAZYSTEP_CACHE_DIR": str(directory / "cache"), **environ})


def test_shape_error_names_the_op_the_shapes_and_the_line(tmp_path: Path) -> None:
    done = run(tmp_path, width=32)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-2:]
    assert last[0] == "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x64 and 32x1)"
    assert "aten.addmm.default(f32[1], f32[32, 64], f32[32, 1] stride [1, 32])" in last[1]
    assert f"at {tmp_path}/train.py:8 in train_step" in last[1]
    assert "change its arguments there" in last[1]


def test_a_step_works_again_after_a_shape_error() -> None:
    weight = torch.ones(3, 2).to("lazy").requires_grad_()
    step = lazystep.step(lambda x: (x @ weight).sum())
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        step(torch.ones(4, 5))
    assert [step(torch.full((4, 3), float(n))).item() for n in range(5)] == [24.0 * n for n in range(5)]


def test_item_in_a_captured_step_names_the_line_and_the_way_out(tmp_path: Path) -> None:
    done = run(tmp_path, body="loss.item()")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("LazyStepWarning") == 1
    assert f"it waits for a value (item) at {tmp_path}/train.py:10 in train_step" in done.stderr
    assert "read it after the call, or in a closure" in done.stderr


def test_the_wait_that_is_named_is_this_calls() -> None:
    x = torch.ones(2).to("lazy")
    for _ in range(5):
        x.sum().item()  # a line that waits more often than the one in the step

    @lazystep.step(fullgraph=True)
    def step(y: torch.Tensor) -> torch.Tensor:
        y.tolist()  # has its value already: cuts nothing, waits all the same
        return y * 2

    step(torch.ones(2))
    with pytest.raises(lazystep.CaptureError, match=r"waits for a value.*in step; read it after the call"):
        step(torch.ones(2))


def test_barrier_in_a_captured_step_is_named() -> None:
    @lazystep.step(fullgraph=True)
    def step(y: torch.Tensor) -> torch.Tensor:
        z = y * 2
        lazystep.mark_step()
        return z + 1

    step(torch.ones(2))
    with pytest.raises(
        lazystep.CaptureError, match=r"ends a step at .*in step; the call has its own barriers"
    ):
        step(torch.ones(2))


def test_without_a_compiler_a_step_runs_and_one_warning_says_what_to_do(tmp_path: Path) -> None:
    nothing = tmp_path / "bin"
    nothing.mkdir()
    done = run(tmp_path, PATH=str(nothing), LAZYSTEP_TIER="auto", CXX="g++")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss ")
    assert done.stderr.count("LazyStepWarning") == 1
    assert "there is no C++ compiler 'g++' on the PATH" in done.stderr
    assert "Install g++ or set CXX" in done.stderr
    assert f"{tmp_path}/train.py:14: LazyStepWarning" in done.stderr or "train.py:15" in done.stderr
    assert list((tmp_path / "cache").glob("libraries/*")) == []
    quiet = run(tmp_path, PATH=str(nothing), LAZYSTEP_TIER="reference")
    assert (quiet.returncode, quiet.stderr) == (0, "")
