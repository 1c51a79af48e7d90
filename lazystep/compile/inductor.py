"""Inductor as the builder process uses it: one call, and the changes to torch 2.13 that the call needs.

The changes are made in this process only, which does nothing but build:

- The scheduler keeps loops apart that must stay apart. A loop that reads a buffer may be fused with a loop
  that overwrites the buffer only if both touch the same element in the same iteration.
  `Scheduler.fusable_weak_dep` looks for reads under the buffer's first name. After an in-place write, later
  reads carry the name of that write. So they are overlooked, and the fused loop reads elements that it has
  already overwritten. For example, `x.diagonal().mul_(2)` followed by
  `x.diagonal()[1:].add_(x.diagonal()[:-1])` gives wrong numbers under `torch.compile`.
- The graph is not traced again. `lower` hands over a graph without mutation, made of the ops that Inductor
  knows, and `aot_export_module` would make the same graph once more, node by node.
- The library has no code that checks its inputs. It would run only if an environment variable is set, takes
  three quarters of the wrapper's lines, and `execute/native.py` checks every argument.
- A check of an index that fails makes the step fail, and not the process: see `bounds`.
- A graph with collectives keeps the order of the program: see `collectives`.
- The compiler is called by `compilers`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.dependencies import MemoryDep
from torch._inductor.scheduler import Scheduler
from torch.fx.experimental.proxy_tensor import make_fx

from . import bounds, compilers
from .cache import LIBRARY
from .collectives import communicates, is_between, register_lowerings, write_early

_fusable_weak_dep = Scheduler.fusable_weak_dep
_can_fuse = Scheduler.can_fuse


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Inductor's decompositions: what a graph must have been traced with for `compile_graph`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own code
        import torch._inductor.lowering  # noqa: F401 - some decompositions look it up by this name
    return select_decomp_table()


def compile_graph(
    graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], options: Mapping[str, Any]
) -> None:
    """Compile a graph from `lower` to the library that the options name. Takes up to a minute."""
    _change_torch()
    options = dict(options)
    if communicates(graph):
        options |= {
            "reorder_for_locality": False,
            "reorder_for_peak_memory": False,
            "post_grad_custom_post_pass": write_early,
        }
    torch._inductor.aot_compile(graph, tuple(inputs), options=options)


def prepare(options: Mapping[str, Any], directory: Path) -> None:
    """Do what the first build would do for all builds: import, read patterns, compile headers.

    Starts the compilers and does not wait for them. Leaves files in `directory` that nobody needs.
    """
    with warnings.catch_warnings(), compilers.preparing():
        warnings.simplefilter("ignore")
        x = torch.empty(8, 8)
        graph = make_fx(
            lambda x: [torch.softmax(x @ x, 1)],
            decomposition_table=dict(decompositions()),
            tracing_mode="fake",
        )(x)
        compile_graph(graph, [x], {**options, "aot_inductor.output_path": str(directory / LIBRARY)})


def _change_torch() -> None:
    # Imported here: lowering alone does not need the modules, and importing them warns of a deprecation.
    from torch._inductor import compile_fx
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    register_lowerings()
    compilers.change_torch()
    bounds.change_torch()
    Scheduler.can_fuse = _can_fuse_in_order  # type: ignore[method-assign, assignment]
    Scheduler.fusable_weak_dep = _fusable_in_place  # type: ignore[method-assign, assignment]
    compile_fx.aot_export_module = _as_it_is  # type: ignore[attr-defined, assignment]
    compile_fx._unlift_graph = lambda mod, gm, graph_signature: gm
    CppWrapperCpu.generate_input_output_runtime_checks = _write_no_checks  # type: ignore[method-assign]


def _can_fuse_in_order(scheduler: Scheduler, node1: Any, node2: Any, *args: Any, **kwargs: Any) -> bool:
    return not is_between(scheduler, node1, node2) and _can_fuse(scheduler, node1, node2, *args, **kwargs)


def _fusable_in_place(scheduler: Scheduler, weak_dep: Any, node1: Any, node2: Any) -> bool:
    if not _fusable_weak_dep(scheduler, weak_dep, node1, node2):
        return False
    names = scheduler.mutation_real_name
    buffer = names[weak_dep.mutating_buf]
    # The original function has checked that there is one write to the buffer, with plain indices.
    (write,) = (w for w in node2.read_writes.writes if w.name == weak_dep.mutating_buf)
    return all(
        isinstance(read, MemoryDep) and read.index == write.index and read.size == write.size
        for read in node1.read_writes.reads
        if names.get(read.name, read.name) == buffer
    )


def _as_it_is(graph: torch.fx.GraphModule, *_: Any, **__: Any) -> tuple[torch.fx.GraphModule, None]:
    return graph, None


def _write_no_checks(wrapper: Any) -> None:
    # The generated code calls the first function, and asks the second before each check of a kernel's result.
    wrapper.prefix.splice_aot(
        """
        static inline void __check_inputs_outputs(AtenTensorHandle*, AtenTensorHandle*) {}
        static constexpr bool _check_aoti_runtime_check_inputs_env() { return false; }
        """
    )
