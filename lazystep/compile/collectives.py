"""Collectives in libraries: launches and waits as calls in the generated code, in the program's order.

A library calls lazystep's own kernels (`execute/communicate.py`), as the reference executable does. So a rank
may change to its library while another one stays on the reference. Errors name the collective. And a check
can feed the results of an earlier run instead of communicating.

Inductor moves work that does not depend on each other. The order is kept by these means:

- Launches and waits write one small tensor, `order`, one after the other: it makes them a chain.
- No loop is fused with one on the other side of a launch or wait, and the passes that reorder are off.
- A graph without mutation writes its inputs at the end. `write_early` moves each of these writes to where the
  new value is there: a bucket's parameters are written before the next bucket is waited for.
- `check_order` reads the generated code. A library with another order is an error of the build.

Between launch and wait the memory belongs to the network. A wait has the launch's result and operand as
arguments, so the compiler neither reuses nor overwrites them before.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..program.collectives import sequence_of
from ..program.program import Program

_LAUNCHED, _WAITED = torch.ops.lazystep.launched.default, torch.ops.lazystep.waited.default
_LAUNCH, _WAIT = torch.ops.lazystep.launch.default, torch.ops.lazystep.wait.default
# A collective whose result nobody uses runs all the same.
for _op in (_LAUNCHED, _WAITED):
    torch.fx.node.has_side_effect(_op)


class OrderError(Exception):
    """The generated code launches or waits in another order than the program."""


def communicates(graph: torch.fx.GraphModule) -> bool:
    """Whether a graph from `lower` has collectives."""
    return any(node.target is _LAUNCHED for node in graph.graph.nodes)


def drop_copies(graph: torch.fx.GraphModule) -> None:
    """Use the result of a wait as it is: functionalization has written it over the tensor that was sent."""
    for node in list(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy.default)):
        old, new = node.args[0].meta["val"], node.args[1].meta["val"]
        made_by = node.args[1].args[0] if node.args[1].args else None
        is_same = old.shape == new.shape and old.stride() == new.stride() and old.dtype == new.dtype
        if is_same and getattr(made_by, "target", None) is _WAITED:
            node.replace_all_uses_with(node.args[1])
            graph.graph.erase_node(node)


def write_early(graph: torch.fx.Graph) -> None:
    """Move each write of an input from the end of the graph to where the new value is computed.

    It stays behind the last node that reads the old value. Runs behind Inductor's other passes: some of them
    take a copy of an input for the input itself, which is right only while all writes are at the end.
    """
    nodes = list(graph.nodes)
    order = {node: number for number, node in enumerate(nodes)}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target, value = node.args[0], node.args[1]
        if target.op != "placeholder" or value.op == "placeholder" or node.users:
            continue
        # An update may write the value, which is then a memory of its own, in place.
        users = (*_readers(target), *filter(_is_mutable, _readers(value)), value)
        after = max(order[user] for user in users if user is not node)
        if after < order[node]:
            nodes[after].append(node)


def _is_mutable(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _readers(tensor: torch.fx.Node) -> set[torch.fx.Node]:
    """The nodes that read a tensor's memory, also through views."""
    found: set[torch.fx.Node] = set()
    aliases = [tensor]
    for alias in aliases:
        for user in alias.users:
            if user not in found:
                found.add(user)
                # Whatever may be a view after lowering. Plain arithmetic makes a new tensor.
                if getattr(user.target, "is_view", False) or user.target in _MAY_ALIAS:
                    aliases.append(user)
    return found


_MAY_ALIAS = frozenset(
    {
        torch.ops.aten.reshape.default,
        torch.ops.aten.contiguous.default,
        torch.ops.aten.clone.default,
        torch.ops.aten._to_copy.default,
        torch.ops.prims.convert_element_type.default,
    }
)


# -- inside of Inductor -----------------------------------------------------------------------------

# By graph: the memory of each launch, by the launch's number.
_memory: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def register_lowerings() -> None:
    """Teach Inductor the two ops. They are functional in graphs, and work in place in libraries."""
    from torch._inductor import ir
    from torch._inductor.lowering import clone, register_lowering
    from torch._inductor.virtualized import V

    def launched(order: Any, out: Any, operand: Any, what: str) -> tuple[Any, Any]:
        if not _is_only_user(V.graph.current_node):
            out = clone(out)
        out = ir.ExternKernel.require_contiguous(out)
        if operand is not None:
            operand = ir.ExternKernel.require_contiguous(operand)
            operand.realize()
        out.realize()
        order.realize()
        ir.FallbackKernel.create(_LAUNCH, order, out, operand, what)
        _memory.setdefault(V.graph, {})[what.partition(" ")[0]] = out, operand
        return order, out

    def waited(order: Any, _out: Any, _operand: Any, what: str) -> tuple[Any, Any]:
        out, operand = _memory[V.graph][what.partition(" ")[0]]
        ir.FallbackKernel.create(_WAIT, order, out, operand, what)
        return order, out

    register_lowering(_LAUNCHED, type_promotion_kind=None)(launched)
    register_lowering(_WAITED, type_promotion_kind=None)(waited)


def _is_only_user(node: torch.fx.Node) -> bool:
    """Whether a launch may take the memory of its tensor: a bucket that nothing else reads."""
    tensor = node.args[1]
    assert isinstance(tensor, torch.fx.Node)
    # A concatenation of one tensor may be that tensor itself.
    is_bucket = tensor.target is torch.ops.aten.cat.default and len(tensor.args[0]) > 1  # type: ignore[arg-type]
    return is_bucket and len(tensor.users) == 1


def is_between(scheduler: Any, node1: Any, node2: Any) -> bool:
    """Whether a launch or a wait stands between two nodes of Inductor's scheduler, before fusion."""
    found = getattr(scheduler, "_lazystep_positions", None)
    if found is None:
        nodes = scheduler.name_to_node.values()
        calls = [n for n in nodes if getattr(n.node, "op_overload", None) in (_LAUNCH, _WAIT)]
        found = scheduler._lazystep_positions = sorted(n.min_order for n in calls)
    first = min(node1.min_order, node2.min_order)
    last = max(node1.max_order, node2.max_order)
    return bool(bisect.bisect(found, first) != bisect.bisect(found, last))


# -- the generated code -----------------------------------------------------------------------------

# A call of an op through torch's dispatcher, with its number in the list of such calls; or of a kernel.
_CALL = re.compile(
    r"aoti_torch_proxy_executor_call_function\(proxy_executor, (\d+)|^ *cpp_fused|aoti_torch_cpu_\w+\(",
    re.MULTILINE,
)


class Called(NamedTuple):
    """A launch or wait in the generated code, and how many kernels run between it and the one before."""

    text: str
    num_kernels: int


def calls_in(wrapper: str, nodes: Sequence[Mapping[str, Any]]) -> list[Called]:
    """The launches and waits of the generated code, which runs from its top to its bottom.

    `nodes`: the calls through the dispatcher, by the numbers that the code has.
    """
    found = []
    num_kernels = 0
    for match in _CALL.finditer(wrapper[wrapper.find("::run_impl(") :]):
        node: Mapping[str, Any] = nodes[int(match[1])]["node"] if match[1] else {"target": ""}
        if node["target"] not in ("lazystep::launch", "lazystep::wait"):
            num_kernels += 1
            continue
        (text,) = (i["arg"]["as_string"] for i in node["inputs"] if "as_string" in i["arg"])
        found.append(Called(text, num_kernels))
        num_kernels = 0
    return found


def check_order(program: Program, called: Sequence[Called]) -> None:
    """Raise `OrderError` unless the code has the program's launches and waits, in the program's order."""
    expected = [text for _, _, text in sequence_of(program)]
    found = [call.text for call in called]
    if found != expected:
        pairs = itertools.zip_longest(expected, found, fillvalue="nothing")
        wanted, got = next(pair for pair in pairs if pair[0] != pair[1])
        raise OrderError(
            f"the generated code has {got!r} where the program has the collective {wanted!r}: a rank with "
            "this library would not fit the others"
        )


def check_library(program: Program, directory: Path, nodes: Path) -> list[Called]:
    """The launches and waits of a library that was built in `directory`. Raises `OrderError`."""
    wrapper = "".join(path.read_text() for path in directory.glob("*.wrapper.cpp"))
    called = calls_in(wrapper, json.loads(nodes.read_text())["nodes"] if nodes.exists() else [])
    check_order(program, called)
    return called
