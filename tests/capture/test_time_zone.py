"""The time zone of the process: a part of what dates become, and compared where a step uses dates."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lazystep

from .common import captured
from .scenes import Scene, check_replays

UTC = datetime.UTC
AWARE = datetime.datetime(2020, 1, 1, tzinfo=UTC)
NAIVE = datetime.datetime(2020, 1, 1)


def move_to(zone: str) -> None:
    os.environ["TZ"] = zone
    time.tzset()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    zone = os.environ.get("TZ")
    yield
    os.environ.pop("TZ", None)
    if zone is not None:
        os.environ["TZ"] = zone
    time.tzset()


def call_often(step: Any) -> None:
    for _ in range(4):
        step(torch.ones(2))


class Moment(datetime.datetime):
    """A user's own kind of time."""


@pytest.mark.parametrize(
    "ask",
    [
        lambda: datetime.datetime.fromtimestamp(0).hour,
        lambda: datetime.date.fromtimestamp(86400 - 3600).day,
        lambda: AWARE.astimezone().hour,
        lambda: NAIVE.timestamp(),
        lambda: float(NAIVE.strftime("%s")),
        lambda: float(f"{NAIVE:%s}"),
        lambda: datetime.datetime(2020, 1, 1, tzinfo=UTC).astimezone().hour,
        lambda: datetime.datetime(2020, 1, 1).timestamp(),
        lambda: Moment.fromtimestamp(0).hour,
    ],
    ids=["hour", "day", "aware", "naive", "text", "f_string", "made_inside", "naive_made_inside", "users"],
)
def test_another_time_zone_is_noticed(ask: Callable[[], float]) -> None:
    def make(device: str) -> Scene:
        move_to("UTC")
        return Scene(step=lambda x: x * (1 + ask()), change=lambda: move_to("Asia/Tokyo"))

    check_replays(make)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: time.mktime((2020, 1, 1, 0, 0, 0, 0, 0, 0)),
        lambda: time.localtime(0).tm_hour,
        lambda: len(time.ctime(0)),
    ],
    ids=["mktime", "localtime", "ctime"],
)
def test_local_time_of_the_system_is_refused(ask: Callable[[], float]) -> None:
    step: Any = captured(lambda x: x * ask(), fullgraph=True)
    with pytest.raises(lazystep.CaptureError, match=r"it calls time\..*call it outside"):
        call_often(step)
