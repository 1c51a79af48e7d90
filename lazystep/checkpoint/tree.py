"""A state as JSON and tensors: dicts, lists, tuples, numbers, strings and tensors, at any depth.

`take_apart` gives every tensor a name and the rest a form that JSON can hold; `put_together` is the inverse.
Dicts keep the types of their keys, floats their bits. What has no such form is refused with its place in the
state.
"""

from __future__ import annotations

import collections
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError

# A tensor and its place in the state, to a tensor or a promise of one, under which the file will know it.
Store = Callable[[str, torch.Tensor], str]


def take_apart(value: Any, store: Store, place: str = "") -> Any:
    """The JSON form of a value. `store(place, tensor)` returns the name under which a tensor is kept."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:  # Python writes no decimal number of more than some thousand digits
        return value if value.bit_length() <= 64 else {"int": hex(value)}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.itemsize <= 8:
        return {"scalar": value.tobytes().hex(), "dtype": value.dtype.str}
    if isinstance(value, float):  # of the others, all bits: the sign of a NaN, too
        return float(value) if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if kind is complex:
        return {"complex": [take_apart(part, store, place) for part in (value.real, value.imag)]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, torch.Tensor):
        return {"tensor": store(place, value)}
    # Subclasses have more than the array: a mask, names.
    if kind in (np.ndarray, np.memmap) and value.dtype.kind in "biuf" and value.itemsize <= 8:
        native = value.astype(value.dtype.newbyteorder("="))
        return {"array": store(place, torch.from_numpy(native)), "dtype": value.dtype.str}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"device": str(value)}
    if kind in _SEQUENCES:
        return {_SEQUENCES[kind]: [take_apart(v, store, f"{place}.{i}") for i, v in enumerate(value)]}
    if kind in _MAPPINGS:
        items = [[take_apart(k, store), take_apart(v, store, f"{place}.{k}")] for k, v in value.items()]
        form = {_MAPPINGS[kind]: items}
        if (versions := getattr(value, "_metadata", None)) is not None:  # of a module's state dict
            form["metadata"] = take_apart(versions, store, f"{place}._metadata")
        return form
    raise CheckpointError(
        f"{place.removeprefix('.')} is of type {kind.__name__}, which a checkpoint can't hold: it has "
        "tensors, numbers, "
        "strings, lists, tuples and dicts. Leave it out of the state, or give its object a state_dict() "
        "of these."
    )


_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "tuple"}
# The default factory of a defaultdict is code: its state is the items.
_MAPPINGS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "dict",
    collections.defaultdict: "dict",
    collections.Counter: "counter",
}


def put_together(form: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The value that `take_apart` has made this form of."""
    if not isinstance(form, dict):
        return form
    kind, content = next(iter(form.items()))
    match kind:
        case "float":
            # Earlier releases have written "nan", "inf" and "-inf".
            return struct.unpack(">d", bytes.fromhex(content))[0] if len(content) == 16 else float(content)
        case "int":
            return int(content, 16)
        case "complex":
            return complex(*(put_together(part, tensors) for part in content))
        case "bytes":
            return bytes.fromhex(content)
        case "scalar":
            return np.frombuffer(bytes.fromhex(content), form["dtype"])[0]
        case "tensor":
            return tensors[content]
        case "array":
            return tensors[content].numpy().astype(form["dtype"])
        case "dtype":
            return getattr(torch, content)
        case "device":
            return torch.device(content)
        case "list":
            return [put_together(v, tensors) for v in content]
        case "tuple":
            return tuple(put_together(v, tensors) for v in content)
        case "dict" | "counter":
            items = {put_together(k, tensors): put_together(v, tensors) for k, v in content}
            if "metadata" in form:
                items = collections.OrderedDict(items)
                vars(items)["_metadata"] = put_together(form["metadata"], tensors)
            return items if kind == "dict" else collections.Counter(items)
    raise CheckpointError(
        f"a state has an unknown kind of value, {kind!r}: it is of a newer version of lazystep"
    )
