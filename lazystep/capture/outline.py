"""What is left of a recorded call when its tensors are gone: enough to know a call with other sizes again.

A step with a new shape is a call of a new kind. If its program differs from that of an earlier call in sizes
only, and it computes its numbers in the same way, then `Replay` takes the outline in the place of an earlier
call of the same kind. One call can't tell whether a size or something unseen made an integer, a number or a
constant. So the next call of the kind is recorded, too, without a witness, which costs little. It must do
what the replay would have done (`Replay.is_confirmed`): two recorded calls of one kind have to show no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..program.difference import differ_in_sizes_only
from ..record.handle import Handle
from ..step_closures import Added
from .recorded import RecordedCall


class Outline:
    """A recorded call without its tensors."""

    def __init__(self, call: RecordedCall) -> None:
        assert call.program is not None
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
        variant = call.program.variant
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
