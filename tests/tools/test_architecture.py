"""What the pages say of the code's structure is so: the walks, the list of patches, what an import does."""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from typing import Any

import pytest

from tests.helpers import ROOT, run_python

CONCEPTS = (ROOT / "docs" / "concepts.md").read_text()
WALKS = CONCEPTS.partition("## Two walks")[2].partition("\n## ")[0]
STEPS = [line for line in WALKS.splitlines() if re.match(r"\d+\. ", line)]
PLACES = [place for step in STEPS for place in re.findall(r"`([\w.:]+)` \(`([\w./]+)`\)", step)]


def test_walks_are_short_and_name_a_function_and_a_file_in_each_step() -> None:
    numbers = [int(step.partition(".")[0]) for step in STEPS]
    assert numbers == [*range(1, 16), *range(1, 13)]
    assert all("(`" in step for step in STEPS)


@pytest.mark.parametrize(("name", "file"), dict.fromkeys(PLACES))
def test_function_of_a_walk_exists(name: str, file: str) -> None:
    path = ROOT / "lazystep" / file
    if path.suffix == ".cpp":
        # A definition: from the first column to a brace, without the semicolon of a call or declaration.
        pattern = rf"^[\w:<>&*][\w:<>&* ]*\b{re.escape(name)}\([^;]*?\{{|^{re.escape(name)}\([^;]*?\{{"
        assert re.search(pattern, path.read_text(), re.MULTILINE)
        return
    found = importlib.import_module("lazystep." + file.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)
    assert found.__module__ == "lazystep." + file.removesuffix(".py").replace("/", ".")


ROOMS = sorted(path.parent for path in (ROOT / "lazystep").glob("*/__init__.py"))


@pytest.mark.parametrize("room", [room for room in ROOMS if room.name != "cli"], ids=lambda room: room.name)
def test_reading_order_of_a_room_names_every_module(room: Any) -> None:
    docstring = (room / "__init__.py").read_text().split('"""')[1]
    named = set(re.findall(r"\w+", re.split(r"Reading\s+order:", docstring)[1]))
    assert {path.stem for path in room.glob("*.py")} - {"__init__"} <= named


# Prints which attributes of torch's modules and classes an import replaces or adds. A name that a module has
# imported from elsewhere counts once, where it belongs.
CHANGES = """
import json, sys, types, warnings
warnings.simplefilter("ignore")
import torch._subclasses.fake_tensor, torch.distributed, torch.nn.modules.linear_cross_entropy_options
import torch.fx.experimental.proxy_tensor, torch._dynamo

def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch" or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            found[f"{name}.{attribute}"] = value
            if isinstance(value, type) and value.__module__ == name:
                found |= {f"{name}.{value.__qualname__}.{key}": one for key, one in vars(value).items()}
    return found

before, modules = attributes(), set(sys.modules)
import IMPORTED
after, new = attributes(), set(sys.modules) - modules

def is_changed(name, value):
    if name.rpartition(".")[0] in new or name in new:
        return False
    return before[name] is not value if name in before else callable(value) or isinstance(value, property)

changed = [name for name, value in after.items() if is_changed(name, value)]
print(json.dumps({"changed": changed, "has_device": hasattr(torch, "lazy"), "modules": sorted(new)}))
"""


def changes_of(imported: str) -> dict[str, list[str]]:
    done = run_python("-c", CHANGES.replace("IMPORTED", imported))
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def changes_without_device() -> dict[str, list[str]]:
    return changes_of("lazystep.overlap, lazystep.compile.worker")


@pytest.fixture(scope="module")
def changes_with_device() -> dict[str, list[str]]:
    return changes_of("lazystep, lazystep.integrations")


def test_import_brings_none_of_the_packages_of_integrations(
    changes_with_device: dict[str, list[str]],
) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = {re.match(r"\w+", name)[0] for name in extras["integrations"]}  # type: ignore[index]
    assert packages
    assert not packages & {name.partition(".")[0] for name in changes_with_device["modules"]}


def test_page_lists_everything_that_the_import_replaces(
    changes_without_device: dict[str, list[str]], changes_with_device: dict[str, list[str]]
) -> None:
    listed = set(re.findall(r"`(torch\.[\w.]+)`", CONCEPTS.partition("## What `import lazystep` changes")[2]))
    # What torch changes by itself when more of it is imported is in both, and its counters are in capitals.
    changed = set(changes_with_device["changed"]) - set(changes_without_device["changed"])
    assert not {name for name in changed if not name.rpartition(".")[2].isupper()} - listed
    mentioned = {"torch.lazy", "torch.serialization", "torch.utils.checkpoint", "torch.compile", "torch.load"}
    assert listed - changed <= mentioned


def test_overlap_and_the_builder_leave_torch_alone(changes_without_device: dict[str, list[str]]) -> None:
    ours = re.findall(r"`(torch\.[\w.]+)`", CONCEPTS.partition("## What `import lazystep` changes")[2])
    assert not set(ours) & set(changes_without_device["changed"])
    assert not changes_without_device["has_device"]
    rooms = {name.split(".")[1] for name in changes_without_device["modules"] if name.startswith("lazystep.")}
    assert not rooms & {"record", "ops", "device", "runtime", "capture"}


def test_first_use_of_another_name_brings_the_device() -> None:
    script = (
        "import lazystep.overlap, torch\n"
        "assert lazystep.metrics.counter_names() == [] and not hasattr(torch, 'lazy')\n"
        "lazystep.mark_step()\n"
        "assert (torch.ones(2).to('lazy') + 1).tolist() == [2.0, 2.0]\n"
        "from lazystep import overlap, to_cpu\n"
    )
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr


# -- the witness, in C ---------------------------------------------------------------------------------

WITNESS = ROOT / "lazystep" / "capture" / "src"


def test_reading_order_of_the_witness_names_every_file_and_includes_go_back_in_it() -> None:
    head = (WITNESS / "witness.c").read_text().split("*/")[0]
    order = re.findall(r"\w+", re.split(r"Reading\s+order:", head)[1].partition(".")[0])
    files = {path.stem: path.read_text() for path in (WITNESS / "witness").glob("*.h")}
    # Those of one release of Python are read as what `frames` includes.
    of_releases = {name for name in files if re.search(r"_3\d\d$|_before_|^events_|^stack_depths$", name)}
    assert set(order) | of_releases == set(files)
    assert not set(order) & of_releases
    for number, name in enumerate(order):
        included = set(re.findall(r'#include "(\w+)\.h"', files[name]))
        assert included <= {*order[:number], *of_releases}, name


def test_stub_of_the_witness_has_every_method_that_c_calls() -> None:
    sources = [path.read_text() for path in (WITNESS / "witness").glob("*.h")]
    called = {name for text in sources for name in re.findall(r'\btell(?:_void|_int)?\("(\w+)"', text)}
    sink = (ROOT / "lazystep" / "capture" / "_witness.pyi").read_text().partition("class _Sink")[2]
    assert called
    assert called == set(re.findall(r"    def (\w+)\(", sink))
