"""Indices out of range in a library: an error of the step, where Inductor's own code ends the process.

Inductor checks each index that it reads from a tensor, inside the loop that uses it, and throws. Most loops
are shared out between the threads of OpenMP, and an exception that leaves such a loop ends the process. So
the body of a loop with a check is wrapped: it keeps the text of the first exception, and the text is thrown
behind the kernel's loops, where it becomes the library's error. Until then, bodies that use such indices are
left out. This costs each of them one look at a flag. `execute/diagnose.py` finds the op for the message.

Where the library calls eager's kernels for `scatter` and `index_put`, Inductor does not look at the code that
the call returns, and the step would go on with wrong numbers. Here these calls are checked like all others.

The kernels differ from eager's in what they take for an index, too:

- Eager's `index_select`, `index_add` and `index_copy` refuse negative indices. Inductor makes them of
  advanced indexing, which counts such an index from the end: `refuse_negative`.
- Inductor's `max_unpool2d` and `max_unpool3d` write without a check. Here they are made of `scatter`.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import torch

_CHECK = "AOTI_TORCH_CHECK("
_FAILURE = """
    struct {
        std::atomic<bool> is_set{false};
        std::string text;
        void keep(const std::exception& error) {
            if (is_set.exchange(true)) return;
            text = error.what();
            text.resize(std::min(text.size(), text.find('\\n')));  // the rest are frames of C++
        }
    } lazystep_failure;
"""

_GUARD = "if (!lazystep_failure.is_set.load(std::memory_order_relaxed))"
# Memory at a place that was computed: `in_ptr1[x1 + 16L*tmp2]`. Not all such places are checked, and after a
# failure they may have been computed from memory that nobody has written.
_INDIRECT = re.compile(r"_ptr\d+\s*(\[|\+)[^;]*\btmp\d+")

# A call that returns a code, as a statement of its own.
_CALL = re.compile(r"(aoti_torch_\w+\(.*\));")

# Ops whose third argument, the index, may not be negative, but is where Inductor takes them apart.
NEVER_NEGATIVE = frozenset({"index_select", "index_add", "index_copy"})


def refuse_negative(index: torch.Tensor) -> torch.Tensor:
    """The index with one that is too large in place of each negative one."""
    return torch.where(index < 0, torch.iinfo(index.dtype).max, index)


def max_unpool(self: torch.Tensor, indices: torch.Tensor, output_size: list[int], **_: Any) -> torch.Tensor:
    """`max_unpool2d` and `max_unpool3d`, with indices that are checked."""
    dims = len(output_size)
    planes = self.shape[:-dims]
    out = self.new_zeros((*planes, math.prod(output_size)))
    out = out.scatter(-1, indices.flatten(-dims), self.flatten(-dims))
    return out.view(*planes, *output_size)


CHECKED = {"max_unpool2d": max_unpool, "max_unpool3d": max_unpool}


def change_torch() -> None:
    """Have Inductor write kernels whose checks may fail. For the process that builds."""
    from torch._inductor.codegen import cpp
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    for owner, name, wrap in (
        (cpp.CppKernelProxy, "gen_body", _wrapping_body),
        (cpp.KernelGroup, "codegen_group", _throwing_again),
        (CppWrapperCpu, "_generate_scatter_fallback", _checking_calls),
        (CppWrapperCpu, "_generate_index_put_fallback", _checking_calls),
    ):
        original = getattr(owner, name)
        if not hasattr(original, "__wrapped__"):  # by an earlier build
            setattr(owner, name, wrap(original))


def _checking_calls(original: Any) -> Any:
    @functools.wraps(original)
    def generate(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        write = wrapper.writeline

        def write_checked(line: Any) -> None:
            call = _CALL.fullmatch(line) if isinstance(line, str) else None
            write(line if call is None else f"AOTI_TORCH_ERROR_CODE_CHECK({call[1]});")

        wrapper.writeline = write_checked
        try:
            original(wrapper, *args, **kwargs)
        finally:
            wrapper.writeline = write

    return generate


def _wrapping_body(original: Any) -> Any:
    @functools.wraps(original)
    def gen_body(kernel: Any, code: Any = None) -> None:
        body = type(code)()
        original(kernel, body)
        text = body.getvalue()
        is_checked = _CHECK in text
        if not is_checked and not (hasattr(code, "has_checks") and _INDIRECT.search(text)):
            code.splice(body)
            return
        code.has_checks = True  # one buffer per kernel
        code.writeline(_GUARD + (" try" if is_checked else ""))
        with code.indent():
            code.splice(body)
        if is_checked:
            code.writeline("catch (const std::exception& error) { lazystep_failure.keep(error); }")

    return gen_body


def _throwing_again(original: Any) -> Any:
    @functools.wraps(original)
    def codegen_group(group: Any, name: str | None = None) -> Any:
        group.stack.close()  # ends the parallel region; the original closes it, too, which then does nothing
        loops = group.loops_code
        if hasattr(loops, "has_checks"):
            group.loops_code = type(loops)()
            group.loops_code.splice(_FAILURE)
            group.loops_code.splice(loops)
            group.loops_code.writeline(
                "if (lazystep_failure.is_set) throw std::runtime_error(lazystep_failure.text);"
            )
        return original(group, name)

    return codegen_group
