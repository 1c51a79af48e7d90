"""Generators of random numbers around a call: which have moved, and whether a replay would move them alike.

A replay repeats the draws that were recorded on the lazy device. So a call that draws in another way, with
Python, with NumPy or on the CPU, can't be captured.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..record.observer import Draw
from .values import GENERATORS, state_of_generator


class RandomState:
    """The states of all known generators before a call."""

    def __init__(self, values: Iterable[Any]) -> None:
        """`values`: what is in the known places, among it generators. Takes the states of the host's."""
        known = {id(value): value for value in values if isinstance(value, GENERATORS)}
        on_host = [value for value in known.values() if not isinstance(value, torch.Generator)]
        self._host_generators = [random, np.random, *on_host]
        self._host_states = [state_of_generator(generator) for generator in self._host_generators]
        self._of_torch = [torch.default_generator]
        for value in known.values():
            if isinstance(value, torch.Generator) and value.device.type == "cpu":
                self._of_torch.append(value)
        self._streams: dict[torch.Generator, torch.Tensor] = {}

    def begin(self) -> None:
        """The call begins: take the states of torch's generators."""
        self._streams = {generator: generator.get_state() for generator in self._of_torch}

    def find_obstacle_on_host(self) -> str:
        """Why the call can't be replayed, if it has drawn with Python or NumPy; else empty."""
        if [state_of_generator(generator) for generator in self._host_generators] != self._host_states:
            return (
                "it draws random numbers with Python or NumPy; draw them on the lazy device, or pass them "
                "as arguments"
            )
        return ""

    def find_obstacle(self, draws: Sequence[Draw], is_outside: Callable[[Any], bool]) -> str:
        """Why repeating the recorded draws does not move torch's generators as the call did; else empty.

        `is_outside`: whether a generator was there before the call. All generators keep their states.
        """
        drawn_from = {draw.generator for draw in draws if draw.generator is not None}
        if not all(is_outside(generator) for generator in drawn_from - self._streams.keys()):
            return (
                "it draws from a torch.Generator that it makes itself, and a replay would go on with its "
                "stream; make the generator outside"
            )
        now = {generator: generator.get_state() for generator in self._streams.keys() | drawn_from}
        try:
            for generator, state in self._streams.items():
                generator.set_state(state)
            for draw in draws:
                draw.again()
            if all(torch.equal(generator.get_state(), now[generator]) for generator in self._streams):
                return ""
            return (
                "it draws random numbers on the CPU, or seeds a generator; draw them on the lazy device, "
                "and seed outside"
            )
        finally:
            for generator, state in now.items():
                generator.set_state(state)
