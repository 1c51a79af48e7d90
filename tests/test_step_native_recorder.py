"""`@lazystep.step` where nothing can be captured: under the native recorder its functions are plain steps."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lazystep.record.native._recorder") is None,
    reason="the native recorder is not built",
)
SCRIPT = """
import warnings

import torch
from torch import nn

import lazystep
from lazystep import metrics


def train(device, decorate):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    @decorate
    def forward(x):
        return model(x)

    @decorate
    def step(x, scale):
        loss = forward(x).square().mean() * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "lazy":
            lazystep.add_step_closure(lambda value: logged.append(value.item()), (loss,))
        return loss

    return step, [step(torch.ones(3, 4) * number, 0.5).detach().cpu() for number in range(5)]


logged = []
_, wanted = train("cpu", lambda function: function)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    step, losses = train("lazy", lazystep.step)
assert all(map(torch.equal, losses, wanted)), (losses, wanted)
assert logged == [loss.item() for loss in wanted]
assert (step.num_recorded, step.num_replayed) == (5, 0)
assert metrics.counter_value("programs_recorded") == 5, metrics.report()  # the step inside is part of it
assert [w.category for w in caught] == [lazystep.LazyStepWarning], [str(w.message) for w in caught]
assert "LAZYSTEP_RECORDER=python" in str(caught[0].message)
assert "native recorder" in step.explain()
assert caught[0].filename == __file__


@lazystep.step(fullgraph=True)
def strict(x):
    raise AssertionError("not reached")


try:
    strict(torch.ones(1))
except lazystep.CaptureError as error:
    assert "LAZYSTEP_RECORDER=python" in str(error)
else:
    raise AssertionError("fullgraph was not refused")


def index(i):
    return table[i]


# What fails in the function, and what fails in its program, as with mark_step.
warnings.simplefilter("ignore")
table = torch.zeros(3).to("lazy")
try:
    lazystep.step(lambda x: x.reshape(7))(table)
except RuntimeError as error:
    assert "shape" in str(error)
else:
    raise AssertionError("the function's error was lost")
try:
    out = lazystep.step(index)(torch.tensor([99]))
    lazystep.wait_device_ops()
except lazystep.StepError as error:
    assert "index" in str(error)
else:
    raise AssertionError("the step's error was lost")
assert (lazystep.step(index)(torch.tensor([1])) + 1).tolist() == [1.0]
print("done")
"""


def test_step_functions_are_plain_steps_with_one_warning(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, str(path)],
        env=os.environ | {"LAZYSTEP_RECORDER": "native", "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
