"""The extensions. One in C++ works with the one release of torch that it was built for, one in C with any.

An extension that can't be used is an error at import, with the command that builds it again.
"""

from __future__ import annotations

import importlib
import json
import re
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from .errors import LazyStepError

_ROOT = Path(__file__).parents[1]


class ExtensionError(LazyStepError, ImportError):
    """An extension is missing, or was built for another torch. The message ends with the command to run.

    Raised by the import of lazystep:

        pip install torch==2.13.1       # another release than the extensions were built for
        python -c "import lazystep"     # raises: lazystep's recorder was built for torch 2.13.0, ...
    """


class Extension(NamedTuple):
    """The module of an extension, and its name in messages."""

    module: str
    name: str
    needs_torch: bool = True  # built against torch's headers, so for one release

    def load(self) -> ModuleType:
        """Import the extension. Raises `ExtensionError`."""
        here = _release(torch.__version__)
        try:
            extension = importlib.import_module(self.module)
        except ImportError as error:
            is_missing = isinstance(error, ModuleNotFoundError) and error.name == self.module
            problem = "has not been built for this Python" if is_missing else f"can't be loaded ({error})"
            remedy = f"Build it{f' for torch {here}' if self.needs_torch else ''}: {_build_command()}"
            raise ExtensionError(f"lazystep's {self.name} {problem}. {remedy}") from None
        if not self.needs_torch:
            return extension
        built = _release(extension.torch_version)
        if built != here:
            problem = f"was built for torch {built}, this is torch {here}"
            remedy = f"Install torch=={built}, or build it again: {_build_command()}"
            raise ExtensionError(f"lazystep's {self.name} {problem}. {remedy}")
        return extension


def _release(version: str) -> str:
    """2.13.0 of 2.13.0+cpu and 2.13.0.dev1: torch's headers tell an extension no more than that."""
    return ".".join(re.findall(r"\d+", version)[:3])


def _build_command() -> str:
    """Builds the extensions for the torch that is here; an isolated build takes the newest of the range."""
    if (_ROOT / "setup.py").exists():
        return f"cd {_ROOT} && python setup.py build_ext --inplace"
    options = "--no-build-isolation --no-cache-dir --force-reinstall --no-deps"
    return f"pip install {options} {_source()}"


def _source() -> str:
    """Where pip has installed lazystep from (PEP 610). A wheel can't be built again: then from the index."""
    try:
        origin = json.loads(metadata.distribution("lazystep").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        origin = {}
    url: str = origin.get("url", "")
    if not url or url.endswith(".whl"):
        return "lazystep"
    vcs = origin.get("vcs_info")
    return f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else url


RECORDER = Extension("lazystep.record._recorder", "recorder")
RUNNER = Extension("lazystep.execute._library", "runner of libraries")
PLACES = Extension("lazystep.capture._places", "reader of places", needs_torch=False)
WITNESS = Extension("lazystep.capture._witness", "witness", needs_torch=False)
