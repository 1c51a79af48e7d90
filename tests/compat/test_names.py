"""`compat` has every public name of torch._lazy, takes the same arguments, and the docs list all of it."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pkgutil
import re
from typing import Any

import pytest
import torch._lazy

import lazystep
from lazystep.compat import names
from tests.helpers import ROOT, run_python

PAGE = ROOT / "docs" / "coming-from.md"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
THEIRS = ["torch._lazy", *(m.name for m in pkgutil.walk_packages(torch._lazy.__path__, "torch._lazy."))]


SCRIPT = """
import importlib, sys, types
for module in sys.argv[1:]:
    for name, thing in vars(importlib.import_module(module)).items():
        home = thing.__name__ if isinstance(thing, types.ModuleType) else getattr(thing, "__module__", None)
        if not name.startswith("_") and (home or "torch._lazy").startswith("torch._lazy"):
            print(module, name)
"""


@functools.cache
def _all_public_names() -> frozenset[tuple[str, str]]:
    # In a process of its own: `torch._lazy.ts_backend` can't be imported beside lazystep. The package first:
    # each module that is imported later becomes an attribute of it, too.
    done = run_python("-c", SCRIPT, *THEIRS)
    assert done.returncode == 0, done.stderr
    return frozenset((module, name) for module, name in map(str.split, done.stdout.splitlines()))


def public_names(module: str) -> set[str]:
    """What a module of torch's has of torch._lazy, also from its other modules, and plain values."""
    return {name for home, name in _all_public_names() if home == module}


def ours(module: str) -> Any:
    return importlib.import_module(module.replace("torch._lazy", "lazystep.compat.torch_lazy"))


def test_every_module_of_torch_lazy_is_there() -> None:
    assert len(THEIRS) >= 11
    for module in THEIRS:
        assert ours(module).__doc__, module


@pytest.mark.parametrize("module", THEIRS)
def test_every_public_name_of_torch_lazy_is_there_and_in_the_registry(module: str) -> None:
    wanted = public_names(module)
    assert wanted
    assert wanted <= set(vars(ours(module)))
    assert wanted == {name.name for name in names.all_names("torch_lazy") if name.module == module}


def test_modules_of_the_package_are_there_without_importing_them() -> None:
    done = run_python(
        "-c",
        "import lazystep.compat.torch_lazy as torch_lazy\n"
        "print(torch_lazy.closure.ClosureHandler.__name__, torch_lazy.device_context.DeviceContext.__name__)",
    )
    assert done.stdout.split() == ["ClosureHandler", "DeviceContext"], done.stderr


@pytest.mark.parametrize("module", [name for name in THEIRS if not name.endswith("ts_backend")])
def test_functions_and_classes_take_the_arguments_of_torchs(module: str) -> None:
    original = importlib.import_module(module)
    refused = {name.name for name in names.all_names("torch_lazy") if name.is_refused}
    for name in public_names(module) - refused:
        theirs, here = getattr(original, name), getattr(ours(module), name)
        if not callable(theirs):
            assert type(here) is type(theirs)
            continue
        wanted = inspect.signature(theirs).parameters.values()
        plain = [p.name for p in wanted if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        needed = [p.name for p in wanted if p.default is inspect.Parameter.empty and p.name in plain]
        bind = inspect.signature(here).bind  # raises if the call is not possible
        bind(*plain)
        bind(**{name: name for name in plain})
        bind(**{name: name for name in needed})
        variadic = {p.kind for p in wanted if p.name not in plain}
        assert variadic <= {p.kind for p in inspect.signature(here).parameters.values()}
        if inspect.isclass(theirs):
            methods = {m for m in vars(theirs) if not m.startswith("_") and callable(getattr(theirs, m))}
            assert methods <= set(dir(here)), f"{module}.{name}"


@pytest.mark.parametrize("system", names.SYSTEMS)
def test_registered_names_exist_and_refused_ones_raise_and_say_what_to_use(system: str) -> None:
    known = names.all_names(system)
    assert len({(name.module, name.name) for name in known}) == len(known) > 30
    for name in known:
        module = name.module.replace(names.SYSTEMS[system], f"lazystep.compat.{system}", 1)
        thing = getattr(importlib.import_module(module), name.name)
        if name.is_refused:
            with pytest.raises(lazystep.UnsupportedError) as error:
                thing(1, key=2)
            assert name.short in str(error.value)
            assert name.here.replace("`", "") in str(error.value)


@pytest.mark.parametrize("system", names.SYSTEMS)
def test_modules_have_no_public_name_that_the_registry_does_not_know(system: str) -> None:
    known = {(name.module, name.name) for name in names.all_names(system)}
    for module in {name.module for name in names.all_names(system)}:
        path = module.replace(names.SYSTEMS[system], f"lazystep.compat.{system}", 1)
        found = importlib.import_module(path)
        own = {
            name
            for name, thing in vars(found).items()
            if not name.startswith("_") and getattr(thing, "__module__", None) == found.__name__
        }
        assert {name for name in own if (module, name) not in known} <= {"CompiledRegion"}


@pytest.mark.parametrize("name", ["torch_lazy", "torch_xla"])
def test_lazysteps_names_in_the_table_exist(name: str) -> None:
    here = " ".join(n.here for n in names.all_names(name))
    found = set(re.findall(r"\blazystep((?:\.\w+)+)", here))
    assert len(found) > 10
    for path in found:
        thing: Any = lazystep
        for part in path.strip(".").split("."):
            thing = getattr(thing, part)


def test_tables_in_the_docs_are_current() -> None:
    text = PAGE.read_text()
    assert [system for _, system, _ in MARKED.findall(text)] == list(names.SYSTEMS)
    expected = MARKED.sub(lambda m: f"{m[1]}{names.to_markdown(m[2])}\n{m[3]}", text)
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(expected)
        text = expected
    assert text == expected, "UPDATE_DOCS=1 pytest tests/compat/test_names.py -k docs rewrites the tables"


def test_the_step_functions_of_torch_xla_are_there_and_not_refused() -> None:
    known = {name.short: name for name in names.all_names("torch_xla")}
    for wanted in (
        "xm.mark_step",
        "xm.add_step_closure",
        "xm.optimizer_step",
        "xm.wait_device_ops",
        "torch_xla.sync",
        "torch_xla.step",
        "torch_xla.compile",
        "torch_xla.device",
    ):
        assert not known[wanted].is_refused
