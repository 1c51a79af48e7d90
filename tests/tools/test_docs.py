"""The code in the README and the docs runs as it stands, and prints what they say."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
from pathlib import Path

import pytest

import lazystep
import lazystep.errors
from lazystep import config
from tests.helpers import ROOT, run_python
from tests.tools import page_runner

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs_and_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    blocks = page_runner.blocks_of(page.read_text())
    done = run_python(page_runner.__file__, page, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    num_run = sum(not block.mark.startswith("compiled") for block in blocks)
    assert done.stdout.count(": ran\n") == num_run


def test_every_python_fence_is_found() -> None:
    for page in PAGES:
        text = page.read_text()
        found = page_runner.blocks_of(text)
        fences = len(re.findall(r"^```python", text, re.MULTILINE))
        assert sum(f"```python\n{block.code}```" in text for block in found) == fences, page.name


def test_program_in_the_readme_is_what_is_printed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """import torch, lazystep
torch.manual_seed(0)
layer = torch.nn.Linear(3, 2).to("lazy").requires_grad_(False)
x = torch.randn(4, 3).to("lazy")
lazystep.mark_step()

y = layer(x)
layer.weight *= 0.5
y.add_(1, alpha=2)
lazystep.mark_step()
print(lazystep.debug.last_program())
"""
    )
    done = run_python(script, cwd=tmp_path)
    shown = (ROOT / "README.md").read_text().partition(">>> print(lazystep.debug.last_program())\n")[2]
    assert done.stdout.strip() == shown.partition("```")[0].strip()


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_contents_list_every_page() -> None:
    contents = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in contents


def test_settings_page_lists_exactly_the_settings() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    assert re.findall(r"^\| `LAZYSTEP.*", page, re.MULTILINE) == [
        f"| `{config.variable(field.name)}` | `{field.default}` | {field.metadata['doc']} |"
        for field in dataclasses.fields(config.Settings)
    ]


def test_errors_page_lists_every_exception_and_warning() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    headings = set(re.findall(r"^## .*", page, re.MULTILINE))
    listed = {name for heading in headings for name in re.findall(r"`(\w+)`", heading)}
    public = {
        name
        for name in lazystep.__all__
        if inspect.isclass(kind := getattr(lazystep, name)) and issubclass(kind, Exception)
    }
    assert public == listed
    raised = [kind for _, kind in inspect.getmembers(lazystep.errors, inspect.isclass)]
    assert {kind.__name__ for kind in raised} <= public


def package_strings() -> list[str]:
    """Every string in the package's code; of a formatted one, the parts between its fields."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "lazystep").rglob("*.py")]
    constants = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [node.value for node in constants if isinstance(node.value, str)]


def test_errors_page_quotes_messages_that_exist() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    cells = [row.split(" | ")[0] for row in re.findall(r"^\| (.*)", page, re.MULTILINE)]
    quotes = [quote for cell in cells for quote in re.findall(r'"(.*?)"', cell)]
    strings = package_strings()
    assert len(quotes) > 40
    for quote in quotes:
        for part in filter(None, (part.strip() for part in quote.split("…"))):
            assert any(part in string for string in strings), f"no message says {part!r}"


# -- the runner itself ---------------------------------------------------------------------------------


def run_text(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    page = tmp_path / "page.md"
    page.write_text(text)
    return run_python(page_runner.__file__, page, cwd=tmp_path)


def test_blocks_continue_start_over_raise_and_warn(tmp_path: Path) -> None:
    done = run_text(
        tmp_path,
        """
<!-- python
x = 1
-->
```python
y = x + 1
print(y, "and", id(y))
```
```output
2 and ...
```
<!-- raises -->
```python
y / 0
```
```output
ZeroDivisionError: division by zero
```
<!-- warns -->
```python
import warnings
warnings.warn("here", stacklevel=1)
```
```output
train.py:6: UserWarning: here
```
<!-- compiled: torchrun -->
```python
this_is_not_run()
```
<!-- starts over -->
```python
assert "x" not in globals()
```
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ran") == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nprint(1)\n```\n```output\n2\n```\n", "the page says\n2\n\nbut this was printed:\n1"),
        ("```python\n1 / 0\n```\n", "in the block at page.md, line 2"),
        ("<!-- raises -->\n```python\n1\n```\n", "this block should raise"),
        ("<!-- warns -->\n```python\n1\n```\n", "this block should warn"),
        ("<!-- compiled: x -->\n```python\n1 +\n```\n", "SyntaxError"),
        ("```python\nimport warnings\nwarnings.warn('x')\n```\n", "UserWarning: x"),
        ("```output\n2\n```\n", "belongs to no code"),
    ],
)
def test_a_page_that_is_wrong_is_found(tmp_path: Path, text: str, message: str) -> None:
    done = run_text(tmp_path, text)
    assert done.returncode == 1
    assert message in done.stderr
