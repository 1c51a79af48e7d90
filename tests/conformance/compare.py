"""Running the same code on the CPU and on the lazy device, and comparing what comes out bit for bit.

A comparison goes over whole trees of results: their structure and Python types, the data type, shape,
strides, offset, bits and autograd state that each tensor shows, its device, and its values. Only CPU
copies of values are compared.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils import _pytree as pytree

import lazystep

SEED = 7
T = TypeVar("T")


def seed() -> None:
    """Seed every generator that the databases draw from.

    The generator itself, not `torch.manual_seed`: that formats a stack trace for each absent device,
    which would take a third of the suite's time.
    """
    torch.default_generator.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


# -- inputs ------------------------------------------------------------------------------------


def copy_inputs(tree: Any, device: str) -> Any:
    """The tree with a fresh leaf on `device` for every tensor: same values, layout and `requires_grad`.

    A tensor that stands in several places of the tree is one tensor in the copy. Arguments that name
    the CPU name the device instead, and generators are copied with their state.
    """
    copies: dict[int, Any] = {}

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in copies:
                copies[id(leaf)] = _copy_tensor(leaf, device).requires_grad_(leaf.requires_grad)
            return copies[id(leaf)]
        if isinstance(leaf, torch.Generator):
            return torch.Generator().set_state(leaf.get_state())
        if isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf == "cpu"):
            return torch.device(device)
        return leaf

    return pytree.tree_map(copy, tree)


def _copy_tensor(tensor: torch.Tensor, device: str) -> torch.Tensor:
    plain = tensor.detach()
    if plain.device.type != "cpu":
        return plain
    if plain.layout is not torch.strided:
        return plain.clone().to(device)
    if plain.is_conj():
        return _copy_tensor(torch._conj(plain), device).conj()
    if plain.is_neg():
        return _copy_tensor(torch._neg_view(plain), device)._neg_view()
    copy = plain.clone()
    memory = plain.untyped_storage()
    if copy.stride() == plain.stride() and copy.untyped_storage().nbytes() == memory.nbytes():
        return copy.to(device)
    # A view: rebuild it on a copy of the memory behind it, some operators reach past the view.
    base = torch.empty(0, dtype=plain.dtype).set_(memory).clone().to(device)
    return base.as_strided(plain.shape, plain.stride(), plain.storage_offset()).detach()


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def pick(items: Sequence[T], number: int) -> Sequence[T]:
    """At most `number` of the items, evenly from the whole sequence, the first and the last among them."""
    if len(items) <= number:
        return items
    step = (len(items) - 1) / max(number - 1, 1)
    return [items[round(i * step)] for i in range(number)]


# -- running -----------------------------------------------------------------------------------


class Outcome:
    """What a run ended with: a tree of results, or the error that it raised.

    `rng_state`: the default generator's state afterwards. `raised_late`: the error came from the
    barrier, not from the line that recorded the op. Without a `barrier` the values are still to come.
    """

    def __init__(self, run: Callable[[], Any], device: str, *, barrier: bool = True) -> None:
        self.tree: Any = None
        self.error: Exception | None = None
        self.raised_late = False
        seed()
        try:
            self.tree = run()
            # Below the barrier: draws take place while recording.
            self.rng_state = torch.get_rng_state()
            if device != "cpu" and barrier:
                self.raised_late = True
                lazystep.mark_step(wait=True)
        except Exception as error:
            self.error = error
            _drain()


def _drain() -> None:
    """Let an error's followers out, so that the next run starts clean."""
    for _ in range(2):
        try:
            lazystep.mark_step(wait=True)
        except lazystep.LazyStepError:
            continue
        return


# -- comparing ---------------------------------------------------------------------------------


def difference(eager: Outcome, lazy: Outcome, *, has_values: bool = True) -> str | None:
    """How the lazy run differs from the eager one, or None. `has_values`: False compares types only."""
    if eager.error is not None or lazy.error is not None:
        return _error_difference(eager, lazy)
    if not torch.equal(eager.rng_state, lazy.rng_state):
        return "the random number generator is in another state afterwards"
    return tree_difference(eager.tree, lazy.tree, has_values=has_values)


def device_run_difference(run: Callable[[str], Any]) -> str | None:
    """How `run("lazy")` differs from `run("cpu")`, or None."""
    return difference(Outcome(lambda: run("cpu"), "cpu"), Outcome(lambda: run("lazy"), "lazy"))


def _error_difference(eager: Outcome, lazy: Outcome) -> str | None:
    if eager.error is None:
        return f"lazy raises {_describe(lazy.error)}"
    if lazy.error is None:
        return f"lazy passes where eager raises {_describe(eager.error)}"
    actual: BaseException | None = lazy.error
    if lazy.raised_late and isinstance(actual, lazystep.StepError):
        actual = actual.__cause__
    if type(actual) is not type(eager.error):
        return f"lazy raises {_describe(lazy.error)} where eager raises {_describe(eager.error)}"
    return None


def _describe(error: BaseException | None) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:200]}"


def tree_difference(eager: Any, lazy: Any, *, has_values: bool = True) -> str | None:
    """How two trees of results differ, or None."""
    expected, expected_spec = pytree.tree_flatten_with_path(eager)
    actual, actual_spec = pytree.tree_flatten_with_path(lazy)
    if expected_spec != actual_spec:
        return f"structure {actual_spec} instead of {expected_spec}"
    values = lazystep.to_cpu([leaf for _, leaf in actual])
    for (path, a), (_, b), value in zip(expected, actual, values, strict=True):
        found = _leaf_difference(a, b, value, has_values)
        if found:
            return f"result{pytree.keystr(path)}: {found}"
    return None


def _leaf_difference(expected: Any, actual: Any, value: Any, has_values: bool) -> str | None:
    if type(expected) is not type(actual) and not isinstance(expected, torch.Tensor):
        return f"{type(actual).__name__} {actual!r} instead of {type(expected).__name__} {expected!r}"
    if not isinstance(expected, torch.Tensor):
        is_nan = isinstance(expected, float) and math.isnan(expected) and math.isnan(actual)
        return None if is_nan or expected == actual else f"{actual!r} instead of {expected!r}"
    if not isinstance(actual, torch.Tensor):
        return f"{type(actual).__name__} instead of a tensor"
    return metadata_difference(expected, actual) or (
        values_difference(expected, value) if has_values else None
    )


def metadata_difference(expected: torch.Tensor, actual: torch.Tensor) -> str | None:
    """How two tensors differ in what they show without being read, or None."""
    for what, look in _METADATA.items():
        if look(expected) != look(actual):
            return f"{what} {look(actual)} instead of {look(expected)}"
    return None


def _strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides that matter: a dimension of one element has none, nor has an empty tensor."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    return tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1)


_METADATA: dict[str, Callable[[torch.Tensor], Any]] = {
    "layout": lambda t: t.layout,
    "dtype": lambda t: t.dtype,
    "shape": lambda t: tuple(t.shape),
    "strides": _strides,
    "offset": lambda t: t.storage_offset() if t.layout is torch.strided else None,
    "conjugate bit": lambda t: t.is_conj(),
    "negative bit": lambda t: t.is_neg(),
    "requires_grad": lambda t: t.requires_grad,
    "grad_fn": lambda t: _SAME_NODES.get(type(t.grad_fn).__name__, type(t.grad_fn).__name__),
}
# Nodes of the same computation under another name.
_SAME_NODES = {
    # torch's reshape makes its view by another op on devices of type lazy.
    "ReshapeAliasBackward0": "ViewBackward0",
    # Eager reads lengths given as tensors before it calls the kernel; on tensor subclasses torch hands
    # them over as they are, which saves a synchronization.
    "CtcLossBackward1": "CtcLossBackward0",
}


def values_difference(expected: torch.Tensor, actual: torch.Tensor) -> str | None:
    """How the values of two CPU tensors differ, or None. NaN equals NaN; -0.0 is not 0.0."""
    if expected.layout is not torch.strided:
        pairs = zip(_sparse_parts(expected), _sparse_parts(actual), strict=True)
        return next((found for a, b in pairs if (found := values_difference(a, b))), None)
    a, b = (_plain(t) for t in (expected, actual))
    if torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return None
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    differs = (a != b) if not a.is_floating_point() else ~(a.isnan() & b.isnan()) & _bits_differ(a, b)
    if not differs.any():
        return None
    where = tuple(differs.nonzero()[0].tolist())
    count = f"{int(differs.sum())} of {differs.numel()} values differ"
    return f"{count}, first at {list(where)}: {b[where].item()!r} instead of {a[where].item()!r}"


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    # A clone: a single element may have any stride and still be contiguous.
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).view(-1)


def _bits_differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.view(integer) != b.view(integer)


def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def device_difference(tensors: Iterable[torch.Tensor]) -> str | None:
    """Which of a lazy run's results is not on the lazy device, or None."""
    for number, tensor in enumerate(tensors):
        if tensor.device.type != "lazy":
            return f"tensor {number} of the results is on {tensor.device}"
    return None
