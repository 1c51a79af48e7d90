"""Values that a step reads in mid-call, and that no later call can find different.

`nn.Transformer` looks at its mask to see whether it is causal; a model may ask a buffer whether something is
switched on. A read would cut the step in two, and the value could be another one in the next call. But a
value that is made from constants, and from tensors that nothing writes, lasts. So it is computed on the side,
without a barrier, and the call goes on. A replay may rest on it as long as those tensors have the values that
they had: the same handles, in memory that no step and no copy has written since.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from .. import metrics
from ..eager import eager_dispatch
from ..execute.reference import ReferenceExecutable
from ..program.program import Number, Program
from ..program.prune import prune
from ..record import _recorder
from ..record.assemble import assemble
from ..record.handle import Handle, PendingRun
from ..record.source import user_line
from ..runtime import runtime

# A value that takes more is not computed twice: its read is a barrier, as it is outside of a captured step.
_MAX_INSTRUCTIONS = 256
_MAX_BYTES = 1 << 24


class Lasting(NamedTuple):
    """Whose value a read rests on, which step wrote it last, and where the read was."""

    handle: Handle
    run: PendingRun | None
    line: str

    @property
    def is_current(self) -> bool:
        """Whether nothing has written the memory since, as far as it was recorded before the last barrier."""
        return self.handle.memory.run is self.run


class LastingReads:
    """The reads of one recorded call."""

    def __init__(self, new_arguments: Collection[Handle] | None) -> None:
        """`new_arguments`: of this call, which the next one may not have; None if no value may be read."""
        self._new_arguments = new_arguments
        self.found: dict[Handle, Lasting] = {}
        self.needs_new_argument = False  # a value that would last if its argument came again

    def read(
        self, handle: Handle, is_drawn: Callable[[Handle], bool], is_traced: Callable[[Number], bool]
    ) -> torch.Tensor | None:
        """A copy of the value; None if it does not last. Waits for the tensors that it is made from.

        `is_drawn`, `is_traced`: whether a tensor that the call has made, or a number, may vary. They are the
        call's own methods. Kept here, they would be a cycle, and a call holds the graph of its result.
        """
        if self._new_arguments is None or handle.type.layout is not torch.strided:
            return None
        program: Program | None = None
        inputs: Collection[Handle] = (handle,)
        numbers: list[Number] = []
        with runtime.recorder.lock:
            index = _recorder.index_in_current(handle)
            if index >= 0:
                known = _recorder.peek()
                operands, numbers = _recorder.peek_operands()
                inputs = list(operands)
                program = _only(assemble(known.entries, known.sources, (index,)), index)
                if program is None or any(is_traced(numbers[slot]) for slot in program.used_slots()):
                    return None
            needed = _needed(program, inputs)
            if sum(one.memory.nbytes for one in needed) > _MAX_BYTES:
                return None
            # Where a tensor begins in its memory is no part of a program: see [Note: offsets].
            if any(_recorder.is_pending(one) or one.type.offset or is_drawn(one) for one in needed):
                return None
            if any(one in self._new_arguments for one in needed):
                self.needs_new_argument = True
                return None
        with runtime.recorder.reading(needed), eager_dispatch():
            value = _compute(program, inputs, needed, numbers, handle)
            for one in needed:
                one.pristine = False  # otherwise the host could fill it again unseen
                self.found.setdefault(one, Lasting(one, one.memory.run, user_line(2)))
        metrics.count("lasting_values_read")
        return value


def _only(program: Program, output: int) -> Program | None:
    """The instructions that make one value; None if they do more than that, or are too many."""
    program = prune(dataclasses.replace(program, outputs=(output,)), keeps_effects=False)
    is_pure = all(instruction.is_torchs for instruction in program.instructions)
    is_small = len(program.instructions) <= _MAX_INSTRUCTIONS
    return program if is_pure and is_small and not program.storage_writes() else None


def _needed(program: Program | None, inputs: Collection[Handle]) -> list[Handle]:
    if program is None:
        return list(inputs)
    used = {value for instruction in program.instructions for value in instruction.reads()}
    return [handle for value, handle in zip(program.inputs, inputs, strict=True) if value in used]


def _compute(
    program: Program | None,
    inputs: Collection[Handle],
    needed: Collection[Handle],
    numbers: list[Number],
    handle: Handle,
) -> torch.Tensor:
    if program is None:
        assert handle.tensor is not None
        return handle.tensor.detach().clone()
    # Inputs that no kept instruction reads may not have been computed; nothing looks at what stands for them.
    nothing = torch.empty(0)
    tensors = [nothing if h not in needed or h.tensor is None else h.tensor for h in inputs]
    return ReferenceExecutable(program).run(tensors, numbers)[0].detach().clone()
