"""What is left of a recorded call when its tensors are gone: enough to know a call with other sizes again.

A step with a new shape is a call of a new kind. If its program differs from that of an earlier call in sizes
only, and it computes its numbers in the same way, then `Replay` takes the outline in the place of an earlier
call of the same kind.

One call can't tell whether a size or something unseen made an integer, a number or a constant. Its relatives
can: `Evidence` has the integers and numbers of the sizes that two calls agreed on. If it foretells those of
the new call, and the call makes no constants, nothing is left to confirm, and the next call is replayed. Else
the next call of the kind is recorded, too, without a witness, which costs little. It must do what the replay
would have done (`Replay.is_confirmed`): two recorded calls of one kind have to show no more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..family.fit import Fit, NoFitError, fit
from ..family.skeleton import Kind, Place
from ..program.difference import differ_in_sizes_only
from ..program.program import Arg, Program
from ..record.handle import Handle
from ..step_closures import Added
from ..tiers.program_cache import Variant
from ._places import is_same
from .recorded import RecordedCall

# So many sizes are fitted, the last ones. More make a fit slower, and hardly better.
_MAX_MEMBERS = 8
# A line goes through any two numbers. The new call's own numbers are the third.
_MIN_MEMBERS = 2


class Evidence:
    """What the calls of several sizes have shown that were recorded twice: which numbers follow from sizes.

    The sizes are those of the inputs that a replay compares before it runs: arguments, and tensors in places.
    The numbers that must follow from them are the integers among the arguments of ops, and the sizes of the
    other inputs, such as random draws. The sizes in between follow from these. Other numbers than integers
    must be the same for all sizes.
    """

    def __init__(self) -> None:
        self._members: dict[tuple[int, ...], tuple[int, ...]] = {}  # numbers, by sizes
        self._places: list[Place] = []
        self._given: frozenset[int] = frozenset()  # positions of the inputs whose sizes are compared
        self._scalars: list[Any] = []
        self._fit: Fit | None = None
        self._is_fitted = False

    def add(self, program: Program, given: Collection[int], scalars: Sequence[Any]) -> None:
        """Two calls with these sizes agreed. `scalars`: the numbers that replays do not compute anew."""
        if self._given != frozenset(given):
            self._given = frozenset(given)
            self._members.clear()
        sizes, numbers = self._numbers(program, scalars)
        if not self._members:
            self._places = [Place(Kind.SIZE, 0, n) for n in range(len(sizes))]
            self._places += [Place(Kind.LITERAL, 0, n) for n in range(len(numbers))]
        self._scalars = _no_integers(scalars)
        self._members.pop(sizes, None)
        self._members[sizes] = numbers
        if len(self._members) > _MAX_MEMBERS:
            del self._members[next(iter(self._members))]
        self._is_fitted = False

    def foretells(self, program: Program, given: Collection[int], scalars: Sequence[Any]) -> bool:
        """Whether the numbers of a call with other sizes are what its relatives say."""
        if self._given != frozenset(given) or len(self._members) < _MIN_MEMBERS:
            return False
        if not all(map(is_same, self._scalars, _no_integers(scalars))):
            return False
        if not self._is_fitted:
            self._is_fitted = True
            self._fit = self._find_fit()
        if self._fit is None:
            return False
        sizes, numbers = self._numbers(program, scalars)
        return self._fit.bind((*sizes, *numbers)) is not None

    def _find_fit(self) -> Fit | None:
        try:
            found = fit(self._places, [(*sizes, *numbers) for sizes, numbers in self._members.items()])
        except NoFitError:
            return None
        # A number that no size explains would be a symbol of its own, and foretell nothing.
        return None if any(one.carries for one in found.symbols) else found

    def _numbers(self, program: Program, scalars: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sizes: list[int] = []
        numbers = [number for number in scalars if type(number) is int]
        for position, value in enumerate(program.inputs):
            found = sizes if position in self._given else numbers
            found += program.values[value].type.shape
        for instruction in program.instructions:
            _add_integers(instruction.args, numbers)
            _add_integers(instruction.kwargs, numbers)
        return tuple(sizes), tuple(numbers)


def _no_integers(scalars: Sequence[Any]) -> list[Any]:
    return [None if type(number) is int else number for number in scalars]


def _add_integers(args: tuple[Arg, ...], found: list[int]) -> None:
    for arg in args:
        if type(arg) is int:
            found.append(arg)
        elif type(arg) is tuple:
            _add_integers(arg, found)


class Outline:
    """A recorded call without its tensors."""

    def __init__(self, call: RecordedCall, evidence: Evidence) -> None:
        assert call.program is not None
        self.evidence = evidence
        self.program = call.program.variant.executable.program
        self.outputs = call.program.variant.outputs
        self.num_draws = call.num_draws
        self.rewinds = call.rewinds
        self.constants: dict[int, torch.Tensor] = {}  # the next call confirms them
        self.scalars = call.scalars
        self.result_spec = call.result_spec
        # A tensor that is neither made by the step nor read in a place can't be recognized by an outline.
        self.result_leaves = [_without_tensor(leaf) for leaf in call.result_leaves]
        self.added = [_without_tensors(added) for added in call.added]
        self._inputs: list[Callable[[], Handle | None]] = [one.weakly() for one in call.program.inputs]

    def is_like(self, call: RecordedCall) -> bool:
        """Whether a call of another kind did the same, but for sizes."""
        if call.program is None or call.lasting.found or len(call.scalars) != len(self.scalars):
            return False
        return self.is_of(call.program.variant)

    def is_of(self, variant: Variant) -> bool:
        """Whether a program is that of the outline, but for sizes."""
        return variant.outputs == self.outputs and differ_in_sizes_only(
            self.program, variant.executable.program
        )

    def had_input(self, position: int, handle: Handle) -> bool:
        """Whether the input in this position was this very value."""
        return self._inputs[position]() == handle


def _without_tensor(leaf: Any) -> Any:
    return None if isinstance(leaf, torch.Tensor) else leaf


def _without_tensors(added: Added) -> Added:
    args, kwargs = pytree.tree_map(_without_tensor, (added.args, dict(added.kwargs)))
    return added._replace(args=args, kwargs=kwargs)
