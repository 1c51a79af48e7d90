"""Lowering a family: one graph for all members, with symbols for the sizes that vary.

The program of one member is traced, as in `lower`, but its sizes and literals are expressions of backed
symbols. Tracing and compiling then add *guards*: conditions on the symbols without which the graph would be
another one. They are read after the build, and a program is a member only if they hold for it. A graph that
holds for one size only is refused: it is no family.

Torch's symbolic shapes are used here and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy import functions as torch_sympy
from torch.utils._sympy.numbers import IntInfinity

from ..family.expression import Expression, evaluate, holds
from ..family.fit import Fit
from ..family.skeleton import Layout, substitute
from ..program.program import Number, Program, Value
from ..program.signature import Argument, Signature
from ..program.types import TensorType
from .lower import example_inputs, trace


class NoFamilyError(Exception):
    """The programs can't share a library: a size is not free, or a guard can't be read."""


class LoweredFamily(NamedTuple):
    """The graph of a family, fake inputs for it, and where torch keeps its guards."""

    graph: torch.fx.GraphModule
    inputs: list[torch.Tensor]
    shape_env: ShapeEnv
    symbols: tuple[sympy.Symbol, ...]


def lower_family(
    program: Program,
    signature: Signature,
    fixed: Mapping[int, Number],
    fit: Fit,
    numbers: Sequence[int],
) -> LoweredFamily:
    """Lower the member `program`, whose numbers are `numbers`, for all members of the fit.

    Behind the inputs of the signature, the graph takes a carrier for each symbol that is no size of an input.
    """
    shape_env = ShapeEnv(duck_shape=False)
    values = fit.bind(numbers)
    assert values is not None, "the traced program is a member"
    symbols, sizes = [], []
    for number, value in enumerate(values):
        source = ConstantSource(f"s{number}")
        one = shape_env.create_symbol(value, source, DimDynamic.DYNAMIC)
        symbols.append(one)
        sizes.append(shape_env.create_symintnode(one, hint=value, source=source))
    changed = substitute(program, signature, fixed, [evaluate(e, sizes) for e in fit.expressions])
    program = dataclasses.replace(
        program,
        values={
            **program.values,
            **{v: _with_layout(program.values[v], at) for v, at in changed.layouts.items()},
        },
        instructions=changed.instructions,
    )
    arguments = [_with_size(program, argument, changed.lengths) for argument in signature.arguments]
    signature = dataclasses.replace(signature, arguments=tuple(arguments))
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env) as mode:
        inputs = example_inputs(signature)
        for one, size in zip(fit.symbols, sizes, strict=True):
            if one.carries:
                inputs.append(torch.empty_strided((size,), (0,), dtype=torch.uint8))
    graph = trace(program, signature, changed.fixed, inputs, mode)
    lowered = LoweredFamily(graph, inputs, shape_env, tuple(symbols))
    _check_free(lowered)
    return lowered


def _with_layout(value: Value, layout: Layout) -> Value:
    """The value with another layout. Its type is not interned: a symbolic size can't be compared."""
    type_ = value.type
    shape, stride, offset = layout
    dense = list(stride)
    for dim in reversed(range(len(shape) - 1)):
        if type_.shape[dim] == 1:  # the stride of a dense tensor, which keeps guards simple
            dense[dim] = shape[dim + 1] * dense[dim + 1]
    return value._replace(
        type=TensorType(type_.dtype, shape, tuple(dense), offset, type_.conj, type_.neg, type_.layout)
    )


def _with_size(program: Program, argument: Argument, lengths: Mapping[int, Any]) -> Argument:
    type_ = program.values[program.inputs[argument.position]].type
    if argument.is_flat:
        flat = argument.type
        size = (lengths[argument.storage],)
        type_ = TensorType(flat.dtype, size, (1,), 0, False, False, flat.layout)
    return argument._replace(type=type_)


def guards_of(lowered: LoweredFamily, members: Sequence[Sequence[int]]) -> list[Expression]:
    """The conditions on the symbols under which the graph, or the library made of it, is right.

    Raises `NoFamilyError` if a symbol is not free, if an equality does not hold for all `members` (the values
    of the symbols in each), or if a condition can't be read.
    """
    _check_free(lowered)
    env, symbols = lowered.shape_env, {one: ("s", n) for n, one in enumerate(lowered.symbols)}
    found: list[Expression] = []
    for guard in env.guards:
        condition = _read(guard.expr, symbols)
        if condition[0] == "==" and not all(holds(condition, member) for member in members):
            raise NoFamilyError(f"it would hold only where {guard.expr}")
        found.append(condition)
    for one in lowered.symbols:
        bounds = env.var_to_range[one]
        for name, bound in ((">=", bounds.lower), ("<=", bounds.upper)):
            if not isinstance(bound, IntInfinity) and bound.is_finite:
                found.append((name, symbols[one], int(bound)))
    return list(dict.fromkeys(found))


def _check_free(lowered: LoweredFamily) -> None:
    env = lowered.shape_env
    for one in lowered.symbols:
        bounds = env.var_to_range[one]
        if one in env.replacements:
            raise NoFamilyError(f"the size {one} is always {env.replacements[one]}")
        if bounds.lower == bounds.upper:
            raise NoFamilyError(f"the size {one} is always {bounds.lower}")
    for node in lowered.graph.graph.nodes:
        for size in _sizes(node.meta.get("val")):
            unknown = size.node.expr.free_symbols - set(lowered.symbols)
            if unknown:
                raise NoFamilyError(f"{node.target} makes a size that depends on values")


def _sizes(value: Any) -> list[Any]:
    """The symbolic sizes of what a node of the graph makes."""
    sizes: list[Any] = list(value.shape) if isinstance(value, torch.Tensor) else [value]
    return [size for size in sizes if isinstance(size, torch.SymInt)]


# How sympy and torch name what an expression of ours can hold.
_NAMES: Mapping[Any, str] = {
    sympy.Add: "+",
    sympy.Mul: "*",
    sympy.Pow: "**",
    sympy.Eq: "==",
    sympy.Ne: "!=",
    sympy.StrictLessThan: "<",
    sympy.LessThan: "<=",
    sympy.StrictGreaterThan: ">",
    sympy.GreaterThan: ">=",
    sympy.And: "and",
    sympy.Or: "or",
    sympy.Not: "not",
    sympy.Max: "max",
    sympy.Min: "min",
    torch_sympy.Max: "max",
    torch_sympy.Min: "min",
    torch_sympy.FloorDiv: "//",
    torch_sympy.CleanDiv: "//",
    torch_sympy.Mod: "%",
    torch_sympy.PythonMod: "%",
    torch_sympy.PowByNatural: "**",
}


def _read(found: sympy.Basic, symbols: Mapping[sympy.Basic, Expression]) -> Any:
    """A condition of torch's as an expression."""
    if found in symbols:
        return symbols[found]
    if isinstance(found, (sympy.Integer, int)):
        return int(found)
    if found in (sympy.true, sympy.false):
        return ("==", 0, 0 if found == sympy.true else 1)
    name = _NAMES.get(type(found))
    if name is None:
        raise NoFamilyError(f"the condition {found} can't be read")
    return (name, *(_read(argument, symbols) for argument in found.args))
