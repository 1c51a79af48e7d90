"""The code in the README and the docs runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What a snippet may take for granted.
PRELUDE = """
import torch, lazystep
torch.manual_seed(0)
loader = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)]
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3, 2)
    def forward(self, x):
        return self.head(x)
model, loss_fn = Net().to("lazy"), torch.nn.functional.mse_loss
opt = torch.optim.AdamW(model.parameters())
"""


def snippets() -> list[object]:
    found: list[object] = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
            found.append(pytest.param(code, id=f"{page.name}-{number}"))
    return found


@pytest.mark.parametrize("code", snippets())
def test_snippet_runs(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
