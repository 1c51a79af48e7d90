"""What the conformance suites share: the sample budget, silenced warnings, counts at the end.

    pytest tests/conformance --samples 40
    LAZYSTEP_TEST_SAMPLES=40 pytest              # pytest knows the option only beside this directory

Every comparison is counted; the summary says how many there were per suite and data type.
A test that compares nothing fails.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

DEFAULT_SAMPLES = 4

# PyTorch's databases call deprecated functions, resize outputs and cast complex to real on purpose,
# and eager warns in the same places as lazy: warnings are no part of what is compared here.
_WARNINGS = "ignore"


# In `make fast`: a few of each database.
FAST = {
    *("add", "matmul", "sort", "nonzero", "nn.functional.dropout", "nn.functional.conv2d", "linalg.solve"),
    *("nn.Linear", "nn.LSTM", "nn.BatchNorm1d", "nn.Dropout", "SGD", "AdamW"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--samples",
        type=int,
        default=None,
        help="samples per operator in float32 in the conformance suites; other data types take fewer",
    )


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(_WARNINGS))
            if item.path.name != "test_native.py" and item.callspec.params.get("name") in FAST:
                item.add_marker(pytest.mark.fast)


@pytest.fixture(scope="session")
def num_samples(request: pytest.FixtureRequest) -> int:
    given = request.config.getoption("--samples", default=None)
    return given or int(os.environ.get("LAZYSTEP_TEST_SAMPLES", DEFAULT_SAMPLES))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Reductions split over threads add in another order: one thread is what makes runs comparable."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Counts:
    """How many comparisons a test has made, by label."""

    def __init__(self) -> None:
        self.compared: Counter[str] = Counter()

    def add(self, label: str) -> None:
        self.compared[label] += 1


@pytest.fixture
def counts(request: pytest.FixtureRequest) -> Iterator[Counts]:
    counts = Counts()
    yield counts
    assert counts.compared, "this test has compared nothing"
    suite = request.path.stem.removeprefix("test_")
    for label, number in counts.compared.items():
        # Properties travel with the report, also from the workers of pytest-xdist.
        request.node.user_properties.append((f"compared {suite}: {label}", number))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    totals: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            # The fixture adds its counts after the call's own report has been made.
            properties = report.user_properties if getattr(report, "when", "") == "teardown" else ()
            for name, number in properties:
                if name.startswith("compared "):
                    totals[name] += number
    if totals:
        terminalreporter.section("conformance")
        for name in sorted(totals):
            terminalreporter.write_line(f"{name.removeprefix('compared '):<40} {totals[name]:>7}")
