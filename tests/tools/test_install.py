"""What an install needs: a build that can't start and an extension that can't be used say so in one line."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import lazystep
from lazystep import cli, extensions
from lazystep.extensions import PLACES, RECORDER, RUNNER, WITNESS, Extension, ExtensionError
from tests.helpers import ROOT, run_python

HERE = torch.__version__.partition("+")[0]


def read_setup(name: str) -> Any:
    """A constant of setup.py, which can't be imported: it would run."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise KeyError(name)


def run_setup(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | environ
    command = [sys.executable, "setup.py", *args]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


# -- building ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["build_ext", "bdist_wheel", "editable_wheel"])
def test_build_without_a_compiler_ends_with_one_line(tmp_path: Path, command: str) -> None:
    done = run_setup(command, PATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "lazystep: building needs a C++20 compiler, and none was found (looked for $CXX, g++, c++, clang++). "
        "Install one (Debian: apt-get install g++), "
        "or install a wheel that `make wheel` has built on another machine.\n"
    )


def test_compiler_of_the_variable_is_the_only_one_that_is_looked_for() -> None:
    done = run_setup("build_ext", CXX="no-such-compiler -pipe")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "none was found (looked for $CXX = no-such-compiler -pipe)" in done.stderr


def test_compiler_that_is_too_old_is_named_with_its_own_words(tmp_path: Path) -> None:
    old = tmp_path / "g++"
    old.write_text("#!/bin/sh\necho \"error: unrecognized option '-std=c++20'\" >&2\necho more >&2\nexit 1\n")
    old.chmod(0o755)
    done = run_setup("build_ext", PATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert (
        "a C++20 compiler, and g++ is none (error: unrecognized option '-std=c++20'). Install" in done.stderr
    )


def test_metadata_and_sources_need_neither_compiler_nor_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch')")
    done = run_setup("egg_info", "--egg-base", str(tmp_path), PATH=str(tmp_path), PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    listed = set((tmp_path / "lazystep.egg-info" / "SOURCES.txt").read_text().splitlines())
    sources = [path for path in (ROOT / "lazystep").rglob("*") if path.suffix in (".c", ".cpp", ".h", ".pyi")]
    assert sources
    assert {str(path.relative_to(ROOT)) for path in sources} <= listed


def test_compiler_of_the_c_variable_is_the_only_one_that_is_looked_for() -> None:
    done = run_setup("build_ext", CC="no-such-compiler")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert (
        "building needs a C compiler, and none was found (looked for $CC = no-such-compiler)" in done.stderr
    )


def test_build_without_torch_says_so(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch')")
    done = run_setup("build_ext", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "building needs torch, and it can't be imported (no torch)" in done.stderr


def test_paths_of_the_extensions_agree() -> None:
    built = read_setup("EXTENSIONS")
    assert set(built) == {extension.module for extension in (RECORDER, RUNNER, PLACES, WITNESS)}
    for source in built.values():
        assert (ROOT / source).exists()
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for name in data["lazystep"]:
        assert (ROOT / "lazystep" / name).exists()


# -- loading -------------------------------------------------------------------------------------------


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def refused(module: str) -> str:
    with pytest.raises(ExtensionError) as caught:
        Extension(module, "recorder").load()
    assert isinstance(caught.value, lazystep.LazyStepError)
    assert isinstance(caught.value, ImportError)
    return str(caught.value)


IN_PLACE = f"cd {ROOT} && python setup.py build_ext --inplace"


def test_extension_of_another_torch_is_refused_with_the_command(modules: Path) -> None:
    (modules / "built_earlier.py").write_text("torch_version = '2.12.1'")
    assert refused("built_earlier") == (
        f"lazystep's recorder was built for torch 2.12.1, this is torch {HERE}. "
        f"Install torch==2.12.1, or build it again: {IN_PLACE}"
    )


@pytest.mark.parametrize("here", ["2.13.0", "2.13.0+cpu", "2.13.0a0+git12", "2.13.0.dev20260101+cu130"])
def test_only_torchs_release_is_compared(modules: Path, monkeypatch: pytest.MonkeyPatch, here: str) -> None:
    (modules / "built_for_2_13_0.py").write_text("torch_version = '2.13.0'")
    monkeypatch.setattr(torch, "__version__", here)
    assert Extension("built_for_2_13_0", "recorder").load().torch_version == "2.13.0"


def test_missing_extension_is_named_with_the_command() -> None:
    want = f"lazystep's recorder has not been built for this Python. Build it for torch {HERE}: {IN_PLACE}"
    assert refused("lazystep.record.never_built") == want


@pytest.mark.parametrize("extension", [PLACES, WITNESS], ids=lambda extension: extension.module)
def test_missing_extension_in_c_stops_the_import_with_the_command(extension: Extension) -> None:
    code = f"import sys\nsys.modules[{extension.module!r}] = None\nimport lazystep\n"
    done = run_python("-c", code)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"lazystep.extensions.ExtensionError: lazystep's {extension.name} ")
    assert last.endswith(f". Build it: {IN_PLACE}")


def test_extension_in_c_works_with_any_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    for extension in (PLACES, WITNESS):
        assert not hasattr(extension.load(), "torch_version")


def test_extension_that_can_not_be_loaded_says_why(modules: Path) -> None:
    (modules / f"damaged{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"\x7fELF")
    assert "damaged" in refused("damaged")
    (modules / "unresolved.py").write_text("raise ImportError('undefined symbol: _ZN2at')")
    want = f"can't be loaded (undefined symbol: _ZN2at). Build it for torch {HERE}: {IN_PLACE}"
    assert want in refused("unresolved")
    (modules / "dependent.py").write_text("import no_such_module_of_another")
    assert "can't be loaded (No module named 'no_such_module_of_another')" in refused("dependent")


@pytest.mark.parametrize(
    ("origin", "target"),
    [
        (None, "lazystep"),
        ({"url": "file:///src/lazystep", "dir_info": {}}, "file:///src/lazystep"),
        (
            {"url": "https://host/lazystep.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "git+https://host/lazystep.git@abc",
        ),
        ({"url": "file:///dist/lazystep-1-cp311-linux_x86_64.whl", "archive_info": {}}, "lazystep"),
    ],
)
def test_installed_package_is_built_from_where_it_came(
    modules: Path, monkeypatch: pytest.MonkeyPatch, origin: object, target: str
) -> None:
    monkeypatch.setattr(extensions, "_ROOT", modules)  # site-packages: no setup.py
    info = modules / "lazystep-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lazystep\nVersion: 1\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    command = "pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps"
    assert refused("lazystep.record.never_built").endswith(f": {command} {target}")


@pytest.mark.parametrize("extension", [RECORDER, RUNNER], ids=lambda extension: extension.module)
def test_import_fails_if_an_extension_does_not_fit(extension: Extension) -> None:
    code = (
        "import sys, types\n"
        f"sys.modules[{extension.module!r}] = types.SimpleNamespace(torch_version='2.12.1')\n"
        "import lazystep\n"
    )
    done = run_python("-c", code)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert f"ExtensionError: lazystep's {extension.name} was built for torch 2.12.1" in last


def test_doctor_takes_the_releases_of_torch_that_the_package_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor = importlib.import_module("lazystep.cli.doctor")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (wanted,) = (d for d in project["project"]["dependencies"] if d.startswith("torch"))
    assert wanted in project["build-system"]["requires"]
    assert wanted == "torch>={}.{},<{}.{}".format(*doctor._TORCH[0], *doctor._TORCH[1])
    for version, is_taken in {
        "2.12.1": False,
        "2.13.0+cpu": True,
        "2.14.1": True,
        "2.15.0+cu132": True,
        "2.16.0": False,
        "3.0.0": False,
    }.items():
        monkeypatch.setattr(torch, "__version__", version)
        problems = [found.text for found in doctor._software() if found.state == "problem"]
        assert problems == (
            []
            if is_taken
            else [f"torch {version}: lazystep is made for >=2.13,<2.16; pip install '{wanted}'"]
        )


def test_doctor_takes_the_pythons_that_the_package_names(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor = importlib.import_module("lazystep.cli.doctor")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [c.rpartition(" ")[2] for c in project["classifiers"] if "Python :: 3." in c]
    assert named == ["{}.{}".format(*python) for python in doctor._PYTHONS]
    for version in (*(f"{python}.1" for python in named), "3.14.0"):
        monkeypatch.setattr(doctor.platform, "python_version", lambda version=version: version)
        notes = [found for found in doctor._software() if found.state == "note"]
        assert bool(notes) == (version == "3.14.0")


def test_another_torch_is_made_in_a_copy_of_the_tree() -> None:
    def plan(*args: str) -> str:
        done = subprocess.run(
            ["make", "-n", "fast", *args], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return done.stdout

    other = plan("TORCH=2.15.*", "MAKE=echo")
    assert "| tar -x -C build/torch-2.15\n" in other
    assert "echo -C build/torch-2.15 IS_COPY=1 fast" in other
    assert "pytest" not in other
    assert "pytest -n 2 --dist loadfile -m fast" in plan()
    # There, the environment has the release that was asked for.
    assert "pytest" in plan("TORCH=2.15.*", "IS_COPY=1")


def test_doctor_says_if_this_python_has_no_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module(WITNESS.module), "supported", 0)
    done = CliRunner().invoke(cli.main, ["doctor"])
    want = "captures need CPython 3.11, 3.12 or 3.13; here every call of a step is recorded"
    assert f"note     extension: {want}\n" in done.output


def test_doctor_reports_extensions_that_fit_and_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor = importlib.import_module("lazystep.cli.doctor")
    missing = Extension("lazystep.execute.never_built", RUNNER.name)
    monkeypatch.setattr(sys.modules[doctor.__name__], "RUNNER", missing)
    done = CliRunner().invoke(cli.main, ["doctor"])
    assert done.exit_code == 1
    assert f"good     extension: recorder, built for torch {HERE}\n" in done.output
    assert "good     extension: reader of places, built for any torch\n" in done.output
    assert "good     extension: witness, built for any torch\n" in done.output
    assert "problem  extension: lazystep's runner of libraries has not been built" in done.output
    assert "problems: 1." in done.output
