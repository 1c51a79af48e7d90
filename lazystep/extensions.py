"""Extensions in C++: optional parts of the install, each built for one release of torch."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch


class ExtensionError(Exception):
    """An extension can't be used; the message says why. `is_missing`: it was never built."""

    def __init__(self, message: str, is_missing: bool) -> None:
        super().__init__(message)
        self.is_missing = is_missing


def load_extension(name: str, what: str) -> ModuleType:
    """Import an extension of this package by its full name. Raises `ExtensionError`.

    `what` it is called in messages, such as "native recorder".
    """
    try:
        extension = importlib.import_module(name)
    except ModuleNotFoundError:
        raise ExtensionError(f"lazystep was installed without its {what}", True) from None
    except ImportError as error:
        problem = f"lazystep's {what} can't be loaded by torch {torch.__version__} ({error})"
        raise ExtensionError(problem, False) from None
    built, here = extension.torch_version, torch.__version__.partition("+")[0]
    if built != here:
        raise ExtensionError(f"lazystep's {what} was built for torch {built}, this is torch {here}", False)
    return extension
