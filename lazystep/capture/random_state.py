"""Generators of random numbers around a call: which have moved, and whether a replay would move them alike.

A replay repeats the draws that were recorded on the lazy device. So a call that draws in another way, with
Python, with NumPy or on the CPU, can't be captured. A call may go back to a state that a generator had during
the same call, as `torch.utils.checkpoint` does before it computes again: a replay does the same.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..record.observer import Draw
from .values import GENERATORS, generator_id, state_of_generator


class Rewind(NamedTuple):
    """A generator is back in a state that it had behind an earlier draw of the call."""

    number: int  # of the draw that comes next
    generator: torch.Generator
    origin: int  # the number of the earlier draw; -1 for the state at the beginning


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
        self.rewinds: list[Rewind] = []  # see `find_obstacle`

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

    def noted(self, draw: Draw) -> Draw:
        """The draw, which has just been made, with the state behind it."""
        if draw.generator is not None:
            # torch makes another object for the generator each time it comes to a kernel.
            same = (one for one in self._streams if generator_id(one) == generator_id(draw.generator))
            draw = draw._replace(generator=next(same, draw.generator))
        return draw._replace(state=_generator_of(draw).get_state())

    def find_obstacle(self, draws: Sequence[Draw], is_outside: Callable[[Any], bool]) -> str:
        """Why repeating the recorded draws does not move torch's generators as the call did; else empty.

        `is_outside`: whether a generator was there before the call. All generators keep their states. Finds
        `rewinds`.
        """
        drawn_from = {draw.generator for draw in draws if draw.generator is not None}
        if not all(is_outside(generator) for generator in drawn_from - self._streams.keys()):
            return (
                "it draws from a torch.Generator that it makes itself, and a replay would go on with its "
                "stream; make the generator outside"
            )
        now = {generator: generator.get_state() for generator in self._streams.keys() | drawn_from}
        try:
            if all(self._find_rewinds(draws, generator, now[generator]) for generator in self._streams):
                return ""
            return (
                "it draws random numbers on the CPU, or seeds a generator; draw them on the lazy device, "
                "and seed outside"
            )
        finally:
            for generator, state in now.items():
                generator.set_state(state)

    def _find_rewinds(self, draws: Sequence[Draw], generator: torch.Generator, end: torch.Tensor) -> bool:
        """Find from which state each draw was made. False if a state is none that the generator had."""
        states = {-1: self._streams[generator]}
        last = -1
        for number, draw in enumerate(draws):
            if _generator_of(draw) is not generator:
                continue
            assert draw.state is not None
            behind = draw.state

            def leads_here(origin: int, draw: Draw = draw, behind: torch.Tensor = behind) -> bool:
                generator.set_state(states[origin])
                draw.again()
                return torch.equal(generator.get_state(), behind)

            if not self._note_origin(number, generator, last, states, leads_here):
                return False
            states[number], last = behind, number
        return self._note_origin(
            len(draws), generator, last, states, lambda origin: torch.equal(states[origin], end)
        )

    def _note_origin(
        self,
        number: int,
        generator: torch.Generator,
        last: int,
        states: Iterable[int],
        leads_here: Callable[[int], bool],
    ) -> bool:
        """Find the state that leads to what follows: the last one, mostly. Whether there is one."""
        origin = next(filter(leads_here, (last, *states)), None)
        if origin is not None and origin != last:
            self.rewinds.append(Rewind(number, generator, origin))
        return origin is not None


def redraws(draws: Sequence[Draw], rewinds: Sequence[Rewind]) -> list[Callable[[], torch.Tensor]]:
    """How a replay repeats each draw, in this order: with the rewinds before it, and behind the last one."""
    again = [draw.again for draw in draws]  # not the draws, which hold the memory of the call
    if not rewinds:
        return again
    states: dict[tuple[torch.Generator, int], torch.Tensor] = {}
    origins = {(one.generator, one.origin) for one in rewinds}

    def save(number: int) -> None:
        states.update({(one, at): one.get_state() for one, at in origins if at == number})

    def rewind(number: int) -> None:
        for one in rewinds:
            if one.number == number:
                one.generator.set_state(states[one.generator, one.origin])

    def redraw(number: int) -> torch.Tensor:
        if number == 0:
            save(-1)
        rewind(number)
        drawn = again[number]()
        save(number)
        if number == len(again) - 1:
            rewind(number + 1)
        return drawn

    return [functools.partial(redraw, number) for number in range(len(again))]


def _generator_of(draw: Draw) -> torch.Generator:
    return torch.default_generator if draw.generator is None else draw.generator
