"""The choice of the executable, without a compiler: stages of a specialization and when it is checked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lazystep import config, notices
from lazystep.tiers.tiered import Specialization, Stage


@pytest.fixture
def specialization() -> Any:
    """One whose library is loaded and has not been checked."""
    tiers: Any = SimpleNamespace(
        builder=SimpleNamespace(mark_checked=lambda library, member: None), num_loaded=0
    )
    made: Any = Specialization(program=None, signature=None, fixed={}, num_threads=1, tiers=tiers)  # type: ignore[arg-type]
    made.library = SimpleNamespace(num_runs=0, library=SimpleNamespace(key="a library"), served=None)
    made.stage = Stage.UNCHECKED
    return made


@pytest.mark.parametrize(
    ("period", "checked"), [("off", []), ("first", [0]), ("3", [0, 3, 6]), ("1", list(range(8)))]
)
def test_library_is_checked_as_often_as_the_setting_says(
    specialization: Any, period: str, checked: list[int]
) -> None:
    found = []
    with config.override(check_native=period):
        for number in range(8):
            if specialization.is_check_due():
                found.append(number)
                specialization.end_check("", "")
            else:
                specialization.library.num_runs += 1
    assert found == checked


@pytest.mark.parametrize(("failure", "mismatch"), [("it crashed", ""), ("", "%3 by 0.1")])
def test_library_that_fails_its_check_is_never_used(specialization: Any, failure: str, mismatch: str) -> None:
    specialization.end_check(failure, mismatch)
    assert specialization.stage is Stage.STAYS
    assert specialization.advance() is None
    assert (failure or mismatch) in specialization.reason
    notices.forget()  # the warning is another test's


def test_library_that_passes_its_check_is_native(specialization: Any) -> None:
    specialization.end_check("", "")
    assert specialization.stage is Stage.NATIVE
    assert specialization.advance() is specialization.library
