"""Programs as readable text, and as a graph for Graphviz."""

from __future__ import annotations

import os
from typing import Any

from .program import Arg, Instruction, Program, Ref, ScalarRef


def to_text(program: Program) -> str:
    """The program as Python-like text, with types, views, writes and the user's lines in comments."""
    lines = [f"def step({len(program.inputs)} inputs, {len(program.scalars)} scalars):"]
    rows: list[tuple[str, str, str]] = []
    for value in program.inputs:
        type_, storage = program.values[value]
        rows.append((f"%{value}: input", f"{type_} in s{storage}", ""))
    for instruction in program.instructions:
        rows.append((_statement(program, instruction), _comment(program, instruction), _line(instruction)))
    rows.append((f"return {', '.join(f'%{v}' for v in program.outputs) or 'nothing'}", "", ""))
    width = min(max(len(row[0]) for row in rows), 72)
    comment_width = min(max(len(row[1]) for row in rows), 48)
    for code, comment, line in rows:
        text = f"    {code:<{width}}"
        if comment or line:
            text += f"  # {comment:<{comment_width}}  {line}"
        lines.append(text.rstrip())
    return "\n".join(lines)


def to_dot(program: Program) -> str:
    """The program as a graph in the dot language: a box per instruction, an edge per value."""
    rows = ["digraph step {", "  rankdir=TB; node [shape=box, fontname=monospace, fontsize=10];"]
    maker: dict[int, str] = {}
    for value in program.inputs:
        maker[value] = f"v{value}"
        rows.append(f'  v{value} [label="%{value} input\\n{program.values[value].type}", shape=ellipse];')
    for number, instruction in enumerate(program.instructions):
        node = f"i{number}"
        label = f"{instruction.op}\\n{_comment(program, instruction)}\\n{_line(instruction)}"
        rows.append(f'  {node} [label="{label}"];')
        for value in dict.fromkeys(instruction.reads()):
            rows.append(f'  {maker[value]} -> {node} [label="%{value}"];')
        # A later reader of a written value depends on the write, not on the instruction that made it.
        for value in (*instruction.defines(), *instruction.writes):
            maker[value] = node
    for value in program.outputs:
        rows.append(f'  out{value} [label="return %{value}", shape=ellipse];')
        rows.append(f"  {maker[value]} -> out{value};")
    return "\n".join([*rows, "}"])


def _statement(program: Program, instruction: Instruction) -> str:
    args = [_arg(program, a) for a in instruction.args]
    args += [f"{name}={_arg(program, a)}" for name, a in instruction.kwargs]
    call = f"{instruction.op.removesuffix('.default')}({', '.join(args)})"
    made = list(dict.fromkeys(instruction.defines()))
    return f"{', '.join(f'%{v}' for v in made)} = {call}" if made else call


def _comment(program: Program, instruction: Instruction) -> str:
    parts = []
    arguments = {program.values[v].storage for v in instruction.reads()}
    for value in dict.fromkeys(instruction.defines()):
        type_, storage = program.values[value]
        parts.append(f"{type_} view of s{storage}" if storage in arguments else f"{type_}")
    written = dict.fromkeys(program.values[v].storage for v in instruction.writes)
    parts += [f"writes s{storage}" for storage in written]
    return "; ".join(parts)


def _line(instruction: Instruction) -> str:
    if instruction.source is None:
        return ""
    path, _, rest = str(instruction.source).rpartition(":")
    return f"{os.path.basename(path)}:{rest.split(' in ')[0]}"


def _arg(program: Program, arg: Arg) -> str:
    if type(arg) is Ref:
        return f"%{arg.value}"
    if type(arg) is ScalarRef:
        return f"{program.scalars[arg.slot].__name__}${arg.slot}"
    if type(arg) is tuple:
        return f"[{', '.join(_arg(program, a) for a in arg)}]"
    return _literal(arg)


def _literal(value: Any) -> str:
    return str(value).removeprefix("torch.") if not isinstance(value, str) else repr(value)
