"""A whole update of an optimizer as one op: what torch's function for it does, or nothing.

Under a `GradScaler`, an update whose gradients have overflowed does not happen, and does not count. Eager's
host reads a flag and decides. In a program the op `lazystep::optimize` gets the flag. Its kernel runs when
the step runs: it looks at the flag, and calls torch's own function, such as `torch.optim.adam.adam`, on the
CPU tensors of the step. So whatever that function computes on the host (bias corrections, branches on the
step count) is computed there, from step counts that are tensors of the program, with eager's bits.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

# torch's functions, by name: the module in which the optimizer finds them.
FUNCTIONS = {
    "adadelta": "torch.optim.adadelta",
    "adafactor": "torch.optim._adafactor",
    "adagrad": "torch.optim.adagrad",
    "adam": "torch.optim.adam",
    "adamax": "torch.optim.adamax",
    "asgd": "torch.optim.asgd",
    "muon": "torch.optim._muon",
    "nadam": "torch.optim.nadam",
    "radam": "torch.optim.radam",
    "rmsprop": "torch.optim.rmsprop",
    "rprop": "torch.optim.rprop",
    "sgd": "torch.optim.sgd",
}
# The functions as torch has made them: the device wraps them, for lazy tensors.
ORIGINALS: dict[str, Callable[..., None]] = {
    name: getattr(importlib.import_module(module), name) for name, module in FUNCTIONS.items()
}
# On the CPU these have a fused kernel, which takes the flag, and rounds differently.
_FUSED = frozenset({"adagrad", "adam", "sgd"})

# Kept for the life of the process: dropping a Library removes its ops.
_library = torch.library.Library("lazystep", "FRAGMENT")
_library.define(
    "optimize(Tensor(a!)[] written, Tensor[] read, Tensor? skip, Scalar[] numbers, str call) -> ()"
)
# In a library. Numbers come as vectors; the text says which element is which number.
_library.define(
    "optimize_natively(Tensor(a!)[] written, Tensor[] read, Tensor skip, Tensor? floats, Tensor? ints, "
    "str call) -> ()"
)
# The same without mutation, for tracing.
_library.define(
    "optimized_natively(Tensor[] written, Tensor[] read, Tensor skip, Tensor? floats, Tensor? ints, "
    "str call) -> Tensor[]"
)


@dataclasses.dataclass
class Call:
    """A call of one of torch's functions, taken apart as the op takes it."""

    written: list[torch.Tensor]
    read: list[torch.Tensor]
    numbers: list[Any]
    text: str = ""  # JSON: the function's name, and each argument as in `_describe`


def take_apart(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    """The call as arguments of the op; None if it has arguments that the op does not take."""
    call = Call([], [], [])
    try:
        described = {
            key: _describe(call, argument, "written" if _is_state(key, argument) else "read")
            for key, argument in (*zip(_names(name), args, strict=False), *kwargs.items())
        }
    except TypeError:
        return None
    call.text = json.dumps([name, described])
    return call


def _is_state(name: str, argument: Any) -> bool:
    """Whether the function writes an argument: a list of parameters or state. One tensor is an option."""
    return isinstance(argument, list) and name != "grads"


@functools.cache
def _names(name: str) -> tuple[str, ...]:
    return tuple(inspect.signature(ORIGINALS[name]).parameters)


def position_of_counts(name: str) -> int | None:
    """Where a function takes step counts, among its arguments behind the parameters and gradients."""
    names = _names(name)
    return names.index("state_steps") - 2 if "state_steps" in names else None


def _describe(call: Call, argument: Any, target: str) -> Any:
    """Where an argument is: `["written", 3]` a tensor, `["number", 0]` a number, `["list", [...]]` a list."""
    if isinstance(argument, torch.Tensor):
        tensors: list[torch.Tensor] = getattr(call, target)
        tensors.append(argument)
        return [target, len(tensors) - 1]
    if isinstance(argument, (list, tuple)):
        elements = [_describe(call, one, target) for one in argument]
        return ["list" if isinstance(argument, list) else "tuple", elements]
    if argument is None or isinstance(argument, (bool, str)):
        return ["literal", argument]
    if isinstance(argument, (int, float)):
        call.numbers.append(argument)
        return ["number", len(call.numbers) - 1]
    raise TypeError(f"{type(argument).__name__} can't be recorded")


@functools.lru_cache(maxsize=1024)
def _read(text: str) -> Any:
    return json.loads(text)


def _rebuild(described: Any, places: dict[str, Sequence[Any]]) -> Any:
    kind, what = described
    if kind in ("list", "tuple"):
        elements = [_rebuild(one, places) for one in what]
        return elements if kind == "list" else tuple(elements)
    return what if kind == "literal" else places[kind][what]


def _arguments(text: str, written: Any, read: Any, numbers: Any) -> tuple[str, dict[str, Any]]:
    name, described = _read(text)
    places = {"written": written, "read": read, "number": numbers}
    return name, {key: _rebuild(one, places) for key, one in described.items()}


def _optimize(
    written: list[torch.Tensor],
    read: list[torch.Tensor],
    skip: torch.Tensor | None,
    numbers: list[Any],
    call: str,
) -> None:
    if skip is not None and skip.item():
        return
    name, arguments = _arguments(call, written, read, numbers)
    with torch.no_grad():
        ORIGINALS[name](**arguments)


def _optimize_natively(
    written: list[torch.Tensor],
    read: list[torch.Tensor],
    skip: torch.Tensor,
    floats: torch.Tensor | None,
    ints: torch.Tensor | None,
    call: str,
) -> None:
    if skip.item():
        return
    vectors = {"float": floats, "int": ints}
    text, sources = _read(call)
    numbers = [what if kind == "fixed" else vectors[kind][what].item() for kind, what in sources]  # type: ignore[index]
    name, arguments = _arguments(text, written, read, numbers)
    if name in _FUSED and _suits_fused(arguments):
        arguments |= {"fused": True, "foreach": False}
    with torch.no_grad():
        ORIGINALS[name](**arguments)


def _suits_fused(arguments: dict[str, Any]) -> bool:
    """Whether the fused kernel computes the same up to rounding."""
    tensors = [*arguments["params"], *arguments["grads"]]
    return (
        len({tensor.dtype for tensor in tensors}) == 1
        and tensors[0].dtype in (torch.float32, torch.float64)
        and not isinstance(arguments["lr"], torch.Tensor)
    )


def _optimized_natively(written: list[torch.Tensor], *rest: Any) -> list[torch.Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in written]


_library.impl("optimize", _optimize, "CPU")
_library.impl("optimize_natively", _optimize_natively, "CPU")
for _name in ("optimize", "optimize_natively"):
    _library.impl(_name, lambda *_: None, "Meta")
_library.impl("optimized_natively", _optimized_natively, "Meta")

OPTIMIZE = torch.ops.lazystep.optimize.default
UPDATE = "lazystep.optimize.default"  # its name in programs
