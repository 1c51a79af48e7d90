"""Runs the Python blocks of one Markdown page in order, as one script, and compares what they print.

    python tests/tools/page_runner.py docs/step.md

A block continues the ones before it, as if they had been pasted into `train.py` one after the other. What is
to be printed stands in a block marked `output`, in which `...` matches anything. A comment before a block
says more about it:

    <!-- starts over -->          the block is the beginning of another script
    <!-- raises -->               it raises; the type, the message and its notes count as printed
    <!-- warns -->                it warns; file, line, category and message count as printed
    <!-- compiled: torchrun -->   it needs more than one process or file, and is only compiled
    <!-- python ... -->           a block that readers do not see: what the page takes for granted
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = "train.py"
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>starts over|raises|warns|compiled: [^>]*?) -->\n)?"
    r"^```(?P<kind>python|output)\n(?P<text>.*?)^```$"
    r"|^<!-- python\n(?P<hidden>.*?)-->$",
    re.DOTALL | re.MULTILINE,
)


@dataclass
class Block:
    """Code, and what it prints if the page says so."""

    code: str
    line: int  # in the page
    mark: str = ""
    output: str | None = None


def blocks_of(page: str) -> list[Block]:
    """The Python blocks of a page, each with its output."""
    blocks: list[Block] = []
    for found in _BLOCK.finditer(page):
        line = page.count("\n", 0, found.start("hidden" if found["hidden"] else "text")) + 1
        if found["kind"] == "output":
            if not blocks or blocks[-1].output is not None:
                raise ValueError(f"line {line}: this output belongs to no code")
            blocks[-1].output = found["text"]
        else:
            blocks.append(Block(found["hidden"] or found["text"], line, found["mark"] or ""))
    return blocks


def matches(expected: str, actual: str) -> bool:
    """Whether both are the same text, but for `...` and for space at the ends of lines."""
    want, got = ([line.rstrip() for line in text.strip().splitlines()] for text in (expected, actual))
    pattern = ".*?".join(map(re.escape, "\n".join(want).split("...")))
    return re.fullmatch(pattern, "\n".join(got), re.DOTALL) is not None


def run_block(block: Block, code: Any, namespace: dict[str, Any]) -> str:
    """Run one block; returns what it printed, raised and warned of."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings(record=block.mark == "warns") as caught:
        warnings.simplefilter("always" if block.mark == "warns" else "error")
        try:
            exec(code, namespace)
        except Exception as error:
            if block.mark != "raises":
                raise
            print(*[line.rstrip() for line in traceback.format_exception_only(error)], sep="\n")
        else:
            if block.mark == "raises":
                raise AssertionError("this block should raise")
        if caught is not None and not caught:
            raise AssertionError("this block should warn")
        for warning in caught or ():
            print(f"{warning.filename}:{warning.lineno}: {warning.category.__name__}: {warning.message}")
    return out.getvalue()


def main(path: Path) -> None:
    """Run a page; ends with an error that names the page's line at the first block that is not as it says."""
    namespace: dict[str, Any] = {}
    num_lines = 0
    for block in blocks_of(path.read_text()):
        where = f"{path.name}, line {block.line}"
        if block.mark == "starts over" or not namespace:
            namespace, num_lines = {"__name__": "__main__"}, 0
        code = compile("\n" * num_lines + block.code, SCRIPT, "exec")
        if block.mark.startswith("compiled"):
            continue
        num_lines += block.code.count("\n")
        try:
            printed = run_block(block, code, namespace)
        except BaseException as error:
            error.add_note(f"in the block at {where}")
            raise
        if block.output is not None and not matches(block.output, printed):
            sys.exit(f"{where}: the page says\n{block.output}\nbut this was printed:\n{printed}")
        sys.stdout.write(f"{where}: ran\n")  # in one piece: an async closure of the block may still print


if __name__ == "__main__":
    main(Path(sys.argv[1]))
