"""Facts about an op that follow from its schema and its kernels, whatever the arguments are."""

from __future__ import annotations

from typing import Any

import torch

from ..program.collectives import LAUNCHES, WAIT
from .decision import Operand
from .work import Work, work_of


class OpFacts:
    """What the schema of an op says, read once."""

    __slots__ = (
        "float_literals",
        "func",
        "has_out",
        "is_absolute",
        "is_collective",
        "is_composite",
        "is_quantizing",
        "is_random",
        "name",
        "needs_nbytes",
        "number_names",
        "number_positions",
        "returns_tensors",
        "work",
        "writes",
    )

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.func = func
        self.name = str(func)  # aten.add.Tensor
        numbers = [(i, a.name) for i, a in enumerate(schema.arguments) if _takes_number(a.type)]
        # Python numbers in these places are operands: a new number makes no new key.
        self.number_positions = frozenset(i for i, _ in numbers)
        self.number_names = frozenset(name for _, name in numbers)
        self.writes = frozenset(
            a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
        )
        self.returns_tensors = any("Tensor" in str(r.type) for r in schema.returns)
        # Writes its results into arguments of the caller, and gives these the right size.
        self.has_out = any(a.name in self.writes and a.kwarg_only for a in schema.arguments)
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        packet = schema.name.partition("::")[2]
        # The size of the result depends on the numbers themselves.
        self.float_literals = packet in ("arange", "range")
        # The result depends on the size of the memory behind the tensor.
        self.needs_nbytes = packet in ("as_strided", "as_strided_", "resize_", "resize", "set_", "set")
        # The result depends on the tensor's offset there: see [Note: offsets] in record/src/recorder.h.
        # A view as another data type counts the offset in other elements.
        changes_type = self.name == "aten.view.dtype" or packet in ("view_as_real", "view_as_complex")
        self.is_absolute = (
            self.needs_nbytes or self.has_out or changes_type or packet.startswith("as_strided")
        )
        # Inference knows nothing of quantized tensors. Fake quantization makes floats.
        self.is_quantizing = "quantize_per_" in packet and "fake_quantize" not in packet
        self.is_collective = self.name in (*LAUNCHES, WAIT)
        self.is_composite = is_composite(func) is True
        self.work: Work | None = work_of(func)

    def written_operands(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """The numbers of the operands that the op writes, by its schema and where the schema does not say."""
        writes = self.writes
        if self.name == "aten.native_batch_norm.default" and args[5]:
            # Updates the running statistics in training; its schema keeps silent about it.
            writes |= {"running_mean", "running_var"}
        written: list[int] = []
        if not writes:
            return written
        number = 0
        names = [a.name for a in self.func._schema.arguments]
        for name, arg in [*zip(names, args, strict=False), *kwargs.items()]:
            leaves = arg if isinstance(arg, (list, tuple)) and not isinstance(arg, Operand) else (arg,)
            for leaf in leaves:
                if type(leaf) is Operand:
                    if name in writes:
                        written.append(number)
                    number += 1
        return written


def is_composite(func: Any) -> bool | None:
    """Whether CPU tensors see only the op's parts. None: other devices do, but the CPU has a kernel for it.

    By C++ kernels alone: Python decompositions are for compilers and take other steps than eager.
    """
    name = func._schema.name
    if not name.startswith("aten::"):
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if not has_kernel(func.name(), "CompositeImplicitAutograd"):
        return False
    return None if has_kernel(func.name(), "CPU") else True


def _takes_number(schema_type: Any) -> bool:
    kind = schema_type.kind()
    if kind in ("OptionalType", "ListType"):
        element = schema_type.getElementType()
        # A list of tensors never holds numbers; a list of numbers (foreach) does.
        return bool(element.kind() == "NumberType" or (kind == "OptionalType" and _takes_number(element)))
    return kind in ("NumberType", "TensorType", "FloatType")
