"""What stands before every generated step."""

from __future__ import annotations

PRELUDE = """
import array, collections, contextvars, copy, dataclasses, enum, functools, itertools, math, operator, os, sys
import threading, types, weakref
import numpy as np, torch, torch.utils.checkpoint
from torch import nn

DEVICE = "{device}"


class Scale:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return x * self.scale

    def __len__(self):
        return int(self.scale)


@dataclasses.dataclass(slots=True, eq=False)
class Slots(Scale):
    scale: object


class Mode(enum.Enum):
    A = 2
    B = 3


def taken(value):
    return value


def scaled(x, a, b=1):
    return x * a * b


def matched(value):
    match value:
        case 2 | "sin" | [2.0, *_] | {{"a": 2.0}} | Mode.A:
            return 1.5
        case None | int() | "cos" | [_, _] | {{"b": _}}:
            return 2.5
        case _:
            return 3.5


def layer(weight):
    made = nn.Linear(3, 3, bias=False)
    nn.init.constant_(made.weight, weight)
    return made.to(DEVICE)


def norm():
    return nn.BatchNorm1d(3).to(DEVICE)
""".strip()
