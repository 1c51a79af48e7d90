"""The native executable: runs a whole program as one library that AOTInductor built.

AOTInductor's runner checks nothing. A tensor of another type would be read out of bounds, and two arguments
that share memory would give wrong numbers. So every argument is checked before each run, and `UnfitError`
refuses a wrong argument before anything has run.
"""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..program.program import Program
from ..program.signature import Argument, Signature, Where
from ..program.types import TensorType, type_of
from .chain import ReadyCall, ReadyRun, make_ready_call
from .diagnose import find_failure
from .executable import InstructionError
from .library import Call, library_of
from .reference import relayout
from .thread_choice import ThreadChoice


class UnfitError(Exception):
    """The library was not built for these inputs. Nothing has run or changed."""


class NativeExecutable:
    """Runs a program's library, for one thread count and one set of fixed scalars. See `Executable`."""

    def __init__(
        self,
        program: Program,
        signature: Signature,
        call: Call,
        num_threads: int,
        carriers: Sequence[torch.Tensor] = (),
    ) -> None:
        """`call`: the library's entry function, from `library.load`. `carriers`: what it takes at the end."""
        self.program = program
        self.num_threads = num_threads
        self._signature = signature
        self._call = call
        self._carriers = carriers
        self._floats = _Numbers(signature.floats, torch.float64)
        self._ints = _Numbers(signature.ints, torch.int64)
        # The arguments that passed the check in the last run: a weak reference to each tensor, and its
        # address. Parameters and optimizer state are the same tensors in every step, so the check is skipped.
        self._checked: list[tuple[Callable[[], Any], int]] = [(_nothing, 0)] * len(signature.arguments)
        self._seconds = 0.0
        self._returns_all = all(where is Where.RETURNED for where, _, _ in signature.outputs)

    def run(self, inputs: list[torch.Tensor], scalars: Sequence[Any]) -> list[torch.Tensor]:
        """See `Executable.run`. Raises `UnfitError` before anything has run."""
        arguments, addresses = self._arguments(inputs)
        inputs.clear()
        flat = list(arguments)
        for numbers in (self._floats, self._ints):
            if numbers.slots:
                flat.append(numbers.write(scalars))
                addresses.add(numbers.address)
        flat += self._carriers
        try:
            start = time.perf_counter()
            returned = self._call(flat)
            self._seconds = time.perf_counter() - start
        except RuntimeError as error:
            failure = self._failure(error, arguments, scalars)
            raise failure from failure.__cause__
        del flat
        return self._outputs(arguments, addresses, returned)

    @property
    def seconds(self) -> float:
        """How long the library has taken for the last run: not the wait for the interpreter lock after it."""
        library = library_of(self._call)
        return self._seconds if library is None else float(library.seconds)

    def _failure(
        self, error: RuntimeError, arguments: Sequence[torch.Tensor], scalars: Sequence[Any]
    ) -> InstructionError:
        """The error of a run, with the op that failed. Runs the program again, op by op, to find it."""
        text = str(error).partition("\nException raised from")[0]  # without the frames of C++
        position = _allocating_position(self.program, text)
        cause: BaseException | None = RuntimeError(text)
        if position is None:
            found = find_failure(self.program, self._inputs_of(arguments), scalars)
            if found is None:
                position = len(self.program.instructions) - 1  # nobody knows: the last one stands for all
            else:
                position, cause = found.position, found.__cause__
        failure = InstructionError(position, all_started=True)
        failure.__cause__ = cause
        return failure

    def _inputs_of(self, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The program's inputs, from what the library was given; empty tensors for those that nobody uses."""
        memory = {
            expected.storage: (tensor, expected.is_flat)
            for expected, tensor in zip(self._signature.arguments, arguments, strict=False)
        }
        inputs = []
        for value in self.program.inputs:
            type_, storage = self.program.values[value]
            tensor, is_flat = memory.get(storage, (torch.empty(0), False))
            inputs.append(tensor.as_strided(type_.shape, type_.stride, type_.offset) if is_flat else tensor)
        return inputs

    # -- runs without Python: see [Note: chain] in chain.h -----------------------------------------------

    def make_ready_call(
        self,
        inputs: Sequence[torch.Tensor | None],
        own: Sequence[int],
        places: Sequence[int],
        fixed: Mapping[int, Any],
        threads: ThreadChoice,
        agreements: Sequence[tuple[Any, int]],
    ) -> ReadyCall | None:
        """The library bound to these inputs; None if they need more than a check of addresses.

        `inputs`: None for those that each run has its own of, at the positions `own`. `places`: where in a
        run's list of numbers each scalar is. `fixed`: the scalars that are part of the library. `threads`: on
        how many it runs.
        `agreements`: the groups of its collectives, see `ReadyCall` in chain.h.
        """
        library = library_of(self._call)
        if library is None or any(argument.is_flat for argument in self._signature.arguments):
            return None
        arguments: list[torch.Tensor | None] = []
        examples: dict[int, tuple[int, torch.Tensor]] = {}
        addresses: set[int] = set()
        for number, expected in enumerate(self._signature.arguments):
            tensor = inputs[expected.position]
            if tensor is None:
                examples[expected.position] = number, _like(expected.type)
            else:
                try:
                    _checked_argument(expected, tensor)
                except UnfitError:
                    return None
                address = tensor.data_ptr()
                if address in addresses:
                    return None
                addresses |= {address} - {0}
            arguments.append(tensor)
        if set(own) != examples.keys():
            return None  # an input that the library does not take
        for numbers in (self._floats, self._ints):
            if numbers.slots:
                arguments.append(numbers.tensor)
        arguments += self._carriers
        values = self.program.values
        return make_ready_call(
            library,
            arguments,
            [examples[position] for position in own],
            self._floats.tensor,
            [places[slot] for slot in self._floats.slots],
            self._ints.tensor,
            [places[slot] for slot in self._ints.slots],
            [(places[slot], value) for slot, value in fixed.items()],
            [_like(values[value].type) for value in self._signature.returned],
            threads,
            agreements,
        )

    def outputs_of(self, run: ReadyRun, fixed: Mapping[int, Any]) -> list[torch.Tensor]:
        """The outputs of a ready run that has ended. Raises `InstructionError` if it has failed.

        `fixed`: the scalars that are part of the library. After a failure, no other run may have begun.
        """
        if run.has_failed:
            scalars = [fixed.get(slot) for slot in range(len(self.program.scalars))]
            for numbers in (self._floats, self._ints):
                for slot, number in zip(numbers.slots, numbers.tensor.tolist(), strict=True):
                    scalars[slot] = number
            failure = self._failure(RuntimeError(run.error), run.arguments(), scalars)
            raise failure from failure.__cause__
        returned = run.returned()
        if run.is_as_declared and self._returns_all:
            return [returned[number] for _, number, _ in self._signature.outputs]
        arguments = run.arguments()
        taken = set() if run.is_as_declared else {_base_address(tensor) for tensor in arguments}
        return self._outputs(arguments, taken, returned)

    def check_fit(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raise `UnfitError` if the library was not built for these inputs. Runs nothing."""
        self._arguments(inputs)

    def _arguments(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], set[int]]:
        """The checked arguments for the library, and the addresses of their memory."""
        arguments = []
        addresses = set()
        num_empty = 0
        checked = self._checked
        for number, expected in enumerate(self._signature.arguments):
            tensor = inputs[expected.position]
            known, address = checked[number]
            # The same tensor at the same address: nobody changes the type of a tensor that a handle holds.
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


class _Numbers:
    """The varying scalars of one kind, in memory that is written before each run.

    NumPy writes the memory, because making a tensor releases the interpreter lock for a moment. The training
    thread, woken by the end of the last step, would take the lock and keep it while it records its next step.
    This step would then begin 0.4 ms later: a fifth of a small step.
    """

    def __init__(self, slots: tuple[int, ...], dtype: torch.dtype) -> None:
        self.slots = slots
        self.tensor = torch.zeros(len(slots), dtype=dtype)
        self._array = self.tensor.numpy()
        self.address = self.tensor.data_ptr()

    def write(self, scalars: Sequence[Any]) -> torch.Tensor:
        """Write these values into the vector, and return it."""
        self._array[:] = [scalars[slot] for slot in self.slots]
        return self.tensor


def _like(type_: TensorType) -> torch.Tensor:
    """A tensor of this type without elements."""
    return torch.empty_strided(type_.shape, type_.stride, dtype=type_.dtype, device="meta")


def _nothing() -> None:
    return None


def _base_address(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage; 0 for an empty tensor.

    Computed from the tensor's own address, because the storage of an empty tensor may refuse to give one.
    """
    address = int(tensor.data_ptr())
    return address - int(tensor.storage_offset()) * tensor.itemsize if address else 0


def _checked_argument(expected: Argument, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the form that the library takes. Raises `UnfitError` if it does not fit."""
    position, type_ = expected.position, expected.type
    if expected.is_flat:
        storage = tensor.untyped_storage()
        if type_.shape[0] * type_.dtype.itemsize > storage.nbytes():
            raise UnfitError(f"input {position} has {storage.nbytes()} bytes of memory")
        tensor = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, type_.shape, (1,))
    if tensor.dtype != type_.dtype or tensor.shape != type_.shape or tensor.stride() != type_.stride:
        raise UnfitError(f"input {position} is {type_of(tensor)}")
    if tensor.storage_offset() or not tensor.is_cpu or _is_lazily_negated(tensor):
        raise UnfitError(f"input {position} is {type_of(tensor)} on {tensor.device}")
    return tensor


def _is_lazily_negated(tensor: torch.Tensor) -> bool:
    # By dispatch keys: `is_conj` and `is_neg` release the interpreter lock, see `_Numbers`.
    keys = torch._C._dispatch_keys(tensor)
    return keys.has(torch._C.DispatchKey.Conjugate) or keys.has(torch._C.DispatchKey.Negative)


_ALLOCATION = re.compile(r"tried to allocate (\d+) bytes")


def _allocating_position(program: Program, message: str) -> int | None:
    """The likely position of an instruction that ran out of memory; None for another error.

    The message contains a size: the first instruction that makes a storage of this size is taken, or else the
    last instruction.
    """
    match = _ALLOCATION.search(message)
    if match is None:
        return None
    for position, instruction in enumerate(program.instructions):
        for value in instruction.defines():
            if program.storages[program.values[value].storage].nbytes == int(match[1]):
                return position
    return len(program.instructions) - 1
