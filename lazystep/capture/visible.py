"""Python functions that do what functions in C do, in sight of the witness.

`map`, `sorted` and the like call a function that they are given. If it is one in C, such as `scores.get` or
`operator.attrgetter("rank")`, no frame shows what it reads. So the witness puts a Python function in its
place, which calls it by an instruction that the witness sees.
"""

from __future__ import annotations

import functools
from typing import Any

FILE = "<lazystep: a function that C code calls>"
"""The file of these functions: their instructions are looked at as the user's own."""

_CODE = """
def caller(function, first, keywords):
    def call(*args, **kwargs):
        return function(*first, *args, **{**keywords, **kwargs})
    return call
"""
_names: dict[str, Any] = {"__name__": __name__}
exec(compile(_CODE, FILE, "exec"), _names)


def caller(function: Any) -> Any:
    """A Python function that calls this one; of a partial, the function inside."""
    if isinstance(function, functools.partial):
        return _names["caller"](function.func, function.args, function.keywords)
    return _names["caller"](function, (), {})
