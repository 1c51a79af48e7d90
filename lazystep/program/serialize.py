"""Programs as JSON: lists, dicts, strings and numbers, the same text for the same program.

The builder process receives programs as this text, and the key of a library on disk is a digest of it.
Reading the text can't run code, as reading a pickle could. Source lines are left out, because they do not
change what a program computes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from .program import Arg, Instruction, Program, Ref, ScalarRef, Storage, Value
from .types import TensorType, tensor_type

_SCALARS: Mapping[str, type] = {"float": float, "int": int, "complex": complex}
# Literals that are named constants of torch, written as {kind: name}.
_NAMED: Mapping[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


class NotPlainError(ValueError):
    """A literal of the program can't be written as plain data."""


def to_json(program: Program) -> str:
    """The program as JSON. Raises `NotPlainError` for a literal of an unknown type."""
    types: dict[TensorType, int] = {}
    values = []
    for number, (type_, storage) in program.values.items():
        values.append([number, types.setdefault(type_, len(types)), storage])
    data = {
        "types": [_type_to_data(type_) for type_ in types],
        "values": values,
        "storages": [[storage.nbytes, storage.is_input] for storage in program.storages],
        "inputs": program.inputs,
        "scalars": [kind.__name__ for kind in program.scalars],
    }
    # The texts of instructions are kept: programs that differ in sizes have the longest ones in common.
    instructions = ",".join([_text_of(i) for i in program.instructions])
    return f'{_dump(data)[:-1]},"instructions":[{instructions}],"outputs":{_dump(program.outputs)}}}'


def _dump(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def _text_of(instruction: Instruction) -> str:
    try:
        return instruction.text
    except AttributeError:
        instruction.text = _dump(_instruction_to_data(instruction))
        return instruction.text


def from_json(text: str) -> Program:
    """The program that `to_json` wrote, without its source lines."""
    data = json.loads(text)
    types = [_type_from_data(*fields) for fields in data["types"]]
    return Program(
        values={number: Value(types[type_], storage) for number, type_, storage in data["values"]},
        storages=tuple(Storage(*fields) for fields in data["storages"]),
        inputs=tuple(data["inputs"]),
        scalars=tuple(_SCALARS[name] for name in data["scalars"]),
        instructions=tuple(_instruction_from_data(*fields) for fields in data["instructions"]),
        outputs=tuple(data["outputs"]),
    )


def _type_to_data(type_: TensorType) -> list[Any]:
    layout, dtype = str(type_.layout), str(type_.dtype)
    return [dtype, type_.shape, type_.stride, type_.offset, type_.conj, type_.neg, layout]


def _type_from_data(
    dtype: str, shape: list[int], stride: list[int], offset: int, conj: bool, neg: bool, layout: str
) -> TensorType:
    return tensor_type(_named(dtype), tuple(shape), tuple(stride), offset, conj, neg, _named(layout))


def _instruction_to_data(instruction: Instruction) -> list[Any]:
    return [
        instruction.op,
        [_arg_to_data(arg) for arg in instruction.args],
        [[name, _arg_to_data(arg)] for name, arg in instruction.kwargs],
        instruction.results,
        instruction.writes,
        instruction.rebinds,
    ]


def _instruction_from_data(
    op: str,
    args: list[Any],
    kwargs: list[tuple[str, Any]],
    results: list[int | None],
    writes: list[int],
    rebinds: list[tuple[int, int]],
) -> Instruction:
    return Instruction(
        op=op,
        args=tuple(_arg_from_data(arg) for arg in args),
        kwargs=tuple((name, _arg_from_data(arg)) for name, arg in kwargs),
        results=tuple(results),
        writes=tuple(writes),
        rebinds=tuple((argument, value) for argument, value in rebinds),
        source=None,
    )


def _arg_to_data(arg: Arg) -> Any:
    kind = type(arg)
    if kind is Ref:
        return {"value": arg.value}
    if kind is ScalarRef:
        return {"scalar": arg.slot}
    if kind is tuple:
        return [_arg_to_data(a) for a in arg]
    if arg is None or kind in (bool, int, str):
        return arg
    if kind is float:
        return {"float": arg.hex()}  # exact, infinities and NaN included
    if kind is complex:
        return {"complex": [arg.real.hex(), arg.imag.hex()]}
    if kind is torch.device:
        return {"device": str(arg)}
    for name, named in _NAMED.items():
        if kind is named:
            return {name: str(arg)}
    raise NotPlainError(f"an argument of type {kind.__module__}.{kind.__name__}")


def _arg_from_data(data: Any) -> Arg:
    if isinstance(data, list):
        return tuple(_arg_from_data(d) for d in data)
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "value":
        return Ref(content)
    if kind == "scalar":
        return ScalarRef(content)
    if kind == "float":
        return float.fromhex(content)
    if kind == "complex":
        return complex(*map(float.fromhex, content))
    if kind == "device":
        return torch.device(content)
    return _named(content)


def _named(name: str) -> Any:
    """The constant of torch that prints as `name`, such as `torch.float32` or `torch.strided`."""
    return getattr(torch, name.removeprefix("torch."))
