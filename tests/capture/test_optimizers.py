"""Every optimizer of pytorch-optimizer in a captured step equals eager bit for bit, replayed or recorded.

A step is trained in eager and as a captured step: alone, with a schedule of the learning rate, and inside the
package's Lookahead. Losses, parameters and the optimizer's whole state must be equal, whether a call is
replayed or recorded. With `UPDATE_DOCS=1` the last test writes the table of what is replayed to
docs/optimizers.md; without, it fails if a row has changed.
"""

from __future__ import annotations

import importlib.metadata
import os
import re

import pytest

from tests.helpers import ROOT

from .optimizers import AVERAGE, LOOKAHEAD, NAMED_LOOKAHEAD, PLAIN, RULES, SCHEDULE, optimizers, outcome

PAGE = ROOT / "docs" / "optimizers.md"
MARKED = re.compile(r"(<!-- table -->\n).*(\n<!-- end of table -->)", re.DOTALL)
VERSION = re.compile(r"pytorch-optimizer ([\d.]+\d)")
FORMS = (PLAIN, SCHEDULE, LOOKAHEAD)
AVERAGED = ("AdamW", "Lion", "NAdam", "SGD")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", optimizers())
def test_step_with_optimizer_equals_eager(name: str, form: str) -> None:
    check(name, form)


@pytest.mark.parametrize("name", AVERAGED)
def test_step_with_averaged_model_equals_eager(name: str) -> None:
    check(name, AVERAGE)


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_step_that_reaches_lookahead_and_what_is_inside_equals_eager(
    name: str,
) -> None:
    check(name, NAMED_LOOKAHEAD)


def check(name: str, form: str) -> None:
    difference = outcome(name, form).difference
    assert not difference, difference


def test_rules_are_of_optimizers_that_exist() -> None:
    assert RULES.keys() <= optimizers().keys()


# -- the table -------------------------------------------------------------------------------------------


def cell(name: str, form: str) -> str:
    found = outcome(name, form)
    return "differs" if found.difference and found.verdict != "error" else found.verdict


def why_not(name: str, forms: tuple[str, ...]) -> str:
    """The reasons of the forms, and of which form each is unless it is the same for all."""
    reasons: dict[str, list[str]] = {}
    for form in forms:
        reason = outcome(name, form).reason
        if cell(name, form) == "differs":
            reason = "a bug"
        if reason:
            reasons.setdefault(reason, []).append(form)
    if len(reasons) == 1 and len(*reasons.values()) == len(forms):
        return next(iter(reasons))
    return "; ".join(f"{', '.join(of)}: {reason}" for reason, of in reasons.items())


def to_markdown() -> str:
    """Both tables, and above them how many there are of each kind."""
    names = list(optimizers())
    cells = [cell(name, form) for name in names for form in FORMS]
    counts = {kind: cells.count(kind) for kind in sorted(set(cells))}
    lines = [
        f"pytorch-optimizer {importlib.metadata.version('pytorch-optimizer')}. "
        f"{len(names)} optimizers in {len(FORMS)} forms: "
        + ", ".join(f"{number} {kind}" for kind, number in counts.items())
        + "."
    ]
    for rows, forms in ((names, FORMS), (list(AVERAGED), (AVERAGE,))):
        lines += ["", f"| optimizer | {' | '.join(forms)} | why not |", "|---" * (len(forms) + 2) + "|"]
        for name in rows:
            row = [name, *(cell(name, form) for form in forms), why_not(name, forms)]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def test_table_in_the_docs_is_current() -> None:
    text = PAGE.read_text()
    version = importlib.metadata.version("pytorch-optimizer")
    is_update = bool(os.environ.get("UPDATE_DOCS"))
    if not is_update and VERSION.findall(text) != [version]:
        pytest.skip(f"the table is of another version of pytorch-optimizer than {version}")
    expected = MARKED.sub(lambda m: m[1] + to_markdown() + m[2], text)
    if is_update:
        PAGE.write_text(expected)
        text = expected
    assert text == expected, (
        "UPDATE_DOCS=1 pytest tests/capture/test_optimizers.py -k docs rewrites the table"
    )
