"""Short programs as text, and a runner that compares lazy with eager.

A program is a list of lines of Python over tensors on the device `D`. It runs once with D = "cpu" and once
with D = "lazy". After every line all that torch tells without values must be equal, and values wherever the
program reads them and at its end. `program_writer.py` writes random ones.
"""

from __future__ import annotations

import contextlib
import linecache
import math
import warnings
from typing import Any

import torch

import lazystep

FILE = "program.py"


class Program(tuple[str, ...]):
    """The lines of a program. Prints as one would type it in."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n" + "".join(f"    {line}\n" for line in self)


def parse(text: str) -> Program:
    """A program from the text of a test."""
    return Program(line.strip() for line in text.strip().splitlines())


class Machine:
    """Runs a program line by line on one device."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.reads: list[Any] = []
        self.names: dict[str, Any] = {"torch": torch, "lazystep": lazystep, "D": device, "nan": math.nan}
        self.names["read"] = lambda value: self.reads.append(frozen(value))
        self._num_lines = 0
        self._versions: dict[str, tuple[int, int | None]] = {}

    def run(self, line: str) -> Exception | None:
        """Run the next line. Returns what it raises."""
        self._num_lines += 1
        code = compile("\n" * (self._num_lines - 1) + line, FILE, "exec")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch: deprecated, but to be equal all the same
                exec(code, self.names)
        except Exception as error:
            return error.with_traceback(None)  # whose frames would keep tensors alive
        return None

    def tensors(self) -> dict[str, torch.Tensor]:
        """The living tensors by name."""
        return {name: value for name, value in self.names.items() if isinstance(value, torch.Tensor)}

    def look(self) -> dict[str, Any]:
        """What torch tells about every tensor without waiting for a value."""
        first: dict[int, str] = {}
        found: dict[str, Any] = {}
        for name, tensor in self.tensors().items():
            # How high the counter of writes is differs, but not whether this line has written.
            before = self._versions.get(name)
            self._versions[name] = now = id(tensor), _version(tensor)
            is_written = before is not None and before[0] == now[0] and before != now
            found[name] = (first.setdefault(id(tensor), name), *_facts(tensor), f"is_written {is_written}")
            # A view's gradient is asked for at the end: autograd may have to look at the base for the answer.
            if not tensor._is_view() and tensor.is_leaf and tensor.grad is not None:
                found[f"{name}.grad"] = _facts(tensor.grad)
        return found

    def values(self) -> dict[str, Any]:
        """What the program leaves behind: all values, gradients and the state of the generator."""
        found: dict[str, Any] = {"generator": torch.get_rng_state().tolist()}
        for name, tensor in self.tensors().items():
            found[name] = frozen(tensor)
            try:
                found[f"{name}.grad"] = frozen(tensor.grad) if tensor.is_leaf else "no leaf"
            except RuntimeError as error:
                if is_refusal(error):
                    raise
                found[f"{name}.grad"] = type(error)
        return found


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        str(tensor.dtype),
        tuple(tensor.shape),
        # The stride of a dimension of size one reaches nothing. Gradients that autograd adds up have others.
        tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1),
        f"offset {tensor.storage_offset()}",
        f"requires_grad {tensor.requires_grad}",
    )


def _version(tensor: torch.Tensor) -> int | None:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors have none, nor do some that took their data
        return None


def frozen(value: Any) -> Any:
    """Something that is equal if and only if the bits are: minus zero is not zero, and NaN is NaN."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    host = value.detach().cpu()
    numbers = (host.double() if host.is_floating_point() else host).tolist()
    return f"{host.dtype} {tuple(host.shape)} {numbers}"


class Refused(Exception):  # noqa: N818 - it is an answer
    """The lazy device has refused a line of the program with an error of its own."""


def compare(program: Program) -> None:
    """Run a program on both devices. AssertionError where they differ, `Refused` if lazy refuses a line."""
    try:
        _compare(program)
    finally:
        # What is recorded or has failed behind the last line that was looked at is not the next program's.
        with contextlib.suppress(lazystep.StepError):
            lazystep.mark_step(wait=True)


def _compare(program: Program) -> None:
    eager = Machine("cpu")
    expected = []
    for line in program:
        error = eager.run(line)
        expected.append((error, eager.look(), len(eager.reads)))
    ends_with = eager.values()
    linecache.cache[FILE] = (0, None, [f"{line}\n" for line in program], FILE)
    lazy = Machine("lazy")
    for line, (error, facts, num_reads) in zip(program, expected, strict=True):
        got = lazy.run(line)
        if error is None and got is not None:
            if is_refusal(got):
                raise Refused(line) from got
            raise AssertionError(f"only lazy raises, at: {line}") from got
        if error is not None:
            if got is None and _fails_in_background(error):
                return
            assert got is not None, f"only eager raises, at: {line}\n{error!r}"
            if str(got) != str(error) and is_refusal(got):
                raise Refused(line) from got
            assert type(got) is type(error), f"lazy raises {got!r} and eager {error!r}, at: {line}"
        _differ(f"after: {line}", lazy.look(), facts)
        if "_is_view()" in line and lazy.reads and any("inference_mode" in earlier for earlier in program):
            # What eager's `stack` or `repeat` of an inference tensor returns calls itself a view, of memory
            # that nobody else has.
            lazy.reads[-1] = eager.reads[num_reads - 1]
        assert lazy.reads == eager.reads[:num_reads], f"another value is read, at: {line}"
    try:
        lazystep.mark_step()
        got_at_end = lazy.values()
    except Exception as error:
        if is_refusal(error):
            raise Refused("the end") from error
        raise AssertionError("only lazy raises, at the end") from error
    _differ("at the end", got_at_end, ends_with)


def _fails_in_background(error: Exception) -> bool:
    """Whether the step fails with eager's error for an index or a mask. Others are raised at the line."""
    try:
        lazystep.mark_step(wait=True)
    except lazystep.StepError as failure:
        # That an empty tensor overlaps with itself is said by eager's kernel, and not by the trial.
        late = ("mask", "shape mismatch", "single memory location")
        is_about_values = isinstance(error, IndexError) or any(text in str(error) for text in late)
        return is_about_values and type(failure.__cause__) is type(error)
    return False


def _differ(where: str, got: dict[str, Any], want: dict[str, Any]) -> None:
    for name in [*want, *got]:
        assert got.get(name) == want.get(name), f"{name} differs, {where}\n{got.get(name)}\n{want.get(name)}"


def is_refusal(error: Exception) -> bool:
    """Whether an error names the op, the line of the program and a way out, as docs/errors.md promises."""
    if isinstance(error, lazystep.UnsupportedError):
        return FILE in str(error)
    if "Inplace update to inference tensor" in str(error):
        return True  # torch's own rule, of which eager makes exceptions
    if "INTERNAL ASSERT FAILED" in str(error) and "variable.cpp" in str(error):
        return True  # torch's, for a view that wants a gradient while its base no longer does
    return any("make the view after it" in note for note in getattr(error, "__notes__", ()))


def shorten(program: Program) -> Program:
    """A program that still differs from eager, without the lines that it does not need for that."""
    while True:
        parts = (Program(program[:k] + program[k + 1 :]) for k in reversed(range(len(program))))
        shorter = next(filter(differs, parts), None)
        if shorter is None:
            return program
        program = shorter


def differs(program: Program) -> bool:
    """Whether lazy does something else than eager."""
    with contextlib.suppress(Refused):
        try:
            compare(program)
        except AssertionError:
            return True
    return False
