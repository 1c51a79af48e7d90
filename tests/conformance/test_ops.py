"""Every operator of PyTorch's operator database: lazy equals eager bit for bit.

One test per operator goes through the data types. Each sample runs on the CPU and on the lazy
device from the same seed; outputs, gradients and the arguments themselves (some are written) must be
the same, and the random number generator must be in the same state. Where eager raises, lazy must
raise the same type.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

import lazystep

from .compare import Outcome, copy_inputs, device_difference, difference, pick, seed, tensors_in
from .conftest import Counts

# float32 gets as many samples as were asked for, each other data type a share of that.
SHARES = {
    torch.float32: 1.0,
    torch.float64: 0.5,
    torch.bfloat16: 0.5,
    torch.int64: 0.5,
    torch.bool: 0.5,
    torch.complex64: 0.5,
}
# Samples are picked evenly from the first of a list: some lists have a thousand.
POOL = 32
MAX_ERROR_INPUTS = 8

# Operators whose values are those of fresh memory: types are compared, values are not.
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


def has_values(name: str, sample: SampleInput) -> bool:
    """Whether eager gives the same values when asked twice."""
    # torch hands LAPACK's gelsy an uninitialized array of pivots, which decides the order of rounding.
    is_gelsy = name.startswith("linalg.lstsq") and sample.kwargs.get("driver") == "gelsy"
    return name not in UNINITIALIZED and not is_gelsy


# All but the few (three in torch 2.13) that have no CPU kernel at all.
OPS = {
    f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op
    for op in op_db
    if op.supported_dtypes("cpu")
}


# Those that have inputs on the CPU that eager refuses: for some the database has them on CUDA only.
WITH_ERROR_INPUTS = [
    name
    for name, op in OPS.items()
    if op.error_inputs_func and next(iter(op.error_inputs_func(op, "cpu")), None)
]


@pytest.fixture(autouse=True)
def _barrier_of_torch_testing(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.testing wraps random operators in a function that ends the step of a lazy result."""
    monkeypatch.setattr(torch, "_lazy", types.SimpleNamespace(mark_step=lazystep.mark_step), raising=False)


def pick_samples(op: OpInfo, dtype: torch.dtype, requires_grad: bool, number: int) -> list[SampleInput]:
    """`number` samples, evenly from the beginning of the operator's list."""
    seed()
    # Below `op.sample_inputs`, which looks for the running test on the stack, at a high price.
    pool = list(itertools.islice(op.sample_inputs_func(op, "cpu", dtype, requires_grad), max(POOL, number)))
    return list(pick(pool, number))


def call(
    function: Callable[..., Any], sample: SampleInput, device: str, *, grad: bool, barrier: bool = True
) -> Outcome:
    """Run a function on a copy of a sample: its outputs, gradients and arguments afterwards."""
    args, kwargs = copy_inputs(((sample.input, *sample.args), sample.kwargs), device)
    if not grad:
        for tensor in tensors_in((args, kwargs)):
            tensor.requires_grad_(False)
    leaves = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
    is_factory = not tensors_in((args, kwargs)) and device != "cpu"

    def run() -> Any:
        with torch.device(device) if is_factory else contextlib.nullcontext():
            out = function(*args, **kwargs)
        result = {"out": out, "grad": None, "args": tensors_in((args, kwargs))}
        if grad:
            result["grad"] = gradients(sample.output_process_fn_grad(out), leaves)
        # Which argument is returned itself, if any.
        given = [id(t) for t in tensors_in((args, kwargs))]
        result["same"] = [given.index(id(t)) if id(t) in given else None for t in tensors_in(out)]
        return result

    return Outcome(run, device, barrier=barrier)


def gradients(out: Any, leaves: list[torch.Tensor]) -> Any:
    """Gradients of the sums of all differentiable outputs."""
    sums = [t.sum() for t in tensors_in(out) if t.requires_grad]
    if not sums or not leaves:
        return None
    ones = [torch.ones_like(s) for s in sums]
    return torch.autograd.grad(sums, leaves, ones, allow_unused=True)


class Checker:
    """Compares the runs of one operator and keeps what differs."""

    def __init__(self, name: str, counts: Counts) -> None:
        self.name = name
        self.counts = counts
        self.label = ""
        self.differences: list[str] = []
        self.num_compared = 0

    def check(self, function: Callable[..., Any], sample: SampleInput, where: str, *, grad: bool) -> Outcome:
        """Run a function on both devices and compare. What eager came to."""
        eager = call(function, sample, "cpu", grad=grad)
        self.compare(where, sample, eager, call(function, sample, "lazy", grad=grad))
        return eager

    def compare(self, where: str, sample: SampleInput, eager: Outcome, lazy: Outcome) -> None:
        found = difference(eager, lazy, has_values=has_values(self.name, sample))
        if found is None and lazy.error is None:
            found = device_difference(tensors_in(lazy.tree["out"]))
        self.counts.add(f"{self.label}, error" if eager.error else self.label)
        self.num_compared += 1
        if found:
            self.differences.append(f"{self.label} {where}: {found}")

    def finish(self) -> None:
        if self.differences:
            more = len(self.differences) - 12
            lines = self.differences[:12] + ([f"and {more} more"] if more > 0 else [])
            pytest.fail("\n".join(lines), pytrace=False)
        assert self.num_compared > 0


@pytest.mark.parametrize("name", OPS)
def test_operator_equals_eager_bitwise(name: str, num_samples: int, counts: Counts) -> None:
    op, checker = OPS[name], Checker(name, counts)
    for dtype, share in shares(op).items():
        checker.label = str(dtype).removeprefix("torch.")
        grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        samples = pick_samples(op, dtype, grad, max(1, round(num_samples * share)))
        for number, sample in enumerate(samples):
            eager = checker.check(op.op, sample, f"sample {number}", grad=grad)
            if number == 0 and dtype is torch.float32:
                # The second run of a program is another one than the first: it is translated.
                checker.compare(
                    f"sample {number} again", sample, eager, call(op.op, sample, "lazy", grad=grad)
                )
                if grad:
                    # Some composites take another branch where no gradient can be asked for.
                    checker.check(op.op, sample, f"sample {number} no grad", grad=False)
            if number < (num_samples / 2 if dtype is torch.float32 else num_samples / 4):
                for kind, function in variants(op, sample, eager):
                    checker.check(function, sample, f"sample {number} {kind}", grad=False)
        for kind, sample in bit_samples(op, dtype, samples):
            checker.check(op.op, sample, kind, grad=grad)
    checker.finish()


def shares(op: OpInfo) -> dict[torch.dtype, float]:
    """The data types of an operator, with their shares of samples: of ours, or one of its own."""
    supported = op.supported_dtypes("cpu")
    return {d: share for d, share in SHARES.items() if d in supported} or {min(supported, key=str): 1.0}


def bit_samples(
    op: OpInfo, dtype: torch.dtype, samples: list[SampleInput]
) -> Iterator[tuple[str, SampleInput]]:
    """A sample whose input has the conjugate or the negative bit set, for one data type each."""
    if not samples or not isinstance(samples[-1].input, torch.Tensor):
        return
    given = samples[-1].input.detach()
    if given.layout is not torch.strided:
        return
    if dtype is torch.complex64 and op.test_conjugated_samples:
        kind, view = "conjugate", torch.conj(given)
    elif dtype is torch.float64 and op.test_neg_view:
        kind, view = "negative", torch._neg_view(given)
    else:
        return
    sample = copy.copy(samples[-1])
    sample.input = view.requires_grad_(samples[-1].input.requires_grad)
    yield kind, sample


def variants(op: OpInfo, sample: SampleInput, eager: Outcome) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The in-place and out= forms of an operator, where this sample has them."""
    inplace = op.get_inplace()
    if inplace is not None and isinstance(sample.input, torch.Tensor):
        yield "in place", inplace
    if op.supports_out and eager.error is None and tensors_in(eager.tree["out"]):
        like = eager.tree["out"]

        def with_out(*args: Any, **kwargs: Any) -> Any:
            out = pytree.tree_map(lambda t: torch.full_like(t.detach(), 1), like)
            return op.op(*args, **kwargs, out=copy_inputs(out, device_of(args, kwargs)))

        def with_empty_out(*args: Any, **kwargs: Any) -> Any:
            out = pytree.tree_map(lambda t: torch.empty(0, dtype=t.dtype), like)
            return op.op(*args, **kwargs, out=copy_inputs(out, device_of(args, kwargs)))

        yield "out=", with_out
        if all(t.layout is torch.strided for t in tensors_in(like)):
            yield "empty out=", with_empty_out


def device_of(*args: Any) -> str:
    """Where a call's result belongs: the device of its tensors, or the default one."""
    return next((t.device for t in tensors_in(args)), torch.get_default_device()).type


@pytest.mark.parametrize("name", WITH_ERROR_INPUTS)
def test_operator_raises_where_eager_does(name: str, counts: Counts) -> None:
    op, checker = OPS[name], Checker(name, counts)
    checker.label = "error inputs"
    seed()
    inputs = itertools.islice(op.error_inputs_func(op, "cpu"), MAX_ERROR_INPUTS)
    for number, error_input in enumerate(inputs):
        checker.check(op.op, error_input.sample_input, f"{number}", grad=False)
    checker.finish()


# Samples that have found a difference and that the default budget does not pick.
def _beyond_the_budget() -> dict[str, tuple[str, SampleInput, bool]]:
    seed()
    many, one = torch.randn(5, 5, 5, dtype=torch.complex64), torch.randn(1, 5, 5, dtype=torch.complex64)
    lu, pivots = torch.linalg.lu_factor(torch.randn(4, 4, dtype=torch.complex64))
    right = torch.randn(3, 4, dtype=torch.complex64)
    return {
        # torch folds a batch of one into a plain product for tensor subclasses, and not for CPU tensors.
        "matmul with a batch of one": ("matmul", SampleInput(many, args=(one,)), False),
        # The result has the conjugate bit, which the given tensor does not have.
        "lu_solve from the right into out=": (
            "linalg.lu_solve",
            SampleInput(lu, args=(pivots, right), kwargs={"left": False}),
            True,
        ),
    }


@pytest.mark.parametrize("case", _beyond_the_budget())
def test_known_hard_sample_equals_eager_bitwise(case: str, counts: Counts) -> None:
    name, sample, into_out = _beyond_the_budget()[case]
    op, checker = OPS[name], Checker(name, counts)
    checker.label = "known hard samples"
    eager = checker.check(op.op, sample, case, grad=False)
    if into_out:
        for kind, function in variants(op, sample, eager):
            checker.check(function, sample, f"{case}, {kind}", grad=False)
    checker.finish()
