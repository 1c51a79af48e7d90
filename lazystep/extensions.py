"""Extensions in C++: optional parts of the install, each built for one release of torch."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple

import torch


class ExtensionError(Exception):
    """An extension can't be used; the message says why. `is_missing`: it was never built."""

    def __init__(self, message: str, is_missing: bool) -> None:
        super().__init__(message)
        self.is_missing = is_missing


class Extension(NamedTuple):
    """Where an extension is, and what it is called in messages."""

    module: str
    name: str

    def load(self) -> ModuleType:
        """Import it. Raises `ExtensionError`."""
        try:
            extension = importlib.import_module(self.module)
        except ModuleNotFoundError:
            raise ExtensionError(f"lazystep was installed without its {self.name}", True) from None
        except ImportError as error:
            problem = f"lazystep's {self.name} can't be loaded by torch {torch.__version__} ({error})"
            raise ExtensionError(problem, False) from None
        built, here = extension.torch_version, torch.__version__.partition("+")[0]
        if built != here:
            problem = f"lazystep's {self.name} was built for torch {built}, this is torch {here}"
            raise ExtensionError(problem, False)
        return extension

    def find_problem(self) -> str:
        """Why it can't be used; empty if it can."""
        try:
            self.load()
        except ExtensionError as error:
            return str(error)
        return ""


RECORDER = Extension("lazystep.record._recorder", "native recorder")
RUNNER = Extension("lazystep.execute._library", "native runner")
