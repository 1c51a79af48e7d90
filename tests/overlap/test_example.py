"""The example runs as its docstring says."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers import ROOT, run_python


def test_example_under_torchrun_is_equal_to_plain(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_python(*torchrun, ROOT / "examples" / "ddp_overlap.py", "--quick", "--timeline", timeline)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "largest difference between the parameters: 0.0" in done.stdout
    assert "72 updates inside backward, 0 left to step()" in done.stdout
    names = {event["name"] for event in json.loads(timeline.read_text())["traceEvents"]}
    assert {"reduce 0", "update 0", "reduce 4", "update 4"} <= names
