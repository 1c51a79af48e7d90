"""The choice of the executable, without a compiler: stages of a specialization and when it is checked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lazystep import LazyStepWarning, config, mark_step, notices
from lazystep.tiers.tiered import Specialization, Stage
from tests.helpers import count


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


def test_check_without_room_is_made_later(specialization: Any) -> None:
    with config.override(check_native="first"):
        specialization.postpone_check("its check needs 9 MB")
        specialization.postpone_check("its check needs 9 MB")
        assert specialization.stage is Stage.UNCHECKED
        assert specialization.is_check_due()
        specialization.end_check("", "")
    assert specialization.stage is Stage.NATIVE
    assert count("native_checks_postponed") == 2
    with pytest.warns(LazyStepWarning, match="its check needs 9 MB") as caught:
        mark_step()
    assert len(caught) == 1
    notices.forget()


def test_later_check_without_room_is_left_out(specialization: Any) -> None:
    with config.override(check_native="3"):
        specialization.end_check("", "")
        specialization.library.num_runs = 3
        assert specialization.is_check_due()
        specialization.postpone_check("its check needs 9 MB")
        assert not specialization.is_check_due()
    assert specialization.stage is Stage.NATIVE
    notices.forget()
