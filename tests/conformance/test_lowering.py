"""Every operator of PyTorch's database, lowered: Inductor's graph computes what the reference does.

Building a library takes seconds, lowering takes milliseconds. So here every program runs twice, on the
reference executable and as its lowered graph, op by op and uncompiled; mutated inputs, aliased
outputs and scalars go through the same signature as a library's. What can't be lowered is listed.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import lazystep
from lazystep.compile.lower import LoweringError, lower
from lazystep.compile.scalars import fixed_slots
from lazystep.execute.compare import describe, differences, distance
from lazystep.execute.native import NativeExecutable
from lazystep.execute.reference import ReferenceExecutable
from lazystep.program.serialize import from_json, to_json
from lazystep.program.signature import NotCallableError, signature_of
from lazystep.tiers.tiered import TieredExecutable
from tests.twice import copy_inputs, perturb_inputs, results_of

from .conftest import Counts
from .test_ops import OPS, UNINITIALIZED, call, pick_samples

# Programs of these stay on the reference executable, and part of what is said about them: a library takes and
# gives real tensors only.
COMPLEX = (
    *(f"fft.{i}{kind}fft{n}" for i in ("", "i") for kind in ("", "r", "h") for n in ("", "2", "n")),
    *("cdouble", "cfloat", "chalf", "complex", "polar", "view_as_complex"),
    *("linalg.eig", "linalg.eigvals", "stft"),
)
NOT_LOWERED = {"resize_": "changes the size of an argument", **dict.fromkeys(COMPLEX, " is complex: ")}


# The sample of these makes no program: they read values, draw at once, have nothing to compute in their first
# sample, or are refused by eager on the CPU.
WITHOUT_A_PROGRAM = UNINITIALIZED | {
    *("allclose", "argwhere", "bincount", "broadcast_shapes", "equal", "item", "nonzero", "unique"),
    *("normal.number_mean", "rand_like", "randint", "randint_like", "randn", "randn_like"),
    "unique_consecutive",
    *(name for name in OPS if name.startswith("signal.windows.")),
}
# The operators that take float32 or int64: all but six.
WITH_A_SAMPLE = [
    name for name, op in OPS.items() if {torch.float32, torch.int64} & op.supported_dtypes("cpu")
]


def one_sample(op: OpInfo) -> tuple[list[SampleInput], bool]:
    """The sample that stands for the operator, and whether it has a gradient."""
    dtype = torch.float32 if torch.float32 in op.supported_dtypes("cpu") else torch.int64
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    return pick_samples(op, dtype, grad, 1), grad


class LoweredExecutable(TieredExecutable):
    """Runs a program as its lowered graph too, and compares."""

    compared: list[str]
    refused: list[str]
    wrong: list[str]

    def run(self, inputs: list[torch.Tensor], scalars: Sequence[Any]) -> list[torch.Tensor]:
        program = self.program
        try:
            plain = from_json(to_json(program))
            assert to_json(plain) == to_json(program)
            slots = fixed_slots(program)
            signature = signature_of(program, slots)
            fixed = {slot: scalars[slot] for slot in slots}
            graph, _ = lower(plain, signature, fixed)
        except (LoweringError, NotCallableError) as error:
            self.refused.append(f"{type(error).__name__}: {error}")
            return super().run(inputs, scalars)
        num_threads = torch.get_num_threads()
        native = NativeExecutable(program, signature, lambda flat: list(graph(*flat)), num_threads)
        moved, copies = copy_inputs(program, inputs), copy_inputs(program, inputs)
        given = list(inputs)
        actual = results_of(program, copies, native.run(list(copies), scalars))
        outputs = super().run(inputs, scalars)
        expected = results_of(program, given, outputs)
        for (value, a), (_, b) in zip(expected, actual, strict=True):
            if (a.shape, a.dtype, a.stride()) != (b.shape, b.dtype, b.stride()):
                self.wrong.append(f"%{value} is {b.dtype} {b.shape} {b.stride()}")

        def moves(numbers: Sequence[int]) -> list[float]:
            perturb_inputs(program, moved)
            again = results_of(program, moved, ReferenceExecutable(program).run(list(moved), scalars))
            return [distance(expected[number][1], again[number][1]) for number in numbers]

        pairs = zip(expected, actual, strict=True)
        found = differences(program, expected, [_without_noise(*pair) for pair in pairs], moves)
        if found:
            self.wrong.append(describe(program, found))
        self.compared.append("")
        return outputs


def _without_noise(
    expected: tuple[int, torch.Tensor], actual: tuple[int, torch.Tensor]
) -> tuple[int, torch.Tensor]:
    """The expected tensor if both are zero but for rounding: Inductor's formulas round differently."""
    tensors = (expected[1], actual[1])
    is_noise = all(t.is_floating_point() and t.numel() and t.abs().max() < 1e-6 for t in tensors)
    return expected if is_noise else actual


@pytest.fixture(autouse=True)
def lowered(monkeypatch: pytest.MonkeyPatch, runtime: Any, runtime_module: Any) -> Any:
    monkeypatch.setattr(torch, "_lazy", types.SimpleNamespace(mark_step=lazystep.mark_step), raising=False)
    monkeypatch.setattr(runtime_module, "TieredExecutable", LoweredExecutable)
    for name in ("compared", "refused", "wrong"):
        monkeypatch.setattr(LoweredExecutable, name, [], raising=False)
    runtime.programs.clear()
    yield LoweredExecutable
    runtime.programs.clear()


@pytest.mark.parametrize("name", WITH_A_SAMPLE)
def test_lowered_graph_computes_what_the_reference_does(
    name: str, lowered: type[LoweredExecutable], counts: Counts
) -> None:
    op = OPS[name]
    samples, grad = one_sample(op)
    for sample in samples:
        call(op.op, sample, "lazy", grad=grad)
        lazystep.wait_device_ops()
    is_recorded = bool(lowered.compared or lowered.refused)
    assert is_recorded == (not name.startswith("jiterator") and name not in WITHOUT_A_PROGRAM)
    counts.add("refused" if lowered.refused else "compared" if is_recorded else "without a program")
    if name not in UNINITIALIZED:
        assert not lowered.wrong, lowered.wrong[:3]
    assert bool(lowered.refused) == (name in NOT_LOWERED), lowered.refused
    for reason in lowered.refused:
        assert NOT_LOWERED[name] in reason
