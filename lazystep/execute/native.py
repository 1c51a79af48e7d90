"""The native executable: a whole program as one library that AOTInductor built.

The runner checks nothing: a tensor of another type would be read out of bounds, and two arguments in
one piece of memory would give wrong numbers. So every argument is checked before each run, and what
does not fit is refused with `UnfitError` before anything has been touched. The run itself does not
hold the interpreter lock.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..program.program import Program
from ..program.signature import Argument, Signature, Where
from ..program.types import type_of
from .executable import InstructionError
from .reference import relayout

# Tensors in, tensors out: what a library is to Python.
Call = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class UnfitError(Exception):
    """The inputs are not what the library was built for. Nothing has been run or changed."""


class NativeExecutable:
    """Runs a program's library. Fits one thread count and one set of fixed scalars. See `Executable`."""

    def __init__(
        self,
        program: Program,
        signature: Signature,
        call: Call,
        fixed: Mapping[int, Any],
        num_threads: int,
    ) -> None:
        """`call` is the library's entry, see `load`."""
        self.program = program
        self.num_threads = num_threads
        self._signature = signature
        self._fixed = tuple(fixed.items())
        self._call = call
        # What was found right at the last run: the tensor, weakly, and its address. Parameters and optimizer
        # state are the same tensors from step to step.
        self._checked: list[tuple[Callable[[], Any], int]] = [(_nothing, 0)] * len(signature.arguments)

    def fits(self, scalars: Sequence[Any], num_threads: int) -> bool:
        """Whether the library was built for these fixed scalars and for this number of threads."""
        return num_threads == self.num_threads and all(
            type(scalars[slot]) is type(value) and scalars[slot] == value for slot, value in self._fixed
        )

    def run(self, inputs: list[torch.Tensor], scalars: Sequence[Any]) -> list[torch.Tensor]:
        """See `Executable.run`. Raises `UnfitError` before anything has run."""
        arguments, addresses = self._arguments(inputs)
        inputs.clear()
        signature = self._signature
        flat = list(arguments)
        if signature.floats:
            flat.append(torch.tensor([scalars[slot] for slot in signature.floats], dtype=torch.float64))
        if signature.ints:
            flat.append(torch.tensor([scalars[slot] for slot in signature.ints], dtype=torch.int64))
        try:
            returned = self._call(flat)
        except RuntimeError as error:
            position = _failed_position(self.program, str(error))
            raise InstructionError(position, all_started=True) from error.with_traceback(None)
        del flat
        return self._outputs(arguments, addresses, returned)

    def _arguments(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], set[int]]:
        """The library's arguments, and the addresses of their memory. Every one has been checked."""
        arguments = []
        addresses = set()
        num_empty = 0
        checked = self._checked
        for number, expected in enumerate(self._signature.arguments):
            tensor = inputs[expected.position]
            known, address = checked[number]
            # The same tensor where it was: nobody changes the type of a tensor that a handle holds.
            if known() is not tensor or tensor.data_ptr() != address:
                argument = _checked_argument(expected, tensor)
                address = _base_address(argument)
                if argument is tensor:
                    checked[number] = weakref.ref(tensor), address
                tensor = argument
            num_empty += address == 0
            addresses.add(address)
            arguments.append(tensor)
        if len(addresses) + max(num_empty - 1, 0) != len(arguments):
            raise UnfitError("two inputs share their memory")
        return arguments, addresses

    def _outputs(
        self, arguments: list[torch.Tensor], taken: set[int], returned: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        values = self.program.values
        for number, value in enumerate(self._signature.returned):
            declared, tensor = values[value].type, returned[number]
            address = _base_address(tensor)
            is_shared = address in taken and address != 0
            taken.add(address)
            if is_shared or tensor.stride() != declared.stride or tensor.storage_offset():
                returned[number] = relayout(tensor, declared, copies=is_shared)
        outputs = []
        for where, number, type_ in self._signature.outputs:
            if where is Where.RETURNED:
                outputs.append(returned[number])
            else:
                memory = returned[number] if where is Where.VIEW else arguments[number]
                outputs.append(memory.as_strided(type_.shape, type_.stride, type_.offset))
        return outputs


def _nothing() -> None:
    return None


def _base_address(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins. By the tensor: an empty one may have a storage that can't be asked."""
    address = int(tensor.data_ptr())
    return address - int(tensor.storage_offset()) * tensor.itemsize if address else 0


def _checked_argument(expected: Argument, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the library takes it. Raises `UnfitError`."""
    position, type_ = expected.position, expected.type
    if expected.is_flat:
        storage = tensor.untyped_storage()
        if type_.shape[0] * type_.dtype.itemsize > storage.nbytes():
            raise UnfitError(f"input {position} has {storage.nbytes()} bytes of memory")
        tensor = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, type_.shape, (1,))
    if tensor.dtype != type_.dtype or tensor.shape != type_.shape or tensor.stride() != type_.stride:
        raise UnfitError(f"input {position} is {type_of(tensor)}")
    if tensor.storage_offset() or tensor.is_conj() or tensor.is_neg() or not tensor.is_cpu:
        raise UnfitError(f"input {position} is {type_of(tensor)} on {tensor.device}")
    return tensor


def load(library: Path) -> Call:
    """The entry of a library. Raises `RuntimeError` or `OSError` if it can't be loaded."""
    call: Call = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1).run
    return call


_ALLOCATION = re.compile(r"tried to allocate (\d+) bytes")


def _failed_position(program: Program, message: str) -> int:
    """The instruction that an error of the whole library belongs to, as far as it can be told.

    A failed allocation tells its size, which names the op that asked for it; else it is the last one.
    """
    match = _ALLOCATION.search(message)
    if match is not None:
        for position, instruction in enumerate(program.instructions):
            for value in instruction.defines():
                if program.storages[program.values[value].storage].nbytes == int(match[1]):
                    return position
    return len(program.instructions) - 1
