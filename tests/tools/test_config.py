"""Settings and counters."""

from __future__ import annotations

import dataclasses

import pytest

import lazystep
from lazystep import config, metrics


def test_description_lists_every_setting() -> None:
    table = config.describe()
    for field in dataclasses.fields(config.Settings):
        assert config.variable(field.name) in table
        assert field.metadata["doc"] in table


def test_environment_sets_every_kind_of_setting() -> None:
    settings = config.Settings.from_environ(
        {"LAZYSTEP_MAX_IN_FLIGHT": "7", "LAZYSTEP_SOURCE_LINES": "off", "LAZYSTEP_EXIT_TIMEOUT": "2.5"}
    )
    assert (settings.max_in_flight, settings.source_lines, settings.exit_timeout) == (7, False, 2.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_in_flight", 0),
        ("max_in_flight", "3"),
        ("max_in_flight", True),
        ("source_lines", 1),
        ("exit_timeout", -1.0),
    ],
)
def test_bad_values_are_refused_and_change_nothing(name: str, value: object) -> None:
    before = getattr(config.settings, name)
    with pytest.raises(lazystep.ConfigError, match=name):
        setattr(config.settings, name, value)
    assert getattr(config.settings, name) == before


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(lazystep.ConfigError, match="no setting 'max_inflight'"):
        config.settings.max_inflight = 3  # type: ignore[attr-defined]


def test_override_puts_the_value_back_after_an_error() -> None:
    before = config.settings.max_in_flight
    with pytest.raises(ZeroDivisionError), config.override(max_in_flight=9):
        assert 1 / (config.settings.max_in_flight - 9)
    assert config.settings.max_in_flight == before


def test_counters_count_report_and_reset() -> None:
    metrics.count("programs_recorded", 2)
    metrics.add_seconds("waiting", 0.5)
    metrics.count_synchronization("item", "train.py:3")
    assert metrics.counter_value("programs_recorded") == 2
    assert metrics.counter_value("seconds_waiting") == 0.5
    assert metrics.counter_value("nothing of the kind") == 0
    assert metrics.synchronizations() == [("item", "train.py:3", 1)]
    assert set(metrics.counter_names()) >= {"programs_recorded", "seconds_waiting", "synchronizations:item"}
    assert "train.py:3" in metrics.report()
    metrics.reset()
    assert metrics.counter_names() == []
    assert metrics.report() == "nothing counted yet"
