"""Python functions that do what functions in C do, in sight of the witness.

`map`, `sorted` and the like call a function that they are given. If it is one in C, such as `scores.get` or
`operator.attrgetter("rank")`, no frame shows what it reads. So the witness puts a Python function in its
place, which calls it by an instruction that the witness sees. In the place of `dict.update`, such a function
writes item by item, so that numbers are followed.
"""

from __future__ import annotations

import functools
import types
from typing import Any

FILE = "<lazystep: a function that C code calls>"
"""The file of these functions: their instructions are looked at as the user's own."""

_CODE = """
def caller(function, first, keywords):
    def call(*args, **kwargs):
        return function(*first, *args, **{**keywords, **kwargs})
    return call

def update(receiver, /, *others, **items):
    for other in others:
        if type(other) is dict and len(others) == 1:
            for key in other:
                receiver[key] = other[key]
        elif type(other) in (list, tuple, zip) and len(others) == 1:
            pairs = list(other)
            if all([type(pair) is tuple and len(pair) == 2 for pair in pairs]):
                for key, value in pairs:
                    receiver[key] = value
            else:
                dict.__ior__(receiver, pairs)
        else:
            dict.__ior__(receiver, *others)  # raises if there are two
    for key in items:
        receiver[key] = items[key]

def updater(receiver):
    return lambda *args, **items: update(receiver, *args, **items)
"""
_names: dict[str, Any] = {"__name__": __name__}
exec(compile(_CODE, FILE, "exec"), _names)


def caller(function: Any) -> Any:
    """A Python function that calls this one, or the function in a partial, or that does what it does."""
    if function is dict.update:
        return _names["update"]
    if isinstance(function, types.BuiltinMethodType) and function.__name__ == "update":
        return _names["updater"](function.__self__)
    if isinstance(function, functools.partial):
        return _names["caller"](function.func, function.args, function.keywords)
    return _names["caller"](function, (), {})
