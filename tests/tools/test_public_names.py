"""The API reference is the docstrings: each public name has one, with an example that is Python."""

from __future__ import annotations

import ast
import importlib.resources
import inspect
import operator
import pydoc
import re
import textwrap
import types
from typing import Any

import pytest

import lazystep
import lazystep.checkpoint
import lazystep.overlap

MODULES = [lazystep, lazystep.checkpoint, lazystep.overlap, lazystep.debug, lazystep.metrics]
NAMES = [
    pytest.param(getattr(module, name), id=f"{module.__name__}.{name}")
    for module in MODULES
    for name in module.__all__
    if not isinstance(getattr(module, name), (types.ModuleType, str))
]


def examples_of(doc: str) -> list[str]:
    """The indented paragraphs of a docstring; else its last one, which ruff puts at the margin."""
    paragraphs = re.split(r"\n\n(?=\S)|\n\n(?=    )", inspect.cleandoc(doc))[1:]
    return [textwrap.dedent(p) for p in paragraphs if p.startswith("    ")] or paragraphs[-1:]


@pytest.mark.parametrize("thing", NAMES)
def test_public_name_has_an_example_whose_names_exist(thing: Any) -> None:
    examples = examples_of(thing.__doc__)
    assert examples, f"no example in\n{thing.__doc__}"
    nodes = [node for example in examples for node in ast.walk(ast.parse(example))]  # prose does not parse
    for node in nodes:
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if re.fullmatch(r"lazystep(\.\w+)+", name):
            operator.attrgetter(name.removeprefix("lazystep."))(lazystep)
    if inspect.isfunction(thing):
        used = {getattr(node, "attr", getattr(node, "id", "")) for node in nodes}
        assert thing.__name__ in used, "the example uses something else"


def test_public_names_are_exactly_those_of_init() -> None:
    public = {
        name
        for name, value in vars(lazystep).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public | {"__version__"} == {
        name for name in lazystep.__all__ if not isinstance(getattr(lazystep, name), types.ModuleType)
    }
    assert sorted(lazystep.__all__) == lazystep.__all__


@pytest.mark.parametrize("module", [lazystep.debug, lazystep.metrics], ids=lambda module: module.__name__)
def test_functions_of_a_module_are_those_it_lists(module: types.ModuleType) -> None:
    own = {
        name for name, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__
    }
    assert {name for name in own if not name.startswith("_")} == set(module.__all__)


def test_help_is_a_tour_of_every_name() -> None:
    shown = pydoc.plain(pydoc.render_doc(lazystep))
    tour = shown[: shown.index("PACKAGE CONTENTS")]
    for name in lazystep.__all__:
        if name not in ("__version__", "Step", "get_device_context", "get_tensor_id"):
            assert name in tour, name


def test_types_are_shipped() -> None:
    assert importlib.resources.files("lazystep").joinpath("py.typed").is_file()
