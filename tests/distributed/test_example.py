"""The example runs as its docstring says."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers import ROOT, run_python


def test_example_under_torchrun_equals_torchs_ddp(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_python(*torchrun, ROOT / "examples" / "ddp_lazy.py", "--quick", "--timeline", timeline)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "losses are equal: True, largest difference of parameters: 0.0" in done.stdout
    assert "1 capture" in done.stdout
    names = {event["name"] for event in json.loads(timeline.read_text())["traceEvents"]}
    assert any(name.startswith("all_reduce of") for name in names)
